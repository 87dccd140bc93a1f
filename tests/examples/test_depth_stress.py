"""The depth stress example, made small: its measurements and its charts."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import heddle
from examples import depth_stress
from heddle.training.settings import Settings
from heddle.training.step import accumulate_gradients

SVG = "{http://www.w3.org/2000/svg}"


def test_the_text_is_the_standard_library() -> None:
    text = depth_stress.standard_library(100_000)
    assert len(text) == 100_000
    assert b"import" in text.tobytes()
    batch, next_batch = depth_stress.random_batch(text, 3), depth_stress.random_batch(text, 4)
    assert batch.tokens.shape == (depth_stress.BATCH_SIZE, depth_stress.SEQUENCE_LENGTH + 1)
    assert np.array_equal(batch.tokens, depth_stress.random_batch(text, 3).tokens)
    assert not np.array_equal(batch.tokens, next_batch.tokens)


def test_norms_are_by_layer_and_gradients_are_cleared() -> None:
    model = heddle.build(heddle.load_config(depth_stress.residual_design("residual_dual", 3)))
    batch = depth_stress.random_batch(depth_stress.standard_library(100_000), 0)
    norms = depth_stress.layer_gradient_norms(model, batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    accumulate_gradients(model, batch, (0, 0))
    for layer, norm in zip(model.layers, norms, strict=True):
        squares = [parameter.grad.square().sum() for parameter in layer.parameters() if parameter.grad is not None]
        assert norm == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-5)


def test_shallow_stacks_learn() -> None:
    text = depth_stress.standard_library(100_000)
    run = depth_stress.measure_design("post_norm", text, 2, Settings(steps=30, learning_rate=3e-3))
    assert np.mean(run["losses"][-5:]) < np.mean(run["losses"][:5]) - 1


def test_report_and_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["depth_stress", "--layers", "3", "--steps", "6", "--out", str(tmp_path)])
    depth_stress.main()
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(depth_stress.DESIGNS)
    report = json.loads((tmp_path / "depth-stress.json").read_text(encoding="utf-8"))
    assert {name: (len(run["gradient_norms"]), len(run["losses"])) for name, run in report["designs"].items()} == (
        dict.fromkeys(depth_stress.DESIGNS, (3, 6))
    )
    picture = (tmp_path / "depth-stress.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(picture)
    assert len([path for path in root.iter(f"{SVG}path") if path.get("class") == "line"]) == 10
    written = [element.text for element in root.iter(f"{SVG}text")]
    assert all(written.count(name) == 2 for name in depth_stress.DESIGNS)
    assert "nan" not in picture
    assert picture.count("http") == 1  # the SVG namespace only: nothing is loaded
