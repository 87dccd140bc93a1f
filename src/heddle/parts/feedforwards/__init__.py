"""The slot of feed-forwards: x [B, T, width] -> the same shape, each token for itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal, NamedTuple, Self

from torch import Tensor, nn
from torch.nn import functional

from heddle.config import Part, refuse
from heddle.numerics import activations
from heddle.parts.context.build import BuildContext
from heddle.parts.context.layout import Layout

Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu"]
GatedActivation = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu", "swiglu_clamped"]
DEFAULT_LIMIT, DEFAULT_ALPHA = 7.0, 1.702  # as in gpt-oss


class FeedforwardConfig(Part, ABC):
    """Config of a feed-forward."""

    slot: ClassVar[str] = "feedforwards"

    def resolved(self, context: BuildContext) -> Self:
        """The same config with every default written out that depends on the context or on other fields."""
        return self

    @abstractmethod
    def build(self, context: BuildContext) -> "Feedforward":
        """Build the module. Raises DesignError if the config does not fit the context."""


class ExpertInfo(NamedTuple):
    """The experts of a mixture of experts.

    router: the module that computes the logits [..., experts]. weights: the parameters of the experts, output
    projection last. The first dimension of these, and of every router parameter, is the expert.
    groups: number of equal groups of adjacent experts that are selected together. capacity_factor: in training, an
    expert takes at most this times its even share of a row's choices; None: no limit.
    """

    router: nn.Module
    weights: tuple[nn.Parameter, ...]
    num_experts: int
    top_k: int
    groups: int = 1
    capacity_factor: float | None = None


class Feedforward(nn.Module, ABC):
    """Maps each token for itself. The layout tells which tokens are padding."""

    @property
    def expert_info(self) -> ExpertInfo | None:
        """The experts, if each token uses only some of the parameters; else None."""
        return None

    @property
    def inactive_parameters(self) -> int:
        """Number of parameters that a token does not use: those of the experts that are not chosen for it."""
        return 0

    def update_expert_bias(self, expert_counts: Tensor) -> None:
        """Adapt the bias of the expert selection to the expert_counts [experts] of a whole optimizer step."""
        return

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> the same shape."""


def activation(name: GatedActivation, limit: float | None = None, alpha: float | None = None) -> activations.Activation:
    """The activation of this name: `gelu` is exact, `gelu_tanh` its tanh approximation, `relu2` the square of ReLU.

    `swiglu_clamped` clamps its inputs by `limit`, and multiplies the argument of its gate's sigmoid by `alpha`.
    """
    if name == "swiglu_clamped":
        return activations.clamped_swiglu(**clamp_settings(name, limit, alpha))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": functional.relu,
        "relu2": lambda x: functional.relu(x).square(),
        "gelu": functional.gelu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "silu": functional.silu,
    }
    return activations.glu(functions[name])


def clamp_settings(name: str | None, limit: float | None, alpha: float | None) -> dict[str, float]:
    """limit and alpha of `swiglu_clamped` with their defaults. Refuses them for any other activation."""
    if name == "swiglu_clamped":
        return {"limit": limit or DEFAULT_LIMIT, "alpha": alpha or DEFAULT_ALPHA}
    for field, value in (("limit", limit), ("alpha", alpha)):
        if value is not None:
            refuse(field, f"{value:g} is used by swiglu_clamped only; choose that activation, or leave it out")
    return {}
