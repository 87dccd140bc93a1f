"""A stand-in for torchao.float8 (pytorch/ao 0.18): its signature, and products of numbers rounded to float8_e4m3fn.

As there, `convert_to_float8_training` replaces in place each `nn.Linear` that the filter accepts by a subclass of
`nn.Linear` over the same parameters, which scales a tensor to float8's range before it rounds.
"""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Float8Linear(nn.Linear):
    """`y = x Wᵀ + b` of rounded x and W; the gradient is that without rounding."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        return functional.linear(rounded(x.to(dtype)), rounded(self.weight.to(dtype)), self.bias)


def rounded(x: Tensor) -> Tensor:
    scale = LARGEST / x.detach().abs().max().clamp(min=1e-12).float()
    result = ((x.detach().float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)
    return x + (result - x).detach()


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: object | None = None,
) -> nn.Module:
    for path, child in list(module.named_modules()):
        if isinstance(child, nn.Linear) and (module_filter_fn is None or module_filter_fn(child, path)):
            with torch.device("meta"):
                linear = Float8Linear(child.in_features, child.out_features, child.bias is not None)
            linear.weight, linear.bias = child.weight, child.bias
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, linear)
    return module


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import torchao.float8` find the stand-in."""
    package, module = ModuleType("torchao"), ModuleType("torchao.float8")
    module.convert_to_float8_training = convert_to_float8_training  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.float8", module)
