"""MLP (Vaswani et al. 2017): `down(f(up(x)))`."""

from torch import Tensor

from heddle.config import PositiveInt, Probability
from heddle.numerics.activations import activation
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import Activation, Feedforward, FeedforwardConfig
from heddle.parts.layout import Layout
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.linear import Linear


class MLPConfig(FeedforwardConfig):
    """Fields of `mlp`."""

    hidden: PositiveInt
    activation: Activation = "gelu"
    bias: bool = False
    dropout: Probability = 0.0

    @property
    def active_hidden(self) -> int:
        """All."""
        return self.hidden

    def build(self, context: BuildContext) -> "MLP":
        """Build the module."""
        return MLP(self, context.width)


class MLP(Feedforward):
    """The module."""

    input_projections = ("up",)

    def __init__(self, config: MLPConfig, width: int) -> None:
        super().__init__()
        self.up = Linear(width, config.hidden, config.bias, value_projection=True)
        self.down = Linear(config.hidden, width, config.bias, output_projection=True)
        self.activation = activation(config.activation)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> the same shape."""
        y: Tensor = self.down(self.dropout(self.activation(self.up(x))))
        return y
