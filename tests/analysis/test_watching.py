"""`heddle watch`: runs followed by their logs while they train, on a page of this machine."""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from heddle.cli.main import run_command
from heddle.lab.pages.runs import watch_page
from heddle.lab.runs import FolderFollower, RunFollower, Sample, downsampled, write_sample
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.storage.file_io import write_json_file
from heddle.storage.lock import RunLock, is_locked
from heddle.storage.manifest import LogPosition
from heddle.storage.model import save
from heddle.storage.run_log import FINAL_FILE, LOG_FILE, LogReader, RunLog
from heddle.tokenization.tokenizer import Tokenizer
from tests import small
from tests.analysis.test_runs import write_run
from tests.html_page import Page


def test_a_log_is_followed_line_by_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    reader = LogReader(run)
    assert not reader.read()
    write_run(run, [4.0, 3.0])
    assert reader.read()
    assert [line["step"] for line in reader.lines] == [1, 2]
    assert not reader.read()
    content = (run / LOG_FILE).read_bytes()
    first, second = content.splitlines(keepends=True)
    log = RunLog(run)
    log.resume(LogPosition(1, first.decode().split('"chain": "')[1][:16]))  # as a run that goes on from step 1
    assert reader.read()
    assert [line["step"] for line in reader.lines] == [1]
    log.write({"step": 2, "tokens": 7})
    log.close()
    with (run / LOG_FILE).open("ab") as file:
        file.write(second[:20])  # a line that is being written
    assert reader.read()
    assert reader.lines[1] == {"step": 2, "tokens": 7}


def test_an_altered_line_is_named_by_its_number_in_the_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [4.0, 3.0])
    follower = RunFollower(run, "run")
    assert follower.follow().error == ""
    with (run / LOG_FILE).open("ab") as file:
        file.write(b'{"step": 3, "chain": "0123456789abcdef"}\n')
    watched = follower.follow()
    assert "line 3" in watched.error
    assert "line 3 was altered" in Page(watch_page([watched])).text()


def test_a_run_is_followed_while_it_trains(tmp_path: Path) -> None:
    follower = FolderFollower([tmp_path])
    assert follower.follow() == []
    run = write_run(tmp_path / "a", [4.0, 2.0], steps=4)
    (watched,) = follower.follow()
    assert (watched.step, watched.steps, watched.tokens, watched.speed) == (2, 4, 200, 100.0)
    assert watched.curves["raw"] == [(100, 4.0), (200, 2.0)]
    assert watched.curves["smoothed"] == [(100, 4.0), (200, pytest.approx((2 + 0.9 * 4) / 1.9))]
    assert watched.curves["validation"] == [(200, 3.0)]
    assert watched.curves["speed"] == [(200, 100.0)]
    assert watched.seconds_left is None
    assert follower.follow()[0] is watched  # nothing changed
    with RunLock(run):
        assert is_locked(run)
        (now,) = follower.follow()
        assert now.is_training
        assert now.seconds_left == 2.0
    assert not is_locked(run)
    assert not is_locked(tmp_path / "none")


@pytest.mark.parametrize(("steps", "status"), [(2, "finished"), (4, "stopped"), (None, "ended")])
def test_a_run_that_does_not_train_is_finished_or_stopped(tmp_path: Path, steps: int | None, status: str) -> None:
    run = write_run(tmp_path / "run", [4.0, 3.0], steps=steps)
    watched = RunFollower(run, "run").follow()
    assert watched.status == status
    assert status in Page(watch_page([watched])).text().split()
    for step, after in ((1, status), (2, "finished")):  # of an earlier end, and of this one, as a task is learned early
        write_json_file(run / FINAL_FILE, {"step": step, "final_bits_per_byte": 3.0})
        assert RunFollower(run, "run").follow().status == after
    (run / FINAL_FILE).write_text("{", encoding="utf-8")
    assert FINAL_FILE in RunFollower(run, "run").follow().error


def test_a_task_s_loss_stands_apart_from_its_accuracy(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [4.0, 3.0])
    log = RunLog(run)
    log.resume(LogPosition())
    log.write({"step": 1, "tokens": 100, "loss": 3.5, "validation_accuracy": 0.25, "seconds": 1.0})
    log.close()
    figures = Page(watch_page([RunFollower(run, "run").follow()])).text()
    assert figures.index("accuracy") < figures.index("loss on answers")


