"""float32 copies of bfloat16 parameters, which the optimizer updates: small updates would be lost in bfloat16.

The copies stay between the steps (Micikevicius et al. 2018), or exist during an update only: then the new weights are
rounded stochastically, and nothing of them is stored but the parameters.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from heddle.distributed.ranks import as_sharded, held_rows, local_part
from heddle.numerics.philox import RandomStream
from heddle.numerics.stochastic_rounding import stochastic_round


class MasterWeights:
    """The copies of all bfloat16 parameters among `parameters`, by name; other dtypes have none.

    Sharded parameters have sharded copies, which are rounded as those of one process are. stochastic: the copies hold
    no memory between updates, and `write_back` rounds stochastically.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], stochastic: bool = False) -> None:
        self.parameters = {name: value for name, value in parameters.items() if value.dtype == torch.bfloat16}
        self.copies = {name: nn.Parameter(value.detach().float()) for name, value in self.parameters.items()}
        self.stochastic = stochastic

    @property
    def state(self) -> dict[str, Tensor]:
        """Return the copies that outlive an update, by name."""
        return {} if self.stochastic else {name: copy.detach() for name, copy in self.copies.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned."""
        with torch.no_grad():
            for name in self.state.keys() & state.keys():
                self.copies[name].copy_(state[name])

    def take_gradients(self) -> None:
        """Move the parameters' gradients to their copies, in float32. A copy that holds no memory gets its values."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            copy = self.copies[name]
            if self.stochastic:
                own = local_part(copy.detach())
                own.untyped_storage().resize_(own.numel() * own.element_size())
                own.copy_(local_part(parameter.detach()))
            copy.grad, parameter.grad = parameter.grad.float(), None

    def write_back(self, key: tuple[int, int]) -> None:
        """Round the copies into the parameters. key: (seed, step), from which stochastic rounding draws."""
        if not self.parameters:
            return
        with torch.no_grad():
            if not self.stochastic:
                weights, copies = self.parameters.values(), self.copies.values()
                torch._foreach_copy_([local_part(x) for x in weights], [local_part(x) for x in copies])
                return
            for name, parameter in self.parameters.items():
                own = local_part(self.copies[name].detach())
                if own.untyped_storage().size():
                    stream = RandomStream.of("stochastic rounding", *key, name)
                    local_part(parameter.detach()).copy_(stochastic_round(own, stream, _first_element(parameter)))
        self.free()

    def discard_gradients(self) -> None:
        """Drop gradients that `take_gradients` moved, as after a step that is skipped."""
        for copy in self.copies.values():
            copy.grad = None
        self.free()

    def free(self) -> None:
        """Free the memory of copies that exist during an update only. Tensors that share it stay valid."""
        for copy in self.copies.values() if self.stochastic else ():
            local_part(copy.detach()).untyped_storage().resize_(0)


def _first_element(parameter: Tensor) -> int:
    """The number, in the whole parameter, of the first element that this rank holds."""
    if as_sharded(parameter) is None:
        return 0
    first_row: int = held_rows(parameter).start
    return first_row * (parameter.numel() // max(1, len(parameter)))


def memory_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
