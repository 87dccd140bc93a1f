"""Compiled layers: the same values, and no recompilation for another layout."""

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

# The compiler reads the .grad of tensors that are not leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

LAYOUTS = [[[12, 4], [16]], [[3, 13], [16]], [[1, 2, 13], [8, 8]]]


def model() -> Decoder:
    overrides = ["vocab_size=61", "width=16", "layers.0.repeat=2", "layers.0.mixer.heads=2", "residual.drop_path=0.5"]
    return build(load_config("preset:gqa-tiny", overrides), dtype=torch.float64)


def compilations() -> tuple[int, int, float]:
    """Compiled frames after the first layout and after all layouts; the largest difference from the eager model."""
    torch._dynamo.reset()
    plain, counter = model(), CompileCounter()
    compiled_model = compiled(plain, backend=counter)
    tokens = torch.arange(32).view(2, 16)
    first, max_difference = 0, 0.0
    for lengths in LAYOUTS:
        with use_random_key(RandomKey(0, 0, torch.arange(2))):
            difference = compiled_model(tokens, Layout.packed(lengths))[0] - plain(tokens, Layout.packed(lengths))[0]
        max_difference = max(max_difference, difference.abs().max().item())
        first = first or counter.frame_count
    return first, counter.frame_count, max_difference


def test_another_layout_does_not_recompile() -> None:
    first, after, max_difference = compilations()
    assert first > 0
    assert after == first
    assert max_difference < 1e-10


def test_layouts_traced_by_the_compiler_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_marked", set())
    with pytest.raises((AssertionError, torch._dynamo.exc.InternalTorchDynamoError)):
        test_another_layout_does_not_recompile()


def test_the_compiled_model_shares_every_parameter() -> None:
    plain = model()
    compiled_model = compiled(plain, backend="eager")
    assert dict(compiled_model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert all(own is compiled_model.get_parameter(name) for name, own in plain.named_parameters())
    assert compiled_model.head.weight is plain.embed.weight


def test_building_a_model_does_not_import_the_compiler() -> None:
    program = "import sys, heddle.model.decoder; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
