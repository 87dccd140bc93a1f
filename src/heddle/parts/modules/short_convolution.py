"""Short convolutions: causal, one per channel, over the last few tokens of the same document.

y_t = f(b + Σ_s w_s ⊙ x_{t−s}),   s from 0 to kernel − 1, within t's document

Recurrent mixers have one before the recurrence, with SiLU for f. Any mixer and feed-forward may have others, through
the option `short_convolution`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from heddle.config import Config, Width, refuse
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.numerics.recurrent.convolution import (
    Taps,
    causal_conv1d,
    find_input_indices,
    find_tokens_near_starts,
    next_conv_state,
)
from heddle.parts.layout import Layout
from heddle.parts.modules.eager import layout_dependent
from heddle.parts.modules.linear import SelfInitialized, fill_normal
from heddle.parts.states import ConvolvedState, MixerState, StateSpec

Convolved = Literal["input", "q", "k", "v", "hidden"]


class ShortConvolutionConfig(Config):
    """`x + conv(x)` for each x that `of` names: one causal weight per channel and token back, within a document.

    These are the Canon layers of Allen-Zhu ("Physics of Language Models: Part 4.1", arXiv 2512.17351). A is the
    `input` of a mixer, after the norm; B its `q`, `k` and `v`, here of `attention`; C the `input` of a feed-forward;
    D its `hidden` channels before the activation, here of `mlp` and `gated`. Inkling (2026) convolves k and v.
    `activation` applies to conv(x). With `residual: false` x is not added. With `token_shift` conv(x) is
    μ ⊙ x_{t−1} + (1 − μ) ⊙ x_t, with one weight μ per channel (RWKV-7's channel mixing).

    The state holds the last conv_kernel − 1 tokens of each x; a feed-forward has a state only for this. It cannot roll
    back.
    """

    later_fields = ("token_shift",)

    of: tuple[Convolved, ...]
    conv_kernel: Width = 4  # tokens that the convolution reads, itself included
    residual: bool = True  # x + conv(x), or conv(x) alone
    activation: Literal["silu"] | None = None
    token_shift: bool = False  # μ for the token before, 1 − μ for the token itself (RWKV)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.of or len(set(self.of)) < len(self.of):
            refuse("of", f"{list(self.of)} should name each convolution once; name at least one")
        if self.token_shift and (self.conv_kernel, self.residual, self.activation) != (2, False, None):
            refuse("token_shift", "needs conv_kernel: 2, residual: false and no activation; give these")
        return self


def check_convolved(config: ShortConvolutionConfig | None, allowed: Sequence[str], kind: str) -> None:
    """Refuse to convolve a tensor that a kind of part does not compute, from within a validator of its config."""
    for name in () if config is None else config.of:
        if name not in allowed:
            refuse("short_convolution.of", f"{kind} has no {name} to convolve; choose from {', '.join(allowed)}")


class ShortConvolution(SelfInitialized):
    """weight [channels, kernel]; the last weight is for the token itself. bias [channels] or None.

    silu: whether SiLU follows. scale: of the initial weights. token_shift: weight is μ [channels], see the config. Its
    state is the last kernel − 1 inputs of each row, [B, kernel − 1, channels].
    """

    matrix_parameters = ()

    def __init__(
        self,
        channels: int,
        kernel: int,
        bias: bool = False,
        silu: bool = True,
        scale: float = 1.0,
        token_shift: bool = False,
    ) -> None:
        super().__init__()
        self.silu, self.scale, self.kernel, self.token_shift = silu, scale, kernel, token_shift
        self.weight = nn.Parameter(torch.empty(channels) if token_shift else torch.empty(channels, kernel))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Normal weights with standard deviation scale/sqrt(kernel): 1 keeps the variance of the input. Zero bias.

        μ is normal around a line from 1 to 0 over the channels, as in the authors' first layer.
        """
        if self.token_shift:
            channels = len(self.weight)
            line = 1.0 - torch.arange(channels, dtype=torch.float32, device="cpu") / channels
            fill_normal(self.weight, std, draws("weight"), line)
        else:
            fill_normal(self.weight, self.scale * self.kernel**-0.5, draws("weight"))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, layout: Layout, conv_state: Tensor | None) -> Tensor:
        """x [B, T, channels] -> y of the same shape, in at least float32, zero at padding.

        It depends on the layout, so call it from a method marked as `eager` or `eager_on_cpu`.
        """
        y = self._convolve(x, conv_state, self._taps(layout))
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
            y = y if layout.padding is None else y.masked_fill(layout.padding[..., None], 0.0)
        return functional.silu(y) if self.silu else y

    def next_state(self, x: Tensor, layout: Layout, conv_state: Tensor) -> Tensor:
        """The state after a call with inputs x, in the dtype of the state before it."""
        return next_conv_state(x.to(conv_state.dtype), conv_state, self._taps(layout))

    @layout_dependent  # no compiler traces a library's kernel
    def _convolve(self, x: Tensor, conv_state: Tensor | None, taps: Taps | None) -> Tensor:
        weight: Tensor = self.weight
        if self.token_shift:
            weight = at_least_float32(weight)
            weight = torch.stack((weight, 1.0 - weight), dim=-1)
        return causal_conv1d(x, weight, conv_state, taps)

    @layout_dependent
    def _taps(self, layout: Layout) -> Taps | None:
        return cached_taps(layout, self.kernel)


