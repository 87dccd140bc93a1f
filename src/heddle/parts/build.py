"""What a part is built with: the sizes of the model, and which layer the part belongs to."""

from dataclasses import dataclass

from torch import nn

from heddle.config import DesignError
from heddle.parts.norms import NormConfig


@dataclass(frozen=True)
class BuildContext:
    """What mixers and feed-forwards are built with.

    width: of the residual stream. norm: the model's default norm. depth: number of layers of this stack (an encoder
    counts its own). layer_index: 0 for the first layer. streams: of hyper-connections; 1: the residual has none.
    vocab_size: number of token ids, for tables of a layer.
    """

    width: int
    norm: NormConfig
    depth: int = 1
    layer_index: int = 0
    streams: int = 1
    vocab_size: int = 1

    def head_dim(self, heads: int, head_dim: int | None) -> int:
        """`head_dim`, or width / heads if it is None. Raises DesignError if that is not a whole number."""
        if head_dim is None and self.width % heads:
            raise DesignError("heads", f"{heads} does not divide width = {self.width}; give head_dim, or other heads")
        return head_dim or self.width // heads


@dataclass(frozen=True)
class ResidualContext:
    """What residual blocks are built with.

    branches: the layer's branch names, "mixer" and "feedforward" or one of them. drop_rate: the layer's rate of
    stochastic depth. dropout: the rate at which elements of a branch's output are dropped. mixer, feedforward: the
    kinds of the layer's, "" if it has none. on_streams: whether the feed-forward reads and writes every stream.
    per_layer: whether the layer reads an embedding of its own. The rest is as in `BuildContext`.
    """

    branches: tuple[str, ...]
    width: int
    norm: NormConfig
    drop_rate: float = 0.0
    dropout: float = 0.0
    depth: int = 1
    layer_index: int = 0
    mixer: str = ""
    feedforward: str = ""
    on_streams: bool = False
    per_layer: bool = False

    def build_norms(self) -> nn.ModuleDict:
        """One norm for each branch."""
        return nn.ModuleDict({name: self.norm.build(self.width) for name in self.branches})
