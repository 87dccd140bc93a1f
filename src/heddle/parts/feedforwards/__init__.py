"""The slot of feed-forwards: x [B, T, width] -> the same shape, each token for itself."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from torch import Tensor, nn

from heddle.config import Part, refuse
from heddle.numerics.activations import GATED, PLAIN
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout

if TYPE_CHECKING:
    Activation = str
    GatedActivation = str
else:  # the names of `heddle.numerics.activations`
    Activation = Literal[tuple(PLAIN)]
    GatedActivation = Literal[(*PLAIN, *GATED)]


class FeedforwardConfig(Part, ABC):
    """Config of a feed-forward."""

    slot: ClassVar[str] = "feedforwards"

    def resolved(self, context: BuildContext) -> Self:
        """The same config with every default written out that depends on the context or on other fields."""
        return self

    @property
    def active_hidden(self) -> int | None:
        """The number of hidden channels that a token uses; None: not stated."""
        return None

    @classmethod
    def default_fields(cls, previous: Part, width: int) -> dict[str, Any]:
        """As many hidden channels as a token used of the previous feed-forward."""
        hidden = previous.active_hidden if isinstance(previous, FeedforwardConfig) else None
        return {} if hidden is None or "hidden" not in cls.model_fields else {"hidden": hidden}

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
    """Maps each token for itself. The layout tells which tokens are padding.

    input_projections: as in `Mixer`.
    """

    input_projections: Sequence[str] | None = None

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


def activation_settings(name: str | None, limit: float | None, alpha: float | None) -> dict[str, float]:
    """The settings of an activation with their defaults. Refuses those that it does not take."""
    defaults = GATED[name].settings if name in GATED else {}
    fields = {"limit": limit, "alpha": alpha}
    for field, value in fields.items():
        if value is not None and field not in defaults:
            users = " or ".join(user for user, function in GATED.items() if field in function.settings)
            refuse(field, f"{value:g} is used by {users} only; choose that activation, or leave it out")
    return {field: fields[field] or default for field, default in defaults.items()}
