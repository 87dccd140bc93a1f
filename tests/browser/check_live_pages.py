"""The pages that a server of this machine shows, in a real browser: a run that trains, and a model that answers."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from heddle.model.size import size
from heddle.storage.manifest import LogPosition
from heddle.storage.model import save
from heddle.storage.run_log import RunLog, SmoothedLoss, read_log
from tests.analysis.test_runs import write_run
from tests.browser.browser import PHONE, chromium, errors, open_page
from tests.browser.check_pages import check_page
from tests.serving.running import TEMPLATE, small_model

__all__ = ["chromium"]  # a fixture


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


def test_a_watched_run_is_followed(chromium: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [8.0, 4.0, 2.0])
    with serving("watch", str(tmp_path), exit_code=130) as (address, process):
        check_page(chromium, address)
        page = open_page(chromium, address)
        cells = "[...document.querySelectorAll('.watched td')].map(cell => cell.textContent.trim())"
        assert page.evaluate(cells)[1].startswith("3 of 40")
        page.focus("#runs")
        loss = SmoothedLoss()
        smoothed = [loss.add(line["bits_per_byte"]) for line in read_log(run)]
        assert page.evaluate(cells)[3] == f"{smoothed[-1]:.4f}"
        log = RunLog(run)
        log.resume(LogPosition())
        log.write({"step": 1, "tokens": 100, "loss": 5.0, "bits_per_byte": 5.5, "seconds": 1.0})
        log.close()
        expect(page.locator(".watched td").nth(1)).to_have_text(re.compile("^1 of 40"))
        assert page.evaluate("document.activeElement.id") == "runs"
        assert page.locator(".plot .trace").count() >= 1
        assert errors(page) == []
        process.send_signal(signal.SIGINT)
        process.wait(60)
        expect(page.locator("#live-note")).to_have_text(re.compile("^heddle watch has ended"))


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
    return f"{count / 1000:.1f} kB" if count >= 1000 else f"{count} bytes"


def test_top_k_of_the_page(chromium: Browser, models: list[str]) -> None:
    texts = []
    with serving("chat", models[1], "--page", "--device", "cpu", "--threads", "1", exit_code=0) as (address, _):
        for top_k in ("", "1", "1"):
            page = open_page(chromium, address)
            fields = {"temperature": "2", "top-p": "1", "top-k": top_k, "max-tokens": "24", "text": "The weaver"}
            for field, value in fields.items():
                page.fill(f"#{field}", value)
            page.click("#send")
            expect(page.locator(".status")).to_contain_text("per second")
            texts.append("".join(page.locator(".token").all_text_contents()))
        assert texts[0] != texts[1] == texts[2]
        assert errors(page) == []


def test_two_models_answer_side_by_side(chromium: Browser, models: list[str]) -> None:
    with serving("chat", *models, "--page", "--device", "cpu", "--threads", "1", exit_code=0) as (address, _):
        check_page(chromium, address)
        page = open_page(chromium, address)
        page.fill("#temperature", "0")
        page.fill("#max-tokens", "12")
        page.select_option("#mode", "completions")
        page.locator("#text").press_sequentially("The weaver")
        page.evaluate(WATCH_STATE)
        page.locator("#send").press("Enter")
        expect(page.locator(".state > svg")).to_have_count(2)
        answers = ["".join(model.locator(".token").all_text_contents()) for model in page.locator(".model").all()]
        assert answers[0] == answers[1] != ""  # the same weights
        assert page.locator(".model .token").count() == 24
        check_growth(page.evaluate("window.drawn"))
        attended = page.locator(".attended").first
        before = attended.text_content() or ""
        assert before.endswith(answers[0][:-1]) or "The weaver" in before
        page.locator(".transcript").first.press("ArrowLeft")
        expect(attended).not_to_have_text(before)
        assert page.locator(".chosen div").count() >= 5
        assert page.evaluate("document.querySelector('.views').scrollWidth") <= 1280
        assert errors(page) == []
        page.click("#undo")
        assert page.locator(".token").count() == 0


def test_what_is_refused_is_said_and_typed_text_stays(chromium: Browser, models: list[str]) -> None:
    with serving("chat", models[1], "--page", "--device", "cpu", "--threads", "1", exit_code=0) as (address, _):
        page = open_page(chromium, address, width=PHONE, dark=True)
        page.fill("#text", "word " * 9000)
        page.click("#send")
        expect(page.locator(".status.failed")).to_contain_text("this server reads 1 to")
        assert len(page.input_value("#text")) == 45000
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
