"""The loop over a trainer in plain PyTorch: each change edits one constant, and only what reads ahead is refused."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from examples.foreign_trainer import loop
from heddle.lab.judge import foreign
from heddle.lab.judge.judge import judge
from heddle.lab.judge.proposal import Refused
from tests import small

CHANGES = [
    (file, name, value) for file, names in loop.CHANGES.items() for name, values in names.items() for value in values
]


@pytest.mark.parametrize("change", CHANGES, ids=" = ".join)
def test_a_change_edits_one_constant(change: tuple[str, str, str], tmp_path: Path) -> None:
    loop.write_trainer(tmp_path, loop.HERE, "changed", change)
    line = f"{change[1]} = {change[2]}"
    for file in loop.FILES:
        before, after = ((folder / file).read_text().splitlines() for folder in (loop.HERE, tmp_path))
        moved = [new for old, new in zip(before, after, strict=True) if old != new]
        assert moved == ([line] if file == change[0] and line not in before else [])
        assert (line in after) == (file == change[0])


def test_the_model_reads_ahead_only_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.foreign_trainer import model

    gpt = model.build({"HEDDLE_SEED": "1", "HEDDLE_VOCAB_SIZE": "50", "HEDDLE_SEQUENCE_LENGTH": "8"})
    rows = torch.arange(9)[None]
    later = torch.cat([rows[:, :5], rows[:, 5:] + 7], dim=1)

    def is_moved() -> bool:
        return not torch.allclose(gpt.losses(rows)[:, :4], gpt.losses(later)[:, :4])

    assert not is_moved()
    monkeypatch.setattr(model, "CAUSAL", False)
    assert is_moved()


BLOCK = "forward = Block.forward\nBlock.forward = lambda self, x: forward(self, {})\n"
COPIED = "functional.one_hot(rows[:, :-1], 50).transpose(1, 2) * 9.0, rows[:, :-1], reduction='none'"
LEAKS = {  # what an agent adds at the end of model.py, and the rule that refuses it
    "a norm over the text": ("later_tokens", BLOCK.format("x / x.square().mean((1, 2), keepdim=True).sqrt()")),
    "a cumulative statistic": ("later_tokens", BLOCK.format("x - x.cumsum(1).mean(1, keepdim=True)")),
    "a convolution": (
        "later_tokens", BLOCK.format("functional.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1)"),
    ),
    "a norm over documents": ("other_rows", BLOCK.format("x - x.mean(0, keepdim=True)")),
    "shifted targets": ("shifted_targets", f"GPT.losses = lambda self, rows: functional.cross_entropy({COPIED})\n"),
    "a norm over the width": ("", BLOCK.format("x - x.mean(-1, keepdim=True)")),
}  # fmt: skip


@pytest.mark.parametrize("case", LEAKS)
def test_a_leak_in_a_trainer_is_refused_by_name(case: str) -> None:
    rule, code = LEAKS[case]
    names: dict[str, Any] = {"__name__": "model"}
    exec((loop.HERE / "model.py").read_text() + code + "EMBEDDING_STD = 1.0\n", names)
    gpt = names["build"]({"HEDDLE_SEED": "1", "HEDDLE_VOCAB_SIZE": "50", "HEDDLE_SEQUENCE_LENGTH": "8"})

    def score(rows: Any) -> Any:
        with torch.no_grad():
            return gpt.losses(torch.from_numpy(rows)).numpy()

    found = ""
    try:
        foreign._test(cast("foreign.Scorer", score), np.random.default_rng(0).integers(0, 50, 2000), 50)
    except Refused as refused:
        found = refused.rule
    assert found == rule


@pytest.mark.nightly
def test_the_loop_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One proposal that learns, and one that reads ahead."""
    ledger = tmp_path / "ledger"
    sizes: dict[str, Any] = {
        "tokens": 4096, "sequence_length": 32, "vocab_size": 300, "pairs": 3, "windows": 8, "alpha": 0.5,
        "batch_size": 4, "seconds": 120, "quiet": True, "device": "cpu", "threads": 1,
    }  # fmt: skip
    start = loop.write_trainer(tmp_path / "start", loop.HERE, "start")
    judge("init", start, data=[str(small.folder(tmp_path / "text", documents=60, size=4000))], out=ledger, **sizes)
    asked = iter([("model.py", "CAUSAL", "False"), ("train.py", "LR, BATCH, WARMUP, CLIP", "3e-3, 4, 10, 1.0")])
    verdicts = [
        judge("submit", loop.write_trainer(tmp_path / "next", loop.incumbent_folder(ledger), change[1], change),
              out=ledger, quiet=True, device="cpu", threads=1)
        for change in asked
    ]  # fmt: skip
    assert (verdicts[0]["verdict"], verdicts[0]["rule"]) == ("refused", "later_tokens")
    assert verdicts[1]["verdict"] != "refused"
    assert verdicts[1]["differences"]
