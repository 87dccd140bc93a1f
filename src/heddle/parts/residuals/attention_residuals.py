"""Attention residuals (Kimi Team 2026, arXiv 2603.15031): each branch reads a softmax mix of all earlier outputs.

v₀ is the embedding of a token and vᵢ the output of branch i. Branch i + 1 has a learned query q, zero at first:

    sⱼ = q · vⱼ / rms(vⱼ),   α = softmax(s₀ … sᵢ),   vᵢ₊₁ = f(N(Σⱼ αⱼ vⱼ))      rms(v) = sqrt(mean(v²) + ε)

With `block_size` K, the outputs of K layers are summed: a branch reads the embedding, the sums of the blocks before its
own, and the sum so far of its own block (Kimi K3, Inkling 2). With `value_norm`, vⱼ / rms(vⱼ) is mixed (Inkling 2).
The first branch reads the embedding itself. The final norm reads one more mix. The paper's norm of keys has a gain, and
Inkling 2 divides scores by sqrt(width): here q absorbs both factors.

v₀ ──┬────────────────────┬──────────────────────────┬── …
     └── N ── mixer ── v₁ ┼──────────────────────────┼── …
                          └── α ── N ── feedf. ── v₂ ┼── …
                                                     └── α ── N ── mixer ── …   ── α ── N ──
"""

from collections.abc import Sequence, Set
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from heddle.config import DesignError, PositiveFloat, PositiveInt
from heddle.numerics.dispatch import add_flops
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.parts.build import ResidualContext
from heddle.parts.modules.dropout import BranchDropout
from heddle.parts.modules.linear import SelfInitialized
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import Branches, FinalNorm, Residual, ResidualConfig

# The stream: the newest source first, then the older ones from the embedding on, each [B, T, width]. Where branches may
# be dropped, one more tensor follows, [B, T, sources]: 1 for a source that the sample has, else 0; the newest is last.
Sources = tuple[Tensor, ...]


class AttentionResidualsConfig(ResidualConfig):
    """`block_size` is a number of layers; without it, every branch's output is its own source (the full form).

    A branch that stochastic depth drops leaves the softmax; in a block it adds nothing, and a block without any branch
    leaves the softmax.
    """

    aliases = ("attnres",)
    stream_grows: ClassVar[bool] = True

    block_size: PositiveInt | None = None  # layers summed into one source; default: none, each branch is a source
    value_norm: bool = False  # whether values are normed as keys are
    eps: PositiveFloat = 1e-6  # of the norm of keys

    @property
    def may_drop(self) -> bool:
        """Whether a branch may be dropped as a whole."""
        return self.drop_path > 0.0 or self.drop_path_first > 0.0

    def check_layers(self, depth: int, most_branches: int, mixers: Set[str]) -> None:
        """Raises DesignError, also if a block does not fit into the model, or holds only one branch."""
        super().check_layers(depth, most_branches, mixers)
        if self.block_size is None:
            return
        if self.block_size > depth:
            raise DesignError(
                "block_size", f"{self.block_size} is more than the model's {depth} layers; give at most as many"
            )
        if self.block_size == 1 and most_branches == 1:
            raise DesignError("block_size", "1 holds only one branch, because every layer has one; leave it out")

    @property
    def has_one_stream(self) -> bool:
        """False."""
        return False

    def expand(self, x: Tensor) -> Sources:
        """The embedding x [B, T, width] is the only source."""
        return (x, torch.ones_like(x[..., :1])) if self.may_drop else (x,)

    def input_norm(self, branch: str, mixer: str) -> str:
        """The branch's own norm."""
        return f"norms.{branch}"

    def build(self, context: ResidualContext) -> "AttentionResiduals":
        """Build the block of one layer."""
        return AttentionResiduals(self, context)

    def build_final_norm(self, width: int, norm: NormConfig) -> nn.Module:
        """Build the norm of the last mix."""
        return MixFinalNorm(self, width, norm)


