"""PaTH attention (Yang et al. 2025, arXiv 2505.16381): what the tokens between key and query say is their position.

    softmax(scale · k_jᵀ H_{j+1} ⋯ H_i q_i) v_j,   H_t = I − β_t w_t w_tᵀ
    β = 2 σ(W_β x + b),   w = ŵ / |ŵ|,   ŵ = SiLU(conv(W_up W_down x))

w and β belong to a head of keys: query head h reads key head h // (heads / kv_heads). H reflects for β of 2 and erases
along w for β of 1, so a score can follow a state that tokens change, such as a permutation. The cache has k, w, v and β
of every token unchanged, so no earlier key is rewritten; a step costs as much as attention with keys three times as
wide.

With `forget` (PaTH-FoX, section 3.3), Σ_l log sigmoid(W_f x_l + b_f) over the tokens l after j up to i is added to the
score, as in `attention`: each query head forgets. The state has these logs as well, in at least float32.
flash-linear-attention multiplies the sums by `scale`, too, which this does not.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn import functional

from heddle.config import PositiveFloat, Width
from heddle.numerics.attention.householder import BLOCK, householder_flops, householder_products
from heddle.numerics.attention.mask import ScoreModifiers, TokenBias, zero_unused_slots
from heddle.numerics.attention.softmax import attention
from heddle.numerics.dispatch import add_flops, counts_flops
from heddle.numerics.norms import at_least_float32
from heddle.numerics.recurrent.gated_delta import l2_normalize
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer, MixerConfig, check_head_groups, merge_heads, split_heads
from heddle.parts.modules.eager import layout_dependent
from heddle.parts.modules.linear import Linear, fused_projections
from heddle.parts.modules.short_convolution import ShortConvolution
from heddle.parts.states import KVCache, MixerState, StateSpec

RANK = 32  # of w, as in the authors' code


class PathAttentionConfig(MixerConfig):
    """Fields of `path_attention`. None: the default named in the comment."""

    aliases = ("path",)
    later_fields = ("forget",)

    heads: Width
    kv_heads: Width | None = None  # default: heads
    head_dim: Width | None = None  # default: width / heads
    value_dim: Width | None = None  # default: head_dim
    vector_rank: Width = RANK  # of the projection to w
    conv_kernel: Width = 3  # tokens that the convolution of w reads, itself included
    scale: PositiveFloat | None = None  # default: 1 / sqrt(head_dim)
    forget: bool = False  # scores fall with the forget gates of the tokens between key and query

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_head_groups("kv_heads", self.kv_heads, self.heads)
        return self

    def resolved(self, context: BuildContext) -> Self:
        """Heads, widths and scale written out."""
        dim = context.head_dim(self.heads, self.head_dim)
        fields = {"kv_heads": self.kv_heads or self.heads, "head_dim": dim, "value_dim": self.value_dim or dim}
        return self.replace(**fields, scale=self.scale or dim**-0.5)

    def build(self, context: BuildContext) -> "PathAttention":
        """Build the module. Raises DesignError if width is not divisible by heads and head_dim is not given."""
        return PathAttention(self, context)


@dataclass(frozen=True, eq=False)
class PathState(MixerState):
    """A cache of [k ; w] and v [B, kv_heads, slots, 2 d_k] and [.., d_v], and one of β in at least float32.

    log_forget: with `forget`, the logs of the gates [B, heads, slots, 1], in at least float32, too. conv_state
    [B, conv_kernel − 1, kv_heads · d_k]: the last inputs of the convolution, which cannot roll back.
    """

    kv: KVCache
    beta: KVCache
    conv_state: Tensor
    log_forget: KVCache | None = None


class PathAttention(Mixer):
    """The module. Its state is a `PathState`."""

    input_projections = ("q", "k", "v", "w_down", "beta", "forget")
    state_note = "with w and β of each token"

    def __init__(self, config: PathAttentionConfig, context: BuildContext) -> None:
        super().__init__()
        self.window, self.causal = None, True
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_dim = context.head_dim(config.heads, config.head_dim)
        self.value_dim = config.value_dim or self.head_dim
        self.scale = config.scale or self.head_dim**-0.5
        self.conv_kernel, width, key_width = config.conv_kernel, context.width, self.kv_heads * self.head_dim
        self.q = Linear(width, self.heads * self.head_dim)
        self.k = Linear(width, key_width)
        self.v = Linear(width, self.kv_heads * self.value_dim, value_projection=True)
        self.w_down, self.w_up = Linear(width, config.vector_rank), Linear(config.vector_rank, key_width)
        self.beta = Linear(width, self.kv_heads, bias=True)
        self.forget = Linear(width, self.heads, bias=True) if config.forget else None
        self.convolution = ShortConvolution(key_width, self.conv_kernel)
        self.out = Linear(self.heads * self.value_dim, width, output_projection=True)

    @property
    def logit_rows(self) -> str:
        """Its logits are not measured."""
        return "is PaTH attention, for which QK-clip is not defined"

    def init_state(self, spec: StateSpec) -> PathState:
        """An empty cache for every token, and zeros before the first one."""
        groups, wide = self.kv_heads, torch.promote_types(spec.dtype, torch.float32)
        kv = KVCache.empty((spec.batch, groups, 2 * self.head_dim, self.value_dim), None, spec)
        beta, log_forget = (
            KVCache.empty((spec.batch, heads, 1, 0), None, replace(spec, dtype=wide)) for heads in (groups, self.heads)
        )
        shape = (spec.batch, self.conv_kernel - 1, groups * self.head_dim)
        conv_state = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        return PathState(kv, beta, conv_state, None if self.forget is None else log_forget)

    def forward(self, x: Tensor, layout: Layout, state: PathState | None = None) -> tuple[Tensor, PathState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        q, k, v, vectors, rates = fused_projections(x, self.q, self.k, self.v, self.w_down, self.beta)
        beta = 2.0 * at_least_float32(rates).sigmoid().transpose(1, 2)
        logs = None
        if self.forget is not None:
            logs = functional.logsigmoid(at_least_float32(self.forget(x))).transpose(1, 2)
        k, v = split_heads(k, self.kv_heads), split_heads(v, self.kv_heads)
        y, state = self._attend(split_heads(q, self.heads), k, v, self.w_up(vectors), (beta, logs), layout, state)
        return self.out(merge_heads(y)), state

    @layout_dependent  # layouts differ from call to call, so this stays out of compiled regions
    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        vectors: Tensor,
        rates: tuple[Tensor, Tensor | None],
        layout: Layout,
        state: PathState | None,
    ) -> tuple[Tensor, PathState | None]:
        """The output of each head, and the new state.

        vectors: ŵ before the convolution. rates: β [B, kv_heads, T], and the logs of forget gates [B, heads, T].
        """
        beta, logs = rates
        convolved = self.convolution(vectors, layout, None if state is None else state.conv_state)
        w = l2_normalize(split_heads(convolved, self.kv_heads)).to(k.dtype)
        if state is None:
            mask = layout.attention_mask(None, True)
        else:
            keys, v, mask, kv = state.kv.extend(torch.cat((k, w), dim=-1), v, layout, None)
            k, w = keys.chunk(2, dim=-1)
            beta, betas = _extended(state.beta, beta, layout)
            log_forget = state.log_forget
            if logs is not None and log_forget is not None:
                logs, log_forget = _extended(log_forget, logs, layout)
            state = PathState(kv, betas, self.convolution.next_state(vectors, layout, state.conv_state), log_forget)
        if counts_flops():
            pairs, block = mask.pairs(q.shape[2], k.shape[2]), min(BLOCK, k.shape[2])
            add_flops(len(q) * householder_flops(pairs, k.shape[2], self.heads, self.kv_heads, self.head_dim, block))
        k, w = zero_unused_slots(k, w, mask)
        products = householder_products(q * self.scale, k, w, beta, mask.k_positions, mask.k_segment_ids)
        bias = TokenBias(logs, products=products)
        return attention(q, k, v, mask, self.scale, None, ScoreModifiers(token_bias=bias)), state


def _extended(cache: KVCache, numbers: Tensor, layout: Layout) -> tuple[Tensor, KVCache]:
    """One number for each head and token [B, H, T] -> those of all tokens [B, H, S], and the new cache."""
    numbers = numbers[..., None]
    numbers, _, _, cache = cache.extend(numbers, numbers[..., :0], layout, None)
    return numbers[..., 0], cache
