"""n-gram memory (Engram, Cheng et al. 2026, arXiv 2601.07372; Qwen4): vectors looked up by the last tokens.

    e_t = [E_j[h_j(token_t, …, token_{t−n+1})]],   j over `heads` hashes for each n from 2 to `order`
    g_t = N(K e_t) · x_t / sqrt(width),   m_t = σ(sign(g_t) sqrt(max(|g_t|, 1e-6))) V e_t
    y_t = m_t + SiLU(Σ_s w_s ⊙ N(m_{t − s·order})),   s from 0 to conv_kernel − 1, within t's document

h_j = (⊕_i a_i token_{t−i}) mod p_j: ⊕ is bitwise xor; `hash_seed` and `index` give the odd a_i; p_j is a prime of its
own, `slots` or more. Before a document's first token, `fill` is read; with `cut` n-grams also end at an earlier `fill`.

With `streams` it reads and writes every stream of hyper-connections, each with a K, norms and taps of its own, and
norms x_t. As the feed-forward of a layer without a mixer it is then Qwen4's (2026).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import DesignError, PositiveInt, Width, refuse
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.numerics.recurrent.convolution import causal_conv1d, next_conv_state
from heddle.numerics.transfer import Constants
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import Feedforward, FeedforwardConfig, token_ids
from heddle.parts.layout import Layout
from heddle.parts.modules.eager import layout_dependent
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal
from heddle.parts.modules.short_convolution import RESIDUAL_SCALE, cached_taps
from heddle.parts.states import MixerState, StateSpec

LEAST_GATE = 1e-6
LAYER_SEED, GAMMA = 10007, 0x9E3779B97F4A7C15  # of the hashes, as transformers draws them


class NGramMemoryConfig(FeedforwardConfig):
    """Fields of `ngram_memory`."""

    later_fields = ("streams", "cut", "multiple")

    dim: Width  # of the vector that each hash looks up
    order: Annotated[int, Field(ge=2, le=16)] = 3  # tokens of the longest n-gram
    heads: Annotated[int, Field(ge=1, le=32)] = 4  # hashes for each n
    slots: PositiveInt  # the least number of vectors of a hash
    conv_kernel: Width = 4  # taps of the convolution, `order` tokens apart
    fill: Annotated[int, Field(ge=0, lt=2**31)] = 0  # the id that is read before a document
    hash_seed: Annotated[int, Field(ge=0, lt=2**16)] = 0
    index: Annotated[int, Field(ge=0, lt=32)] = 0  # of this memory in a design with several: other hashes and primes
    id_range: PositiveInt = 2**18  # products of smaller ids and a_i do not overflow
    streams: bool = False  # of hyper-connections, each by itself
    cut: bool = False  # no n-gram reaches over an earlier `fill`
    multiple: PositiveInt = 1  # the rows of all tables are a multiple of it; those beyond the last one are not read

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.streams and self.short_convolution is not None:
            refuse("streams", "reads every stream, but short_convolution is of one input; leave one of them out")
        return self

    @property
    def reads_tokens(self) -> bool:
        """Always."""
        return True

    @property
    def reads_streams(self) -> bool:
        """As `streams` says."""
        return self.streams

    @property
    def hashes(self) -> int:
        """How many vectors a token looks up."""
        return (self.order - 1) * self.heads

    @property
    def sizes(self) -> list[int]:
        """p_j."""
        return primes_from(self.slots, self.index * self.hashes, self.hashes)

    def build(self, context: BuildContext) -> "NGramMemory":
        """Build the module. Raises DesignError for `streams` where the residual has none."""
        if self.streams and context.streams == 1:
            reason = "reads the streams of hyper-connections, but the residual has one stream"
            raise DesignError("streams", f"{reason}; choose residual.kind: hyper_connections, or leave it out")
        return NGramMemory(self, context)


def primes_from(start: int, skipped: int, count: int) -> list[int]:
    """`count` primes >= start, without the first `skipped` ones."""
    from sympy import nextprime  # slow to import

    found = [start - 1]
    for _ in range(skipped + count):
        found.append(int(nextprime(found[-1])))
    return found[1 + skipped :]


def multipliers(config: NGramMemoryConfig) -> list[int]:
    """a_0 to a_{order−1}: odd, from splitmix64 of the seed, below 2^63 / id_range."""
    bound, mask = max(1, (2**63 - 1) // config.id_range // 2), 2**64 - 1
    values = []
    for place in range(config.order):
        state = config.hash_seed + LAYER_SEED * config.index + GAMMA * (place + 2)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = ((state & mask) ^ (state & mask) >> shift) * factor & mask
        values.append(2 * ((state ^ state >> 31) % bound) + 1)
    return values


@dataclass(frozen=True, eq=False)
class NGramState(MixerState):
    """ids int64 [B, order − 1]: the last tokens of the document, plus 1; 0: none. conv_state [B, tokens, width]."""

    ids: Tensor
    conv_state: Tensor


class Tables(SelfInitialized):
    """The vectors of all hashes, one table after another: weight [sum of primes, dim]."""

    matrix_parameters = ()

    def __init__(self, config: NGramMemoryConfig) -> None:
        super().__init__()
        self.sizes = config.sizes
        self.starts = [0, *accumulate(self.sizes)][: config.hashes]
        rows = -(-sum(self.sizes) // config.multiple) * config.multiple
        self.weight = nn.Parameter(torch.empty(rows, config.dim))
        self.multipliers, self.heads, self.fill = tuple(multipliers(config)), config.heads, config.fill
        self.cut = config.cut
        self.constants = Constants()

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Draw the weight from normal(0, std)."""
        fill_normal(self.weight, std, draws("weight"))

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [B, T, order], oldest first, plus 1; 0: before the document -> [B, T, hashes · dim]."""
        ids = torch.where(ids > 0, ids - 1, self.fill)
        if self.cut:
            earlier = ids[..., :-1].flip(-1)  # the nearest first
            earlier = earlier.masked_fill((earlier == self.fill).cumsum(-1) > 0, self.fill)
            ids = torch.cat((earlier.flip(-1), ids[..., -1:]), dim=-1)

        def constant(values: Sequence[int]) -> Tensor:
            return self.constants.tensor(tuple(values), torch.int64, ids.device)

        factors = constant(self.multipliers)
        mixed, rows = ids[..., -1] * factors[0], []
        for place in range(1, ids.shape[-1]):
            mixed = mixed ^ ids[..., -1 - place] * factors[place]
            head = slice((place - 1) * self.heads, place * self.heads)
            rows.append(mixed[..., None] % constant(self.sizes[head]) + constant(self.starts[head]))
        return functional.embedding(torch.cat(rows, dim=-1), self.weight).flatten(-2)


class DilatedConvolution(SelfInitialized):
    """weight [width, kernel], the last for the token itself; the taps are `dilation` tokens apart."""

    matrix_parameters = ()

    def __init__(self, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.weight = nn.Parameter(torch.empty(width, kernel))

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Normal, as torch's Conv1d begins."""
        fill_normal(self.weight, RESIDUAL_SCALE * self.weight.shape[1] ** -0.5, draws("weight"))

    @property
    def spread(self) -> Tensor:
        """The weight with zeros between its taps, [width, (kernel − 1) · dilation + 1]."""
        width, kernel = self.weight.shape
        zeros = self.weight.new_zeros(width, kernel, self.dilation - 1)
        return torch.cat((zeros, self.weight[..., None]), dim=-1).flatten(1)[:, self.dilation - 1 :]


