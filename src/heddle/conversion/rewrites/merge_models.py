"""Merge several models of one design: mix their weights tensor by tensor, in float64.

Linear means (Wortsman et al. 2022, https://arxiv.org/abs/2203.05482), slerp along the arc between two tensors, task
arithmetic (Ilharco et al. 2023, https://arxiv.org/abs/2212.04089), TIES (Yadav et al. 2023,
https://arxiv.org/abs/2306.01708) and DARE (Yu et al. 2024, https://arxiv.org/abs/2311.03099), with the formulas and
defaults of mergekit 0.1.5. Its draws are others, and it computes in the dtype of the merge.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from heddle.config import DesignError, FiniteFloat
from heddle.conversion.convert import open_source
from heddle.conversion.rewrite import EVERYTHING, Rewrite
from heddle.conversion.weights import CalibrationText, ConvertedWeights, Weights
from heddle.numerics.random import RandomStream

STRAIGHT = 0.9995  # cosine of an angle so small that slerp is linear
NO_DIVISOR = 1e-8  # a sum of weights below this divides nothing
NO_RESCALING = 1e-7  # nor do differences that add up to less

Share = Annotated[float, Field(gt=0, le=1)]
DRAWN = ("dare", "dare_ties")
TAKEN_BY = {
    "t": ("slerp",),
    "density": ("ties", *DRAWN),
    "densities": ("ties", *DRAWN),
    "scale": ("task_arithmetic", "ties", *DRAWN),
    "normalize": ("linear", "task_arithmetic", "ties", *DRAWN),
    "rescale": DRAWN,
    "seed": DRAWN,
}  # the methods that take an option


class MergeModels(Rewrite):
    """Merge MODEL with the folders `models` by `method`. `weights`: one number per model, MODEL's first.

    linear: the weighted mean, with equal weights by default. slerp: `t` of the way from MODEL to the other.
    The other methods add weighted differences from MODEL, the common base: MODEL + `scale` · Σ wᵢ Δᵢ. There, `weights`
    has one number for each of `models`, 1 by default. task_arithmetic: Δᵢ unchanged. ties: keep the share `density` of
    each tensor of Δᵢ with the largest magnitudes, then average by weight the values with the sign of the weighted sum.
    dare: keep a random share `density` of Δᵢ, drawn by `seed`, and rescale it: to the sum of magnitudes before (l1), or
    by 1 / density, as in the paper. dare_ties: draw as in dare, then sum the values with the sign of the weighted sum.
    `densities`: one for each of `models`, instead of `density`. `normalize`: divide by the sum of the weights that took
    part; by default in linear and ties.
    """

    keeps: ClassVar[frozenset[str]] = EVERYTHING
    exact: ClassVar[bool] = False  # the result is another model
    targets: ClassVar[Mapping[str, str]] = {"merge": "method"}
    method: Literal["linear", "slerp", "task_arithmetic", "ties", "dare", "dare_ties"]
    models: tuple[str, ...]
    weights: tuple[FiniteFloat, ...] | None = None
    t: Annotated[float, Field(ge=0, le=1)] = 0.5
    density: Share = 1.0
    densities: tuple[Share, ...] | None = None
    scale: FiniteFloat = 1.0
    normalize: bool | None = None
    rescale: Literal["l1", "density"] = "l1"
    seed: int = 0

    @property
    def other_models(self) -> tuple[Path, ...]:
        """The folders."""
        return tuple(map(Path, self.models))

    @property
    def divides(self) -> bool:
        """Whether the result is divided by the sum of the weights."""
        return self.method in ("linear", "ties") if self.normalize is None else self.normalize

    def apply(self, source: Weights, text: CalibrationText | None) -> Weights:
        """Raises DesignError for models of other designs and for options that do not fit the method."""
        self.refuse_layers("merge")
        for option, methods in TAKEN_BY.items():
            if self.method not in methods and getattr(self, option) != type(self).model_fields[option].default:
                raise DesignError("merge", f"{self.method} takes no {option}; {', '.join(methods)} do")
        count = len(self.models)
        if count < 1 or (self.method == "slerp" and count != 1):
            wanted = "one other model" if self.method == "slerp" else "the folder of at least one other model"
            raise DesignError("merge", f"{self.method} needs {wanted}: models=[FOLDER]")
        wanted_weights = count + (self.method == "linear")
        if self.weights is not None and (self.method == "slerp" or len(self.weights) != wanted_weights):
            reason = "takes t, not weights" if self.method == "slerp" else f"takes {wanted_weights} weights"
            raise DesignError("merge", f"{self.method} of {count} models beside MODEL {reason}, not {self.weights}")
        if self.densities is not None and (self.density != 1 or len(self.densities) != count):
            taken = f"one density, or {count} densities"
            raise DesignError(
                "merge", f"{self.method} of {count} models beside MODEL takes {taken}, not {self.densities}"
            )
        weights = self.weights or (1.0,) * wanted_weights
        if self.method == "linear" and self.divides and sum(weights) == 0:
            raise DesignError("merge", "the weights of a mean add up to 0; give others")
        others = [open_source(folder).weights for folder in self.other_models]
        for folder, other in zip(self.models, others, strict=True):
            if other.design != source.design:
                raise DesignError("merge", f"{folder} has a different design; only models of one design can be merged")
        return _Merged(source, others, self, weights)

    def mix(self, name: str, first: Tensor, others: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Merge one tensor. name: seeds dare's draws. first: MODEL's tensor; others: of the same shape, all float64."""
        factors = torch.tensor(weights, dtype=torch.float64, device=first.device).view(-1, *[1] * first.dim())
        if self.method == "linear":
            total = (factors * torch.stack([first, *others])).sum(0)
            return total / sum(weights) if self.divides else total
        if self.method == "slerp":
            return slerp(first, others[0], self.t)
        densities = self.densities or (self.density,) * len(others)
        changes = [other - first for other in others]
        if self.method == "ties":
            changes = [_largest(change, density) for change, density in zip(changes, densities, strict=True)]
        elif self.method in DRAWN:
            drawn = enumerate(zip(changes, densities, strict=True))
            changes = [self._drawn(name, index, change, density) for index, (change, density) in drawn]
        weighted = torch.stack(changes) * factors
        took_part = torch.ones_like(weighted)
        if self.method.endswith("ties"):
            took_part = (weighted.sign() == torch.where(weighted.sum(0) >= 0, 1.0, -1.0)).double()
        total = (weighted * took_part).sum(0)
        if self.divides:
            divisor = (factors * took_part).sum(0)
            total = total / torch.where(divisor.abs() < NO_DIVISOR, 1.0, divisor)
        return first + self.scale * total

    def _drawn(self, name: str, index: int, change: Tensor, density: float) -> Tensor:
        """Keep a random share `density` of a change, rescaled."""
        if density == 1:
            return change
        draws = RandomStream.of(self.seed, "dare", index, name).uniform(0, change.numel())
        kept = change * (draws < density).view(change.shape).to(change.device)
        if self.rescale == "density":
            return kept / density
        before, after = change.abs().sum(), kept.abs().sum()
        return kept if min(before, after) < NO_RESCALING else kept * (before / after)


