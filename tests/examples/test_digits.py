"""The example that tells digits, made short: its rows are the images, it learns, and its picture is well formed."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import digits
from heddle.parts.context.layout import Layout
from heddle.parts.positions.axial_rope import AxialRopeConfig, locate


def test_rows_are_images() -> None:
    image = np.zeros((1, 8, 8))
    image[0, 2, 5], image[0, 7, 6] = 16, 8
    rows = digits.rows(image, np.array([3]))
    assert rows.labels.tolist() == [[3] + [-1] * 32]
    assert rows.places is not None
    inked = np.flatnonzero(rows.tokens[0])
    assert rows.tokens[0, inked].tolist() == [digits.CLASS, 4, 10]  # the right one of a pair, then the left one
    assert rows.places[0, inked].tolist() == [[3.5, 3.5], [4.5, 2], [6.5, 7]]


def test_images_move_without_coming_back_on_the_other_side() -> None:
    image = np.arange(64).reshape(1, 8, 8)
    there = digits.moved(image, 1, -1)
    assert there[0, :7, 1:].tolist() == image[0, 1:, :7].tolist()
    assert not there[0, 7].any()
    assert not there[0, :, 0].any()


def test_no_image_that_measures_is_trained_on() -> None:
    data = digits.dataset()
    assert len(data.test.tokens) == digits.TESTED
    assert len(data.train.tokens) == 5 * (1797 - digits.TESTED)
    assert not set(map(bytes, data.test.tokens)) & set(map(bytes, data.train.tokens[: 1797 - digits.TESTED]))
    assert data.vocab_size == digits.CLASS + 1


@pytest.mark.parametrize("position", digits.SCHEMES)
def test_every_scheme_takes_a_step(position: str, tmp_path: Path) -> None:
    assert 0 <= digits.accuracy(position, 0, 1, tmp_path, digits.dataset()) <= 1


def test_it_learns(tmp_path: Path) -> None:
    data = digits.dataset()
    before, after = (digits.accuracy("axial", 0, steps, tmp_path / str(steps), data) for steps in (1, 60))
    assert before < 0.25
    assert after > before + 0.1


def test_places_of_an_image_are_read_back() -> None:
    rotation = AxialRopeConfig(base=30.0).build(12)
    places = torch.from_numpy(digits.places())[None]
    heads = torch.randn(1, 4, 33, 12)
    turned = rotation(heads, Layout.causal(1, 33).with_places(places))
    torch.testing.assert_close(locate(rotation, heads, turned), places.float(), rtol=0, atol=1e-4)


def test_the_picture_has_a_dot_a_seed() -> None:
    found = {"axial": [0.95, 1.0], "none": [0.5, 0.7, 0.6]}
    tree = ElementTree.fromstring(digits.picture(found))
    dots = [float(one.attrib["cx"]) for one in tree.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(dots) == 5
    assert max(dots) == dots[1]
    assert "97.5%" in "".join(tree.itertext())
