"""Gated DeltaNet (Yang et al. 2024), the linear layers of Qwen3-Next: a memory that decays and corrects itself.

    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,   o_t = S_t q_t,   y = W_out (N(o) ⊙ SiLU(z))
    α = exp(−exp(A) · softplus(a + b)),   β = sigmoid(·),   q = q̂ / (|q̂| sqrt(d_k)),   k = k̂ / |k̂|

q̂, k̂ and v̂ come of causal depthwise convolutions and SiLU; a, z and β's argument of x. Value head h reads key head
h // (heads / key_heads). The memory is d_k · d_v numbers a head, however long the text.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import Count, build_under, refuse
from heddle.numerics.attention.observer import imply
from heddle.numerics.norms import at_least_float32
from heddle.numerics.recurrent.convolution import Taps, convolution, find_starts, find_taps, next_tail
from heddle.numerics.recurrent.gated_delta import Rule, delta, unit
from heddle.parts.context.layout import Layout, Memory
from heddle.parts.context.mixer_state import MixerState
from heddle.parts.mixers import Mixer, MixerConfig, Place, widen
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Leaf, Linear, fill_normal, together
from heddle.parts.norms import NormConfig


class GatedDeltaConfig(MixerConfig):
    """Fields of `gated_delta`; absent means the usual default."""

    heads: Count  # of values, memories and outputs
    key_heads: Count | None = None  # of queries and keys; default: heads
    head_dim: Count | None = None  # of queries and keys; default: width / heads
    value_dim: Count | None = None  # default: head_dim
    convolution: Count = 4  # tokens that it reaches, itself included; 1 looks at no other
    norm: NormConfig | None = None  # of each head's output; default: the model's

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.key_heads is not None and self.heads % self.key_heads:
            refuse("key_heads", f"{self.key_heads} does not divide heads = {self.heads}; choose a divisor of it")
        return self

    def resolved(self, place: Place) -> Self:
        """Heads, widths and norm written out."""
        dim = place.head_dim(self.heads, self.head_dim)
        return self.replace(
            key_heads=self.key_heads or self.heads,
            head_dim=dim,
            value_dim=self.value_dim or dim,
            norm=self.norm or place.norm,
        )

    def build(self, place: Place) -> "GatedDelta":
        """Make the module. Raises DesignError if width is not divisible by heads and head_dim is not given."""
        return GatedDelta(self, place)


@dataclass(frozen=True, eq=False)
class GatedDeltaState(MixerState):
    """memory S [B, heads, d_k, d_v], in at least float32; tail [B, convolution − 1, channels], its last inputs."""

    memory: Tensor
    tail: Tensor


class Convolution(Leaf):
    """The weights [channels, kernel] of a depthwise convolution, the last of each for the token itself."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel))

    def initialise(self, std: float, generator: torch.Generator) -> None:
        """Normal weights that keep the size of what comes in."""
        fill_normal(self.weight, self.weight.shape[1] ** -0.5, generator)

    def forward(self, x: Tensor, tail: Tensor | None, taps: Taps | None) -> Tensor:
        """x [B, T, channels] -> the same, in at least float32."""
        x = at_least_float32(x)
        return convolution(x, self.weight.to(x.dtype), None if tail is None else tail.to(x.dtype), taps)


class Decay(Leaf):
    """a [B, T, heads] -> log α = −exp(A) · softplus(a + b) [B, heads, T], in at least float32."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.empty(heads))  # A
        self.bias = nn.Parameter(torch.empty(heads))  # b

    def initialise(self, std: float, generator: torch.Generator) -> None:
        """exp(A) uniform in [1, 16], softplus(b) log-uniform in [0.001, 0.1], as the authors' code and Mamba-2 do."""
        drawn = torch.rand(2, *self.rate.shape, generator=generator, device="cpu")
        step = torch.exp(math.log(1e-3) + drawn[1] * math.log(100.0))
        with torch.no_grad():
            self.rate.copy_(torch.log(1.0 + 15.0 * drawn[0]))
            self.bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(self, a: Tensor) -> Tensor:
        """The logarithm of what each head keeps of its memory at each token."""
        rate, bias = at_least_float32(self.rate), at_least_float32(self.bias)
        return (-rate.exp() * functional.softplus(at_least_float32(a) + bias)).transpose(1, 2)


