"""The cache folder: where it is, what a killed process leaves in it, and what happens if it cannot be written."""

import os
import time
from pathlib import Path

import pytest

from heddle.data.cache import DataCache, default_cache_folder
from heddle.data.corpus import prepare_corpus
from heddle.errors import MachineError


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HEDDLE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_folder() == tmp_path / "home/.cache/heddle"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_folder() == tmp_path / "xdg/heddle"
    monkeypatch.setenv("HEDDLE_CACHE", str(tmp_path / "own"))
    assert default_cache_folder() == tmp_path / "own"


def test_what_a_killed_process_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.bin.tmp-4194305-00000000", tmp_path / ".b.bin.tmp-4194305-00000000"  # no such processes
    for path in (old, new):
        path.write_bytes(b"left")
    two_hours_ago = time.time() - 2 * 3600
    os.utime(old, (two_hours_ago, two_hours_ago))
    DataCache(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [new.name]


def test_an_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_corpus(cache_folder: Path) -> None:
        prepare_corpus([str(text)], vocab_size=300, max_train_tokens=None, cache_folder=cache_folder)

    text = tmp_path / "text.txt"
    text.write_text("warp and weft " * 100)
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"file/cache: cannot be written .*HEDDLE_CACHE"):
        make_corpus(tmp_path / "file" / "cache")
    with pytest.raises(MachineError, match=r"file: cannot be written"):
        make_corpus(tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    with pytest.raises(MachineError, match=r"closed: cannot be written"):
        make_corpus(tmp_path / "closed")
