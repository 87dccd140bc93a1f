"""Folders of transformers converted to fewer key/value heads: transformers writes the same greedy text as heddle."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import heddle
from heddle.conversion.convert import Conversion, convert, open_source
from heddle.conversion.rewrites.kv_heads import KVHeads
from heddle.conversion.weights import CalibrationText
from heddle.exchange.export import export
from tests.conversion.exactness import calibration_text
from tests.exchange.cases import CASES
from tests.exchange.hf_models import VOCABULARY, plain, read_json, saved, their_logits

WRITTEN = 32
FAMILIES = ["llama", "qwen3", "gemma2"]


def random_text() -> CalibrationText:
    generator = torch.Generator().manual_seed(0)
    return calibration_text([torch.randint(1, VOCABULARY, (8, 48), generator=generator)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_fewer_heads_in_transformers(family: str, kv_heads: int, tmp_path: Path) -> None:
    """From 2 heads to 1, and to 3, which takes 6 heads apart: what heddle computes, transformers computes."""
    _, folder = saved(family, next(iter(CASES[family].variants)))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    source = open_source(folder)
    convert(Conversion(source, (KVHeads(kv_heads=kv_heads),), random_text()), tmp_path / "converted")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    model, _ = heddle.load(tmp_path / "converted")
    export(model, tmp_path / "exported")
    assert read_json(tmp_path / "exported")["num_key_value_heads"] == kv_heads
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", dtype=torch.float32, **plain(family)
    ).eval()
    prompt = torch.randint(1, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(4))
    written = theirs.generate(prompt, max_new_tokens=WRITTEN, min_new_tokens=WRITTEN, do_sample=False)[0, 9:]
    ours = heddle.generate(model, [prompt[0].tolist()], max_new_tokens=WRITTEN)[0]
    assert ours == written.tolist()
    with torch.no_grad():
        logits = model.head(model(prompt)[0])
    assert float((their_logits(theirs, prompt) - logits).abs().max()) < 1e-4
