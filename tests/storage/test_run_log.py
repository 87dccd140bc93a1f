"""The chained log: every altered byte is named with its line, a cut end is tolerated, and no counted line is lost."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from heddle.errors import CheckpointError, MachineError
from heddle.storage import run_log
from heddle.storage.manifest import EMPTY_CHAIN, LogPosition
from heddle.storage.run_log import IDENTITY_KEYS, LOG_FILE, LogReader, RunLog, open_run, read_log, verify_log
from tests.storage.shared import Died, System, standing_in

LINES: list[dict[str, Any]] = [
    {"step": 1, "loss": 5.25, "skipped": False, "seconds": 0.5},
    {"step": 2, "loss": None, "experts": {"layers.0": {"load": [0.5, 0.5]}}, "note": '", "chain": "0"}'},
    {"step": 3, "loss": 1e-9, "note": "βῆτα\u2028\r\n"},
    {"step": 4, "loss": 3.0},
]


def write_lines(folder: Path, lines: list[dict[str, Any]], position: LogPosition | None = None) -> list[LogPosition]:
    """Append lines to a log; returns the position before the first line and after each line."""
    log = RunLog(folder)
    log.resume(LogPosition() if position is None else position)
    positions = [log.position]
    for line in lines:
        log.write(line)
        positions.append(log.position)
    log.sync()
    log.close()
    return positions


def test_lines_come_back_without_their_chain(tmp_path: Path) -> None:
    assert read_log(tmp_path) == []
    positions = write_lines(tmp_path, LINES)
    assert read_log(tmp_path) == LINES
    assert [position.lines for position in positions] == [0, 1, 2, 3, 4]
    assert len({position.head for position in positions}) == 5


def test_anyone_can_follow_the_chain(tmp_path: Path) -> None:
    positions = write_lines(tmp_path, LINES)
    chain = EMPTY_CHAIN
    for line, position in zip((tmp_path / LOG_FILE).read_bytes().split(b"\n")[:-1], positions[1:], strict=True):
        content, _, rest = line.rpartition(b', "chain": "')
        chain = hashlib.sha256(chain.encode() + content).hexdigest()[:16]
        assert rest == f'{chain}"}}'.encode()
        assert json.loads(line)["chain"] == chain == position.head


def test_every_altered_byte_is_named_with_its_line_and_nothing_is_written(tmp_path: Path) -> None:
    position = write_lines(tmp_path, LINES)[-1]
    path = tmp_path / LOG_FILE
    raw = path.read_bytes()
    for offset in range(len(raw)):
        for bit in (0, 3, 6):
            damaged = raw[:offset] + bytes([raw[offset] ^ 1 << bit]) + raw[offset + 1 :]
            path.write_bytes(damaged)
            number = raw[:offset].count(b"\n") + 1
            with pytest.raises(CheckpointError) as caught:
                RunLog(tmp_path).resume(position)
            assert str(caught.value).startswith(f"{path}: line {number}")
            assert "\n" not in str(caught.value)
            assert path.read_bytes() == damaged
            if offset < len(raw) - 1:  # without its line end, the last line is one that was cut short
                with pytest.raises(CheckpointError, match=f"line {number}"):
                    read_log(tmp_path)
    assert os.listdir(tmp_path) == [LOG_FILE]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_lines_taken_out_put_in_or_exchanged_are_named(tmp_path: Path, at: int) -> None:
    position = write_lines(tmp_path, LINES)[-1]
    path = tmp_path / LOG_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    for changed in (
        [*lines[:at], *lines[at + 1 :]],
        [*lines[:at], lines[at], *lines[at:]],
        [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]],
        [*lines[:at], b"\n", *lines[at:]],
        [*lines[:at], b"[1]\n", *lines[at:]],
        [*lines[:at], b'{"step": 1}\n', *lines[at + 1 :]],  # as format 1 wrote them
    ):
        path.write_bytes(b"".join(changed))
        for read in (lambda: RunLog(tmp_path).resume(position), lambda: read_log(tmp_path)):
            with pytest.raises(CheckpointError, match=r"log\.jsonl: line [1-4]"):
                read()
        assert path.read_bytes() == b"".join(changed)


def test_fewer_lines_than_the_checkpoint_counted_are_refused(tmp_path: Path) -> None:
    position = write_lines(tmp_path, LINES)[-1]
    path = tmp_path / LOG_FILE
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    with pytest.raises(CheckpointError, match=r"3 lines.*4"):
        RunLog(tmp_path).resume(position)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"0 lines.*4"):
        RunLog(tmp_path).resume(position)
    assert os.listdir(tmp_path) == []


def test_the_log_of_another_run_is_refused(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    position = write_lines(own, LINES)[-1]
    write_lines(other, [line | {"seconds": 9} for line in LINES])
    with pytest.raises(CheckpointError, match="4 lines"):
        RunLog(other).resume(position)


def test_newer_lines_are_dropped_aloud_and_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    positions = write_lines(tmp_path, LINES)
    path = tmp_path / LOG_FILE
    whole = path.read_bytes()
    for tail in (b"", b'{"step": 5, "lo', bytes(100), b"\n\n"):
        path.write_bytes(whole + tail)
        capsys.readouterr()
        assert write_lines(tmp_path, LINES[2:], positions[2]) == positions[2:]
        assert path.read_bytes() == whole
        assert "lines 3 to " in capsys.readouterr().err
    assert write_lines(tmp_path, [], positions[4]) == [positions[4]]
    assert capsys.readouterr().err == ""
    write_lines(tmp_path, LINES, LogPosition())
    assert path.read_bytes() == whole
    assert "lines 1 to 4 are of steps after the loaded checkpoint" in capsys.readouterr().err


def test_a_newer_line_that_was_altered_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    positions = write_lines(tmp_path, LINES)
    path = tmp_path / LOG_FILE
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"1e-09", b"2e-09"))
    capsys.readouterr()
    assert write_lines(tmp_path, LINES[1:], positions[1]) == positions[1:]
    notice = "lines 2 to 4 are of steps after the loaded checkpoint, and line 3 of them was altered; these steps are "
    notice += "repeated"
    assert notice in capsys.readouterr().err
    assert path.read_bytes() == whole


def test_another_environment_is_told_when_a_run_is_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    identity: dict[str, Any] = dict.fromkeys(IDENTITY_KEYS)
    before = {"versions": {"torch": "2.12.0", "numpy": "1"}, "runtime": {"device": "cpu", "threads": 4, "cpu": "A"}}
    assert not open_run(tmp_path, identity, before)
    (tmp_path / LOG_FILE).touch()
    capsys.readouterr()
    assert open_run(tmp_path, identity, before)
    assert open_run(tmp_path, identity, {"command": "another"})
    assert capsys.readouterr().err == ""
    now = {"versions": {"torch": "2.13.0", "numpy": "2"}, "runtime": {"device": "cpu", "threads": 2, "cpu": "A"}}
    assert open_run(tmp_path, identity, now)
    assert capsys.readouterr().err.endswith(
        'continues in another environment: torch was "2.12.0", now it is "2.13.0"; threads was 4, now it is 2; '
        "data, their order, the schedule and saved files stay equal, but from here on numbers may differ in "
        "their last bits\n"
    )


def test_a_cut_last_line_is_no_damage(tmp_path: Path) -> None:
    positions = write_lines(tmp_path, LINES)
    path = tmp_path / LOG_FILE
    whole = path.read_bytes()
    start = len(b"".join(whole.splitlines(keepends=True)[:3]))
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        assert read_log(tmp_path) == LINES[:3]
        assert write_lines(tmp_path, LINES[3:], positions[3]) == positions[3:]
        assert path.read_bytes() == whole


def resume_and_write(folder: Path, position: LogPosition) -> None:
    write_lines(folder, LINES[2:], position)


@pytest.mark.parametrize("tail", [bytes(400), b"{" + bytes(3), b"x", b"\xff"])
def test_what_is_no_beginning_of_a_line_is_named_by_every_reader(tail: bytes, tmp_path: Path) -> None:
    write_lines(tmp_path, LINES[:2])
    reader = LogReader(tmp_path)
    reader.read()
    with (tmp_path / LOG_FILE).open("ab") as file:
        file.write(tail)
    for read in (read_log, verify_log, lambda folder: LogReader(folder).read(), lambda folder: reader.read()):
        with pytest.raises(CheckpointError, match=r"log\.jsonl: line 3"):
            read(tmp_path)


def test_dying_at_any_call_loses_no_counted_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    positions = write_lines(run, LINES)
    whole = (run / LOG_FILE).read_bytes()

    def reset() -> None:
        for path in run.iterdir():
            path.unlink()
        (run / LOG_FILE).write_bytes(whole + b'{"step"')

    reset()
    with standing_in(System()) as counting:
        resume_and_write(run, positions[2])
    assert {"open", "write", "fsync", "rename"} <= set(counting.trace)
    for at, name in enumerate(counting.trace, start=1):
        for how in ("before", "half", "after") if name == "write" else ("before", "after"):
            reset()
            with standing_in(System(at, how)), pytest.raises(Died):
                resume_and_write(run, positions[2])
            assert read_log(run)[:2] == LINES[:2], (at, name, how)
            resume_and_write(run, positions[2])
            assert (run / LOG_FILE).read_bytes() == whole, (at, name, how)


def test_a_full_disk_is_the_machines_fault(tmp_path: Path) -> None:
    with standing_in(System()) as counting:
        write_lines(tmp_path, LINES)
    messages = []
    for at in range(1, len(counting.trace) + 1):
        (tmp_path / LOG_FILE).unlink(missing_ok=True)
        with standing_in(System(at, OSError(28, "No space left on device"))):
            try:
                write_lines(tmp_path, LINES)
            except MachineError as error:
                messages.append(str(error))
    assert len(messages) > 6
    assert all("No space left on device" in message and "\n" not in message for message in messages)


def test_a_pipe_or_a_link_is_no_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOG_FILE)
    with pytest.raises(CheckpointError, match=r"log\.jsonl:.*pipe"):
        read_log(tmp_path)
    (tmp_path / LOG_FILE).unlink()
    (tmp_path / LOG_FILE).symlink_to("elsewhere")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        RunLog(tmp_path).resume(LogPosition())


def test_a_line_with_a_right_chain_that_is_no_json_is_named(tmp_path: Path) -> None:
    for content in (b"{" + b'"a":{' * 50_000, b'{"a": nothing', b'{"a": 1, "a": 2', b'{"\xff": 1'):
        chain = hashlib.sha256(EMPTY_CHAIN.encode() + content).hexdigest()[:16]
        (tmp_path / LOG_FILE).write_bytes(content + f', "chain": "{chain}"}}\n'.encode())
        with pytest.raises(CheckpointError, match="line 1"):
            read_log(tmp_path)


def test_a_chain_of_each_line_alone_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a line's hash does not depend on the lines before it."""
    monkeypatch.setattr(run_log, "_next_chain", lambda previous, content: hashlib.sha256(content).hexdigest()[:16])
    with pytest.raises(AssertionError):
        test_lines_taken_out_put_in_or_exchanged_are_named(tmp_path, 0)


def test_a_log_that_trusts_the_count_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: resuming does not verify the lines."""
    monkeypatch.setattr(run_log, "_verify_lines", lambda *arguments: None)
    with pytest.raises(pytest.fail.Exception):
        test_every_altered_byte_is_named_with_its_line_and_nothing_is_written(tmp_path)
