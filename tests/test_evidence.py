"""The page of evidence: judgments follow from numbers, rows can be trained, and the page shows what is saved."""

import dataclasses
import json
import signal
import statistics
from pathlib import Path

import pytest

import evidence.__main__ as command
from evidence.__main__ import PAGE, RESULTS, main
from evidence.page import render_page
from evidence.row import AGREES, DISAGREES, MAX_LOSS, NOT_RESOLVED, Finding, Row, Training, differences
from evidence.run import by_training, load_row, row_names, run_rows, save_results, train_one
from heddle.data import corpus
from heddle.model.load_config import load_config
from heddle.signals import Interrupted
from tests import small

SAVED = [name for name in row_names() if (RESULTS / f"{name}.json").is_file()]


def judged(*findings: Finding) -> list[str]:
    row = Row("a row", ["a paper"], [], lambda results: findings)
    return [judgment.word for judgment in row.judge({})]


def test_a_claim_agrees_only_where_its_whole_interval_is_above_the_threshold() -> None:
    assert judged(Finding("", [1.0, 1.1, 0.9])) == [AGREES]
    assert judged(Finding("", [-1.0, -1.1, -0.9])) == [DISAGREES]
    assert judged(Finding("", [1.0, -1.1, 0.9])) == [NOT_RESOLVED]
    assert judged(Finding("", [1.0, 1.1, 0.9], threshold=1.0)) == [NOT_RESOLVED]
    # t with 2 degrees of freedom is 4.30: z, 1.96, would call this resolved
    assert judged(Finding("", [0.1, 0.2, 0.3])) == [NOT_RESOLVED]


def test_more_claims_of_a_row_need_wider_intervals() -> None:
    finding = Finding("", [0.5, 0.7, 0.8])
    assert judged(finding) == [AGREES]
    assert judged(*[finding] * 12) == [NOT_RESOLVED] * 12


def test_differences_are_paired_by_seed() -> None:
    results = {"a": {0: {"loss": 1.0}, 1: {"loss": 3.0}}, "b": {1: {"loss": 2.5}, 0: {"loss": 0.5}, 2: {"loss": 9.0}}}
    assert differences(results, "a", "b", "loss") == [0.5, 0.5]


def test_a_training_that_diverged_has_the_largest_loss() -> None:
    assert by_training([{"key": "a", "seed": 0, "numbers": {"loss": None}}])["a"][0]["loss"] == MAX_LOSS


@pytest.mark.parametrize("name", row_names())
def test_each_row_has_designs_and_findings(name: str) -> None:
    row = load_row(name)
    assert set(row.by_key) == {training.key for training in row.trainings}
    for design in {json.dumps(training.design) for training in row.trainings}:
        load_config(json.loads(design))
    numbers = {"loss": 2.0, "accuracy": 0.5, "first token": 0.1, "largest layer": 0.1, "change": 0.1}
    results = {training.key: dict.fromkeys(training.seeds, numbers) for training in row.trainings}
    results["full attention"] = {seed: numbers | {"accuracy": 1.0} for seed in range(5)}
    assert all(len(finding.differences) >= 3 for finding in row.findings(results))


def test_saved_results_are_those_of_present_trainings_and_give_the_saved_words() -> None:
    for name in SAVED:
        row, data = load_row(name), json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        trained = [(run["key"], run["seed"], run["sha256"]) for run in data["runs"]]
        assert trained == [(t.key, seed, t.sha256) for t in row.trainings for seed in t.seeds], name
        words = [judgment.word for judgment in row.judge(by_training(data["runs"]))]
        assert words == [finding["word"] for finding in data["findings"]], name


