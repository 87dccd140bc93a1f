"""The slot of feed-forwards: x [B, T, width] -> the same shape, token by token, or with a few tokens before each.

One that reads earlier tokens has a state, as a mixer does, and keeps the mixers' law: a sequence cut anywhere, with the
state carried over, gives the same result as the whole sequence.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import model_validator
from torch import Tensor, nn

from heddle.config import Part, refuse
from heddle.errors import ConfigError
from heddle.numerics.activations import GATED, LEARNED, PLAIN
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.modules.short_convolution import ShortConvolutionConfig, ShortConvolutions, check_convolved
from heddle.parts.states import StateSpec

if TYPE_CHECKING:
    Activation = str
    LearnedActivation = str
    GatedActivation = str
else:  # the names of `heddle.numerics.activations`
    Activation = Literal[tuple(PLAIN)]
    LearnedActivation = Literal[(*PLAIN, *LEARNED)]
    GatedActivation = Literal[(*PLAIN, *GATED)]


class FeedforwardConfig(Part, ABC):
    """Config of a feed-forward."""

    slot: ClassVar[str] = "feedforwards"
    # what `short_convolution` may name here; the layer convolves the input
    convolved: ClassVar[tuple[str, ...]] = ("input",)

    short_convolution: ShortConvolutionConfig | None = None

    @model_validator(mode="after")
    def _check_convolved(self) -> Self:
        check_convolved(self.short_convolution, self.convolved, self.kind)
        return self

    def resolved(self, context: BuildContext) -> Self:
        """The same config with every default written out that depends on the context or on other fields."""
        return self

    @property
    def active_hidden(self) -> int | None:
        """The number of hidden channels that a token uses; None: not stated."""
        return None

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads the ids of tokens (`HandedOver.tokens`)."""
        return False

    @property
    def reads_streams(self) -> bool:
        """Whether it reads and writes every stream of hyper-connections, [B, T, streams, width], in its layer alone."""
        return False

    @classmethod
    def default_fields(cls, previous: Part, width: int) -> dict[str, Any]:
        """As many hidden channels as a token used in the previous feed-forward."""
        hidden = previous.active_hidden if isinstance(previous, FeedforwardConfig) else None
        return {} if hidden is None or "hidden" not in cls.model_fields else {"hidden": hidden}

    @abstractmethod
    def build(self, context: BuildContext) -> "Feedforward":
        """Build the module. Raises DesignError if the config does not fit the context."""


class ExpertInfo(NamedTuple):
    """The experts of a mixture of experts.

    router: the module that computes the logits [..., experts]. weights: the parameters of the experts, output
    projection last. The first dimension of these, and of the router's own parameters, is the expert.
    groups: number of equal groups of adjacent experts that are selected together. capacity_factor: in training, an
    expert takes at most this times its even share of a row's choices; None: no limit. hashed: whether the ids of tokens
    select experts, not their scores.
    """

    router: nn.Module
    weights: tuple[nn.Parameter, ...]
    num_experts: int
    top_k: int
    groups: int = 1
    capacity_factor: float | None = None
    hashed: bool = False


class Feedforward(nn.Module, ABC):
    """Maps each token on its own, or with the few before it. The layout tells which tokens are padding.

    window: how many tokens a token depends on, itself included; if it is more than 1, the feed-forward has a state.
    dilation: the distance between the tokens of the window whose x it reads; if it reads ids, then of the whole window.
    streams: how many streams it reads and writes, x [B, T, streams, width]; None: x [B, T, width]. input_projections,
    fast_graph: as in `Mixer`. convolutions: the short convolutions of its hidden channels, if any.
    """

    window: int = 1
    dilation: int = 1
    streams: int | None = None
    input_projections: Sequence[str] | None = None
    fast_graph: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.convolutions: ShortConvolutions | None = None

    def convolve_hidden(self, config: ShortConvolutionConfig | None, channels: Mapping[str, int]) -> None:
        """Build the short convolutions of hidden channels, if the config names them."""
        if config is not None and "hidden" in config.of:
            self.convolutions = ShortConvolutions(config, channels)
            self.window = config.conv_kernel

    def init_state(self, spec: StateSpec) -> Any:
        """An empty state, a `MixerState`; None if it reads no earlier tokens."""
        return None if self.convolutions is None else self.convolutions.init_state(spec)

    @property
    def expert_info(self) -> ExpertInfo | None:
        """The experts, if each token uses only some of the parameters; else None."""
        return None

    @property
    def inactive_parameters(self) -> int:
        """Number of parameters that a token does not use: the experts that are not chosen for it."""
        return 0

    def update_expert_bias(self, expert_counts: Tensor) -> None:
        """Adapt the bias of the expert selection to the expert_counts [experts] of a whole optimizer step."""
        return

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout, state: Any = None) -> tuple[Tensor, Any]:
        """x [B, T, width] -> ([B, T, width], new state, or None without a state). The state passed in is consumed."""


def token_ids(layout: Layout, reader: str) -> Tensor:
    """The ids of the call's tokens, int64 [B, T], which the model hands over. Raises ConfigError, naming `reader`."""
    tokens = None if layout.handed_over is None else layout.handed_over.tokens
    if tokens is None:
        raise ConfigError(f"{reader} reads the ids of tokens, which only a model hands over; call the model")
    return tokens


def activation_settings(name: str | None, limit: float | None, alpha: float | None) -> dict[str, float]:
    """The settings of an activation with their defaults. Refuses settings that it does not take."""
    defaults = GATED[name].settings if name in GATED else {}
    fields = {"limit": limit, "alpha": alpha}
    for field, value in fields.items():
        if value is not None and field not in defaults:
            users = " or ".join(user for user, function in GATED.items() if field in function.settings)
            refuse(field, f"{value:g} is used only by {users}; choose that activation, or leave it out")
    return {field: fields[field] or default for field, default in defaults.items()}