def cached_taps(layout: Layout, kernel: int) -> Taps | None:
    """As `_taps`, once for each layout."""
    return layout.cached(("taps", kernel), lambda: _taps(layout, kernel))


def _taps(layout: Layout, kernel: int) -> Taps | None:
    """Which inputs the convolution reads for each token; None if they are always the tokens just before it."""
    padding, segment_ids = layout.padding, layout.call_segment_ids
    if padding is None and segment_ids is None:
        return None
    zeros = torch.zeros_like(layout.positions)
    index = find_input_indices(layout.positions >= 0, zeros if segment_ids is None else segment_ids, kernel)
    # A graph that read the lengths would fit these documents only.
    known = padding is None and layout.doc_lengths is not None and not is_compiling()
    return Taps(
        index,
        find_tokens_near_starts(layout.doc_lengths, kernel, index.device) if known and layout.doc_lengths else None,
        segment_ids if padding is None else None,
    )


RESIDUAL_SCALE = 3**-0.5  # the initial weights of torch's Conv1d; x + conv(x) begins with 4/3 of x's variance


class ShortConvolutions(nn.ModuleDict):
    """The short convolutions of one part: of each tensor named in `channels`, [B, T, channels] wide.

    Their `conv_state` is one tensor [B, conv_kernel − 1, sum of channels]: the last inputs, in the order of `channels`.
    """

    def __init__(self, config: ShortConvolutionConfig, channels: Mapping[str, int]) -> None:
        scale, silu = RESIDUAL_SCALE if config.residual else 1.0, config.activation == "silu"
        kernel = config.conv_kernel
        super().__init__(
            {
                name: ShortConvolution(width, kernel, silu=silu, scale=scale, token_shift=config.token_shift)
                for name, width in channels.items()
            }
        )
        self.kernel, self.residual, self.widths = kernel, config.residual, list(channels.values())
        self.has_activation = silu

    def init_state(self, spec: StateSpec, own: MixerState | None = None) -> ConvolvedState:
        """Zeros, next to the part's own state; their size does not depend on the cache length."""
        shape = (spec.batch, self.kernel - 1, sum(self.widths))
        return ConvolvedState(own, torch.zeros(shape, dtype=spec.dtype, device=spec.device))

    @layout_dependent  # layouts differ from call to call, so this stays out of compiled regions
    def forward(
        self, inputs: Mapping[str, Tensor], layout: Layout, state: ConvolvedState | None
    ) -> tuple[list[Tensor], ConvolvedState | None]:
        """inputs [B, T, channels] by name -> the same in this order, convolved where named, and the new state."""
        states = [None] * len(self) if state is None else state.conv_state.split(self.widths, dim=-1)
        outputs, following, number = [], [], 0
        for name, x in inputs.items():
            if name not in self:
                outputs.append(x)
                continue
            convolution, conv_state = self[name], states[number]
            assert isinstance(convolution, ShortConvolution)
            y = convolution(x, layout, conv_state)
            outputs.append((at_least_float32(x) + y if self.residual else y).to(x.dtype))
            if conv_state is not None:
                following.append(convolution.next_state(x, layout, conv_state))
            number += 1
        return outputs, None if state is None else replace(state, conv_state=torch.cat(following, dim=-1))


def build_convolutions(config: ShortConvolutionConfig | None, channels: Mapping[str, int]) -> ShortConvolutions | None:
    """The convolutions of tensors of these widths; None without any."""
    return None if config is None or not channels else ShortConvolutions(config, channels)


def convolve(
    convolutions: ShortConvolutions | None, inputs: Mapping[str, Tensor], layout: Layout, state: Any
) -> tuple[list[Tensor], Any]:
    """The inputs in their order, convolved where there are convolutions, and the new state."""
    return (list(inputs.values()), state) if convolutions is None else convolutions(inputs, layout, state)
