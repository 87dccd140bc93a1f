"""Random stacks of residual blocks around two functions, beside the layers of transformers in float64."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heddle.parts.build import ResidualContext

NAMES = ("mixer", "feedforward")
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mixer": lambda x: x.flip(1).tanh(),
    "feedforward": lambda x: x.roll(1, dims=-1).sin(),
}


class Branch(nn.Module):
    """A function in the place of a mixer or a feed-forward. more: how many other results theirs returns."""

    def __init__(self, function: Callable[[Tensor], Tensor], more: int = 0) -> None:
        super().__init__()
        self.function, self.more = function, more

    def forward(self, hidden_states: Tensor, **options: Any) -> Any:
        y = self.function(hidden_states)
        return (y, *[None] * self.more) if self.more else y


class Stack(NamedTuple):
    """Blocks and their last norm with random weights, their input x [B, T, width], and the hidden states."""

    blocks: Any
    final: Any
    x: Tensor
    hidden: Tensor

    def beside(self, theirs: Tensor) -> list[tuple[Tensor, ...]]:
        """Outputs and gradients of ours and theirs."""
        direction = torch.randn(self.x.shape, dtype=torch.float64)
        inputs = [self.x, *self.blocks.parameters(), *self.final.parameters()]
        return [(y, *torch.autograd.grad((y * direction).sum(), inputs)) for y in (self.hidden, theirs)]


def random_stack(config: Any, norm: Any, shape: Sequence[int], seed: int) -> Stack:
    """Blocks of this residual. shape: how many, their width, and the length of the text."""
    depth, width, length = shape
    contexts = [ResidualContext(NAMES, width, norm, depth=depth, layer_index=index) for index in range(depth)]
    blocks, final = nn.ModuleList(map(config.build, contexts)).double(), config.build_final_norm(width, norm).double()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in (*blocks.parameters(), *final.parameters()):
            parameter.normal_(1.0 if parameter.dim() < 2 else 0.0, 0.8)
    x = torch.randn(2, length, width, dtype=torch.float64, requires_grad=True)
    stream = config.expand(x)
    for block in blocks:
        stream = block(stream, FUNCTIONS)
    return Stack(blocks, final, x, final(stream))
