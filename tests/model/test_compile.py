"""Compiled layers: the same values, and no compilation anew for another layout."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from heddle.model.compiled import compiled
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.numerics.random import RandomKey, use_random_key
from heddle.parts.context.layout import Layout
from heddle.parts.modules import eager

# The compiler itself looks at the .grad of tensors that are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

LAYOUTS = [[[12, 4], [16]], [[3, 13], [16]], [[1, 2, 13], [8, 8]]]


def model() -> Decoder:
    overrides = ["vocab_size=61", "width=16", "layers.0.repeat=1", "layers.0.mixer.heads=2", "residual.drop_path=0.5"]
    return build(load_config("preset:gqa-tiny", overrides), dtype=torch.float64)


def compilations() -> tuple[int, int, float]:
    """Compiled frames after the first layout and after all, and the largest difference to the plain model."""
    torch._dynamo.reset()
    plain, counter = model(), CompileCounter()
    twin = compiled(plain, backend=counter)
    tokens = torch.arange(32).view(2, 16)
    first, worst = 0, 0.0
    for lengths in LAYOUTS:
        with use_random_key(RandomKey(0, 0, torch.arange(2))):
            difference = twin(tokens, Layout.packed(lengths))[0] - plain(tokens, Layout.packed(lengths))[0]
        worst = max(worst, difference.abs().max().item())
        first = first or counter.frame_count
    return first, counter.frame_count, worst


def test_another_layout_compiles_nothing_anew() -> None:
    first, after, worst = compilations()
    assert first > 0
    assert after == first
    assert worst < 1e-10


def test_planted_layouts_that_are_traced_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_marked", set())
    with pytest.raises((AssertionError, torch._dynamo.exc.InternalTorchDynamoError)):
        test_another_layout_compiles_nothing_anew()


def test_the_twin_shares_every_parameter_and_leaves_the_model_plain() -> None:
    plain = model()
    twin = compiled(plain, backend="eager")
    assert dict(twin.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert all(own is twin.get_parameter(name) for name, own in plain.named_parameters())
    assert twin.head.weight is plain.embed.weight


def test_a_model_is_built_without_the_compiler() -> None:
    program = "import sys, heddle.model.decoder; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
