"""Planted leaks are refused by name, with the smallest case and the part; the same parts without the leak are not."""

import hashlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from heddle.data.corpus import prepare_corpus
from heddle.data.token_file import TokenFile
from heddle.lab.judge import proposal
from heddle.lab.judge.ledger import TOKENIZER_FILE, Candidate
from heddle.lab.judge.proposal import (
    LEAKS,
    OVERLAP,
    read_proposal,
    screen,
    screen_apart,
    smallest_leak,
    training_overlap,
)
from heddle.model.load_config import load_config
from tests import small

NORM = '''"""x over its root mean square{words}."""

from torch import Tensor

from heddle.config import PositiveFloat
from heddle.parts.modules.linear import SelfInitialized
from heddle.parts.norms import NormConfig


class LeakyNormConfig(NormConfig):
    eps: PositiveFloat = 1e-5

    def build(self, width: int, heads: int | None = None) -> "LeakyNorm":
        return LeakyNorm(self.eps)


class LeakyNorm(SelfInitialized):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def init_weights(self, std: float, draws: object) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean({dims}, keepdim=True) + self.eps).rsqrt()
'''
FEEDFORWARD = '''"""A linear map of {words}."""

import torch
from torch import Tensor
from torch.nn import functional

from heddle.config import PositiveInt
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import Feedforward, FeedforwardConfig
from heddle.parts.modules.linear import Linear


class LeakyMapConfig(FeedforwardConfig):
    hidden: PositiveInt

    def build(self, context: BuildContext) -> "LeakyMap":
        return LeakyMap(context.width, self.hidden)


class LeakyMap(Feedforward):
    input_projections = ("up",)

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width, output_projection=True)

    def forward(self, x: Tensor, layout: object, state: object = None) -> tuple[Tensor, object]:
        y = self.up(x)
        {line}
        return self.down(y), state
'''
NORM_CHANGE: dict[str, Any] = {"overrides": ["norm.kind=leaky_norm"]}
MAP_CHANGE: dict[str, Any] = {"overrides": ["layers.*.feedforward.kind=leaky_map"]}
LEAKY = {
    "a norm": (NORM.format(words=" over the text", dims="(-1, -2)"), "leaky_norm", "causality"),
    "a cumulative statistic": (
        FEEDFORWARD.format(words="what is above the mean so far", line="y = y - y.cumsum(1).mean(1, keepdim=True)"),
        "leaky_map",
        "causality",
    ),
    "a convolution": (
        FEEDFORWARD.format(
            words="three tokens", line="y = functional.pad(y, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1)"
        ),
        "leaky_map",
        "causality",
    ),
    "packed documents": (
        FEEDFORWARD.format(words="the sum so far", line="y = y.cumsum(1)"), "leaky_map", "document_isolation",
    ),
}  # fmt: skip
SOUND = {
    "a norm": (NORM.format(words="", dims="-1"), "leaky_norm"),
    "a map": (FEEDFORWARD.format(words="itself", line="y = torch.tanh(y)"), "leaky_map"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a text and its tokenizer, as in a ledger."""
    root = tmp_path_factory.mktemp("leaks")
    (root / "text").mkdir()
    draw, words = random.Random(0), ["warp", "weft", "heddle", "shuttle", "reed", "loom", "lifts", "throws", "the", "a"]
    for number in range(30):
        (root / "text" / f"{number}.txt").write_text(" ".join(draw.choices(words, k=200)))
    corpus = prepare_corpus([str(root / "text")], vocab_size=small.VOCABULARY, max_train_tokens=512)
    (root / TOKENIZER_FILE).write_text(corpus.tokenizer.to_json())
    yield root
    shutil.rmtree(root)


def request(root: Path, file: Path, number: int = 1) -> dict[str, Any]:
    """What screens a proposal of a file against the small design."""
    submission, files = read_proposal(file), []
    for name, content in submission.files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
        files.append([name, hashlib.sha256(content).hexdigest()])
    return {
        "folder": str(root), "base": Candidate("small", design=small.design()).dump(), "name": submission.name,
        "change": submission.change, "files": files, "number": number, "known": {}, "equal_to": None,
        "vocab_size": small.VOCABULARY, "budget": ["tokens", 512, 512], "data": [str(root / "text")],
        "sequence_length": 16, "second": 0, "limits": [str(root / "own"), 60.0, 8.0],
        "training": {"batch_size": 4},
    }  # fmt: skip


def part_request(root: Path, tmp_path: Path, source: str, kind: str) -> dict[str, Any]:
    (tmp_path / f"{kind}.py").write_text(source)
    change = NORM_CHANGE if kind == "leaky_norm" else MAP_CHANGE
    (tmp_path / "mine.yaml").write_text(f"part: {kind}.py\noverrides: {change['overrides']}\n")
    return request(root, tmp_path / "mine.yaml")


@pytest.mark.parametrize("case", LEAKY)
def test_a_part_that_leaks_is_refused(case: str, made: Path, tmp_path: Path) -> None:
    source, kind, law = LEAKY[case]
    try:
        rule, sentence = screen(part_request(made, tmp_path, source, kind))["refused"]
    finally:
        small.forget_parts()
    assert rule == law
    # two or three tokens are enough, and the module is named
    assert sentence[:8] in ("2 tokens", "3 tokens"), sentence
    assert f"({kind})" in sentence


@pytest.mark.parametrize("case", SOUND)
def test_the_same_part_without_the_leak_is_not(
    case: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposal, "LAWS", LEAKS)  # all of them take seconds
    try:
        screened = screen(part_request(made, tmp_path, *SOUND[case]))
    finally:
        small.forget_parts()
    assert "refused" not in screened, screened
    assert screened["sizes"][0]["tokens"] == 512


def test_code_is_read_in_a_process_with_limits(made: Path, tmp_path: Path) -> None:
    """An endless loop, a file that ends the process, and one that fails are refused, and this process goes on."""
    source, kind = SOUND["a norm"]
    end, fail = "import os\nos._exit(3)\n", "1 / 0\n"
    asked = part_request(made, tmp_path, source + end, kind)
    (made / "asked").mkdir()
    rule, sentence = screen_apart(asked, made / "asked")["refused"]
    assert (rule, "code 3" in sentence) == ("limits", True)
    asked = part_request(made, tmp_path, source + fail, kind)
    rule, sentence = screen(asked)["refused"]
    assert (rule, "ZeroDivisionError" in sentence) == ("part", True)


def test_a_design_without_a_leak_has_no_case() -> None:
    assert smallest_leak(load_config(small.design())) is None


def test_held_out_text_in_the_training_text(made: Path, tmp_path: Path) -> None:
    corpus = prepare_corpus(
        [str(made / "text")], vocab_size=None, max_train_tokens=512, tokenizer=made / TOKENIZER_FILE
    )
    secret = corpus.tokenizer.decode(corpus.validation.read(1, 90).tolist())
    for name, text in (("own", "Looms of another kind, with other words in every line.\n" * 40), ("copied", secret)):
        (tmp_path / f"{name}.txt").write_text(text * 3, encoding="utf-8")
        (tmp_path / f"{name}.yaml").write_text(f"data: [{name}.txt]\n")
    assert "refused" not in screen(request(made, tmp_path / "own.yaml"))
    rule, sentence = screen(request(made, tmp_path / "copied.yaml"))["refused"]
    assert (rule, "held-out text" in sentence) == ("evaluation_text_in_training", True)


class Tokens:
    """In the place of a token file."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop]


@pytest.mark.parametrize("is_known", [False, True])
def test_overlap_is_found_where_a_plain_search_finds_it(is_known: bool) -> None:
    draws = np.random.default_rng(1)
    held_out, own = draws.integers(0, 9, 400), draws.integers(0, 9, 300)
    text = np.concatenate([draws.integers(0, 9, 50), held_out[100:140], draws.integers(0, 9, 50)])
    own = np.concatenate([own, held_out[90:150]]) if is_known else own  # then the ledger trains on it as well

    def grams(tokens: np.ndarray) -> list[tuple[int, ...]]:
        return [tuple(tokens[start : start + OVERLAP]) for start in range(len(tokens) - OVERLAP + 1)]

    secret = set(grams(held_out)) - set(grams(own))
    expected = [index for index, gram in enumerate(grams(text)) if gram in secret]
    found = training_overlap(cast("TokenFile", Tokens(held_out)), [cast("TokenFile", Tokens(own))], [text])
    assert found == (f"tokens {expected[0]} to {expected[0] + OVERLAP - 1} of part 1" if expected else None)
    assert bool(expected) == (not is_known)
