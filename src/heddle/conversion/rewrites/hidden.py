"""Narrower feed-forwards: the hidden channels with the largest output stay, and are refitted to replace the others.

The output of a channel is measured as E[a²] ‖w‖² on the text, with its activation a and its column w of the last
projection. With the Gram matrix G = Σ a aᵀ, kept channels S and removed channels R, least squares gives the columns
that change the output least:

    W_S + W_R G_RS G_SS⁺
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from heddle.config import PositiveInt
from heddle.conversion.rewrite import Rewrite
from heddle.conversion.weights import CalibrationText, ConvertedWeights, LayerActivations, Weights
from heddle.parts.feedforwards import FeedforwardConfig
from heddle.parts.feedforwards.gated import GatedConfig
from heddle.parts.feedforwards.mlp import MLPConfig

NEGLIGIBLE = 1e-10  # singular values of G_SS, as shares of the largest: directions that the text hardly has


class Hidden(Rewrite):
    """`hidden`: the channels that `mlp` and `gated` feed-forwards keep, chosen and refitted on the text."""

    keeps: ClassVar[frozenset[str]] = frozenset({"attention"})
    exact: ClassVar[bool] = False
    text_decides_weights: ClassVar[bool] = True
    targets: ClassVar[Mapping[str, str]] = {"hidden": "hidden"}
    hidden: PositiveInt

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if no layer, or not every named one, has such a wider feed-forward."""
        none = f"no layer has an mlp or gated feed-forward wider than {self.hidden}; give fewer channels"
        return _Narrower(source, self.change_feedforwards(source.design, self._narrower, none), text)

    def _narrower(self, feedforward: FeedforwardConfig | None, path: str) -> FeedforwardConfig | str:
        if not isinstance(feedforward, MLPConfig | GatedConfig):
            return "is neither mlp nor gated"
        if feedforward.hidden <= self.hidden:
            return f"has no more than {self.hidden} channels"
        if isinstance(feedforward, GatedConfig) and feedforward.sparsity is not None:
            return "compares its channels with each other (sparsity)"
        return feedforward.replace(hidden=self.hidden)


class _Narrower(ConvertedWeights):
    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """The layer with fewer rows of its first projections, and refitted columns of the last one."""
        layer = self.source.layer(index)
        if index not in self.changed:
            return layer
        gram, down = gram_matrix(self.activations(index)), layer["feedforward.down.weight"].double()
        gram = gram.to(down.device)
        written = gram.diagonal() * down.square().sum(0)
        order = written.sort(descending=True, stable=True).indices
        kept = self.specs[f"layers.{index}.feedforward.down.weight"][1][1]
        stays, goes = order[:kept].sort().values, order[kept:]
        moved = torch.linalg.pinv(gram[stays][:, stays], rtol=NEGLIGIBLE, hermitian=True) @ gram[stays][:, goes]
        for name in ("gate.weight", "gate.bias", "up.weight", "up.bias"):
            if f"feedforward.{name}" in layer:
                layer[f"feedforward.{name}"] = layer[f"feedforward.{name}"][stays]
        layer["feedforward.down.weight"] = down[:, stays] + down[:, goes] @ moved.T
        return layer


@torch.no_grad()
def gram_matrix(activations: LayerActivations) -> Tensor:
    """Σ a aᵀ over the tokens of a text, of the hidden channels of a layer's feed-forward: float64 [hidden, hidden]."""
    assert activations.layer.feedforward is not None
    read = activations.inputs_of(activations.layer.feedforward.get_submodule("down"))
    return torch.stack([tokens.T @ tokens for tokens in map(Tensor.double, read)]).sum(0)
