"""The example of transfer over width, with losses that are stated instead of trained."""

import argparse
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from examples import width_transfer
from heddle.training.width_transfer import scale_to_width, transfer_over_width

SVG = "{http://www.w3.org/2000/svg}"
Row = dict[str, Any]


def options(out: Path, seeds: int = 1) -> argparse.Namespace:
    return argparse.Namespace(out=out, optimizer="adamw", steps=2, seeds=seeds, jobs=1, multiples=[1, 2, 4, 8])


def stated(task: Row) -> Row:
    """A parabola around an exponent that falls by 1 with each doubling of the width, or stays; above it diverges."""
    doublings = (task["width"] // width_transfer.BASE_WIDTH).bit_length() - 1
    best = 1 - doublings if task["scaling"] == "standard" else 1
    exponent = task["exponent"]
    loss = None if exponent > best + 3 else 3.0 + 0.1 * (exponent - best) ** 2 + 0.01 * task["seed"]
    return {**task, "bits_per_byte": loss, "cpu_seconds": 0.0}


def test_the_grid_grows_to_the_best_rate_and_is_not_trained_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(width_transfer, "train_run", stated)
    rows = width_transfer.run_grid(options(tmp_path), map)
    by_scaling = width_transfer.curves(rows)
    best = {
        scaling: {width: width_transfer.best_exponent(curve) for width, curve in by_width.items()}
        for scaling, by_width in by_scaling.items()
    }
    assert best == {"standard": {32: 1, 64: 0, 128: -1, 256: -2}, "transfer": {32: 1, 64: 1, 128: 1, 256: 1}}
    assert [width_transfer.steps_moved(by_width) for by_width in by_scaling.values()] == [3, 0]
    assert width_transfer.fitted_exponent(by_scaling["standard"][64]) == pytest.approx(0.0)
    assert min(row["exponent"] for row in rows) == -3  # one beyond the best of width 256
    assert json.loads((tmp_path / "adamw.json").read_text()) == rows

    monkeypatch.setattr(width_transfer, "train_run", None)  # a call would fail
    assert width_transfer.run_grid(options(tmp_path), map) == rows


def test_the_figure_has_a_line_and_a_ring_for_each_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(width_transfer, "train_run", stated)
    figure = ElementTree.fromstring(width_transfer.render_svg(width_transfer.run_grid(options(tmp_path, seeds=2), map)))
    assert (len(figure.findall(f"{SVG}polyline")), len(figure.findall(f"{SVG}circle"))) == (8, 8)
    texts = [text.text for text in figure.iter(f"{SVG}text")]
    assert "standard: the best rate moves by a factor of 8.0" in texts
    assert "transfer: the best rate moves by a factor of 1.0" in texts


def test_every_width_is_one_design() -> None:
    """Twice as wide is twice as many heads of the same width, and the transfer knows every weight."""
    config = width_transfer.base_design()
    for multiple in width_transfer.MULTIPLES[1:]:
        wide = scale_to_width(config, multiple * width_transfer.BASE_WIDTH)
        assert wide.layers[0].mixer is not None
        assert wide.layers[0].mixer.head_shape(wide.width) == (2 * multiple, 16)
        assert transfer_over_width(wide, width_transfer.BASE_WIDTH).scales["layers.0.mixer.q.weight"].learning_rate == (
            1 / multiple
        )
