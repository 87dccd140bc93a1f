"""The pages that a server of this machine shows, in a real browser: a run that trains, and a model that answers."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from heddle.model.size import size
from heddle.storage.manifest import LogPosition
from heddle.storage.model import save
from heddle.storage.run_log import RunLog, read_log
from heddle.training.smoothed_loss import SmoothedLoss
from tests.analysis.test_runs import write_run
from tests.browser.browser import Browser
from tests.browser.check_pages import browser, check_page
from tests.serving.running import TEMPLATE, small_model

__all__ = ["browser"]  # a fixture
NOTE = "document.getElementById('live-note').textContent"


@contextmanager
def serving(*arguments: str, exit_code: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A command that serves a page: its address, and its process, which Ctrl-C ends with this code."""
    command = [sys.executable, "-m", "heddle", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == exit_code, err
    finally:
        process.kill()
        process.wait()


def test_a_watched_run_is_followed(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [8.0, 4.0, 2.0])
    with serving("watch", str(tmp_path), exit_code=130) as (address, process):
        check_page(browser, address)
        cells = "[...document.querySelectorAll('.watched td')].map(cell => cell.textContent.trim())"
        assert browser.run(cells)[1].startswith("3 of 40")
        browser.run("document.getElementById('runs').focus()")
        loss = SmoothedLoss()
        smoothed = [loss.add(line["bits_per_byte"]) for line in read_log(run)]
        assert browser.run(cells)[3] == f"{smoothed[-1]:.4f}"
        log = RunLog(run)
        log.resume(LogPosition())
        log.write({"step": 1, "tokens": 100, "loss": 5.0, "bits_per_byte": 5.5, "seconds": 1.0})
        log.close()
        browser.wait_for(f"{cells}[1].startsWith('1 of 40')")
        assert browser.run("document.activeElement.id") == "runs"
        assert browser.run("document.querySelectorAll('.plot .trace').length") >= 1
        assert browser.errors == []
        process.send_signal(signal.SIGINT)
        process.wait(60)
        browser.wait_for(f"{NOTE}.startsWith('heddle watch has ended')")


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """A model with a chat template, and one without."""
    model, tokenizer = small_model()
    for name, files in (("talks", {"chat_template.jinja": TEMPLATE}), ("writes", {})):
        tokenizer.companion_files = files
        save(model, tmp_path / name, tokenizer)
    return [str(tmp_path / name) for name in ("talks", "writes")]


# Notes each text about the state of the first model, as it is drawn.
WATCH_STATE = """window.drawn = [];
new MutationObserver(records => records.forEach(record => record.addedNodes.forEach(node => {
  if (node.localName === "p") window.drawn.push(node.textContent);
}))).observe(document.querySelector(".state"), {childList: true}); 0"""


def check_growth(drawn: list[str]) -> None:
    """While 12 tokens came, the state was drawn after each of them, with the bytes of the model's state."""
    model, tokenizer = small_model()
    prompt = len(tokenizer.bos_ids) + len(tokenizer.encode("The weaver"))
    sizes = [size(model.config, context_length=prompt + new).state_bytes for new in range(1, 13)]
    assert sizes == sorted(set(sizes))
    expected = [f"{readable(sizes[new - 1])} for the {prompt + new} tokens so far" for new in range(1, 13)]
    assert [text.partition(";")[0] for text in drawn[:12]] == expected
    assert {text.partition("at ")[2] for text in drawn[:12]} == {str(prompt + 12)}


def readable(count: int) -> str:
    """Bytes as the page says them."""
    return f"{count / 1000:.1f} KB" if count >= 1000 else f"{count} bytes"


def test_top_k_of_the_page(browser: Browser, models: list[str]) -> None:
    texts = []
    with serving("chat", models[1], "--page", "--device", "cpu", "--threads", "1", exit_code=0) as (address, _):
        browser.look(1280, 900)
        for top_k in ("", "1", "1"):
            browser.open(address)
            fields = {"temperature": "2", "top-p": "1", "top-k": top_k, "max-tokens": "24", "text": "The weaver"}
            for field, value in fields.items():
                browser.run(f"document.getElementById('{field}').value = '{value}'")
            browser.run("document.getElementById('send').click()")
            browser.wait_for("document.querySelector('.status').textContent.includes('a second')")
            texts.append(browser.run("[...document.querySelectorAll('.token')].map(each => each.textContent).join('')"))
        assert texts[0] != texts[1] == texts[2]
        assert browser.errors == []


def test_two_models_answer_side_by_side(browser: Browser, models: list[str]) -> None:
    with serving("chat", *models, "--page", "--device", "cpu", "--threads", "1", exit_code=0) as (address, _):
        check_page(browser, address)
        browser.look(1280, 900)
        browser.open(address)
        for field, value in (("temperature", "0"), ("max-tokens", "12"), ("mode", "completions")):
            browser.run(f"$ = document.getElementById('{field}'); $.value = '{value}'; $.onchange?.()")
        browser.run("document.getElementById('text').focus()")
        for letter in "The weaver":
            browser.press(letter, letter)
        browser.run(WATCH_STATE)
        browser.run("document.getElementById('send').focus()")
        browser.press("Enter", "\r")
        drawn = "document.querySelectorAll('.state > svg').length === 2"
        browser.wait_for(drawn)
        answers = browser.run(
            "[...document.querySelectorAll('.model')].map(model => [...model.querySelectorAll('.token')]"
            ".map(token => token.textContent).join(''))"
        )
        assert answers[0] == answers[1] != ""  # the same weights
        assert browser.run("document.querySelectorAll('.model .token').length") == 24
        check_growth(browser.run("window.drawn"))
        attended = "document.querySelector('.attended').textContent"
        before = browser.run(attended)
        assert before.startswith("The weaver") or before.endswith(answers[0][:-1]) or "The weaver" in before
        browser.run("document.querySelector('.transcript').focus()")
        browser.press("ArrowLeft")
        browser.wait_for(f"{attended} !== {before!r}")
        assert browser.run("document.querySelectorAll('.chosen div').length") >= 5
        assert browser.run("document.querySelector('.views').scrollWidth") <= 1280
        assert browser.errors == []
        browser.run("document.getElementById('undo').click()")
        assert browser.run("document.querySelectorAll('.token').length") == 0


def test_what_is_refused_is_said_and_typed_text_stays(browser: Browser, models: list[str]) -> None:
    with serving("chat", models[1], "--page", "--device", "cpu", "--threads", "1", exit_code=0) as (address, _):
        browser.look(390, 900, dark=True)
        browser.open(address)
        browser.run("document.getElementById('text').value = 'word '.repeat(9000)")
        browser.run("document.getElementById('send').click()")
        browser.wait_for("document.querySelector('.status.failed') !== null")
        assert "this server reads 1 to" in browser.run("document.querySelector('.status').textContent")
        assert browser.run("document.getElementById('text').value.length") == 45000
        assert browser.run("document.documentElement.scrollWidth") <= 390
