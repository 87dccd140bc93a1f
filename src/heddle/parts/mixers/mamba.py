"""Mamba (Gu & Dao 2023): a selective scan, in which every channel has a state and decays of its own.

    S_t = exp(Δ_t A) ⊙ S_{t−1} + Δ_t k_t v_t,   o_t = S_tᵀ q_t + D v_t,   y = W_out (o ⊙ SiLU(z))
    Δ = softplus(W_up a + b),   a, k, q = W_a v, W_k v, W_q v,   v = SiLU(conv(W_v x)),   A = −exp(A′)

q, k and v are the paper's C, B and x. v and z have `hidden` channels; a channel's state S and its A have `state_size`
elements, and all channels share q and k. With `norm`, a, k and q are normalized (Jamba, Lieber et al. 2024;
Falcon-Mamba, Zuo et al. 2024, without weights). Mamba-2 has one decay for each head of channels instead.
"""

from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import DesignError, Width, build_under
from heddle.numerics.attention.observer import notify_implied_weights
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.numerics.recurrent.selective_scan import ScanInputs, selective_scan
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig, RecurrentMixer
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal, fused_projections
from heddle.parts.modules.recurrent import fill_time_steps, softplus
from heddle.parts.modules.short_convolution import ShortConvolution
from heddle.parts.norms import NormConfig
from heddle.parts.states import ConvRecurrentState, StateSpec, without_padding

EXPANSION = 2  # channels for each of the width, as in the paper
WIDTH_OF_RANK = 16  # the width for each dim of a, rounded up, as in the paper


class MambaConfig(MixerConfig):
    """Fields of `mamba`. None: off, or the default named in the comment."""

    aliases = ("mamba1",)
    width_fields: ClassVar[tuple[str, ...]] = ("hidden", "time_step_rank")

    hidden: Width | None = None  # channels; default: 2 width
    state_size: Width = 16  # width of q and k, the paper's N
    time_step_rank: Width | None = None  # of the projection to Δ; default: width / 16, rounded up
    conv_kernel: Width = 4  # tokens that the convolution reads, itself included
    conv_bias: bool = True
    bias: bool = False  # of the first and the last projection
    norm: NormConfig | None = None  # of what computes Δ, of k and of q

    def resolved(self, context: BuildContext) -> Self:
        """Channels and rank written out."""
        hidden, rank = self.sizes(context.width)
        return self.replace(hidden=hidden, time_step_rank=rank)

    def sizes(self, width: int) -> tuple[int, int]:
        """Channels and rank in a model of this width."""
        return self.hidden or EXPANSION * width, self.time_step_rank or -(-width // WIDTH_OF_RANK)

    def build(self, context: BuildContext) -> "Mamba":
        """Build the module. Raises DesignError for a norm over a single number."""
        return Mamba(self, context)


class Mamba(SelfInitialized, RecurrentMixer):
    """The module. Its state is a `ConvRecurrentState` with d_k = state_size and d_v = 1 for each channel."""

    input_projections = ("v", "gate")
    matrix_parameters = ()  # the rate is a table

    def __init__(self, config: MambaConfig, context: BuildContext) -> None:
        super().__init__()
        (hidden, rank), size = config.sizes(context.width), config.state_size
        for field, width in (("time_step_rank", rank), ("state_size", size)):
            if config.norm is not None and width == 1:
                raise DesignError(field, "1 is too few for norm, after which at most a sign is left; give at least 2")
        self.hidden, self.state_size, self.conv_kernel = hidden, size, config.conv_kernel
        self.v = Linear(context.width, hidden, config.bias, value_projection=True)
        self.gate = Linear(context.width, hidden, config.bias)
        self.convolution = ShortConvolution(hidden, config.conv_kernel, config.conv_bias)
        self.time_step_down, self.k, self.q = (Linear(hidden, width) for width in (rank, size, size))
        # As numbers uniform in ± 1 / sqrt(rank), the authors' choice, in variance.
        self.time_step_up = Linear(rank, hidden, initial_std=(3 * rank) ** -0.5)
        self.time_step_bias = nn.Parameter(torch.empty(hidden))  # b
        self.rate = nn.Parameter(torch.empty(hidden, size))  # A′
        self.skip = nn.Parameter(torch.empty(hidden))  # D
        self.time_step_norm, self.k_norm, self.q_norm = (
            None if config.norm is None else build_under("norm", config.norm.build, width)
            for width in (rank, size, size)
        )
        self.out = Linear(hidden, context.width, config.bias, output_projection=True)

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """A is −1, …, −state_size in every channel, D is 1, softplus(b) log-uniform in [0.001, 0.1], as in the paper.

        A′ has normal noise, so that every element has its own draw, whichever rank fills it.
        """
        pattern = torch.arange(1, self.state_size + 1, dtype=torch.float32, device="cpu").log()
        fill_normal(self.rate, std, draws("rate"), pattern)
        nn.init.ones_(self.skip)
        fill_time_steps(self.time_step_bias, draws("time_step_bias"))

    def init_state(self, spec: StateSpec) -> ConvRecurrentState:
        """Zeros; the size does not depend on the cache length."""
        shape = (self.hidden, self.state_size, 1)
        return ConvRecurrentState.empty(spec, shape, (self.conv_kernel - 1, self.hidden))

    def forward(
        self, x: Tensor, layout: Layout, state: ConvRecurrentState | None = None
    ) -> tuple[Tensor, ConvRecurrentState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        v, gate = fused_projections(x, self.v, self.gate)
        convolved = self._convolve(v, layout, state)
        a, k, q = fused_projections(convolved.to(v.dtype), self.time_step_down, self.k, self.q)
        if self.time_step_norm is not None and self.k_norm is not None and self.q_norm is not None:
            a, k, q = self.time_step_norm(a), self.k_norm(k), self.q_norm(q)
        time_step = softplus(at_least_float32(self.time_step_up(a)) + at_least_float32(self.time_step_bias))
        o, state = self._scan(v, (q, k, convolved), time_step, layout, state)
        return self.out((o * functional.silu(at_least_float32(gate))).to(gate.dtype)), state

    @eager  # layouts differ from call to call, so this stays out of compiled regions
    def _convolve(self, v: Tensor, layout: Layout, state: ConvRecurrentState | None) -> Tensor:
        y: Tensor = self.convolution(v, layout, None if state is None else state.conv_state)
        return y

    @eager
    def _scan(
        self,
        v: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        time_step: Tensor,
        layout: Layout,
        state: ConvRecurrentState | None,
    ) -> tuple[Tensor, ConvRecurrentState | None]:
        """v [B, T, hidden] before the convolution, q, k [B, T, state_size], v and Δ [B, T, hidden] -> o and the state.

        o [B, T, hidden] is in at least float32.
        """
        q, k, convolved = (at_least_float32(x) for x in qkv)
        inputs = ScanInputs(
            q[:, None],
            k[:, None],
            convolved.mT[..., None],
            without_padding(time_step.mT[..., None], layout),  # padding does not decay the state
            -at_least_float32(self.rate).exp(),
            at_least_float32(self.skip),
            layout.call_segment_ids,
            v.dtype,
        )
        if state is None:
            notify_implied_weights(
                lambda one_hot: selective_scan(inputs._replace(v=one_hot), None)[0], inputs.v, layout.padding
            )
            return selective_scan(inputs, None)[0][..., 0].mT, None
        o, recurrent_state = selective_scan(inputs, state.recurrent_state)
        conv_state = self.convolution.next_state(v, layout, state.conv_state)
        return o[..., 0].mT, ConvRecurrentState(recurrent_state, conv_state)