class GatedDelta(Mixer):
    """The module."""

    def __init__(self, config: GatedDeltaConfig, place: Place) -> None:
        super().__init__()
        self.heads = config.heads
        self.key_heads = config.key_heads or config.heads
        self.head_dim = place.head_dim(config.heads, config.head_dim)
        self.value_dim = config.value_dim or self.head_dim
        self.kernel = config.convolution
        self.reach, self.causal = None, True
        keys, values = self.key_heads * self.head_dim, self.heads * self.value_dim
        self.widths = [2 * keys, values]
        self.q = Linear(place.width, keys)
        self.k = Linear(place.width, keys)
        self.v = Linear(place.width, values)
        self.gate = Linear(place.width, values)
        self.a = Linear(place.width, self.heads)
        self.beta = Linear(place.width, self.heads)
        self.convolution = Convolution(sum(self.widths), self.kernel)
        self.decay = Decay(self.heads)
        self.norm = build_under("norm", (config.norm or place.norm).build, self.value_dim)
        self.out = Linear(values, place.width, last=True)

    @property
    def looks_back(self) -> int:
        """No earlier position is asked for: memory and tail are all there is."""
        return 0

    def init_state(
        self,
        batch: int,
        capacity: int | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        memory: Memory | None = None,
        rewind: int = 0,
    ) -> GatedDeltaState:
        """Nothing seen yet; the size does not depend on the capacity."""
        tail = torch.zeros(batch, self.kernel - 1, sum(self.widths), dtype=dtype, device=device)
        wide = torch.promote_types(dtype, torch.float32)
        nothing = torch.zeros(batch, self.heads, self.head_dim, self.value_dim, dtype=wide, device=device)
        return GatedDeltaState(nothing, tail)

    def _answer(self, rule: Rule) -> Tensor:
        """What the rule reads of a memory that held nothing."""
        wide = torch.promote_types(rule.v.dtype, torch.float32)
        shape = (rule.v.shape[0], self.heads, self.head_dim, rule.v.shape[3])
        return delta(rule, rule.v.new_zeros(shape, dtype=wide))[0]

    def forward(
        self, x: Tensor, layout: Layout, state: GatedDeltaState | None = None
    ) -> tuple[Tensor, GatedDeltaState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        q, k, v, a, beta, gate = together(x, self.q, self.k, self.v, self.a, self.beta, self.gate)
        inputs = torch.cat((q, k, v), dim=-1)
        y, state = self._recall(inputs, self.decay(a), beta, layout, state)
        y = self.norm(y.transpose(1, 2).to(inputs.dtype))
        gate = functional.silu(gate.unflatten(-1, (self.heads, -1)))
        return self.out((y * gate).flatten(2)), state

    @eager  # layouts differ from call to call; what is compiled is around this
    def _recall(
        self, inputs: Tensor, log_decay: Tensor, beta: Tensor, layout: Layout, state: GatedDeltaState | None
    ) -> tuple[Tensor, GatedDeltaState | None]:
        """inputs [B, T, channels], log α [B, heads, T], beta [B, T, heads] -> o [B, heads, T, d_v]."""
        taps = layout.once(("taps", self.kernel), lambda: _taps(layout, self.kernel))
        mixed = functional.silu(self.convolution(inputs, None if state is None else state.tail, taps))
        qk, v = mixed.split(self.widths, dim=-1)
        q, k = unit(widen(qk, 2 * self.key_heads)).chunk(2, dim=1)
        if layout.padding is not None:  # its keys and values are zero: what it must not do is take time
            log_decay = log_decay.masked_fill(layout.padding[:, None], 0.0)
        rule = Rule(
            q * self.head_dim**-0.5,
            k,
            widen(v, self.heads),
            log_decay,
            at_least_float32(beta).sigmoid().transpose(1, 2),
            layout.segments,
        )
        if state is None:
            imply(lambda one_hot: self._answer(rule._replace(v=one_hot)), rule.v, layout.padding)
            return self._answer(rule), None
        y, memory = delta(rule, state.memory)
        return y, GatedDeltaState(memory, next_tail(inputs.to(state.tail.dtype), state.tail, taps))


def _taps(layout: Layout, kernel: int) -> Taps | None:
    """Where the inputs of each token's convolution stand; None where they stand before it."""
    padding, segments = layout.padding, layout.segments
    if padding is None and segments is None:
        return None
    zeros = torch.zeros_like(layout.positions)
    index = find_taps(layout.positions >= 0, zeros if segments is None else segments, kernel)
    known = padding is None and layout.pieces is not None
    return Taps(index, find_starts(layout.pieces, kernel, index.device) if known and layout.pieces else None)