def test_the_page_shows_the_saved_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_page({name: load_row(name) for name in row_names()}, RESULTS)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("first_token", {"loss", "first token", "largest layer"}),
        ("longer_texts", {"loss", "change"}),
        ("recall_of_mixers", {"accuracy"}),
    ],
)
def test_a_training_is_measured(name: str, numbers: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = load_row(name)
    training = row.trainings[0]
    short = dataclasses.replace(training, settings={**training.settings, "steps": 1, "batch_size": 2})
    row = dataclasses.replace(row, trainings=[short])
    monkeypatch.setattr("evidence.run.load_row", lambda _: row)
    texts = small.corpus(tmp_path / "texts", documents=8, size=12_000)
    monkeypatch.setattr(corpus, "prepare_corpus", lambda *arguments, **options: texts)
    monkeypatch.setattr("evidence.run.FINAL_TOKENS", 256)
    line = train_one(name, training.key, 0, tmp_path)
    assert set(line["numbers"]) == numbers
    assert (line["key"], line["sha256"]) == (short.key, short.sha256)
    assert not list((tmp_path / "runs" / name).iterdir())


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Row:
    """A row of two designs, whose trainings count how often they run."""
    trainings = [Training(key, {"width": 8}, "recall:parity", {"steps": 1}, seeds=(0, 1)) for key in ("a", "b")]

    def findings(results: object) -> list[Finding]:
        return [Finding("b ends lower", differences(results, "a", "b", "loss"), note="of two")]  # type: ignore[arg-type]

    row = Row("Two designs", ["A paper 2020: b ends lower."], trainings, findings, remark="Small.")
    monkeypatch.setattr("evidence.run.load_row", lambda _: row)

    def train_one(name: str, key: str, seed: int, folder: Path) -> dict[str, object]:
        loss = {"a": 3.0, "b": 2.0}[key] + 0.01 * seed * (key == "b")
        return {"key": key, "seed": seed, "sha256": row.by_key[key].sha256, "numbers": {"loss": loss}, "seconds": 60.0}

    monkeypatch.setattr("evidence.run.train_one", train_one)
    return row


def test_a_row_continues_and_is_saved_only_when_complete(
    row: Row, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_rows(["two"], tmp_path)
    file = tmp_path / "two.jsonl"
    complete = file.read_text()
    changed = json.loads(complete.splitlines()[0]) | {"sha256": "of another design"}
    file.write_text("\n".join([json.dumps(changed), *complete.splitlines()[1:3]]) + "\n")
    save_results("two", tmp_path, tmp_path / "two.json", "2026-01-01")
    assert not (tmp_path / "two.json").exists()
    capsys.readouterr()
    run_rows(["two"], tmp_path)  # the first one, which is of another design, and the last one
    assert capsys.readouterr().out.splitlines() == [
        "1/2 two a seed 0: loss 3 (60 s)",
        "2/2 two b seed 1: loss 2.01 (60 s)",
    ]
    save_results("two", tmp_path, tmp_path / "two.json", "2026-01-01")
    data = json.loads((tmp_path / "two.json").read_text())
    assert [finding["word"] for finding in data["findings"]] == [AGREES]
    assert data["findings"][0]["mean"] == statistics.mean([1.0, 0.99])
    assert data["processor_seconds"] == 240


def test_a_page_names_claims_words_costs_and_rows_that_were_not_run(row: Row, tmp_path: Path) -> None:
    assert render_page({"two": row}, tmp_path).endswith("## Not run yet\n\n- Two designs: `python -m evidence two`\n")
    run_rows(["two"], tmp_path)
    save_results("two", tmp_path, tmp_path / "two.json", "2026-01-01")
    page = render_page({"two": row}, tmp_path)
    assert "| b ends lower | +0.995 ± 0.064 bits per byte | agrees; of two |" in page
    assert "\n\nSmall.\n\n`two`: 4 runs, 2 seeds, 4 minutes, 2026-01-01.\n" in page
    data = json.loads((tmp_path / "two.json").read_text())
    data["runs"][0]["numbers"]["loss"] = None
    (tmp_path / "two.json").write_text(json.dumps(data))
    assert "minutes, 2026-01-01; 1 diverged.\n" in render_page({"two": row}, tmp_path)


def test_the_command_runs_saves_and_writes_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run_rows(names: list[str], folder: Path, workers: int) -> None:
        ran.extend(names)
        if names == ["muon"]:
            raise Interrupted(signal.SIGTERM, "saved at step 3; the same command continues")

    monkeypatch.setattr(command, "run_rows", run_rows)
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "PAGE", tmp_path / "evidence.md")
    assert main(["longer_texts", "muon", "first_token", "--out", str(tmp_path)]) == 143
    assert ran == ["longer_texts", "muon"]
    assert capsys.readouterr().err == "evidence: saved at step 3; the same command continues\n"
    assert (tmp_path / "evidence.md").read_text().count("\n- ") == len(row_names())
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["muons"])
    assert "no row muons; choices: attention_residuals, " in capsys.readouterr().err
