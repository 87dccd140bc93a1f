"""MLP (Vaswani et al. 2017): `down(f(up(x)))`."""

from torch import Tensor

from heddle.config import Count, Rate
from heddle.parts.context.layout import Layout
from heddle.parts.feedforwards import Activation, Feedforward, FeedforwardConfig, activation
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.linear import Linear


class MLPConfig(FeedforwardConfig):
    """Fields of `mlp`."""

    hidden: Count
    activation: Activation = "gelu"
    bias: bool = False
    dropout: Rate = 0.0

    def build(self, width: int) -> "MLP":
        """Make the module."""
        return MLP(self, width)


class MLP(Feedforward):
    """The module."""

    def __init__(self, config: MLPConfig, width: int) -> None:
        super().__init__()
        self.up = Linear(width, config.hidden, config.bias)
        self.down = Linear(config.hidden, width, config.bias, last=True)
        self.activation = activation(config.activation)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> the same shape."""
        return self.down(self.dropout(self.activation(self.up(x))))
