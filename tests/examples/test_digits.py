"""The digits example, made short: its rows are the images, it learns, and its chart is well formed."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import digits
from heddle.parts.layout import Layout
from heddle.parts.positions.axial_rope import AxialRopeConfig
from tests.parts.recovered_coordinates import recover_coordinates


def test_rows_are_images() -> None:
    image = np.zeros((1, 8, 8))
    image[0, 2, 5], image[0, 7, 6] = 16, 8
    rows = digits.encode_images(image, np.array([3]))
    assert rows.labels.tolist() == [[3] + [-1] * 32]
    assert rows.coordinates is not None
    inked = np.flatnonzero(rows.tokens[0])
    assert rows.tokens[0, inked].tolist() == [digits.CLASS_TOKEN, 4, 10]  # the right one of a pair, then the left one
    assert rows.coordinates[0, inked].tolist() == [[3.5, 3.5], [4.5, 2], [6.5, 7]]


def test_images_move_without_coming_back_on_the_other_side() -> None:
    image = np.arange(64).reshape(1, 8, 8)
    shifted = digits.shift_images(image, 1, -1)
    assert shifted[0, :7, 1:].tolist() == image[0, 1:, :7].tolist()
    assert not shifted[0, 7].any()
    assert not shifted[0, :, 0].any()


def test_no_test_image_is_trained_on() -> None:
    data = digits.load_dataset()
    assert len(data.test.tokens) == digits.TEST_IMAGES
    assert len(data.train.tokens) == 5 * (1797 - digits.TEST_IMAGES)
    assert not set(map(bytes, data.test.tokens)) & set(map(bytes, data.train.tokens[: 1797 - digits.TEST_IMAGES]))
    assert data.vocab_size == digits.CLASS_TOKEN + 1


@pytest.mark.parametrize("position", digits.SCHEMES)
def test_every_scheme_takes_a_step(position: str, tmp_path: Path) -> None:
    assert 0 <= digits.train_and_test(position, 0, 1, tmp_path, digits.load_dataset()) <= 1


def test_it_learns(tmp_path: Path) -> None:
    data = digits.load_dataset()
    before, after = (digits.train_and_test("axial", 0, steps, tmp_path / str(steps), data) for steps in (1, 60))
    assert before < 0.25
    assert after > before + 0.1


def test_coordinates_of_an_image_are_recovered() -> None:
    rotation = AxialRopeConfig(base=30.0).build(12)
    coordinates = torch.from_numpy(digits.token_coordinates())[None]
    heads = torch.randn(1, 4, 33, 12)
    rotated = rotation(heads, Layout.causal(1, 33).with_coordinates(coordinates))
    torch.testing.assert_close(recover_coordinates(rotation, heads, rotated), coordinates.float(), rtol=0, atol=1e-4)


def test_the_chart_has_a_dot_for_each_seed() -> None:
    results = {"axial": [0.95, 1.0], "none": [0.5, 0.7, 0.6]}
    tree = ElementTree.fromstring(digits.render_svg(results))
    dots = [float(circle.attrib["cx"]) for circle in tree.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(dots) == 5
    assert max(dots) == dots[1]
    assert "97.5%" in "".join(tree.itertext())
