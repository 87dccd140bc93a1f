"""A classifier of handwritten digits: a bidirectional encoder with 2-D rotary position embeddings.

    python examples/digits.py                       # trains, and prints the accuracy on the test images
    python examples/digits.py --position learned    # or rope, or none, instead of axial
    python examples/digits.py --all digits.svg      # all four with three seeds each, and a chart of them

The images are scikit-learn's: 1,797 of 8 × 8 pixels in 17 gray levels. Two horizontal neighbors are one token, and the
digit is predicted at an extra class token. The training loop is that of `heddle train`: the same command again resumes.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import heddle
from heddle.data.labeled import LabeledDataset, LabeledRows
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from heddle.training.settings import Settings

IMAGE_SIZE, TEST_IMAGES = 8, 360  # pixels; number of test images
GRAY_LEVELS = 5  # after quantization
CLASS_TOKEN = GRAY_LEVELS**2  # the token after those of pairs of pixels; the labels are tokens 0 to 9
SEEDS = (0, 1, 2)
SCHEMES: dict[str, str] = {
    "axial": "2-D rotary: rotated by x and by y",
    "learned": "a learned vector for each position",
    "rope": "1-D rotary: rotated by the position",
    "none": "no positions: a bag of pairs of pixels",
}


def token_coordinates() -> np.ndarray:
    """x and y of each token [33, 2]: the class token in the center, then pairs of pixels row by row."""
    row, pair = np.divmod(np.arange(IMAGE_SIZE * IMAGE_SIZE // 2), IMAGE_SIZE // 2)
    middle = (IMAGE_SIZE - 1) / 2
    return np.concatenate(([[middle, middle]], np.stack((2 * pair + 0.5, row), axis=-1)))


def encode_images(images: np.ndarray, digits: np.ndarray) -> LabeledRows:
    """Images [N, 8, 8] with values 0 to 16 as rows of 33 tokens; the label of the first token is the digit."""
    pairs = np.rint(images * ((GRAY_LEVELS - 1) / 16)).astype(np.int64).reshape(len(images), -1, 2)
    tokens = np.pad(pairs @ np.array([GRAY_LEVELS, 1]), ((0, 0), (1, 0)), constant_values=CLASS_TOKEN)
    labels = np.full_like(tokens, -1)
    labels[:, 0] = digits
    return LabeledRows(tokens, labels, np.tile(token_coordinates(), (len(images), 1, 1)))


def shift_images(images: np.ndarray, right: int, down: int) -> np.ndarray:
    """Shift images by −1, 0 or 1 pixels in each direction; pixels that leave the image are lost."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    return padded[:, 1 - down : 1 - down + IMAGE_SIZE, 1 - right : 1 - right + IMAGE_SIZE]


def load_dataset() -> LabeledDataset:
    """A fixed fifth of the images is for testing; each other image is for training, also shifted in four directions."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    shifts = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]
    train_images = np.concatenate([shift_images(data.images[train], *step) for step in shifts])
    return LabeledDataset(
        encode_images(train_images, np.tile(data.target[train], len(shifts))),
        encode_images(data.images[test], data.target[test]),
    )


def classifier_design(position: str) -> dict[str, Any]:
    """Three layers of bidirectional attention and feed-forwards."""
    rotary = {"axial": {"kind": "axial_rope", "base": 30.0}, "rope": {"kind": "rope", "base": 30.0}}.get(position)
    added_position = {"kind": "learned", "length": 1 + IMAGE_SIZE * IMAGE_SIZE // 2} if position == "learned" else None
    return {
        "vocab_size": CLASS_TOKEN + 1,
        "width": 48,
        "embedding": {"position": added_position},
        "layers": [
            {
                "repeat": 3,
                "mixer": {"kind": "attention", "heads": 4, "causal": False, "qk_norm": "head", "position": rotary},
                "feedforward": {"kind": "gated", "hidden": 96},
            }
        ],
        "head": {"tied": False},
        "initialization": {"std": 0.1},
    }


def train_and_test(position: str, seed: int, steps: int, out: Path, data: LabeledDataset) -> float:
    """Train the run in `out`, or resume it; return the accuracy on the test images."""
    settings = Settings(
        steps=steps, batch_size=32, sequence_length=data.length, learning_rate=4e-3, seed=seed, schedule="linear"
    )
    config = heddle.load_config(classifier_design(position))
    return train(TrainingJob(config, data, settings, out, label=f"{position}, seed {seed}")).task_accuracy


def render_svg(results: dict[str, list[float]]) -> str:
    """An SVG with a dot for each seed and a line at the mean, for light and dark pages."""
    lowest = min(np.floor(10 * min(map(min, results.values()))) / 10, 0.9)
    left, width, line_height = 290, 400, 46
    x = lambda share: left + width * (share - lowest) / (1 - lowest)  # noqa: E731
    height = 40 + line_height * len(results)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 90} {height + 10}" role="img">',
        "<title>Accuracy on test images by position scheme; a dot per seed, a line at the mean</title>",
        "<style>text{font:14px system-ui,sans-serif;fill:#1f2328}.grid{stroke:#d1d9e0}.mean{stroke:#1f2328}"
        ".dot{fill:#0969da;fill-opacity:.7}.small{font-size:12px;fill:#59636e}@media(prefers-color-scheme:dark){"
        "text{fill:#f0f6fc}.grid{stroke:#3d444d}.mean{stroke:#f0f6fc}.dot{fill:#4493f8}.small{fill:#9198a1}}</style>",
    ]
    for tick in np.arange(round(lowest * 10), 11) / 10:
        x_position = f"{x(tick):.1f}"
        parts.append(f'<line class="grid" x1="{x_position}" x2="{x_position}" y1="10" y2="{height - 24}"/>')
        parts.append(f'<text class="small" x="{x_position}" y="{height - 6}" text-anchor="middle">{tick:.0%}</text>')
    for number, (name, values) in enumerate(results.items()):
        y, mean = 32 + line_height * number, float(np.mean(values))
        parts.append(f'<text x="0" y="{y}">{name}</text><text class="small" x="0" y="{y + 16}">{SCHEMES[name]}</text>')
        parts += [f'<circle class="dot" cx="{x(value):.1f}" cy="{y}" r="6"/>' for value in values]
        x_position = f"{x(mean):.1f}"
        parts.append(
            f'<line class="mean" x1="{x_position}" x2="{x_position}" y1="{y - 12}" y2="{y + 12}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{left + width + 30}" y="{y + 5}">{mean:.1%}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Train one scheme, or compare all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--position", choices=list(SCHEMES), default="axial")
    parser.add_argument("--all", type=Path, metavar="SVG", help="train every scheme with three seeds and plot them")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"))
    options = parser.parse_args()
    data, results = load_dataset(), {}
    for position in [options.position] if options.all is None else SCHEMES:
        results[position] = [
            train_and_test(position, seed, options.steps, options.out / f"{position}-{seed}-{options.steps}", data)
            for seed in ([options.seed] if options.all is None else SEEDS)
        ]
        accuracies = ", ".join(f"{share:.1%}" for share in results[position])
        print(f"{position}: {accuracies} of {TEST_IMAGES} test images", flush=True)
    if options.all is not None:
        options.all.write_text(render_svg(results), encoding="utf-8")


if __name__ == "__main__":
    main()
