"""Optimizers that do not import torch's compiler: the same numbers as torch's own."""

import subprocess
import sys

import pytest
import torch

from heddle.training.optimizer import EagerAdamw

IMPORT = f"from {EagerAdamw.__module__} import EagerAdamw"
TRAIN = f"""
import sys, torch
{IMPORT}
weight = torch.nn.Parameter(torch.ones(3))
optimizer = EagerAdamw([weight], lr=0.1)
weight.sum().backward()
optimizer.step()
optimizer.zero_grad()
assert weight.grad is None and weight[0] < 1
print(sorted(name for name in sys.modules if name == "torch._dynamo"))
"""


@pytest.mark.parametrize("fused", [False, True])
def test_steps_equal_those_of_torch(fused: bool) -> None:
    """Three steps with weight decay, bit for bit, and no gradient of the update itself."""
    weights = []
    for kind in (EagerAdamw, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = kind([{"params": [weight], "weight_decay": 0.3}], lr=0.1, betas=(0.9, 0.95), fused=fused)
        for _ in range(3):
            weight.pow(3).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(weight)
    assert torch.equal(*weights)
    assert weights[0].is_leaf
    assert not torch.equal(weights[0], torch.linspace(-1, 1, 7))


def test_a_step_does_not_import_the_compiler() -> None:
    """torch's own AdamW imports `torch._dynamo` when it is made, more than a second before the first step."""
    result = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    own = TRAIN.replace(IMPORT, "EagerAdamw = torch.optim.AdamW")
    result = subprocess.run([sys.executable, "-c", own], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['torch._dynamo']"
