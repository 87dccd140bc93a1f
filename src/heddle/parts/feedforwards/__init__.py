"""The slot of feed-forwards: x [B, T, width] -> the same shape, each token by itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal, NamedTuple, Self

from torch import Tensor, nn
from torch.nn import functional

from heddle.config import Part, refuse
from heddle.numerics import activations
from heddle.parts.context.layout import Layout

Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu"]
GatedActivation = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu", "swiglu_clamped"]
LIMIT, ALPHA = 7.0, 1.702  # of gpt-oss


class FeedforwardConfig(Part, ABC):
    """Config of a feed-forward."""

    slot: ClassVar[str] = "feedforwards"

    def resolved(self) -> Self:
        """The same feed-forward with every default that depends on other fields written out."""
        return self

    @abstractmethod
    def build(self, width: int) -> "Feedforward":
        """Make the module for a stream of `width` dims."""


class Mixture(NamedTuple):
    """What a mixture of experts is made of.

    router: the module that gives each token a number for each expert, [..., experts]; a parameter of it has an entry
    of its first dimension an expert. weights: the experts' parameters, the same, those of the last projection last.
    groups: equal neighbours among the experts that are chosen together. capacity: in training, an expert takes no more
    than this times its even share of a row's choices; None: all of them.
    """

    router: nn.Module
    weights: tuple[nn.Parameter, ...]
    experts: int
    top_k: int
    groups: int = 1
    capacity: float | None = None


class Feedforward(nn.Module, ABC):
    """Maps each token by itself; the layout tells padding apart for those that count tokens."""

    @property
    def mixture(self) -> Mixture | None:
        """Its experts, of which each token meets some; None: every token meets all there is."""
        return None

    @property
    def idle_parameters(self) -> int:
        """How many of its parameters a token does not meet: those of experts that are not chosen for it."""
        return 0

    def balance(self, loads: Tensor) -> None:
        """Take the loads [experts] of a whole optimizer step that was taken, to choose more evenly in the next one."""
        return

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> the same shape."""


def activation(name: GatedActivation, limit: float | None = None, alpha: float | None = None) -> activations.Activation:
    """The function of a name: `gelu` is exact, `gelu_tanh` its approximation, `relu2` the square of ReLU.

    `swiglu_clamped` bounds what it reads by `limit`, and the sigmoid of its gate is `alpha` times as steep.
    """
    if name == "swiglu_clamped":
        return activations.clamped(**clamps(name, limit, alpha))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": functional.relu,
        "relu2": lambda x: functional.relu(x).square(),
        "gelu": functional.gelu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "silu": functional.silu,
    }
    return activations.glu(functions[name])


def clamps(name: str | None, limit: float | None, alpha: float | None) -> dict[str, float]:
    """limit and alpha of an activation, written out. Refuses them beside one that does not read them."""
    if name == "swiglu_clamped":
        return {"limit": limit or LIMIT, "alpha": alpha or ALPHA}
    for field, value in (("limit", limit), ("alpha", alpha)):
        if value is not None:
            refuse(field, f"{value:g} is read by swiglu_clamped alone; choose that activation, or leave it out")
    return {}
