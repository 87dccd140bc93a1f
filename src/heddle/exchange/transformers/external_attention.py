"""Softmax attention computed by an attention function of transformers, which `attn_implementation` names.

Such functions belong to kernel libraries. The contract of transformers is
function(module, q, k, v, mask, scaling=, sliding_window=, dropout=, **kwargs) -> (y, weights), with q [B, heads, T, d],
k and v [B, kv_heads, T, d], and y [B, T, heads, d] or any shape with the same order of elements. Further keyword
arguments of the model's call are passed on to every function.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from heddle.errors import ConfigError
from heddle.model.decoder import LENGTH_DEPENDENT, Decoder
from heddle.numerics.attention.mask import AttentionMask, ScoreModifiers
from heddle.numerics.attention.softmax import AttentionFunction, WeightDropout
from heddle.parts.mixers.attention import Attention

BUILTIN = (None, "eager", "sdpa")  # for these names heddle computes attention itself


class AttentionModule(nn.Module):
    """The module that attention functions receive: the attributes that they read, and the mixer as a child."""

    def __init__(self, mixer: Attention, layer_idx: int, config: Any) -> None:
        super().__init__()
        self.mixer = mixer
        self.layer_idx = layer_idx
        self.config = config
        self.scaling = mixer.scale
        self.is_causal = True
        self.num_key_value_groups = mixer.heads // mixer.kv_heads


class ExternalAttention:
    """The attention backend of one call of the model (see `heddle.numerics.attention.softmax.AttentionBackend`).

    modules: what the function receives for each mixer. attention_mask and position_ids: arguments of the model's call,
    from which masks are made. kwargs: its further keyword arguments.
    """

    def __init__(
        self,
        modules: Mapping[nn.Module, AttentionModule],
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        kwargs: Mapping[str, Any],
    ) -> None:
        self.modules, self.kwargs = modules, kwargs
        self.attention_mask, self.position_ids = attention_mask, position_ids
        self.masks: dict[int | None, Any] = {}  # by window

    def __call__(self, layer: nn.Module) -> AttentionFunction:
        """The attention of one mixer, computed by the function of transformers."""
        module = self.modules[layer]
        function = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, None)

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            mask: AttentionMask,
            scale: float,
            dropout: WeightDropout | None,
            modifiers: ScoreModifiers,
        ) -> Tensor:
            if dropout is not None:
                raise ConfigError("dropout: attn_implementation cannot drop attention weights by sample; set it to 0")
            if any(modifier is not None for modifier in modifiers):
                raise ConfigError("attn_implementation: supports no softcap, sink or bias of the scores; leave it out")
            window = mask.window
            hf_mask = self._mask(module.config, window, q)
            y, *_ = function(module, q, k, v, hf_mask, scaling=scale, sliding_window=window, dropout=0.0, **self.kwargs)
            heads_last: Tensor = y.reshape(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
            return heads_last.transpose(1, 2)

        return attend

    def _mask(self, config: Any, window: int | None, q: Tensor) -> Any:
        """The mask in the format of the attention function; made once for all layers with the same window."""
        if window not in self.masks:
            create_mask = create_causal_mask if window is None else create_sliding_window_causal_mask
            self.masks[window] = create_mask(  # by place: releases name the fourth, a cache, differently
                config, q[:, 0], self.attention_mask, None, self.position_ids
            )
        return self.masks[window]


def uses_external_attention(config: Any) -> bool:
    """Whether a HeddleConfig names an attention function that is not heddle's own."""
    return config._attn_implementation not in BUILTIN


def unsupported_reasons(decoder: Decoder) -> list[str]:
    """Why external attention cannot run a model: one reason per field; empty if it can.

    Such functions expect the same heads in all layers, and one size of window.
    """
    reasons: list[str] = []
    first_shape: tuple[int, int, int] | None = None
    windows: set[int] = set()
    for index, mixer in enumerate(decoder.mixers()):
        path = f"layers[{index}].mixer"
        if not isinstance(mixer, Attention):
            reasons.append(f"{path} is {'absent' if mixer is None else type(mixer).__name__}, not softmax attention")
            continue
        fields: dict[str, Any] = {
            "sink": mixer.sink,
            "softcap": mixer.softcap,
            "position, a distance bias,": mixer.score_bias,
        }
        fields |= {"indexer": mixer.indexer, "forget": mixer.forget, "relative_dim": mixer.relative}
        reasons += [f"{path}.{name} is set" for name, value in fields.items() if value is not None]
        if mixer.chunked:
            reasons.append(f"{path}.chunked is true")
        if not mixer.causal:
            reasons.append(f"{path}.causal is false")
        if mixer.value_dim != mixer.head_dim:
            reasons.append(f"{path}.value_dim is {mixer.value_dim}, not head_dim = {mixer.head_dim}")
        shape = (mixer.heads, mixer.kv_heads, mixer.head_dim)
        first_shape = first_shape or shape
        if shape != first_shape:
            reasons.append(f"{path} has heads, kv_heads and head_dim {shape}, an earlier layer {first_shape}")
        windows |= set() if mixer.window is None else {mixer.window}
    if len(windows) > 1:
        reasons.append(f"windows differ: {sorted(windows)}")
    return [*reasons, *([LENGTH_DEPENDENT] if decoder.length_dependent else [])]


def attention_modules(decoder: Decoder, config: Any) -> dict[nn.Module, AttentionModule]:
    """For every mixer, the module that an attention function receives.

    Raises ConfigError for a design that external attention cannot run, naming the first reason.
    """
    reasons = unsupported_reasons(decoder)
    if reasons:
        name = config._attn_implementation
        raise ConfigError(
            f"attn_implementation: '{name}' needs identical layers of softmax attention, but {reasons[0]}; "
            "leave it out, or serve the design with heddle or transformers"
        )
    modules: dict[nn.Module, AttentionModule] = {}
    for index, mixer in enumerate(decoder.mixers()):
        assert isinstance(mixer, Attention)
        modules[mixer] = AttentionModule(mixer, layer_idx=index, config=config)
    return modules
