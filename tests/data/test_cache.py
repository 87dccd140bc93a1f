"""The cache folder: where it is, what a killed process leaves in it, and what happens if it cannot be written."""

import json
import os
import pwd
import time
from pathlib import Path

import pytest

from heddle import progress
from heddle.cli.main import run_command
from heddle.data import cache as cache_module
from heddle.data.cache import DataCache, default_cache_folder, use_own_compile_cache
from heddle.data.corpus import prepare_corpus
from heddle.errors import CheckpointError, MachineError
from heddle.storage.file_io import read_json_file, write_json_file


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HEDDLE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_folder() == tmp_path / "home/.cache/heddle"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_folder() == tmp_path / "xdg/heddle"
    monkeypatch.setenv("HEDDLE_CACHE", str(tmp_path / "own"))
    assert default_cache_folder() == tmp_path / "own"


@pytest.mark.parametrize("command", ["train @ --data stdlib --steps 1", "--install-completion"])
def test_no_home_is_said_in_a_sentence(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for a user of a container who is in no list of users."""
    for name in ("HOME", "HEDDLE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHELL", "/bin/bash")
    monkeypatch.setattr(pwd, "getpwuid", lambda user: {}[user])
    arguments = command.replace("@", "preset:gqa-tiny").split()
    assert run_command([*arguments, *(["--out", str(tmp_path / "run")] if "--data" in arguments else [])]) == 2
    assert "heddle: HOME: is not set" in capsys.readouterr().err


def test_compiled_kernels_lie_in_the_cache_unless_the_user_chose_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEDDLE_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    use_own_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    use_own_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled")
    assert (tmp_path / "compiled").stat().st_mode & 0o777 == 0o700  # it holds code that torch unpickles


def test_what_a_killed_process_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.bin.tmp-4194305-00000000", tmp_path / ".b.bin.tmp-4194305-00000000"  # no such processes
    for path in (old, new):
        path.write_bytes(b"left")
    two_hours_ago = time.time() - 2 * 3600
    os.utime(old, (two_hours_ago, two_hours_ago))
    DataCache(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [new.name]


def test_an_altered_text_is_refused_aloud_and_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DataCache(tmp_path)
    path = cache.path("tokenizer.json", "inputs")
    assert cache.read_text(path) is None
    cache.write_text(path, "βῆτα\r\n")
    assert cache.read_text(path) == "βῆτα\r\n"
    assert capsys.readouterr().err == ""
    raw = path.read_bytes()
    for offset in range(len(raw)):
        path.write_bytes(raw[:offset] + bytes([raw[offset] ^ 1]) + raw[offset + 1 :])
        assert cache.read_text(path) is None, offset
        assert f"warning: {path}:" in capsys.readouterr().err
    path.write_text('{"model": {"type": "BPE"}}')  # as format 1 wrote it
    assert cache.read_text(path) is None


def test_a_tokenizer_that_was_altered_and_still_reads_is_learned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_corpus() -> str:
        corpus = prepare_corpus([str(text)], vocab_size=300, max_train_tokens=None, cache_folder=tmp_path / "cache")
        return corpus.tokenizer.hash

    text = tmp_path / "text.txt"
    text.write_text("warp and weft " * 100 + "the loom lifts " * 50)
    right = make_corpus()
    (path,) = (tmp_path / "cache").glob("*.tokenizer.json")
    saved = read_json_file(path)
    merges = json.loads(saved["text"])["model"]["merges"]
    changed = json.loads(saved["text"])
    changed["model"]["merges"] = [merges[1], merges[0], *merges[2:]]
    for planted in (False, True):
        with monkeypatch.context() as patch:
            raw = path.read_text()
            path.write_text(raw.replace(json.dumps(saved["text"]), json.dumps(json.dumps(changed))))
            assert path.read_text() != raw
            if planted:  # a reader that trusts the cache
                patch.setattr(cache_module, "read_json_file", lambda path: json.loads(path.read_text()))
            assert (make_corpus() == right) is not planted
    assert "it is made again" in capsys.readouterr().err


def test_an_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_corpus(cache_folder: Path) -> None:
        prepare_corpus([str(text)], vocab_size=300, max_train_tokens=None, cache_folder=cache_folder)

    text = tmp_path / "text.txt"
    text.write_text("warp and weft " * 100)
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"file/cache:.*HEDDLE_CACHE"):
        make_corpus(tmp_path / "file" / "cache")
    with pytest.raises(MachineError, match=r"file:.*written"):
        make_corpus(tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    with pytest.raises(MachineError, match=r"closed:.*written"):
        make_corpus(tmp_path / "closed")


def make_corpus(folder: Path) -> str:
    """The hash of a small corpus whose cache is in the folder."""
    text = folder / "text.txt"
    text.write_text("warp and weft " * 100 + "the loom lifts " * 50)
    corpus = prepare_corpus([str(text)], vocab_size=300, max_train_tokens=None, cache_folder=folder / "cache")
    assert len(corpus.validation) > 0
    return corpus.hash


def test_a_damaged_token_file_is_named_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = make_corpus(tmp_path)
    paths = sorted((tmp_path / "cache").glob("*.bin"))
    before = [path.read_bytes() for path in paths]
    for path, raw in zip(paths, before, strict=True):
        for damaged in (raw[:-1], raw[:4100] + bytes([raw[4100] ^ 1]) + raw[4101:], b"", b"[" * 5000):
            path.write_bytes(damaged)
            capsys.readouterr()
            with progress.quiet():  # what was lost is named even then
                assert make_corpus(tmp_path) == right
            expected = f"warning: {path}: was altered, or written by an earlier heddle; it is made again\n"
            assert capsys.readouterr().err == expected
    assert [path.read_bytes() for path in paths] == before


def test_a_cached_tokenizer_that_this_version_cannot_read_is_learned_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = make_corpus(tmp_path)
    (path,) = (tmp_path / "cache").glob("*.tokenizer.json")
    for text in ("{}", "[" * 100_000, '{"model": {"type": "Newer"}}'):
        write_json_file(path, {"text": text})  # its SHA-256 is right
        capsys.readouterr()
        assert make_corpus(tmp_path) == right
        assert f"warning: {path}:" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["*.bin", "*.tokenizer.json"])
def test_what_is_no_file_in_the_cache_is_named_and_not_waited_for(tmp_path: Path, pattern: str) -> None:
    make_corpus(tmp_path)
    path = sorted((tmp_path / "cache").glob(pattern))[0]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=rf"{path.name}:.*pipe"):
        make_corpus(tmp_path)
