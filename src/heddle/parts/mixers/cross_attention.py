"""Cross-attention (Vaswani et al. 2017): queries from the decoder, keys and values from an encoder output m.

    softmax:         softmax(Q Kᵀ / sqrt(d_k)) V,              Q = W_q x,  K = W_k m,  V = W_v m
    double_softmax:  softmax_d(Q) (softmax_s(K)ᵀ V),           linear in both lengths (Shen et al. 2018)

The encoder output has its own length and width. Every token of the decoder sees every token of its row's encoder output
that is not padding; if there is none, the result is zero. The encoder output is projected once, when the state is
created. Keys and values may be projected from different sequences (`EncoderOutput.values`).
"""

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import model_validator
from torch import Tensor

from heddle.config import PositiveFloat, Width, refuse
from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.attention.softmax import attention
from heddle.numerics.recurrent.double_softmax import (
    double_softmax,
    read_summary,
    summarize_keys_values,
)
from heddle.parts.build import BuildContext
from heddle.parts.layout import EncoderOutput, Layout
from heddle.parts.mixers import Mixer, MixerConfig, check_double_softmax, check_head_groups, merge_heads, split_heads
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Linear
from heddle.parts.position_table import PositionTable
from heddle.parts.states import MixerState, StateSpec


class CrossAttentionConfig(MixerConfig):
    """Fields of `cross_attention`. None or false: off, or the default named in the comment."""

    absent_fields = (("value_embedding", "adds rows of the call's tokens, but values are the encoder's; leave it out"),)

    heads: Width
    kv_heads: Width | None = None  # default: heads
    head_dim: Width | None = None  # default: width / heads
    value_dim: Width | None = None  # default: head_dim
    encoder_width: Width | None = None  # default: the model's width
    normalization: Literal["softmax", "double_softmax"] = "softmax"
    bias: bool | Literal["qkv"] = False  # true: q, k, v and out; qkv: those three
    scale: PositiveFloat | None = None  # default: 1 / sqrt(head_dim)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_head_groups("kv_heads", self.kv_heads, self.heads)
        if self.scale is not None and self.normalization == "double_softmax":
            refuse("scale", "double_softmax computes no scores to scale; leave it out")
        return self

    def resolved(self, context: BuildContext) -> Self:
        """Heads and widths written out, and the scale unless double_softmax is used."""
        dim = context.head_dim(self.heads, self.head_dim)
        return self.replace(
            kv_heads=self.kv_heads or self.heads,
            head_dim=dim,
            value_dim=self.value_dim or dim,
            encoder_width=self.encoder_width or context.width,
            scale=None if self.normalization == "double_softmax" else self.scale or dim**-0.5,
        )

    def build(self, context: BuildContext) -> "CrossAttention":
        """Build the module.

        Raises DesignError if width is not divisible by heads and head_dim is not given, or if double_softmax would
        normalize over a single dim.
        """
        return CrossAttention(self, context)


@dataclass(frozen=True, eq=False)
class ProjectedEncoderOutput(MixerState):
    """keys [B, G, S, d_k], values [B, G, S, d_v]; positions int64 [B, S], −1 at padding; None: there is no padding."""

    keys: Tensor
    values: Tensor
    positions: Tensor | None

    def can_roll_back(self, tokens: int, table: PositionTable) -> bool:
        """Always: it does not depend on the decoder's tokens."""
        return True


@dataclass(frozen=True, eq=False)
class SummarizedEncoderOutput(MixerState):
    """softmax_s(K)ᵀ V [B, G, d_k, d_v] of double softmax, in at least float32, whatever the encoder output's length."""

    summary: Tensor

    def can_roll_back(self, tokens: int, table: PositionTable) -> bool:
        """Always: it does not depend on the decoder's tokens."""
        return True


class CrossAttention(Mixer):
    """The module. Its state is the projected encoder output, which no call changes."""

    input_projections = ("q",)

    def __init__(self, config: CrossAttentionConfig, context: BuildContext) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        head_dim = context.head_dim(config.heads, config.head_dim)
        check_double_softmax(config.normalization, head_dim)
        value_dim = config.value_dim or head_dim
        self.scale = config.scale or head_dim**-0.5
        self.window, self.causal = 1, True
        self.encoder_width = config.encoder_width or context.width
        self.normalization = config.normalization
        qkv_bias = bool(config.bias)
        self.q = Linear(context.width, self.heads * head_dim, bias=qkv_bias)
        self.k = Linear(self.encoder_width, self.kv_heads * head_dim, bias=qkv_bias)
        self.v = Linear(self.encoder_width, self.kv_heads * value_dim, bias=qkv_bias, value_projection=True)
        self.out = Linear(self.heads * value_dim, context.width, bias=config.bias is True, output_projection=True)

    @property
    def lookback(self) -> int:
        """0: it reads no earlier token of the decoder."""
        return 0

    @property
    def logit_rows(self) -> str:
        """Its logits are not measured."""
        return "is cross-attention, for which QK-clip is not defined"

    def init_state(self, spec: StateSpec) -> ProjectedEncoderOutput | SummarizedEncoderOutput:
        """The projected encoder output; its size does not depend on the cache length."""
        encoder_output = spec.encoder_output
        assert encoder_output is not None  # checked by the model
        projected = self._project(encoder_output)
        if self.normalization == "double_softmax":
            return SummarizedEncoderOutput(
                summarize_keys_values(projected.keys, projected.values, encoder_output.is_token)
            )
        return projected.map(lambda _, x: x.contiguous())

    def forward(
        self, x: Tensor, layout: Layout, state: ProjectedEncoderOutput | SummarizedEncoderOutput | None = None
    ) -> tuple[Tensor, ProjectedEncoderOutput | SummarizedEncoderOutput | None]:
        """x [B, T, width] -> ([B, T, width], the same state)."""
        y = self._read(split_heads(self.q(x), self.heads), layout, state)
        return self.out(merge_heads(y)), state

    @eager  # encoder outputs differ from call to call, so this stays out of compiled regions
    def _read(
        self, q: Tensor, layout: Layout, state: ProjectedEncoderOutput | SummarizedEncoderOutput | None
    ) -> Tensor:
        if isinstance(state, SummarizedEncoderOutput):
            return read_summary(q, state.summary)
        if state is None:
            assert layout.encoder_output is not None  # checked by the model
            state = self._project(layout.encoder_output)
            if self.normalization == "double_softmax":
                return double_softmax(q, state.keys, state.values, layout.encoder_output.is_token)
        return attention(q, state.keys, state.values, _full_mask(layout, state), self.scale)

    def _project(self, encoder_output: EncoderOutput) -> ProjectedEncoderOutput:
        """Keys and values, in the model's dtype."""
        keys, values = (x.to(self.k.weight.dtype) for x in encoder_output.clean())
        positions = None if encoder_output.is_token is None else encoder_output.is_token.long() - 1
        k, v = split_heads(self.k(keys), self.kv_heads), split_heads(self.v(values), self.kv_heads)
        return ProjectedEncoderOutput(k, v, positions)


def _full_mask(layout: Layout, state: ProjectedEncoderOutput) -> AttentionMask:
    """Each token sees every token of the encoder output, except padding."""
    padded, length = state.positions is not None, state.keys.shape[2]
    if state.positions is None:
        k_positions = layout.positions.new_zeros(1, 1).expand(layout.batch, length)
    else:
        k_positions = state.positions
    return AttentionMask(
        layout.positions,
        k_positions,
        causal=False,
        all_visible=not padded and length > 0,
        may_have_padding=padded,
    )
