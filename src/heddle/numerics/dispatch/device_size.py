"""How much an operation computes at one time, by the kind of device."""

from typing import NamedTuple

from torch import Tensor

from heddle.numerics.dispatch.operation import device_type


class DeviceSize(NamedTuple):
    """A size, in the unit of its constant. `cpu` fits a CPU's cache; `accelerator` takes few launches."""

    cpu: int
    accelerator: int

    def on(self, tensor: Tensor) -> int:
        """The size for the device of a tensor. Within `record_choices`, for the device that the tensor stands for."""
        return self.cpu if device_type(tensor) == "cpu" else self.accelerator