def test_a_curve_keeps_its_peaks() -> None:
    points = [(step, 100.0 if step == 777 else float(step % 7)) for step in range(3000)]
    kept_points = downsampled(points)
    assert len(kept_points) <= 600
    assert (777, 100.0) in kept_points
    assert kept_points == sorted(kept_points)
    assert downsampled(points[:500]) == points[:500]


def test_the_newest_checkpoint_writes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train([small.text(3000)], 300)
    model = build(load_config(small.design(), [f"vocab_size={tokenizer.vocab_size}"]))
    save(model, tmp_path / "model", tokenizer)
    sample = write_sample("The", 3)(tmp_path / "model", 5)
    assert (sample.step, sample.error) == (5, "")
    assert sample.text != ""
    assert "there is no such folder" in write_sample("The", 3)(tmp_path / "none", 5).error


def test_the_page_is_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs/b", [8.0] * 20 + [2.0, 4.0] * 10)
    write_run(tmp_path / "runs/<i>x", [3.0, 1.0])
    write_run(tmp_path / "runs/begun", [])
    assert run_command(["watch", str(tmp_path / "runs"), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert page.loads == []
    assert "<i>x" in page.text()
    assert "connect-src" not in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none"], "none:"),
        ([".", "--out", "x", "--open"], "--out x:"),
        ([".", "--port", "70000"], "--port 70000:"),
    ],
)
def test_errors_of_watch_are_a_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["watch", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_the_page_is_served_until_ctrl_c(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [3.0, 1.0])
    command = [sys.executable, "-m", "heddle", "watch", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    with urllib.request.urlopen(address, timeout=60) as answer:
        page = answer.read().decode()
    assert "2 of 40" in Page(page).text()
    assert "connect-src 'self'" in page
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "heddle: the page has ended; the runs continue"


def test_samples_and_experts_are_on_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [3.0])
    log = RunLog(run)
    log.resume(LogPosition())
    load = {"layers.0.feedforward": {"load": [0.25, 0.75], "entropy": 0.5, "dropped": 0.0}}
    log.write({"step": 1, "tokens": 10, "loss": 2.0, "seconds": 1.0, "skipped": False, "experts": load})
    log.close()
    (run / "checkpoints/step-00000001").mkdir(parents=True)
    follower = RunFollower(run, "run", lambda folder, step: Sample(step, "Once", " upon <b>"))
    text = Page(watch_page([follower.follow()], revision=3)).text()
    assert "Once upon <b>" in text.replace("Once  upon", "Once upon")
    assert "layers.0" in text
    assert "1.50" in text  # of an even share


def test_a_log_that_was_begun_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    """Also where it is longer again by the next look."""
    run = write_run(tmp_path / "run", [4.0])
    reader = LogReader(run)
    reader.read()
    log = RunLog(run)
    log.resume(LogPosition())
    for step in (7, 8, 9):
        log.write({"step": step, "tokens": step, "note": "longer than the line before" * 9})
    log.close()
    assert reader.read()
    assert [line["step"] for line in reader.lines] == [7, 8, 9]


def test_a_page_draws_all_curves_of_a_log(tmp_path: Path) -> None:
    """The loss, the rate, the gradient's norm, the speed and the memory, each from its own numbers."""
    run = write_run(tmp_path / "run", [4.0, 3.0, 2.0])
    log = RunLog(run)
    log.resume(LogPosition())
    for step in range(1, 4):
        own = {"learning_rate": 0.1 * step, "gradient_norm": 7.0 + step, "peak_memory_bytes": 1e6 * step}
        log.write({"step": step, "tokens": 100 * step, "loss": 1.0, "bits_per_byte": 5.0 - step, "seconds": 0.5} | own)
    log.close()
    followed = RunFollower(run, "run").follow()
    assert followed.curves["memory"] == [(100, 1e6), (200, 2e6), (300, 3e6)]
    assert followed.curves["rate"] == [(100, 0.1), (200, 0.2), (300, pytest.approx(0.3))]
    assert followed.curves["raw_norm"] == [(100, 8.0), (200, 9.0), (300, 10.0)]
    text = watch_page([followed])
    for title in ("bits per byte", "learning rate", "gradient norm", "tokens/s", "memory"):
        assert f">{title}</" in text, title
    assert text.count('"ticksuffix":"B"') == 1  # bytes of memory
