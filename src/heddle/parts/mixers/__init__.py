"""The slot of token mixers: attention, linear attention and their relatives.

Every mixer keeps one law: a sequence cut anywhere, with the state carried over, gives the same result as the whole
sequence. Training passes no state, prefill passes an empty one, and decoding passes the state back token by token.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, get_type_hints

import torch
from pydantic import model_validator
from torch import Tensor, nn

from heddle.config import DesignError, Part, refuse
from heddle.numerics.attention.mask import ScoreBiasFunction
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.modules.linear import Linear
from heddle.parts.modules.short_convolution import ShortConvolutionConfig, check_convolved
from heddle.parts.positions import MixerPositionConfig, ScoreBias
from heddle.parts.states import StateSpec

if TYPE_CHECKING:
    from heddle.parts.modules.value_embedding import ValueEmbeddingConfig


class MixerConfig(Part, ABC):
    """Config of a mixer."""

    slot: ClassVar[str] = "mixers"
    # what `short_convolution` may name here; the layer convolves the input
    convolved: ClassVar[tuple[str, ...]] = ("input",)
    # fields that grow with the model's width
    width_fields: ClassVar[tuple[str, ...]] = ("heads", "kv_heads", "key_heads", "kv_rank", "query_rank")

    absent_fields = (
        ("value_embedding", "is for attention, differential_attention, linear_attention and retention; leave it out"),
    )

    short_convolution: ShortConvolutionConfig | None = None

    @model_validator(mode="after")
    def _check_convolved(self) -> Self:
        check_convolved(self.short_convolution, self.convolved, self.kind)
        return self

    def resolved(self, context: BuildContext) -> Self:
        """The same config with every default written out that depends on the context or on other fields."""
        return self

    @property
    def windows(self) -> tuple[int, ...]:
        """The window, or the windows of the mixers within it. Empty: all tokens are seen."""
        return ()

    def with_window(self, window: int) -> Self:
        """The same config with windows of at most `window` tokens; a mixer that cannot have one is unchanged."""
        return self

    @property
    def reads_kv(self) -> bool:
        """Whether it reads what `kv_read` names from an earlier layer: the last of its `kv_kind` with its own."""
        return False

    @property
    def kv_kind(self) -> Any:
        """Layers of the same `kv_kind` can share what `kv_read` names; None: it neither shares nor reads any."""
        return None

    @property
    def kv_read(self) -> tuple[str, str]:
        """What `reads_kv` is about: the field that says so, and what is read."""
        return "shared_kv", "keys and values"

    @property
    def adds_first_values(self) -> bool:
        """Whether it adds the values of the first layer of its kind to its own."""
        return False

    @property
    def hands_values(self) -> bool:
        """Whether it can hand its values to later layers of its kind that add them to theirs."""
        return False

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads the ids of tokens (`HandedOver.tokens`)."""
        return False

    @property
    def value_table(self) -> "ValueEmbeddingConfig | None":
        """The table of token embeddings whose rows are added to its values; None: there is none."""
        return None

    @property
    def shares_bias(self) -> bool | None:
        """Whether its score bias reads the table of an earlier layer; None: it has no table."""
        position = getattr(self, "position", None)
        return position.shares_table if isinstance(position, MixerPositionConfig) else None

    @property
    def template(self) -> "MixerConfig":
        """The mixer whose fields a replacement of another kind keeps: itself, or a mixer within it."""
        return self

    def head_shape(self, width: int) -> tuple[int, int]:
        """The number of heads, and the width of each head's output, in a model of this width; (0, 0) without heads."""
        heads = getattr(self, "heads", 0)
        own_width = getattr(self, "value_dim", None) or getattr(self, "head_dim", None)
        return (heads, own_width or width // heads) if heads else (0, 0)

    @classmethod
    def default_fields(cls, previous: Part, width: int) -> dict[str, Any]:
        """A head_dim, if the heads of the previous mixer do not divide the width."""
        heads, dim = previous.head_shape(width) if isinstance(previous, MixerConfig) else (0, 0)
        return {"head_dim": dim} if heads and width % heads and "head_dim" in cls.model_fields else {}

    @classmethod
    def is_recurrent(cls) -> bool:
        """Whether the module that `build` declares is a `RecurrentMixer`."""
        return issubclass(get_type_hints(cls.build).get("return", Mixer), RecurrentMixer)

    @abstractmethod
    def build(self, context: BuildContext) -> "Mixer":
        """Build the module. Raises DesignError if the config does not fit the context."""


class LogitRows(NamedTuple):
    """Rows of a projection that set the size of each head's logits.

    parts: of each head's rows, in order, (rows, p): multiplied by f^p, the logits of the head are multiplied by f,
    together with the other projections.
    """

    projection: Linear
    parts: Sequence[tuple[int, float]]


class Mixer(nn.Module, ABC):
    """Maps x [B, T, width] to the same shape; each token depends on the tokens that it may see.

    window: how many tokens a token sees, itself included (causal), or how many to each side (bidirectional). None: all.
    chunked: whether the window is a chunk: a token sees only tokens with its own ⌊position / window⌋.
    beyond_window: how many more earlier tokens it depends on, through its own short convolutions.
    causal: whether later tokens are hidden. A mixer that is not causal has no state.
    encoder_width: the width of the encoder output that it reads; None: it reads none.
    state_note: what its state holds in place of keys and values of each head, as a phrase for display.
    input_projections: names of the projections that read x, if nothing else reads it; some may be absent. None: not
    stated. uses_layer_index: whether its formula depends on the layer index. absolute_positions: whether it depends on
    positions themselves, not only on their differences.
    fast_graph: whether a graph of it by torch's compiler is fast on a CPU.

    kv_source: index of the layer whose `kv_read` it reads. value_source: index of the layer whose values it adds
    to its own. kv_target: index under which it hands over its own (`Layout.handed_over`). table_source, table_target:
    the same for the rows of a table of token embeddings. bias_source, bias_target: the same for the table of a score
    bias. The model sets these seven.
    kv_fields, value_fields, bias_fields: what must be equal in both layers, by field.
    """

    window: int | None
    causal: bool
    chunked: bool = False
    beyond_window: int = 0
    encoder_width: int | None = None
    state_note: str = ""
    input_projections: Sequence[str] | None = None
    uses_layer_index: bool = False
    absolute_positions: bool = False
    fast_graph: bool = False
    kv_source: int | None = None
    value_source: int | None = None
    kv_target: int | None = None
    table_source: int | None = None
    table_target: int | None = None
    bias_source: int | None = None
    bias_target: int | None = None

    @property
    def kv_fields(self) -> Mapping[str, Any]:
        """Empty: it neither reads nor hands over keys and values."""
        return {}

    @property
    def value_fields(self) -> Mapping[str, Any]:
        """Empty: it neither adds values of another layer nor hands over its own."""
        return {}

    @property
    def bias_fields(self) -> Mapping[str, Any]:
        """What the table of its score bias depends on; empty: it has none."""
        bias = getattr(self, "score_bias", None)
        return bias.table_fields if isinstance(bias, ScoreBias) else {}

    def call_bias(self, bias: ScoreBias | None, layout: Layout, dtype: torch.dtype) -> ScoreBiasFunction | None:
        """The score bias of a call, its own or that of `bias_source`; handed over if later layers read its table."""
        if self.bias_source is not None:
            assert layout.handed_over is not None
            return layout.handed_over.biases[self.bias_source]
        function = None if bias is None else bias(layout, dtype)
        if self.bias_target is not None and layout.handed_over is not None:
            assert function is not None
            layout.handed_over.biases[self.bias_target] = function
        return function

    @property
    def logit_rows(self) -> Sequence[LogitRows] | str | None:
        """What QK-clip scales, or why nothing can be; None: there is no softmax over keys."""
        return None

    @property
    def lookback(self) -> int | None:
        """How many earlier tokens the position table must keep for its state: all (None), some, or none (0)."""
        return self.window

    @property
    def rings(self) -> tuple[int | None, ...]:
        """How many tokens each of its caches keeps, without those for a rollback: all (None), some, or none (0)."""
        return (self.lookback,)

    @abstractmethod
    def init_state(self, spec: StateSpec) -> Any:
        """An empty state, a `MixerState`. A recurrence cannot roll back, so it ignores `spec.rollback`."""

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout, state: Any = None) -> tuple[Tensor, Any]:
        """x [B, T, width] -> ([B, T, width], new state, or None without a state). The state passed in is consumed."""