class NGramMemory(Feedforward):
    def __init__(self, config: NGramMemoryConfig, context: BuildContext) -> None:
        super().__init__()
        self.config, self.width, read = config, context.width, config.hashes * config.dim
        self.streams = streams = context.streams if config.streams else None
        self.channels = context.width * (streams or 1)
        self.tables = Tables(config)
        self.key = Linear(read, self.channels)
        self.value = Linear(read, context.width, value_projection=True, output_projection=True)
        self.key_norm, self.conv_norm = (context.norm.build(context.width, streams) for _ in range(2))
        self.query_norm = None if streams is None else context.norm.build(context.width, streams)
        self.convolution = DilatedConvolution(self.channels, config.conv_kernel, config.order)
        self.window, self.dilation = config.conv_kernel * config.order, config.order

    @property
    def inactive_parameters(self) -> int:
        """Number of elements in the vectors that a token does not look up."""
        return (self.tables.weight.shape[0] - self.config.hashes) * self.config.dim

    def init_state(self, spec: StateSpec) -> NGramState:
        """No earlier tokens."""
        tokens = (self.config.conv_kernel - 1) * self.config.order
        ids = torch.zeros(spec.batch, self.config.order - 1, dtype=torch.int64, device=spec.device)
        return NGramState(ids, torch.zeros(spec.batch, tokens, self.channels, dtype=spec.dtype, device=spec.device))

    def forward(self, x: Tensor, layout: Layout, state: NGramState | None = None) -> tuple[Tensor, NGramState | None]:
        """x [B, T, width] -> ([B, T, width], new state); with streams x [B, T, streams, width]."""
        vectors = self._look_up(layout, state)
        key, value = self.key(vectors), at_least_float32(self.value(vectors))
        if self.query_norm is not None:
            x, key, value = self.query_norm(x), key.view(x.shape), value[..., None, :]
        key = at_least_float32(self.key_norm(key))
        score = (key * at_least_float32(x)).sum(-1, keepdim=True) * self.width**-0.5
        memory = (score.sign() * score.abs().clamp(min=LEAST_GATE).sqrt()).sigmoid() * value
        return self._convolve(memory.to(x.dtype), layout, state)

    @layout_dependent
    def _look_up(self, layout: Layout, state: NGramState | None) -> Tensor:
        """[B, T, hashes · dim]; `fill` at padding."""
        ids, order = self._ids(layout), self.config.order
        taps = cached_taps(layout, order)
        earlier = ids.new_zeros(ids.shape[0], order - 1) if state is None else state.ids
        inputs = torch.cat((earlier, ids), dim=1)
        if taps is None:
            places = torch.arange(ids.shape[1], device=ids.device)[:, None]
            found = inputs[:, places + torch.arange(order, device=ids.device)]
            return cast(Tensor, self.tables(found))
        index = taps.input_indices[:, :-1]
        found = inputs.gather(1, index.clamp(min=0).flatten(1)).view(index.shape)
        return cast(Tensor, self.tables(found.masked_fill(index < 0, 0)))

    def _ids(self, layout: Layout) -> Tensor:
        """The ids of the call plus 1, int64 [B, T]."""
        return token_ids(layout, "kind: ngram_memory") + 1

    @layout_dependent
    def _convolve(self, memory: Tensor, layout: Layout, state: NGramState | None) -> tuple[Tensor, NGramState | None]:
        shape, weight = memory.shape, self.convolution.spread
        x, memory = self.conv_norm(memory).flatten(2), memory.flatten(2)
        taps = cached_taps(layout, weight.shape[1])
        convolved = causal_conv1d(x, weight, None if state is None else state.conv_state, taps)
        y = (at_least_float32(memory) + functional.silu(convolved)).to(memory.dtype)
        if layout.padding is not None:
            y = y.masked_fill(layout.padding[..., None], 0.0)
        if state is None:
            return y.view(shape), None
        near = cached_taps(layout, self.config.order)
        ids = next_conv_state(self._ids(layout)[..., None], state.ids[..., None], near)
        inputs = next_conv_state(x.to(state.conv_state.dtype), state.conv_state, taps)
        return y.view(shape), NGramState(ids.squeeze(-1), inputs)
