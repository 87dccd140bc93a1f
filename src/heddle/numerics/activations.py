"""Activations of feed-forward layers: `f(up)`, `f(gate) ⊙ up` (Shazeer 2020), and clamped forms of SwiGLU."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics import native
from heddle.numerics.dispatch import Kernel, Operation
from heddle.numerics.norms import at_least_float32

PlainFunction = Callable[[Tensor], Tensor]


class Activation(Protocol):
    """up and gate [..., hidden] -> [..., hidden]. gate is None in a plain MLP. The inputs are not modified."""

    def __call__(self, up: Tensor, gate: Tensor | None = None, /) -> Tensor:
        """Apply the activation elementwise."""


class GatedFunction(NamedTuple):
    """A function f(up, gate, **settings) -> [..., hidden], and the settings that it takes, with their defaults."""

    function: Callable[..., Tensor]
    settings: Mapping[str, float]


# To add a function, define it in this file: with `@plain` for an f, with `@gated` for a function of both inputs. The
# configs of feed-forwards then accept its name. Functions in `LEARNED` have parameters; only `mlp` takes them.

PLAIN: dict[str, PlainFunction] = {}
GATED: dict[str, GatedFunction] = {}


def plain(function: PlainFunction) -> PlainFunction:
    """Add a function of one input. With a gate it is applied to the gate, and multiplied by the other input."""
    PLAIN[function.__name__] = function
    return function


def gated(settings: Mapping[str, float]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Add a function of both inputs, which needs a gate, with the defaults of its settings."""

    def add(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        GATED[function.__name__] = GatedFunction(function, settings)
        return function

    return add


@plain
def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return functional.relu(x)


@plain
def relu2(x: Tensor) -> Tensor:
    """The square of ReLU (So et al. 2021)."""
    return functional.relu(x).square()


@plain
def gelu(x: Tensor) -> Tensor:
    """x Φ(x) (Hendrycks & Gimpel 2016)."""
    return functional.gelu(x)


@plain
def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU."""
    return functional.gelu(x, approximate="tanh")


@plain
def silu(x: Tensor) -> Tensor:
    """x σ(x)."""
    return functional.silu(x)


class SwigluFacts(NamedTuple):
    """What decides the kernel of `silu(gate) * up`. native: whether its C++ operator serves these tensors."""

    dtype: torch.dtype
    native: bool


def _native_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    y: Tensor = torch.ops.heddle.swiglu(gate, up)
    return y


def _native_swiglu_unsupported(facts: SwigluFacts) -> str | None:
    return native.unsupported_dtype(facts.dtype) if facts.native else native.NOT_IN_USE


SWIGLU: Operation[SwigluFacts] = Operation(
    "swiglu",
    (
        Kernel("native", _native_swiglu, _native_swiglu_unsupported, traceable=False),
        Kernel("reference", lambda gate, up: silu(gate) * up, lambda facts: None),
    ),
)


LEARNED = ("xielu",)  # names of functions with parameters of their own, which the feed-forward holds


def xielu(x: Tensor, a_p: Tensor, a_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU (Huang & Schlag 2024): `α_p x² + β x` above 0, else `α_n (exp(min(x, ε)) − 1 − x) + β x`.

    α_p = softplus(a_p), α_n = β + softplus(a_n); the parameters broadcast with x.
    """
    above = functional.softplus(a_p) * x * x
    below = (torch.expm1(torch.minimum(x, eps)) - x) * (beta + functional.softplus(a_n))
    return torch.where(x > 0, above, below) + beta * x


@gated({"limit": 7.0, "alpha": 1.702})
def swiglu_clamped(up: Tensor, gate: Tensor, limit: float, alpha: float) -> Tensor:
    """`(clamp(up, −limit, limit) + 1) ⊙ g σ(alpha g)`, g = min(gate, limit), as in gpt-oss."""
    clamped_gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (clamped_gate * (alpha * clamped_gate).sigmoid())


@gated({"limit": 10.0})
def swiglu_limited(up: Tensor, gate: Tensor, limit: float) -> Tensor:
    """`clamp(up, −limit, limit) ⊙ silu(min(gate, limit))`, as in DeepSeek V4."""
    return up.clamp(-limit, limit) * silu(gate.clamp(max=limit))


def activation(name: str, settings: Mapping[str, float] | None = None) -> Activation:
    """The activation of this name, with defaults for settings that are left out."""
    if name in GATED:
        function, defaults = GATED[name]
        return partial(_with_gate, partial(function, **{**defaults, **(settings or {})}))
    return glu(PLAIN[name])


def glu(function: PlainFunction) -> Activation:
    """`function(gate) * up`, or `function(up)` without a gate."""
    return partial(_glu, function)


# Partial calls of the module's functions, not closures, so that a model can be pickled.
def _glu(function: PlainFunction, up: Tensor, gate: Tensor | None = None, /) -> Tensor:
    if gate is None:
        return function(up)
    if function is silu:
        facts = SwigluFacts(gate.dtype, native.serves("swiglu", gate, up) and gate.dtype == up.dtype)
        y: Tensor = SWIGLU.choose(facts).run(gate, up)
        return y
    return function(gate) * up


def is_swiglu(function: Activation) -> bool:
    """Whether this activation is `silu(gate) * up`."""
    return isinstance(function, partial) and function.func is _glu and function.args == (silu,)


def _with_gate(function: Callable[[Tensor, Tensor], Tensor], up: Tensor, gate: Tensor | None = None, /) -> Tensor:
    assert gate is not None
    return function(up, gate)


def normal_quantile(share: float) -> float:
    """The quantile function of the standard normal distribution, computed in float32."""
    return float(torch.erfinv(2 * torch.tensor(share, dtype=torch.float32, device="cpu") - 1) * math.sqrt(2))


def above_quantile(x: Tensor, quantile: float) -> Tensor:
    """relu(x − mean x − quantile · std x) over the last dim, in at least float32; equal numbers have no gradient."""
    wide = at_least_float32(x)
    centered = wide - wide.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)
    return (centered - quantile * variance.sqrt()).relu().to(x.dtype)
