"""`heddle verify`: every damage to a file of a run, a comparison's results or the cache is named, and nothing else."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from heddle.cli.main import run_command
from heddle.data.corpus import prepare_corpus
from heddle.lab import verify
from heddle.lab.verify import DAMAGED, NOT_COVERED, OK, verify_files
from heddle.storage.checkpoints import checkpoint_folder
from heddle.storage.file_io import leftover_path, write_json_file
from heddle.training.loop import train
from tests import small
from tests.storage.damage import damaged, overwrite

TRIALS = 5_000  # tools/soak.py takes more


def write_files(root: Path) -> None:
    """Write a run, the cache of its text, and the plan and a result of a comparison."""
    text = small.folder(root / "text", documents=12, size=300)
    corpus = prepare_corpus([str(text)], vocab_size=280, max_train_tokens=None, cache_folder=root / "cache")
    shutil.rmtree(text)
    train(small.job(corpus, root / "run", small.design(width=8), steps=5))
    write_json_file(root / "plan.json", {"seeds": [0], "entries": ["a"]})
    write_json_file(root / "runs" / "a-0.json", {"bits_per_byte": 2.5})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("written")
    write_files(root)
    (root / "report.html").write_text("a page")
    (root / "run" / "notes.json").write_text('{"of": "the user"}')
    leftover_path(root / "run" / "run.json", "tmp").write_text("half")
    return root


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "written"))


def covered_files(folder: Path) -> list[Path]:
    return [folder / result.path for result in verify_files(folder) if result.status == OK]


def test_one_file_is_verified_as_in_its_folder(folder: Path) -> None:
    results = {result.path: result for result in verify_files(folder)}
    names = [
        name for name in results if name.endswith((".safetensors", "log.jsonl", "run.json", "a-0.json", "notes.json"))
    ]
    assert len(names) > 6
    for name in names:
        [alone] = verify_files(folder / name)
        assert alone.status == results[name].status, name


def test_each_file_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run_command(["verify", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    locks = {name for name in files if name.endswith(".lock")}
    assert {line[13:].partition(":")[0] for line in lines[:-1]} == files - locks
    uncovered = [line[13:] for line in lines if line.startswith(NOT_COVERED)]
    assert len(uncovered) == 3, uncovered
    assert f"report.html: {verify._uncovered_reason(Path('report.html'))}" in uncovered
    assert f"run/notes.json: {verify.NO_HASH}" in uncovered
    assert any(f"process {os.getpid()} did not finish it" in line for line in uncovered)
    assert lines[-1] == f"{len(lines) - 1} files: 0 damaged, 3 not covered"
    for name in ("checkpoints/step-00000005/training.safetensors", "log.jsonl", "run.json"):
        assert f"ok           run/{name}" in lines
    assert sum("cache/" in line and line.endswith(".bin") for line in lines) == 2


def test_damage_is_named_in_json_with_an_exit_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = checkpoint_folder(folder / "run", 5) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    (folder / "plan.json").write_text("{}")
    (folder / "run" / "run.json").unlink()
    capsys.readouterr()
    assert run_command(["verify", str(folder), "--json"]) == 1
    results = json.loads(capsys.readouterr().out)["files"]
    broken = {result["path"]: result["reason"] for result in results if result["status"] == DAMAGED}
    assert set(broken) == {"run/checkpoints/step-00000005/model.safetensors", "run/run.json", "plan.json"}
    assert "was altered" in broken["run/checkpoints/step-00000005/model.safetensors"]
    assert broken["run/run.json"].endswith("is missing; restore it or name another folder")


def test_lines_that_a_checkpoint_counted_may_not_be_missing(folder: Path) -> None:
    log = folder / "run" / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    for fewer in (lines[:-1], [*lines[:-1], lines[-1][:20]], []):
        log.write_bytes(b"".join(fewer))
        assert [result.path for result in verify_files(folder) if result.status == DAMAGED] == ["run/log.jsonl"]
    log.unlink()
    assert [result.path for result in verify_files(folder) if result.status == DAMAGED] == ["run/log.jsonl"]
    log.write_bytes(b"".join(lines) + b'{"step": 6, "lo')  # a crash cut it short
    assert [result.path for result in verify_files(folder) if result.status == DAMAGED] == []


def test_a_checkpoint_of_another_step_or_run_is_named(folder: Path, tmp_path: Path) -> None:
    checkpoints = folder / "run" / "checkpoints"
    newest = checkpoint_folder(folder / "run", 5)
    newest.rename(newest.with_name("step-00000007"))
    named = [result for result in verify_files(folder) if result.status == DAMAGED]
    assert [(result.path, "step 7" in str(result.reason)) for result in named] == [
        ("run/checkpoints/step-00000007/training.json", True)
    ]
    shutil.rmtree(checkpoints)
    text = small.folder(tmp_path / "text", documents=12, size=300)
    corpus = prepare_corpus([str(text)], vocab_size=280, max_train_tokens=None)
    train(small.job(corpus, tmp_path / "other", small.design(width=8), steps=5, seed=3))
    shutil.copytree(tmp_path / "other" / "checkpoints", checkpoints)
    shutil.copy(tmp_path / "other" / "log.jsonl", folder / "run")
    named = [result for result in verify_files(folder) if result.status == DAMAGED]
    assert named
    assert all(result.path.endswith("/training.json") and "another run" in str(result.reason) for result in named)


def test_folders_that_cannot_be_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("text")
    for name, sentence in (("", "holds no file with a hash"), ("/none", "does not exist"), ("/file", "file: holds")):
        assert run_command(["verify", f"{tmp_path}{name}"]) == 2
        assert sentence in capsys.readouterr().err


def test_models_and_exports_are_covered(folder: Path, tmp_path: Path) -> None:
    assert run_command(["export", f"{folder}/run", f"{tmp_path}/exported"]) == 0
    assert {result.status for result in verify_files(tmp_path / "exported")} == {OK}
    assert {result.status for result in verify_files(checkpoint_folder(folder / "run", 5))} == {OK}


def unnoticed(folder: Path, trials: int, seed: int) -> Iterator[str]:
    """A message for each damaged file that `verify` does not name, and each sound one that it does.

    Many files are damaged at a time. Without its manifest no file of a folder can be verified, nor how long a log was,
    so these are damaged in turns.
    """
    draw = random.Random(seed)
    contents = {path: path.read_bytes() for path in covered_files(folder)}
    with_manifest = [path for path in contents if path.name == "log.jsonl" or "checkpoints" in path.parts]
    manifests = [path for path in with_manifest if path.name == "manifest.json"]
    others = [path for path in contents if path not in with_manifest]
    inside = [path for path in with_manifest if path not in manifests]
    tried = 0
    while tried < trials:
        versions = {
            path: damaged(contents[path], draw) for path in [*others, *draw.choice((manifests, inside, inside))]
        }
        for path, version in versions.items():
            overwrite(path, version, len(contents[path]))
        named = {folder / result.path for result in verify_files(folder) if result.status == DAMAGED}
        changed = {path for path, version in versions.items() if version != contents[path]}
        for path in named ^ changed:
            tail = versions[path].removeprefix(contents[path])  # a line that a crash cut short is no damage
            if path.name != "log.jsonl" or not versions[path].startswith(contents[path]) or b"\n" in tail:
                yield f"{path.relative_to(folder)}: {'not ' if path in changed else ''}named"
        for path, version in versions.items():
            overwrite(path, contents[path], len(version))
        tried += len(changed)


def test_no_random_damage_is_silent(folder: Path) -> None:
    assert list(unnoticed(folder, TRIALS, 0)) == []


@pytest.mark.parametrize("name", ["verify_file", "verify_log", "read_json_file", "TokenFile"])
def test_a_check_that_is_left_out_is_caught(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: one kind of file is not verified."""
    trials = unnoticed(folder, 300, 2)
    monkeypatch.setattr(verify, name, lambda *arguments: None)
    assert next(trials, None) is not None
