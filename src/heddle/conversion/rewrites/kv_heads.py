"""Change the number of key/value heads: more by repeating them, exact; fewer by merging groups of heads, lossy.

`groups` says which heads are merged: neighbors, heads with similar queries or with similar keys and values, or heads
that change the layer's output on the text least when merged. `merge` says how a group becomes one head: see
`heddle.conversion.merge_heads`. `least-squares` also refits the output projection on the text.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from heddle.config import DesignError, Width, refuse
from heddle.conversion.head_parameters import (
    HeadStatistics,
    Parameters,
    batches,
    build_mixer,
    head_sizes,
    repeat_key_heads,
    text_statistics,
    weight_statistics,
)
from heddle.conversion.merge_heads import Groups, Merge, MergedHeads, best_groups, contiguous_groups, head_outputs
from heddle.conversion.rewrite import Rewrite, replace_layers
from heddle.conversion.sensitivity import StateBudget, plan_sizes, replacement_losses
from heddle.conversion.weights import CalibrationText, ConvertedWeights, LayerActivations, Weights
from heddle.model.config import ModelConfig
from heddle.parts.build import BuildContext
from heddle.parts.mixers import Mixer
from heddle.parts.mixers.attention import Attention, AttentionConfig
from heddle.parts.positions import ScoreBiasConfig
from heddle.parts.positions.relative_bias import RelativeBiasConfig

# Refit an attention layer's output projection on a text, by ridge regression on the outputs of another layer.


RIDGE = 1e-3  # of the mean squared input of the projection


@torch.no_grad()
def fit_output(layer: Parameters, mixer: Attention, activations: LayerActivations) -> dict[str, Tensor]:
    """Refit W_o (and its bias) to minimize Σ |y − W_o z − b|² + λ |ΔW_o|² over the text.

    z: the input of the projection in `mixer`, which has the parameters of `layer` in float64. y: the output of the
    mixer in `activations`. λ = RIDGE · tokens · mean(z²). ΔW_o: the change, so a layer without error does not change.
    """
    weight, bias = layer["mixer.out.weight"].double(), layer.get("mixer.out.bias")
    inputs = weight.shape[1] + (bias is not None)
    square, cross = weight.new_zeros(inputs, inputs), weight.new_zeros(inputs, len(weight))
    for (x, layout), y in zip(batches(activations), activations.mixer_outputs, strict=True):
        z = head_outputs(mixer, x, layout).flatten(1)
        error = y[layout.positions >= 0].double() - mixer.out(z)
        z = z if bias is None else torch.cat((z, z.new_ones(len(z), 1)), dim=1)
        square += z.T @ z
        cross += z.T @ error
    ridge = RIDGE * square.diagonal().mean()
    change = torch.linalg.solve(square + ridge * torch.eye(inputs, dtype=square.dtype, device=square.device), cross).T
    result = dict(layer)
    result["mixer.out.weight"] = weight + change[:, : weight.shape[1]]
    if bias is not None:
        result["mixer.out.bias"] = bias.double() + change[:, -1]
    return result


Grouping = Literal["contiguous", "similar-queries", "similar-keys-values", "similar-outputs"]


TOKENS_PER_INPUT = 2  # tokens of text that a layer needs, for each input of its projections

Mixers = Mapping[int, AttentionConfig]  # by the number of the layer


TIED = {  # options of attention, and what ties a head to its place
    "value_residual": "adds the same head of another layer",
    "indexer": "selects keys for heads by their index",
}


class KVHeads(Rewrite):
    """Change the number of key/value heads of `attention`: more by repeating (exact), fewer by merging (lossy).

    kv_heads: of every layer; or state_budget: the share of the state per token to keep, distributed over the layers so
    that the loss on the text rises least. similarity: whether heads are compared and aligned on the text, or by their
    weights.
    """

    targets: ClassVar[Mapping[str, str]] = {"kv_heads": "kv_heads"}
    methods: ClassVar[Sequence[Mapping[str, str]]] = (
        {"groups": "contiguous", "merge": "mean"},
        {"groups": "contiguous", "merge": "first"},
        {"groups": "similar-queries", "merge": "mean"},
        {"groups": "similar-keys-values", "merge": "mean"},
        {"groups": "similar-outputs", "merge": "mean"},
        {"groups": "similar-outputs", "merge": "aligned"},
        {"groups": "similar-outputs", "merge": "least-squares"},
    )
    kv_heads: Width | None = None
    state_budget: StateBudget | None = None
    groups: Grouping = "similar-outputs"
    merge: Merge = "least-squares"
    similarity: Literal["text", "weights"] = "text"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kv_heads is None and self.state_budget is None:
            refuse("kv_heads", "is missing; give the number of key/value heads, or state_budget")
        if self.kv_heads is not None and self.state_budget is not None:
            refuse("kv_heads", "conflicts with state_budget; give one of the two")
        if self.similarity == "weights" and (self._is_on_text or not self._compares):
            on_text = "similar-outputs and least-squares are defined on a text"
            reason = on_text if self._is_on_text else "no heads are compared"
            refuse("similarity", f"cannot be weights, since {reason}; leave it out")
        return self

    @property
    def _compares(self) -> bool:
        """Whether `similarity` matters: heads are compared, but not by an option that is defined on a text only."""
        return self.groups in ("similar-queries", "similar-keys-values") or self.merge == "aligned"

    @property
    def _is_on_text(self) -> bool:
        """Whether an option is defined on a text only."""
        return self.groups == "similar-outputs" or self.merge == "least-squares"

    @property
    def _merges_on_text(self) -> bool:
        return self._is_on_text or (self._compares and self.similarity == "text")

    def describe(self) -> dict[str, Any]:
        """As `Rewrite.describe`, with the seed of removed methods, which conversions on disk record."""
        return super().describe() | {"seed": 0}

    @property
    def needs_text(self) -> bool:
        """True unless heads are grouped and merged by their weights alone."""
        return self.state_budget is not None or self._merges_on_text

    @property
    def chooses_on_text(self) -> bool:
        """True if it chooses each layer's number."""
        return self.state_budget is not None

    def is_exact(self, design: ModelConfig) -> bool:
        """True if heads are only repeated."""
        return self.kv_heads is not None and not _merged(self._mixers(design), self.kv_heads)

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError if the number does not divide the query heads, or if a layer's heads cannot be merged."""
        mixers = self._mixers(source.design)
        if self.kv_heads is not None:
            for index, mixer in mixers.items():
                _check_count(index, mixer, self.kv_heads)
        reduced = mixers if self.kv_heads is None else _merged(mixers, self.kv_heads)
        for index, mixer in reduced.items():
            self._check_reordering(index, mixer)
            if self.needs_text:
                _check_text(text, source.design, mixer)
        counts = self._budgeted(source, text, mixers) if self.kv_heads is None else dict.fromkeys(mixers, self.kv_heads)
        layers = {
            index: source.design.layers[index].replace(mixer=mixer.replace(kv_heads=counts[index]))
            for index, mixer in mixers.items()
        }
        return _SharedHeads(source, replace_layers(source.design, layers), text, self)

    def _mixers(self, design: ModelConfig) -> Mixers:
        """The layers to convert. Raises DesignError for one without softmax attention, or if there is none."""
        indices, mixers, others = self.selected_layers(design), {}, set()
        for index in indices:
            mixer = design.layers[index].mixer
            if isinstance(mixer, AttentionConfig):
                mixers[index] = mixer
            elif mixer is not None:
                others.add(mixer.kind)
        if (others and self.layers is not None) or not mixers:
            kinds = " and ".join(sorted(others)) or "no mixer"
            raise DesignError("kv_heads", f"converts attention, but these layers have {kinds}; name other layers")
        return mixers

    def _check_reordering(self, index: int, mixer: AttentionConfig) -> None:
        """Raises DesignError for an option that heads cannot leave, and if their scores depend on their index."""
        for name, reason in TIED.items():
            if getattr(mixer, name) is not None:
                reason = f"{reason}, so heads cannot be merged"
                raise DesignError(f"layers.{index}.mixer.{name}", f"{reason}; name other layers, or leave it out")
        position = mixer.position
        depends = isinstance(position, ScoreBiasConfig) and not isinstance(position, RelativeBiasConfig)
        if position is not None and depends and self.groups != "contiguous" and self.kv_heads != 1:
            reason = f"{position.kind} gives each head its own bias by index, so heads cannot be reordered"
            raise DesignError(f"layers.{index}.mixer.position", f"{reason}; use groups=contiguous")

    def _budgeted(self, source: Weights, text: CalibrationText | None, mixers: Mixers) -> dict[int, int]:
        """The heads of each layer under the budget, by what fewer heads in one layer add to the loss on the text."""
        assert text is not None
        assert self.state_budget is not None
        losses: dict[int, dict[int, float]] = {index: {_heads(mixer): 0.0} for index, mixer in mixers.items()}
        counts = sorted({count for mixer in mixers.values() for count in _divisors(_heads(mixer))[:-1]})
        for number, count in enumerate(counts, start=1):
            label = f"measuring layers with {count} key/value heads ({number} of {len(counts)})"
            added = replacement_losses(source, text, self._replacement(source, mixers, count), label)
            for index, loss in added.items():
                losses[index][count] = loss
        widths = {index: sum(head_sizes(mixer)[1:]) for index, mixer in mixers.items()}
        choices = [[(n * widths[index], loss) for n, loss in sorted(losses[index].items())] for index in mixers]
        total = sum(sizes[-1][0] for sizes in choices)
        planned = plan_sizes(choices, int(self.state_budget * total + 1e-9))
        if planned is None:
            least = sum(sizes[0][0] for sizes in choices) / total
            reason = (
                f"{self.state_budget:.4g} of the state per token is less than the {least:.4g} of one head per layer"
            )
            raise DesignError("state_budget", f"{reason}; raise it")
        return {index: size // widths[index] for index, size in zip(mixers, planned, strict=True)}

    def _replacement(self, source: Weights, mixers: Mixers, count: int) -> Callable[[LayerActivations], Mixer | None]:
        """Replaces the mixer of a layer by one with `count` key heads, where that is fewer and divides."""
        design = source.design

        def replace(activations: LayerActivations) -> Mixer | None:
            index = activations.index
            if index not in mixers or count not in _divisors(_heads(mixers[index]))[:-1]:
                return None
            layer = self.convert(source.layer(index), design, index, count, lambda: activations)
            context = BuildContext(design.width, design.norm, design.depth, index)
            mixer = build_mixer(mixers[index].replace(kv_heads=count), context, layer)
            return mixer.to(activations.mixer_inputs[0].device, source.dtype)

        return replace

    def convert(
        self,
        layer: Parameters,
        design: ModelConfig,
        index: int,
        kv_heads: int,
        activations: Callable[[], LayerActivations],
    ) -> dict[str, Tensor]:
        """The parameters of layer `index` of a resolved design with `kv_heads` key heads, on the text's device.

        If that does not divide the present number of heads, they are first repeated up to a common multiple.
        activations: returns the layer's activations on the calibration text; only called if they are needed.
        """
        config = design.layers[index].mixer
        assert isinstance(config, AttentionConfig)
        common = math.lcm(_heads(config), kv_heads)
        layer = repeat_key_heads(layer, config, common // _heads(config))
        config = config.replace(kv_heads=common)
        if common == kv_heads:
            return layer
        if self._merges_on_text:
            device = activations().mixer_inputs[0].device
            layer = {name: value.to(device) for name, value in layer.items()}
        context = BuildContext(design.width, design.norm, design.depth, index)
        merger = MergedHeads(layer, config, context, self._statistics(layer, config, context, activations), self.merge)
        result = merger.merge_groups(self._groups(merger, kv_heads, activations))
        if self.merge == "least-squares":
            mixer = build_mixer(config.replace(kv_heads=kv_heads), context, result)
            return fit_output(result, mixer, activations())
        return result

    def _statistics(
        self,
        layer: Parameters,
        config: AttentionConfig,
        context: BuildContext,
        activations: Callable[[], LayerActivations],
    ) -> HeadStatistics:
        if self.merge == "least-squares" or (self._compares and self.similarity == "text"):
            return text_statistics(layer, config, context, activations())
        return weight_statistics(layer, config)

    def _groups(self, merger: MergedHeads, groups: int, activations: Callable[[], LayerActivations]) -> Groups:
        if self.groups == "contiguous":
            return contiguous_groups(merger.heads, groups)
        if groups == 1:
            return [list(range(merger.heads))]
        if self.groups == "similar-outputs":
            costs = merger.similar_outputs(activations())
        else:
            is_queries = self.groups == "similar-queries"
            costs = merger.similar_queries() if is_queries else merger.similar_keys_values()
        return best_groups(costs, groups)


class _SharedHeads(ConvertedWeights):
    def __init__(self, source: Weights, design: ModelConfig, text: CalibrationText | None, rewrite: KVHeads) -> None:
        super().__init__(source, design, text)
        self.rewrite = rewrite

    def convert_layer(self, index: int) -> dict[str, Tensor]:
        """The layer with its new number of key heads."""
        layer, mixer = self.source.layer(index), self.design.layers[index].mixer
        if index not in self.changed:
            return layer
        assert isinstance(mixer, AttentionConfig)
        activations = lambda: self.activations(index)  # noqa: E731
        converted = self.rewrite.convert(layer, self.source.design, index, _heads(mixer), activations)
        return {name: value.to(layer[name].device) for name, value in converted.items()}


def _heads(mixer: AttentionConfig) -> int:
    """The key heads of a resolved config."""
    return head_sizes(mixer)[0]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _merged(mixers: Mixers, kv_heads: int) -> Mixers:
    """The layers whose heads are not just repeated."""
    return {index: mixer for index, mixer in mixers.items() if kv_heads % _heads(mixer)}


def _check_count(index: int, mixer: AttentionConfig, kv_heads: int) -> None:
    if mixer.heads % kv_heads:
        *choices, last = map(str, _divisors(mixer.heads))
        listed = f"{', '.join(choices)} or {last}" if choices else last
        path = f"layers.{index}.mixer.kv_heads"
        raise DesignError(path, f"{kv_heads} does not divide heads = {mixer.heads}; give {listed}")


def _check_text(text: CalibrationText | None, design: ModelConfig, mixer: AttentionConfig) -> None:
    """Raises DesignError without a text, or with too few tokens for least squares over a layer's inputs."""
    if text is None:
        raise DesignError("kv_heads", "needs a text to calibrate on; give one, or groups and merge that need none")
    _, _, value_dim = head_sizes(mixer)
    needed = TOKENS_PER_INPUT * max(design.width, mixer.heads * value_dim)
    if text.tokens < needed:
        raise DesignError(
            "kv_heads",
            f"needs a text of {needed} tokens, but there are {text.tokens}; give --calibration-tokens {needed}",
        )
