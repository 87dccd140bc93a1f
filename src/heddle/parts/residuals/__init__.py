"""The slot of residual connections: one choice for the model, one block per layer. Each file draws its figure."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import model_validator
from torch import Tensor, nn

from heddle.config import DesignError, Part, Probability, refuse
from heddle.parts.build import ResidualContext
from heddle.parts.modules.dropout import BranchDropout
from heddle.parts.norms import NormConfig

Stream = Any  # what passes from layer to layer: a tensor [B, T, width], or several
Branches = Mapping[str, Callable[[Tensor], Tensor]]  # "mixer" and "feedforward" in this order, or one of them


class InitialScales(NamedTuple):
    """Factors of the initial standard deviation of projections.

    values: of projections to a mixer's values and a feed-forward's hidden channels. outputs: of a branch's last
    projection.
    """

    values: float = 1.0
    outputs: float = 1.0


class ResidualConfig(Part, ABC):
    """Config of a residual block.

    drop_path, drop_path_first: stochastic depth rates of the last and of the first layer; in between the rate is linear
    (Huang et al. 2016, §3). dropout: rate at which elements of a branch's output are dropped, the same in every layer
    (Vaswani et al. 2017, §5.4).
    layer_scalar: whether the stream after each layer, with what `embedding.per_layer` adds, is multiplied by a learned
    number, at first 1 (Gemma 4, 2026).
    stream_grows: whether the stream grows from layer to layer, so that no two layers cost the same.
    """

    slot: ClassVar[str] = "residuals"
    later_fields: ClassVar[tuple[str, ...]] = ("drop_path_first", "layer_scalar")
    stream_grows: ClassVar[bool] = False

    drop_path: Probability = 0.0  # stochastic depth of the last layer (Huang et al. 2016); linear in between
    drop_path_first: Probability = 0.0  # stochastic depth of the first layer
    dropout: Probability = 0.0  # of elements of a branch's output
    layer_scalar: bool = False  # a learned factor of the stream after each layer

    @model_validator(mode="after")
    def _check_layer_scalar(self) -> Self:
        if self.layer_scalar and not self.has_one_stream:
            refuse("layer_scalar", f"multiplies one stream, and {self.kind} has several; leave it out")
        return self

    def check_layers(self, depth: int, most_branches: int, mixers: Set[str]) -> None:
        """Raises DesignError for a field that does nothing in a model of `depth` layers.

        most_branches: 2 if a layer of the model has a mixer and a feed-forward, else 1. mixers: the kinds of its
        layers' mixers, "" if one has none.
        """
        if self.drop_path and depth == 1:
            reason = f"{self.drop_path:g} does nothing in a model of one layer, which is the first"
            raise DesignError("drop_path", f"{reason}; give drop_path_first, add layers, or leave it out")

    def drop_rate(self, layer_index: int, depth: int) -> float:
        """The rate of stochastic depth of one layer."""
        return self.drop_path_first + (self.drop_path - self.drop_path_first) * layer_index / max(1, depth - 1)

    @property
    def has_one_stream(self) -> bool:
        """Whether the stream is one tensor [B, T, width]."""
        return True

    @property
    def parallel_streams(self) -> int:
        """How many streams of one width a feed-forward can read and write by itself; 1: none but the one."""
        return 1

    @property
    def takes_embeddings(self) -> bool:
        """Whether `embedding.per_layer` can be added after a layer."""
        return self.has_one_stream

    @property
    def keeps_stream(self) -> bool:
        """Whether a layer whose branches add zero leaves every stream unchanged, whatever its other weights."""
        return False

    @property
    def first_layer_differs(self) -> bool:
        """Whether the block of the first layer has other weights than the blocks of equal layers after it."""
        return False

    def expand(self, x: Tensor) -> Stream:
        """The stream that enters the first layer, made from the embedding x [B, T, width], without weights."""
        return x

    def build_expansion(self, width: int) -> nn.Module | None:
        """Build the module that makes the stream from the embedding in place of `expand`; None: no weights do."""
        return None

    def initial_scales(self, depth: int) -> InitialScales:
        """The factors for `depth` layers, which give the sum of all branches the same initial scale at any depth."""
        return InitialScales(outputs=float((2 * depth) ** -0.5))

    def input_norm(self, branch: str, mixer: str) -> str | None:
        """The norm whose output the branch reads, as a path in the block; only branches read it. None: not stated.

        mixer: the kind of the layer's mixer, "" if it has none.
        """
        return None

    def output_norm(self, branch: str, mixer: str) -> str | None:
        """The norm of the branch's output before it is added, as a path in the block. mixer: as in `input_norm`."""
        return None

    @abstractmethod
    def build(self, context: ResidualContext) -> "Residual":
        """Build the block of one layer."""

    @abstractmethod
    def build_final_norm(self, width: int, norm: NormConfig) -> nn.Module:
        """Build the module that maps the last layer's stream to hidden states [B, T, width]."""


class FinalNormConfig(ResidualConfig, ABC):
    """Config of a residual block with a norm after the last layer, unless `final_norm` is false."""

    later_fields = (*ResidualConfig.later_fields, "final_norm")

    final_norm: bool = True  # a norm after the last layer

    @property
    def keeps_stream(self) -> bool:
        """True: branches are added to the stream."""
        return True

    def build_final_norm(self, width: int, norm: NormConfig) -> nn.Module:
        """Build the final norm, or an identity."""
        return FinalNorm(width, norm) if self.final_norm else nn.Identity()


class Residual(nn.Module, ABC):
    """Adds the branches of one layer to the stream; each branch output passes through `drops[name]` first."""

    def __init__(self, context: ResidualContext) -> None:
        super().__init__()
        self.drops = nn.ModuleDict(
            {name: BranchDropout(context.dropout, context.drop_rate) for name in context.branches}
        )

    @abstractmethod
    def forward(self, stream: Stream, branches: Branches) -> Stream:
        """The stream after the layer."""

    def identity_output(self, stream: Stream) -> Stream:
        """The stream after this layer if no branch, here or in earlier layers, adds anything.

        It is unchanged, unless the block normalizes the stream itself.
        """
        return stream

    def add_embedding(self, stream: Stream, branch: Callable[[Tensor], Tensor]) -> Stream:
        """The stream after the layer with the branch of `embedding.per_layer` added."""
        return stream + branch(stream)

    def dropped_output(self, stream: Stream) -> Stream:
        """The stream after this layer if stochastic depth drops every branch here."""
        return self.identity_output(stream)


class FinalNorm(nn.Module):
    """The final norm of a stream that is one tensor, or of a tensor made from it. `norm` returns the hidden states."""

    def __init__(self, width: int, norm: NormConfig) -> None:
        super().__init__()
        self.norm = norm.build(width)

    def forward(self, stream: Stream) -> Tensor:
        """[B, T, width] -> the same shape."""
        y: Tensor = self.norm(stream)
        return y