class RecurrentMixer(Mixer, ABC):
    """A mixer whose state replaces all earlier tokens; its size does not depend on their number."""

    window: int | None = None
    causal: bool = True

    @property
    def lookback(self) -> int:
        """0: no earlier token is read again."""
        return 0


def check_head_groups(field: str, groups: int | None, heads: int) -> None:
    """Refuse a number of groups that does not divide the heads, from within a validator. None: each head is a group."""
    if groups is not None and heads % groups:
        refuse(field, f"{groups} does not divide heads = {heads}; choose a divisor of it")


def check_double_softmax(normalization: str, head_dim: int) -> None:
    """Refuse double_softmax over one dim, where the softmax of every query is 1. Raises DesignError."""
    if normalization == "double_softmax" and head_dim == 1:
        reason = "1 makes the softmax of every query 1 with double_softmax, whatever the input"
        raise DesignError("head_dim", f"{reason}; give at least 2, or another normalization")


def check_norm_width(field: str, width: int) -> None:
    """Refuse a norm over one number, which would keep at most its sign. Raises DesignError."""
    if width == 1:
        raise DesignError(field, "leaves the norm one number per head, so at most its sign survives; give wider heads")


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads · d] -> [B, heads, T, d]."""
    split: Tensor = x.unflatten(-1, (heads, -1))
    return split.transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, heads, T, d] -> [B, T, heads · d]."""
    return torch.flatten(x.transpose(1, 2), 2)