class SourceMix(SelfInitialized):
    """A learned query, and the softmax mix of sources that it reads."""

    matrix_parameters = ("query",)  # [1, width]: a product with a vector

    def __init__(self, config: AttentionResidualsConfig, width: int) -> None:
        super().__init__()
        self.eps, self.value_norm, self.may_drop = config.eps, config.value_norm, config.may_drop
        self.query = nn.Parameter(torch.empty(1, width))

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Zero: every source has the same weight, so that the mix is the stream of pre-norm, divided by a number."""
        nn.init.zeros_(self.query)

    def forward(self, stream: Sources) -> Tensor:
        """The mix [B, T, width].

        The backward pass keeps the sources themselves, which all mixes share, and numbers per token and source.
        """
        sources, present = _sources(stream, self.may_drop)
        query = at_least_float32(self.query)
        add_flops(4 * len(sources) * stream[0].numel())
        inverse = [self._inverse_rms(source, query.dtype) for source in sources]
        scores = [(source * query).sum(-1, keepdim=True) for source in sources]
        logits = torch.cat(scores, dim=-1) * torch.cat(inverse, dim=-1)
        if present is not None:
            logits = logits.masked_fill(present == 0, float("-inf"))
        weights = logits.softmax(-1)
        if self.value_norm:
            weights = weights * torch.cat(inverse, dim=-1)
        mix = weights[..., :1] * sources[0]
        for index, source in enumerate(sources[1:], start=1):
            mix = mix + weights[..., index : index + 1] * source
        result: Tensor = mix.to(stream[0].dtype)
        return result

    def _inverse_rms(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, 1] in at least float32."""
        wide = torch.promote_types(source.dtype, dtype)
        length: Tensor = torch.linalg.vector_norm(source, dim=-1, keepdim=True, dtype=wide)
        return (length.square() / source.shape[-1] + self.eps).rsqrt()


def _sources(stream: Sources, may_drop: bool) -> tuple[list[Tensor], Tensor | None]:
    """The sources from the embedding on, and which ones samples have; None: all."""
    newest, *older = stream
    present = older.pop() if may_drop else None
    return [*older, newest], present


def _stream(sources: Sequence[Tensor], present: Tensor | None) -> Sources:
    *older, newest = sources
    return (newest, *older) if present is None else (newest, *older, present)


class AttentionResiduals(Residual):
    """The block: a norm and a mix per branch; the model's first branch has no mix."""

    def __init__(self, config: AttentionResidualsConfig, context: ResidualContext) -> None:
        super().__init__(context)
        self.norms = context.build_norms()
        mixed = context.branches if context.layer_index else context.branches[1:]
        self.mixes = nn.ModuleDict({name: SourceMix(config, context.width) for name in mixed})
        self.may_drop = config.may_drop
        starts_block = config.block_size is not None and context.layer_index % config.block_size == 0
        if config.block_size is None:
            self.starting = context.branches  # branches whose output is a new source
        else:
            self.starting = context.branches[:1] if starts_block else ()

    def forward(self, stream: Sources, branches: Branches) -> Sources:
        """The stream, with the output of each branch as a source, or added to the newest one."""
        for name, branch in branches.items():
            x = self.mixes[name](stream) if name in self.mixes else stream[0]
            y, drop = branch(self.norms[name](x)), cast(BranchDropout, self.drops[name])
            keep = drop.draw_path(y)
            stream = self._written(stream, name, drop(y, keep), keep)
        return stream

    def _written(self, stream: Sources, name: str, y: Tensor, keep: Tensor | None) -> Sources:
        """keep: bool [B, 1, 1], the samples that keep the branch; None: all."""
        sources, present = _sources(stream, self.may_drop)
        y, kept = y.to(stream[0].dtype), None
        if present is not None:
            ones = torch.ones_like(present[..., :1])
            kept = ones if keep is None else ones * keep
        if name in self.starting:
            sources.append(y)
            present = None if present is None or kept is None else torch.cat((present, kept), dim=-1)
        else:
            sources[-1] = sources[-1] + y
            if present is not None and kept is not None:
                present = torch.cat((present[..., :-1], torch.maximum(present[..., -1:], kept)), dim=-1)
        return _stream(sources, present)

    def identity_output(self, stream: Sources) -> Sources:
        """Outputs of zero are sources, or are added."""
        for name in self.drops:
            stream = self._written(stream, name, torch.zeros_like(stream[0]), None)
        return stream

    def dropped_output(self, stream: Sources) -> Sources:
        """Dropped outputs are not sources."""
        keep = torch.zeros_like(stream[0][:, :1, :1], dtype=torch.bool)
        for name in self.drops:
            stream = self._written(stream, name, torch.zeros_like(stream[0]), keep)
        return stream


class MixFinalNorm(FinalNorm):
    """The final norm, of a last mix."""

    def __init__(self, config: AttentionResidualsConfig, width: int, norm: NormConfig) -> None:
        super().__init__(width, norm)
        self.mix = SourceMix(config, width)

    def forward(self, stream: Sources) -> Tensor:
        """The hidden states [B, T, width]."""
        return super().forward(self.mix(stream))
