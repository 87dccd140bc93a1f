"""Kimi Delta Attention (Kimi Team 2025, "Kimi Linear"): the gated delta rule with a decay for each channel of the key.

    S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ,   o_t = S_tᵀ q_t,   y = W_out (N(o) ⊙ σ(W_↑ W_↓ x))
    α = exp(−exp(A) · softplus(W_↑ W_↓ x + b)) in (0, 1)^d_k,   β = σ(·),   q = q̂ / (|q̂| sqrt(d_k)),   k = k̂ / |k̂|

q̂, k̂, v̂, the state, `negative_eigenvalues` and `preconditioned` are those of `gated_delta`. The decay and the output
gate have their own low-rank projections, with `full_gates` whole matrices (Ling 3.0, 2026); A is one number per head.
With `decay_bound` c,
α = exp(−c · σ(exp(A) · (W_↑ W_↓ x + b))) is above exp(−c): with c = 5, as in GLM-5 Next and Bailing's hybrids (2026),
float32 can represent the decay over 16 tokens. With `channel_gates` each channel of the key and of the value has
a gate in β's place, b = σ(·), which `negative_eigenvalues` doubles, and w = σ(·) (Gated DeltaNet-2, arXiv 2605.22791):

    S_t = (I − k_t (b_t ⊙ k_t)ᵀ) Diag(α_t) S_{t−1} + k_t (w_t ⊙ v_t)ᵀ
"""

from collections.abc import Sequence
from typing import Self

import torch
from pydantic import model_validator
from torch import Tensor

from heddle.config import PositiveFloat, Width, build_under, refuse
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig, check_norm_width
from heddle.parts.modules.linear import Linear, fused_projections
from heddle.parts.modules.recurrent import (
    CURVATURE_PROJECTIONS,
    BoundedDecay,
    DeltaRuleMixer,
    GatedDecay,
    check_preconditioned,
)
from heddle.parts.modules.short_convolution import ShortConvolution
from heddle.parts.norms import NormConfig
from heddle.parts.states import ConvRecurrentState


class KDAConfig(MixerConfig):
    """Fields of `kda`. None: the default named in the comment."""

    later_fields = ("negative_eigenvalues", "decay_bound", "channel_gates", "preconditioned", "full_gates")
    absent_fields = (
        ("value_embedding", "adds rows to values as projected, but here these are convolved; leave it out"),
    )

    heads: Width
    head_dim: Width | None = None  # of queries and keys; default: width / heads
    value_dim: Width | None = None  # default: head_dim
    gate_rank: Width | None = None  # of the projections of decay and output gate; default: head_dim
    full_gates: bool = False  # decay and output gate are projected by whole matrices, which have no rank
    conv_kernel: Width = 4  # tokens that the convolution reads, itself included
    norm: NormConfig | None = None  # of each head's output; default: the model's norm
    negative_eigenvalues: bool = False  # β = 2 σ(·), up to 2
    decay_bound: PositiveFloat | None = None  # upper bound of −log α; None: −log α = exp(A) · softplus(·), unbounded
    channel_gates: bool = False  # each channel has gates in the place of β (Gated DeltaNet-2)
    preconditioned: bool = False  # scaled keys write (Preconditioned DeltaNet)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_preconditioned(self.preconditioned, self.negative_eigenvalues)
        if self.full_gates and self.gate_rank is not None:
            refuse("gate_rank", "is for low-rank gates, but full_gates makes them full-rank; leave one out")
        return self

    def resolved(self, context: BuildContext) -> Self:
        """Widths, rank and norm written out."""
        dim = context.head_dim(self.heads, self.head_dim)
        return self.replace(
            head_dim=dim,
            value_dim=self.value_dim or dim,
            gate_rank=None if self.full_gates else self.gate_rank or dim,
            norm=self.norm or context.norm,
        )

    def build(self, context: BuildContext) -> "KDA":
        """Build the module. Raises DesignError if width is not divisible by heads and head_dim is not given."""
        return KDA(self, context)


class KDA(DeltaRuleMixer):
    """The module. Its state is a `ConvRecurrentState`."""

    input_projections: Sequence[str] = ("q", "k", "v", "beta", "decay_down", "gate_down", *CURVATURE_PROJECTIONS)

    def __init__(self, config: KDAConfig, context: BuildContext) -> None:
        head_dim = context.head_dim(config.heads, config.head_dim)
        super().__init__(
            context.width,
            heads=config.heads,
            key_heads=config.heads,
            head_dim=head_dim,
            value_dim=config.value_dim or head_dim,
            conv_kernel=config.conv_kernel,
            negative_eigenvalues=config.negative_eigenvalues,
            channel_gates=config.channel_gates,
            preconditioned=config.preconditioned,
        )
        rank = None if config.full_gates else config.gate_rank or self.head_dim
        value_width = self.heads * self.value_dim
        gates = self.heads * self.head_dim + value_width if self.channel_gates else self.heads
        self.beta = Linear(context.width, gates)  # of β, or of b and w
        self.decay_down = None if rank is None else Linear(context.width, rank)
        self.decay_up = Linear(rank or context.width, self.heads * self.head_dim)
        self.gate_down = None if rank is None else Linear(context.width, rank)
        self.gate_up = Linear(rank or context.width, value_width)
        if rank is None:
            self.input_projections = ("q", "k", "v", "beta", "decay_up", "gate_up", *CURVATURE_PROJECTIONS)
        self.convolution = ShortConvolution(sum(self.conv_widths), self.conv_kernel)
        bound, sizes = config.decay_bound, (self.heads, self.head_dim)
        self.decay = GatedDecay(*sizes) if bound is None else BoundedDecay(*sizes, bound)
        check_norm_width("value_dim", self.value_dim)
        self.norm = build_under("norm", (config.norm or context.norm).build, self.value_dim)
        self.out = Linear(value_width, context.width, output_projection=True)

    def forward(
        self, x: Tensor, layout: Layout, state: ConvRecurrentState | None = None
    ) -> tuple[Tensor, ConvRecurrentState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        decay_and_gate = (self.decay_down or self.decay_up, self.gate_down or self.gate_up)
        projections = (self.q, self.k, self.v, self.beta, *decay_and_gate, *self.curvature_projections)
        q, k, v, beta, decay, gate, *curvature = fused_projections(x, *projections)
        decay = decay if self.decay_down is None else self.decay_up(decay)
        qkv, (log_decay, _) = torch.cat((q, k, v), dim=-1), self.decay(decay)
        o, state = self._delta_rule(qkv, log_decay, beta, layout, state, curvature)
        o = self.norm(o.transpose(1, 2).to(qkv.dtype))
        gate = (gate if self.gate_down is None else self.gate_up(gate)).unflatten(-1, (self.heads, -1)).sigmoid()
        return self.out((o * gate).flatten(2)), state