def slerp(first: Tensor, second: Tensor, t: float) -> Tensor:
    """Interpolate by `t` along the arc between two tensors as vectors; linearly if they are nearly parallel."""
    norms = first.norm() * second.norm()
    cosine = (first * second).sum() / norms if norms > 0 else torch.ones(())
    if abs(float(cosine)) > STRAIGHT:
        return (1 - t) * first + t * second
    angle = torch.arccos(cosine)
    return (((1 - t) * angle).sin() * first + (t * angle).sin() * second) / angle.sin()


def _largest(change: Tensor, density: float) -> Tensor:
    """Zero all but the share `density` of the values with the largest magnitudes."""
    kept = max(int(density * change.numel()), 1)
    flat = change.flatten()
    result = torch.zeros_like(flat)
    places = flat.abs().topk(kept).indices
    result[places] = flat[places]
    return result.view(change.shape)


class _Merged(ConvertedWeights):
    def __init__(
        self, source: Weights, others: Sequence[Weights], rewrite: MergeModels, weights: Sequence[float]
    ) -> None:
        super().__init__(source, source.design)
        self.others, self.rewrite, self.model_weights = others, rewrite, weights

    def convert_parameter(self, name: str, value: Tensor) -> Tensor:
        """The parameter, mixed."""
        if not value.is_floating_point():
            return value
        others = [other.tensor(name).to(value.device, torch.float64) for other in self.others]
        return self.rewrite.mix(name, value.double(), others, self.model_weights)
