"""A stand-in for Liger's loss: the signature of linkedin/Liger-Kernel 0.8.2, functional.py, and torch's values."""

import sys
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch import libraries

OPTIONS: dict[str, Any] = {
    "bias": None,
    "ce_weight": None,
    "ignore_index": -100,
    "lse_square_scale": 0.0,
    "label_smoothing": 0.0,
    "reduction": "mean",
    "softcap": None,
    "return_z_loss": False,
    "accum_dtype": None,
    "use_token_scaling": False,
    "return_token_accuracy": False,
    "return_predicted_tokens": False,
}
KIND = Parameter.POSITIONAL_OR_KEYWORD
SIGNATURE = Signature(
    [
        *(Parameter(name, KIND) for name in ("input", "weight", "target")),
        *(Parameter(name, KIND, default=value) for name, value in OPTIONS.items()),
    ]
)


def liger_fused_linear_cross_entropy(*arguments: Any, **options: Any) -> Tensor:
    """The loss alone, as Liger returns it if nothing else is asked for."""
    call = SIGNATURE.bind(*arguments, **options)
    call.apply_defaults()
    values = call.arguments
    assert values["accum_dtype"] == torch.float32, "sums in bfloat16 lose the gradients of rare words"
    unused = {"ce_weight", "lse_square_scale", "label_smoothing", "use_token_scaling"}
    assert all(values[name] == OPTIONS[name] for name in unused | {name for name in OPTIONS if "return" in name})
    logits = functional.linear(values["input"], values["weight"], values["bias"])
    if values["softcap"] is not None:
        logits = values["softcap"] * torch.tanh(logits / values["softcap"])
    return functional.cross_entropy(logits, values["target"], reduction=values["reduction"])


def install_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a test, `liger_kernel` can be imported."""
    libraries._modules.clear()
    package, transformers = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    module = ModuleType("liger_kernel.transformers.functional")
    vars(module)["liger_fused_linear_cross_entropy"] = liger_fused_linear_cross_entropy
    vars(transformers)["functional"] = module
    for loaded in (package, transformers, module):
        monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
