"""Every path of every command: what stands there is named as what it is, and nothing is waited for or replaced."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heddle.cli import serve as serving
from heddle.cli.main import run_command
from heddle.errors import describe_path
from heddle.exchange import load as loading
from heddle.lab.explore import page as explored
from tests import small

SIZE = "--sequence-length 16 --batch-size 4 --steps 1 --device cpu"
MAX_SECONDS = 60  # for what would otherwise wait for ever


@pytest.fixture(scope="module")
def workspace(workspace: Path) -> Iterator[Path]:
    """With one of each thing that is no file and no folder."""
    for suffix in ("", ".gguf"):
        os.mkfifo(workspace / f"pipe{suffix}")
        os.symlink(f"circle{suffix}", workspace / f"circle{suffix}")
    (workspace / "file").write_text("no folder")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{workspace}/socket")
        yield workspace


THINGS = {
    "@/pipe": "is a named pipe",
    "@/socket": "is a socket",
    "/dev/zero": "is a device",
    "@/circle": "is a symbolic link",
    "@/circle/inner": "lies below a symbolic link that leads back to itself",
    "@/file/inner": "lies below a file",
    "n" * 300: "is too long a name",
}
READING = [
    "show ?",
    "check ?",
    f"train ? --data @/text --out @/new {SIZE}",
    f"train @/good.yaml --data ? --out @/new {SIZE}",
    f"train @/good.yaml --data hf:? --out @/new {SIZE}",
    f"train --from @/run --data chat:? --out @/new {SIZE}",
    f"train @/good.yaml --data @/text --tokenizer ? --out @/new {SIZE}",
    f"train --from ? --data @/text --out @/new {SIZE}",
    "show @/good.yaml --part ?",
    "compare ? --data @/text --out @/new",
    "compare @/good.yaml --data @/text --out @/new --tokenizer ?",
    "generate ?",
    "generate @/run --draft-model ?",
    "inspect ? --text x",
    "import ? @/new",
    "export ? @/new",
]
WRITING = [
    f"train @/good.yaml --data @/text --out ? {SIZE}",
    "compare @/good.yaml --data @/text --out ?",
    "inspect @/run --text x --out ?",
    "import @/exported ?",
    "export @/run ?",
]


@pytest.mark.parametrize("command", READING + WRITING)
def test_what_stands_at_a_path_is_named(
    command: str, workspace: Path, capsys: pytest.CaptureFixture[str], no_waiting: None
) -> None:
    before = listing(workspace)
    for thing, words in THINGS.items():
        arguments = [word.replace("?", thing).replace("@/", f"{workspace}/") for word in command.split()]
        capsys.readouterr()
        code = run_command(arguments)
        out, err = capsys.readouterr()
        assert (code, out) == (2, ""), (thing, err)
        last = err.splitlines()[-1]
        assert last.startswith("heddle: ")
        assert os.path.dirname(thing).replace("@", str(workspace)) in last
        is_inside_file = command.startswith("inspect @/run") and thing == "@/file/inner"
        allowed = ("it is a file", "name too long") if is_inside_file or len(thing) > 255 else ()
        assert any(text in last for text in (words, *allowed)), (thing, last)
    assert listing(workspace) == before


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """A test that waits for what never comes fails."""

    def give_up(*arguments: object) -> None:
        raise AssertionError("waits for ever")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(MAX_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def listing(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mode for path in folder.rglob("*") if path.name != ".lock"}


@pytest.mark.parametrize(("thing", "words"), [("@/pipe", "is a named pipe"), ("@/circle", "is a symbolic link that")])
def test_a_gguf_replaces_only_files(
    thing: str, words: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = thing.replace("@/", f"{workspace}/") + ".gguf"
    capsys.readouterr()
    assert run_command(["export", f"{workspace}/run", path, "--format", "gguf"]) == 2
    assert capsys.readouterr().err.startswith(f"heddle: {path}: {words}")


def test_pipes_inside_folders_of_data_are_skipped_or_named(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_waiting: None
) -> None:
    small.folder(tmp_path / "text")
    os.mkfifo(tmp_path / "text" / "pipe.txt")
    (tmp_path / "text" / "circle.txt").symlink_to("circle.txt")
    train = ["train", f"{workspace}/good.yaml", *SIZE.split(), "--out", f"{tmp_path}/run"]
    assert run_command([*train, "--data", f"{tmp_path}/text"]) == 0
    printed = capsys.readouterr().err
    assert "skipped 2 files of text: circle.txt cannot be read" in printed
    assert "; and pipe.txt" in printed
    for name in ("a.jsonl", "b.parquet", "c.arrow"):
        folder = tmp_path / name[0]
        folder.mkdir()
        os.mkfifo(folder / name)
        assert run_command([*train, "--data", f"hf:{folder}"]) == 2
        assert f"{name}" in capsys.readouterr().err


def test_a_device_is_never_replaced(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replacing /dev/null by a file of the same name would break the machine."""
    assert run_command(["inspect", f"{workspace}/run", "--text", "x", "--out", "/dev/null", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "heddle: /dev/null: is a device, not a file; choose another name\n"
    assert describe_path("/dev/null") == "is a device"


def test_every_kind_of_path_has_words(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to("nothing")
    assert describe_path(tmp_path / "broken") == "is a symbolic link to nothing"
    assert describe_path(tmp_path / "nothing") == "does not exist"
    assert describe_path(tmp_path) == "is a folder"
    assert describe_path(workspace / "file") == "is a file"
    assert describe_path("a\0b") == "is not a valid name"


def test_a_place_that_nothing_can_be_written_to_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def works(*_: Any) -> None:
        raise AssertionError("the work was begun")

    monkeypatch.setattr(explored, "explorer_page", works)
    monkeypatch.setattr(loading, "load", works)
    monkeypatch.setattr(serving, "load_any", works)
    (tmp_path / "file").write_text("no folder")
    model = str(tmp_path / "model")
    for words in (
        ["explore", "preset:gqa-tiny", "--out", str(tmp_path)],
        ["inspect", model, "--text", "a", "--out", str(tmp_path)],
        ["import", model, str(tmp_path / "file" / "inner")],
    ):
        assert run_command(words) == 2, words


def test_more_ranks_than_a_machine_has_are_refused() -> None:
    assert run_command(["train", "preset:gqa-tiny", "--out", "none", "--nproc", "1000000000"]) == 2
