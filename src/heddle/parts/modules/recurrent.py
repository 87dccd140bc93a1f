"""What recurrent mixers share: decays computed from each token, and the mixers of the gated delta rule."""

import math
from abc import ABC
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from heddle.config import refuse
from heddle.numerics.attention.observer import notify_implied_weights
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws, RandomStream
from heddle.numerics.recurrent.convolution import next_conv_state
from heddle.numerics.recurrent.gated_delta import EPS, DeltaInputs, gated_delta_rule, l2_normalize
from heddle.numerics.recurrent.ssd import SSDInputs, state_space_duality
from heddle.parts.layout import Layout
from heddle.parts.mixers import RecurrentMixer, split_heads
from heddle.parts.modules.eager import eager_on_cpu, layout_dependent
from heddle.parts.modules.linear import Linear, SelfInitialized
from heddle.parts.modules.short_convolution import ShortConvolution, cached_taps
from heddle.parts.states import ConvRecurrentState, StateSpec, call_cu_seqlens, without_padding

SQUASH = 1.5  # a preconditioner is between its inverse and itself

# The decay that recurrent mixers compute from each token, as Mamba-2 does (Dao & Gu 2024).
#
# Δ = softplus(a + b),   log α = −exp(A) Δ


def fill_time_steps(bias: Tensor, stream: RandomStream) -> None:
    """Fill b so that softplus(b) is log-uniform in [0.001, 0.1], as the authors' code does."""
    time_step = torch.exp(math.log(1e-3) + stream.uniform(0, len(bias)) * math.log(100.0))
    with torch.no_grad():
        bias.copy_(time_step + torch.log(-torch.expm1(-time_step)))  # inverse of softplus


class GatedDecay(SelfInitialized):
    """A per head and b per channel, `channels` for each head. `limits`: the minimum and maximum of Δ."""

    def __init__(self, heads: int, channels: int = 1, limits: Sequence[float] | None = None) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.empty(heads))  # A
        self.bias = nn.Parameter(torch.empty(heads * channels))  # b
        self.limits = limits

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """exp(A) uniform in [1, 16], softplus(b) log-uniform in [0.001, 0.1], as the authors' code does."""
        with torch.no_grad():
            self.rate.copy_(torch.log(1.0 + 15.0 * draws("rate").uniform(0, len(self.rate))))
        fill_time_steps(self.bias, draws("bias"))

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """a [B, T, heads · channels] -> log α and Δ [B, heads, T, channels], in at least float32."""
        rate, bias = at_least_float32(self.rate), at_least_float32(self.bias)
        time_step = softplus(at_least_float32(a) + bias).unflatten(-1, (len(rate), -1))
        if self.limits is not None:
            time_step = time_step.clamp(*self.limits)
        log_decay = -rate.exp()[:, None] * time_step
        return log_decay.transpose(1, 2), time_step.transpose(1, 2)


class BoundedDecay(GatedDecay):
    """log α = −bound · σ(exp(A) (a + b)): no decay is below exp(−bound) per token (GLM-5 Next 2026)."""

    def __init__(self, heads: int, channels: int, bound: float) -> None:
        super().__init__(heads, channels)
        self.bound = bound

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """A of 0, as the authors' code does; b as above, so that log α / −bound begins in [0.001, 0.0952]."""
        super().init_weights(std, draws)
        nn.init.zeros_(self.rate)

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """a [B, T, heads · channels] -> log α and, in place of Δ, log α / −bound [B, heads, T, channels]."""
        rate, bias = at_least_float32(self.rate), at_least_float32(self.bias)
        argument = (at_least_float32(a) + bias).unflatten(-1, (len(rate), -1))
        share = (rate.exp()[:, None] * argument).sigmoid().transpose(1, 2)
        return -self.bound * share, share


