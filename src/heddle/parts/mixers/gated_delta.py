"""Gated DeltaNet (Yang et al. 2024), the linear layers of Qwen3-Next: a state that decays and corrects itself.

    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,   o_t = S_t q_t,   y = W_out (N(o) ⊙ f(z))
    α = exp(−exp(A) · softplus(a + b)),   β = sigmoid(·),   q = q̂ / (|q̂| sqrt(d_k)),   k = k̂ / |k̂|

q̂, k̂ and v̂ are projections of x after a causal depthwise convolution and SiLU; a, z and the argument of β are plain
projections of x; f is SiLU or the sigmoid (Qwen4). Value head h reads key head h // (heads / key_heads). The state S
has d_k · d_v elements per head. With `negative_eigenvalues` β is 2 · sigmoid(·): the eigenvalue 1 − β of I − β k kᵀ is
then between −1 and 1, and a negative one reflects what is stored along k, which allows tracking states such as a parity
(Grazzi et al. 2024). With `steps` n a token corrects the state n times, each with its own k, v and β, after one decay
and before one output (Gated DeltaProduct, Siems et al. 2025): its transition is a product of n such matrices, such as a
rotation. `preconditioned` writes with k̃ = k ⊙ M, S_t = α_t S_{t−1} (I − β_t k_t k̃_tᵀ) + β_t v_t k̃_tᵀ, where M is larger
for channels that past keys used less (Preconditioned DeltaNet, Tumma et al. 2026).
"""

from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn import functional

from heddle.config import Width, build_under, refuse
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig, check_head_groups, check_norm_width
from heddle.parts.modules.linear import Linear, fused_projections
from heddle.parts.modules.recurrent import CURVATURE_PROJECTIONS, DeltaRuleMixer, GatedDecay, check_preconditioned
from heddle.parts.modules.short_convolution import ShortConvolution
from heddle.parts.norms import NormConfig
from heddle.parts.states import ConvRecurrentState


class GatedDeltaConfig(MixerConfig):
    """Fields of `gated_delta`. None: the default named in the comment."""

    aliases = ("gated_deltanet", "gdn")
    later_fields = ("negative_eigenvalues", "steps", "gate", "preconditioned")
    absent_fields = (
        ("value_embedding", "adds rows to values as projected, but here these are convolved; leave it out"),
    )

    heads: Width  # of values, states and outputs
    key_heads: Width | None = None  # of queries and keys; default: heads
    head_dim: Width | None = None  # of queries and keys; default: width / heads
    value_dim: Width | None = None  # default: head_dim
    conv_kernel: Width = 4  # tokens that the convolution reads, itself included
    norm: NormConfig | None = None  # of each head's output; default: the model's norm
    negative_eigenvalues: bool = False  # β = 2 σ(·), up to 2 (Grazzi et al. 2024; OLMo Hybrid 2026)
    steps: Width = 1  # corrections of the state per token, each with its own k, v and β (DeltaProduct)
    gate: Literal["silu", "sigmoid"] = "silu"  # f
    preconditioned: bool = False  # scaled keys write (Preconditioned DeltaNet)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_head_groups("key_heads", self.key_heads, self.heads)
        check_preconditioned(self.preconditioned, self.negative_eigenvalues)
        if self.preconditioned and self.steps > 1:
            refuse("steps", f"{self.steps} has no definition with preconditioned; leave one of the two out")
        return self

    def resolved(self, context: BuildContext) -> Self:
        """Heads, widths and norm written out."""
        dim = context.head_dim(self.heads, self.head_dim)
        return self.replace(
            key_heads=self.key_heads or self.heads,
            head_dim=dim,
            value_dim=self.value_dim or dim,
            norm=self.norm or context.norm,
        )

    def build(self, context: BuildContext) -> "GatedDelta":
        """Build the module. Raises DesignError if width is not divisible by heads and head_dim is not given."""
        return GatedDelta(self, context)


class GatedDelta(DeltaRuleMixer):
    """The module. Its state is a `ConvRecurrentState`."""

    input_projections = ("q", "k", "v", "a", "beta", "gate", *CURVATURE_PROJECTIONS)

    def __init__(self, config: GatedDeltaConfig, context: BuildContext) -> None:
        head_dim = context.head_dim(config.heads, config.head_dim)
        super().__init__(
            context.width,
            heads=config.heads,
            key_heads=config.key_heads or config.heads,
            head_dim=head_dim,
            value_dim=config.value_dim or head_dim,
            conv_kernel=config.conv_kernel,
            negative_eigenvalues=config.negative_eigenvalues,
            steps=config.steps,
            preconditioned=config.preconditioned,
        )
        value_width = self.heads * self.value_dim
        self.gate_function = functional.silu if config.gate == "silu" else torch.sigmoid
        self.gate = Linear(context.width, value_width)
        self.a = Linear(context.width, self.heads)
        self.beta = Linear(context.width, self.steps * self.heads)
        self.convolution = ShortConvolution(sum(self.conv_widths), self.conv_kernel)
        self.decay = GatedDecay(self.heads)
        check_norm_width("value_dim", self.value_dim)
        self.norm = build_under("norm", (config.norm or context.norm).build, self.value_dim)
        self.out = Linear(value_width, context.width, output_projection=True)

    def forward(
        self, x: Tensor, layout: Layout, state: ConvRecurrentState | None = None
    ) -> tuple[Tensor, ConvRecurrentState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        projections = (self.q, self.k, self.v, self.a, self.beta, self.gate, *self.curvature_projections)
        q, k, v, a, beta, gate, *curvature = fused_projections(x, *projections)
        qkv, (log_decay, _) = torch.cat((q, k, v), dim=-1), self.decay(a)
        y, state = self._delta_rule(qkv, log_decay, beta, layout, state, curvature)
        y = self.norm(y.transpose(1, 2).to(qkv.dtype))
        gate = self.gate_function(gate.unflatten(-1, (self.heads, -1)))
        return self.out((y * gate).flatten(2)), state
