"""What the mixers of the gated delta rule share: a short convolution of q, k and v, and one state matrix per head."""

from abc import ABC

from torch import Tensor

from heddle.numerics.attention.observer import notify_implied_weights
from heddle.numerics.norms import at_least_float32
from heddle.numerics.recurrent.gated_delta import DeltaInputs, gated_delta_rule, l2_normalize
from heddle.parts.context.layout import Layout
from heddle.parts.context.mixer_state import StateSpec
from heddle.parts.context.recurrent_state import ConvRecurrentState, call_cu_seqlens, without_padding
from heddle.parts.mixers import RecurrentMixer, split_heads
from heddle.parts.modules.eager import eager_on_cpu, layout_dependent
from heddle.parts.modules.linear import Linear
from heddle.parts.modules.short_convolution import ShortConvolution


class DeltaRuleMixer(RecurrentMixer, ABC):
    """A mixer of the gated delta rule. Its state is a `ConvRecurrentState`.

    A subclass adds the other projections and the convolution, whose channels are those of q and k, then those of v.
    """

    convolution: ShortConvolution

    def __init__(
        self, width: int, *, heads: int, key_heads: int, head_dim: int, value_dim: int, conv_kernel: int
    ) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.conv_kernel = conv_kernel
        self.conv_widths = [2 * key_heads * head_dim, heads * value_dim]
        self.q = Linear(width, key_heads * head_dim)
        self.k = Linear(width, key_heads * head_dim)
        self.v = Linear(width, heads * value_dim, value_projection=True)

    def init_state(self, spec: StateSpec) -> ConvRecurrentState:
        """Zeros; the size does not depend on the cache length."""
        shape = (self.heads, self.head_dim, self.value_dim)
        return ConvRecurrentState.empty(spec, shape, (self.conv_kernel - 1, sum(self.conv_widths)))

    @eager_on_cpu
    def _delta_rule(
        self, qkv: Tensor, log_decay: Tensor, beta: Tensor, layout: Layout, state: ConvRecurrentState | None
    ) -> tuple[Tensor, ConvRecurrentState | None]:
        """Output o [B, heads, T, d_v], and the new state.

        qkv [B, T, channels], log α [B, heads, T, 1] or [B, heads, T, d_k], beta [B, T, heads].
        """
        convolved = self.convolution(qkv, layout, None if state is None else state.conv_state)
        qk, v = convolved.split(self.conv_widths, dim=-1)
        q, k = l2_normalize(split_heads(qk, 2 * self.key_heads)).chunk(2, dim=1)
        inputs = DeltaInputs(
            q * self.head_dim**-0.5,
            k,
            split_heads(v, self.heads),
            without_padding(log_decay, layout),  # padding, whose keys and values are zero, does not decay the state
            at_least_float32(beta).sigmoid().transpose(1, 2),
            layout.call_segment_ids,
            self._cu_seqlens(layout),
            qkv.dtype,
        )
        if state is None:
            notify_implied_weights(
                lambda one_hot: gated_delta_rule(inputs._replace(v=one_hot), None)[0], inputs.v, layout.padding
            )
            return self._recurrence(inputs, None)[0], None
        o, recurrent_state = self._recurrence(inputs, state.recurrent_state)
        return o, ConvRecurrentState(recurrent_state, self.convolution.next_state(qkv, layout, state.conv_state))

    @layout_dependent
    def _cu_seqlens(self, layout: Layout) -> tuple[Tensor, Tensor] | None:
        return call_cu_seqlens(layout)

    @layout_dependent  # no compiler traces a library's kernel
    def _recurrence(self, inputs: DeltaInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return gated_delta_rule(inputs, state)
