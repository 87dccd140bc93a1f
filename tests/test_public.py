"""The public API, used as the documentation uses it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import heddle
from heddle.tokenization.tokenizer import Tokenizer
from tests import small


def test_the_lines_of_the_documentation(tmp_path: Path) -> None:
    config = heddle.load_config(small.design_file(tmp_path / "my.yaml"), overrides=["layers.0.mixer.kv_heads=2"])
    model = heddle.build(config, dtype=torch.float32, device="cpu", seed=0)

    tokens = torch.randint(0, 300, (2, 12))
    hidden, state = model(tokens, layout=None, state=None)
    logits = model.head(hidden)
    assert hidden.shape == (2, 12, 16)
    assert logits.shape == (2, 12, 300)
    assert state is None

    with torch.no_grad():
        state = model.init_state(batch=2, cache_length=12)
        first, state = model(tokens[:, :7], state=state)
        rest, state = model(tokens[:, 7:], state=state)
    torch.testing.assert_close(torch.cat((first, rest), dim=1), hidden.detach())

    padded = heddle.Layout.padded([12, 5], side="right")
    packed = heddle.Layout.packed([[12], [4, 8]])
    explicit = heddle.Layout(positions=packed.positions, segment_ids=packed.segment_ids)
    assert padded.positions[1, 5:].eq(-1).all()
    torch.testing.assert_close(model(tokens, explicit)[0], model(tokens, packed)[0])
    torch.testing.assert_close(model(tokens, heddle.Layout.causal(2, 12))[0], hidden)

    size = heddle.size(config, context_length=64, batch=2)
    assert size.parameters == size.active_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.flops_per_token > 0
    assert size.state_bytes == model.init_state(batch=2, cache_length=64).bytes

    with heddle.kernels(attention="reference", linear="reference"):
        torch.testing.assert_close(model(tokens)[0], hidden)

    weights = heddle.attention_weights(model, tokens)
    assert {None if layer is None else tuple(layer.shape) for layer in weights} == {(2, 2, 12, 12)}

    tokenizer = Tokenizer.train([small.text(3000)], 300)
    heddle.save(model, tmp_path / "saved", tokenizer=tokenizer)
    model, loaded = heddle.load(tmp_path / "saved")
    assert loaded is not None

    lists = heddle.generate(model, [[1, 2, 3], [4]], max_new_tokens=5, temperature=0.8, top_k=20, top_p=0.9, seed=1)
    assert [len(row) for row in lists] == [5, 5]
    texts = heddle.generate(model, ["The weaver", ""], loaded, max_new_tokens=5)
    assert [type(text) for text in texts] == [str, str]


@pytest.mark.parametrize("source", ["preset:gqa-tiny", small.design()])
def test_designs_come_from_anywhere(source: str) -> None:
    config = heddle.load_config(source, ["width=32", "layers.*.mixer.window=8"])
    assert config.width == 32
    assert heddle.load_config(config.dump()) == config


def test_every_public_name_is_there_and_no_other() -> None:
    for name in heddle.__all__:
        assert getattr(heddle, name) is not None
    assert set(heddle.__all__) <= set(dir(heddle))  # what a prompt completes
    with pytest.raises(AttributeError, match="no attribute 'weave'"):
        heddle.weave  # noqa: B018
    assert heddle.__version__.count(".") == 2


def test_importing_heddle_imports_nothing_heavy() -> None:
    code = "import sys, heddle; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic', 'click')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
