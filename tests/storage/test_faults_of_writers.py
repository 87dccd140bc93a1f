"""Every writer beside checkpoints dies, or is refused, at any system call: what it writes is whole or not there."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from heddle.data.cache import DataCache
from heddle.data.token_file import write_token_file
from heddle.errors import MachineError
from heddle.exchange.export import export
from heddle.exchange.gguf import export_gguf
from heddle.exchange.load import load
from heddle.lab.verify import NOT_COVERED, OK, verify_files
from heddle.model.decoder import build
from heddle.storage import file_io
from heddle.storage.model import save
from heddle.storage.run_log import open_run
from tests import small
from tests.storage.shared import Died, System, standing_in

FAILURES = (errno.ENOSPC, errno.EIO, errno.EROFS)
LLAMA = {
    "vocab_size": 32, "width": 8,
    "layers": [{"mixer": {"kind": "attention", "heads": 2, "kv_heads": 1, "position": {"kind": "rope"}},
                "feedforward": {"kind": "gated", "hidden": 8}}],
}  # fmt: skip


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[Path], object]]:
    return make_writers(tmp_path_factory.mktemp("source"))


def make_writers(root: Path) -> dict[str, Callable[[Path], object]]:
    """Return functions that write below a folder, by name. root: for what they write from."""
    torch.manual_seed(0)
    model = build(small.config(LLAMA))
    export(model, root / "exported")
    imported = load(root / "exported")

    def cached(folder: Path) -> None:
        cache = DataCache(folder)
        cache.write_text(cache.path("tokenizer.json", 1), "a text")

    def tokens(folder: Path) -> None:
        arguments = {"vocab_size": 300, "eod_id": 0, "tokenizer_hash": "none"}
        with write_token_file(folder / f"{'0' * 32}.bin", **arguments) as writer:  # type: ignore[arg-type]
            writer.add([[1, 2, 3]], 3)
            writer.end_source()

    def run(folder: Path) -> None:
        open_run(folder, {"design": {"width": 8}}, {"command": "heddle train"})

    return {
        "export": lambda folder: export(model, folder / "out"),
        "gguf": lambda folder: export_gguf(model, folder / "out.gguf"),
        "import": lambda folder: save(imported.model, folder / "out", imported.tokenizer, imported.text_files),
        "cache": cached,
        "tokens": tokens,
        "run": run,
    }


def fault(folder: Path, write: Callable[[Path], object], whole: dict[str, bytes]) -> str | None:
    """What is wrong after a write that died or failed: now, or after it is repeated. None if nothing is."""
    for repeated in (False, True):
        if repeated:
            write(folder)
        seen = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        final = {name: content for name, content in seen.items() if ".tmp-" not in name and not name.endswith(".lock")}
        if final != whole and (repeated or final):
            return f"{sorted(final)} is not {sorted(whole)}"
    damaged = [result for result in verify_files(folder) if result.status not in (OK, NOT_COVERED)]
    return None if not damaged else f"{damaged} are damaged"


def faults(
    root: Path, write: Callable[[Path], object], hows: tuple[str | BaseException, ...], stride: int = 1
) -> tuple[int, list[str]]:
    """(number of trials, faults) over every `stride`-th call."""
    (root / "whole").mkdir()
    with standing_in(System()) as counting:
        write(root / "whole")
    whole = {
        path.relative_to(root / "whole").as_posix(): path.read_bytes()
        for path in (root / "whole").rglob("*")
        if path.is_file()
    }
    tried, wrong = 0, []
    for how in hows:
        for at in range(1, len(counting.trace) + 1, stride):
            if how == "half" and counting.trace[at - 1] != "write":
                continue
            shutil.rmtree(root / "trial", ignore_errors=True)
            (root / "trial").mkdir()
            with standing_in(System(at, how)):
                try:
                    write(root / "trial")
                except (Died, MachineError):
                    tried += 1
            message = fault(root / "trial", write, whole)
            if message is not None:
                wrong.append(f"{how} call {at} ({counting.trace[at - 1]}): {message}")
    return tried, wrong


NAMES = ["export", "gguf", "import", "cache", "tokens", "run"]
SLOW = ("export", "import")  # the CI takes some of their calls
DEATHS = ("before", "half", "after")


@pytest.mark.parametrize("name", NAMES)
def test_dying_leaves_nothing_or_all(name: str, writers: dict[str, Callable[[Path], object]], tmp_path: Path) -> None:
    tried, wrong = faults(tmp_path, writers[name], DEATHS, 5 if name in SLOW else 1)
    assert wrong == []
    assert tried > 6


@pytest.mark.parametrize("name", NAMES)
def test_a_failing_call_is_one_sentence_and_leaves_nothing_or_all(
    name: str, writers: dict[str, Callable[[Path], object]], tmp_path: Path
) -> None:
    tried, wrong = faults(
        tmp_path, writers[name], tuple(OSError(code, os.strerror(code)) for code in FAILURES), 9 if name in SLOW else 2
    )
    assert wrong == []
    assert tried > 2


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_dying_or_failing_at_any_call(name: str, writers: dict[str, Callable[[Path], object]], tmp_path: Path) -> None:
    failures = tuple(OSError(code, os.strerror(code)) for code in FAILURES)
    assert faults(tmp_path, writers[name], (*DEATHS, *failures))[1] == []


def test_a_writer_without_a_temporary_name_is_caught(
    writers: dict[str, Callable[[Path], object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: files are written under their own names."""
    monkeypatch.setattr(file_io, "leftover_path", lambda path, role: path)
    assert faults(tmp_path, writers["run"], ("half", "after"))[1] != []
