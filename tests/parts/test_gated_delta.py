"""The gated delta part: how it starts, what its state holds, and what it refuses."""

from typing import Any

import pytest
import torch
from torch.nn import functional

import heddle
from heddle.config import DesignError, decode
from heddle.laws.subject import advance, answer, fresh, subject, text
from heddle.model.config import ModelConfig
from heddle.parts.context.layout import Layout
from heddle.parts.mixers.gated_delta import Decay
from tests.cases import case, delta, design


def config_of(**fields: Any) -> ModelConfig:
    return decode(ModelConfig, design(delta(**fields)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_state_of_one_size(dtype: torch.dtype) -> None:
    model = heddle.build(config_of(heads=6, key_heads=2, head_dim=5, value_dim=3, convolution=3), dtype=dtype)
    width = torch.finfo(dtype).bits // 8
    for capacity in (None, 9, 5000):
        state = model.init_state(2, capacity)
        assert state.layer_bytes == [2 * (6 * 5 * 3 * max(width, 4) + 2 * (2 * 2 * 5 + 6 * 3) * width)] * 2
    _, after = advance(model, state, text(model.config, 2, 7))
    kinds = {name.rsplit(".", 1)[-1]: tensor.dtype for name, tensor in after.tensors().items() if "layers" in name}
    assert kinds == {"memory": torch.promote_types(dtype, torch.float32), "tail": dtype}


def test_projections_have_the_promised_shapes() -> None:
    mixer = heddle.build(config_of(heads=6, key_heads=2, head_dim=5, value_dim=3)).layers[0].mixer
    shapes = {name: tuple(value.shape) for name, value in mixer.named_parameters()}  # type: ignore[union-attr]
    assert shapes == {
        "q.weight": (10, 24),
        "k.weight": (10, 24),
        "v.weight": (18, 24),
        "gate.weight": (18, 24),
        "a.weight": (6, 24),
        "beta.weight": (6, 24),
        "convolution.weight": (38, 4),
        "decay.rate": (6,),
        "decay.bias": (6,),
        "norm.weight": (3,),
        "out.weight": (24, 18),
    }


def test_decays_start_where_the_authors_put_them() -> None:
    decay = Decay(2000)
    decay.initialise(0.02, torch.Generator().manual_seed(0))
    rate, step = decay.rate.detach().exp(), functional.softplus(decay.bias.detach())
    assert 1.0 <= float(rate.min()) < 1.1 < 15.9 < float(rate.max()) <= 16.01
    assert 0.00099 < float(step.min()) < 0.00102 < 0.098 < float(step.max()) < 0.101
    assert 0.009 < float(step.median()) < 0.011


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"heads": 6, "key_heads": 4}, r"key_heads: 4 does not divide heads = 6; choose a divisor"),
        ({"heads": 5}, r"heads: 5 does not divide width = 24; give head_dim"),
        ({"convolution": 0}, r"convolution: should be greater than 0"),
        ({"convolution": None}, r"convolution: should be a valid integer"),
    ],
)
def test_refusals(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(DesignError, match=words):
        heddle.build(config_of(**fields))


def test_a_call_without_tokens_changes_nothing() -> None:
    model = subject(case("delta"))
    tokens = text(model.config, 2, 9)
    _, state = advance(model, fresh(model, 2), tokens[:, :5])
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    hidden, state = advance(model, state, tokens[:, :0])
    assert hidden.shape == (2, 0, 24)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())
    assert answer(model, tokens[:, :0]).shape == (2, 0, 24)


def test_many_chunks_of_packed_and_padded_rows() -> None:
    """Longer than the laws' texts: documents and padding at and around the edges of chunks."""
    model = subject(case("delta-key-heads"))
    lengths = [[31, 33, 1, 2, 63], [64, 32, 34], [130]]
    tokens, layout = text(model.config, 3, 130), Layout.packed(lengths)
    hidden = answer(model, tokens, layout)
    for row, sizes in enumerate(lengths):
        alone = torch.cat([answer(model, piece[None])[0] for piece in tokens[row].split(sizes)])
        torch.testing.assert_close(hidden[row], alone, rtol=0, atol=1e-10)
    padded = Layout.padded([130, 97, 33], side="left")
    hidden = answer(model, tokens, padded)
    for row, length in enumerate((130, 97, 33)):
        alone = answer(model, tokens[row : row + 1, 130 - length :])
        torch.testing.assert_close(hidden[row, 130 - length :], alone[0], rtol=0, atol=1e-10)


def test_autocast_keeps_the_recurrence_wide() -> None:
    """Under bfloat16 autocast only projections are narrow, as in a model of bfloat16 weights."""
    exact = subject(case("delta"))
    tokens = text(exact.config, 2, 70)
    want = answer(exact, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = answer(exact.float(), tokens)
    assert float((got.double() - want).square().mean() / want.square().mean()) < 1e-2