class Preconditioner(SelfInitialized):
    """The keys that write, k̃ = k ⊙ M: dims along which few keys were seen are written more (arXiv 2604.21100).

        A_t = γ_t A_{t−1} + b_t k_t ⊙ k_t,   M = 1.5^{−s},   s = r / (1 + |r|),   r = log(A + 1e-6) − c

    The curvature A has an element per channel of the key. γ is a decay as α, b = σ(·); both and c, which begins at
    −0.2, are one number per head of keys. M is between 2/3 and 3/2.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.a, self.beta = Linear(width, heads), Linear(width, heads)
        self.decay = GatedDecay(heads)
        self.center = nn.Parameter(torch.empty(heads))  # c

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """c as in the authors' code; the projections and the decay initialize themselves."""
        nn.init.constant_(self.center, -0.2)

    def forward(
        self, k: Tensor, projected: Sequence[Tensor], layout: Layout, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """k [B, heads, T, d_k] -> k̃, and the curvature [B, heads, 1, d_k]. projected: the arguments of γ and b."""
        log_decay, _ = self.decay(projected[0])
        inputs = SSDInputs(
            torch.ones_like(k[..., :1]),
            at_least_float32(projected[1]).sigmoid().transpose(1, 2)[..., None],
            k.square(),
            without_padding(log_decay, layout),
            torch.ones_like(k[..., :1]),
            k.new_zeros(k.shape[1]),
            layout.call_segment_ids,
        )
        curvature, state = self._sums(inputs, state)
        center = at_least_float32(self.center)[:, None, None]
        return k * SQUASH ** -functional.softsign((curvature + EPS).log() - center), state

    @layout_dependent
    def _sums(self, inputs: SSDInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return state_space_duality(inputs, state)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)). torch's compiler expects other strides of its gradient than torch's kernel returns."""
    return torch.logaddexp(x, torch.zeros_like(x)) if is_compiling() else functional.softplus(x)


# What the mixers of the gated delta rule share: a short convolution of q, k and v, and one state matrix per head.


class DeltaRuleMixer(RecurrentMixer, ABC):
    """A mixer of the gated delta rule. Its state is a `ConvRecurrentState`.

    A subclass adds the other projections and the convolution, over the channels of q, k and v in this order.
    negative_eigenvalues: β is 2 σ(·) and not σ(·), so that I − β k kᵀ may reflect k, not only erase along it.
    steps: corrections of the state per token, each with its own k, v and β; the state decays once, before them.
    channel_gates: whether gates for each channel erase and write in the place of β. preconditioned: whether k̃ writes.
    """

    convolution: ShortConvolution

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        key_heads: int,
        head_dim: int,
        value_dim: int,
        conv_kernel: int,
        negative_eigenvalues: bool,
        steps: int = 1,
        channel_gates: bool = False,
        preconditioned: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.conv_kernel = conv_kernel
        self.negative_eigenvalues = negative_eigenvalues
        self.steps, self.channel_gates = steps, channel_gates
        self.preconditioner = Preconditioner(width, key_heads) if preconditioned else None
        self.conv_widths = [(1 + steps) * key_heads * head_dim, steps * heads * value_dim]
        self.q = Linear(width, key_heads * head_dim)
        self.k = Linear(width, steps * key_heads * head_dim)
        self.v = Linear(width, steps * heads * value_dim, value_projection=True)

    def init_state(self, spec: StateSpec) -> ConvRecurrentState:
        """Zeros; the size does not depend on the cache length."""
        shape = (self.heads, self.head_dim, self.value_dim)
        state = ConvRecurrentState.empty(spec, shape, (self.conv_kernel - 1, sum(self.conv_widths)))
        if self.preconditioner is None:
            return state
        return replace(state, curvature=state.recurrent_state.new_zeros(spec.batch, self.key_heads, 1, self.head_dim))

    @property
    def curvature_projections(self) -> tuple[Linear, ...]:
        """The projections of x that a preconditioner reads; none without it."""
        return () if self.preconditioner is None else (self.preconditioner.a, self.preconditioner.beta)

    @eager_on_cpu
    def _delta_rule(
        self,
        qkv: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        layout: Layout,
        state: ConvRecurrentState | None,
        curvature: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ConvRecurrentState | None]:
        """Output o [B, heads, T, d_v], and the new state.

        qkv [B, T, channels], log α [B, heads, T, 1] or [B, heads, T, d_k], beta [B, T, steps · heads], or with
        `channel_gates` [B, T, heads · (d_k + d_v)]. curvature: the outputs of `curvature_projections`.
        """
        convolved = self.convolution(qkv, layout, None if state is None else state.conv_state)
        qk, v = convolved.split(self.conv_widths, dim=-1)
        qk = l2_normalize(split_heads(qk, (1 + self.steps) * self.key_heads))
        q, k = qk.split([self.key_heads, self.steps * self.key_heads], dim=1)
        beta, write = at_least_float32(beta).sigmoid(), None
        if self.channel_gates:
            beta, write = beta.split([self.heads * self.head_dim, self.heads * self.value_dim], dim=-1)
        if self.negative_eigenvalues:
            beta = 2.0 * beta
        beta, v, read = beta.transpose(1, 2), split_heads(v, self.steps * self.heads), None
        if write is not None:
            read, v = k * split_heads(beta.mT, self.heads), v * split_heads(write, self.heads)
            beta = torch.ones_like(v[..., 0])
        curvature_state = None
        if self.preconditioner is not None:
            read = k if read is None else read
            k, curvature_state = self.preconditioner(k, curvature, layout, None if state is None else state.curvature)
        inputs = DeltaInputs(
            q * self.head_dim**-0.5,
            k,
            v,
            without_padding(log_decay, layout),  # padding, whose keys and values are zero, does not decay the state
            beta,
            layout.call_segment_ids,
            self._cu_seqlens(layout),
            qkv.dtype,
            read,
        )
        if self.steps > 1:
            inputs = in_steps(inputs, self.steps)
        elif state is None:
            notify_implied_weights(
                lambda one_hot: gated_delta_rule(inputs._replace(v=one_hot), None)[0], inputs.v, layout.padding
            )
        if state is None:
            return self._recurrence(inputs, None)[0], None
        o, recurrent_state = self._recurrence(inputs, state.recurrent_state)
        conv_state = self.convolution.next_state(qkv, layout, state.conv_state)
        return o, ConvRecurrentState(recurrent_state, conv_state, curvature_state)

    @layout_dependent
    def _cu_seqlens(self, layout: Layout) -> tuple[Tensor, Tensor] | None:
        return call_cu_seqlens(layout)

    @layout_dependent  # no compiler traces a library's kernel
    def _recurrence(self, inputs: DeltaInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.steps == 1:
            return gated_delta_rule(inputs, state)
        if inputs.v.shape[2] != self.steps:
            o, after = gated_delta_rule(inputs, state)
            return o[:, :, self.steps - 1 :: self.steps], after
        o, after = gated_delta_rule(one_step(inputs, 0), state)  # one token: a chunk would cost more
        for step in range(1, self.steps):
            o, after = gated_delta_rule(one_step(inputs, step), after)
        return o, after


CURVATURE_PROJECTIONS = ("preconditioner.a", "preconditioner.beta")


def check_preconditioned(preconditioned: bool, negative_eigenvalues: bool) -> None:
    """Refuse keys that would write up to three times what they read, from within a validator."""
    if preconditioned and negative_eigenvalues:
        refuse("preconditioned", "does not bound the state with negative_eigenvalues; leave one of the two out")


def in_steps(inputs: DeltaInputs, steps: int) -> DeltaInputs:
    """The inputs with each token's steps one after the other: k, v and beta come with `steps` times as many heads.

    The state decays before the first step and is read after the last one.
    """
    k, v, beta = (x.unflatten(1, (steps, -1)).movedim(1, 3).flatten(2, 3) for x in (inputs.k, inputs.v, inputs.beta))
    ids, bounds = inputs.call_segment_ids, inputs.cu_seqlens
    return DeltaInputs(
        functional.pad(inputs.q.unsqueeze(3), (0, 0, steps - 1, 0)).flatten(2, 3),
        k,
        v,
        functional.pad(inputs.log_decay.unsqueeze(3), (0, 0, 0, steps - 1)).flatten(2, 3),
        beta,
        None if ids is None else ids.repeat_interleave(steps, dim=1),
        None if bounds is None else (bounds[0] * steps, bounds[1] * steps),
        inputs.dtype,
    )


def one_step(inputs: DeltaInputs, step: int) -> DeltaInputs:
    """One step of a single token. A new document begins at its first step."""
    q, k, v, log_decay, beta = (x[:, :, step : step + 1] for x in inputs[:5])
    ids = inputs.call_segment_ids if step == 0 else None
    return DeltaInputs(q, k, v, log_decay, beta, None if ids is None else ids[:, :1], None, inputs.dtype)


# Token shift (Peng et al. 2023, RWKV): a token reads the one before it in its document.


def token_before(x: Tensor, layout: Layout, last: Tensor | None) -> Tensor:
    """x [B, T, C] -> the token before each, in its document; zero where there is none.

    last [B, 1, C]: the token before the call; None: there is none. It depends on the layout, as the convolution does.
    """
    last = x.new_zeros(x.shape[0], 1, x.shape[2]) if last is None else last.to(x.dtype)
    inputs, taps = torch.cat((last, x), dim=1), cached_taps(layout, 2)
    if taps is None:
        return inputs[:, : x.shape[1]]
    index = taps.input_indices[:, :-1, :1]
    before = inputs.gather(1, index.clamp(min=0).expand(-1, -1, x.shape[2]))
    return before.masked_fill(index < 0, 0.0)


def last_token(x: Tensor, layout: Layout, last: Tensor) -> Tensor:
    """The `last` [B, 1, C] of the next call, after a call with inputs x [B, T, C], in the dtype of this call's."""
    return next_conv_state(x.to(last.dtype), last, cached_taps(layout, 2))
