"""`heddle convert --search`: what it writes, that it continues after kills, and which goals it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle.cli.main import run_command
from heddle.conversion.convert import open_source
from heddle.conversion.heal import calibration_from_corpus
from heddle.conversion.weights import build_model
from heddle.data.corpus import prepare_corpus
from heddle.errors import CheckpointError, ConfigError
from heddle.lab.compare.budget import TimeBudget
from heddle.lab.conversion.results import parse_results
from heddle.lab.pages.conversion import conversion_page
from heddle.lab.search.results import SearchResults
from heddle.lab.search.scores import Evaluator, put_together
from heddle.lab.search.search import Search, SearchInput, kept_layers, parse_goals, search_tokens, split_text
from heddle.model.size import size
from heddle.progress import quiet
from heddle.storage.file_io import read_json_file
from heddle.storage.model import load
from tests import small
from tests.html_page import Page

ONLY = ("kv_heads=1", "window=4", "gated_delta,fit_steps=2")
GOAL = "state@64=50%"
QUICK = [
    "--sequence-length",
    "16",
    "--report-tokens",
    "64",
    "--calibration-tokens",
    "256",
    "--quiet",
    "--device",
    "cpu",
]
SPEED = ["--speed-context-length", "4"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and a run of three layers that trained on it."""
    return small.trained_run(tmp_path_factory.mktemp("workspace"), 3)


def given(workspace: Path, folder: Path, *goals: str, **fields: Any) -> SearchInput:
    source = open_source(workspace / "run")
    assert source.tokenizer is not None
    corpus = prepare_corpus(
        [str(workspace / "text")], vocab_size=None, max_train_tokens=None, tokenizer=source.tokenizer
    )
    text = calibration_from_corpus(corpus, search_tokens(256), 16)
    lengths = source.tokenizer.byte_lengths
    found = SearchInput(source, text, parse_goals(goals or [GOAL]), ONLY, (), 16, folder, lengths)
    return replace(found, **fields)


def command(workspace: Path, out: Path, *options: str) -> list[str]:
    return ["convert", f"{workspace}/run", str(out), "--data", f"{workspace}/text", *QUICK, *SPEED, *options]


def searched(workspace: Path, out: Path, *options: str) -> list[str]:
    named = [word for name in ONLY for word in ("--only", name)]
    return command(workspace, out, "--search", GOAL, *named, *options)


@pytest.fixture(scope="module")
def written(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a search wrote."""
    out = tmp_path_factory.mktemp("written") / "out"
    assert run_command(searched(workspace, out, "--heal", "128")) == 0
    return out


@pytest.fixture(scope="module")
def finished(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Search:
    """A search that ran."""
    with quiet():
        search = Search(given(workspace, tmp_path_factory.mktemp("work")))
        search.run()
    return search


def results_of(folder: Path) -> SearchResults:
    found = parse_results(read_json_file(folder / "convert.json")).search
    assert found is not None
    return found


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load(folder)[0].named_parameters())


def test_what_a_search_writes(workspace: Path, written: Path) -> None:
    found, model = results_of(written), load(written)[0]
    states = [size(each, 64) for each in (model.config, open_source(workspace / "run").config)]
    small_one, large = (each.state_bytes - each.position_table_bytes for each in states)
    assert small_one <= 0.5 * large
    assert set(found.targets) == set(ONLY)
    assert len(found.scores) == 9
    assert found.pair_check.pairs == 27  # 9 · 8 / 2 less those of one layer
    chosen = [each for each in found.measured if each.choice == found.chosen]
    assert chosen[0].share == pytest.approx(small_one / large)
    assert chosen[0].kl == min(each.kl for each in found.measured if not each.is_baseline)
    assert all(each.share <= 0.5 + 1e-9 for each in found.measured)
    assert {"greedy on the scores", "best of random choices"} < {each.name for each in found.measured}
    page = Page(conversion_page(parse_results(read_json_file(written / "convert.json")))).text()
    for words in ("How the design was chosen", "state at 64 tokens", "gated_delta", *(each.name for each in chosen)):
        assert words in page
    assert not (written.with_name("out.work") / "search").exists()


def test_the_choice_is_a_conversion_of_its_own(workspace: Path, written: Path, tmp_path: Path) -> None:
    rewrites = json.loads((written / "conversion.json").read_text(encoding="utf-8"))["rewrites"]
    target = f"layerwise,choices={json.dumps(rewrites[0]['choices'])}"
    assert run_command(command(workspace, tmp_path / "again", "--to", target, "--report-tokens", "0")) == 0
    ours, again = weights_of(written.with_name("out.work") / "converted"), weights_of(tmp_path / "again")
    assert ours.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in ours.items())


def test_a_killed_search_continues_with_the_same_bits(
    workspace: Path, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls, hidden = tmp_path / "killed", [0], Evaluator.hidden

    def killed(self: Evaluator, model: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] % 25 == 0:
            raise KeyboardInterrupt
        return hidden(self, model)

    monkeypatch.setattr(Evaluator, "hidden", killed)
    kills = 0
    while run_command(searched(workspace, out)) == 130:
        kills += 1
    assert kills > 1
    monkeypatch.undo()
    unhealed, healed, continued = (
        weights_of(written.with_name("out.work") / "converted"),
        weights_of(written),
        weights_of(out),
    )
    assert all(torch.equal(value, continued[name]) for name, value in unhealed.items())
    assert not all(torch.equal(value, continued[name]) for name, value in healed.items())
    first, second = (replace(results_of(each), seconds=0.0) for each in (written, out))
    assert first == second


def test_the_least_state_of_enough_quality(workspace: Path, finished: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "added_bits", lambda self, choice: 0.01 * len(choice))
    with quiet():
        choices = []
        for most in ("0.005", "0.02", "0.03"):
            search = Search(given(workspace, finished.given.folder, "state@64", f"quality<={most}"))
            if most == "0.005":
                with pytest.raises(ConfigError, match="as it is"):
                    search.run()
                continue
            conversion, results = search.run()
            assert len(conversion.items) <= float(most) * 100 + 1e-9
            choices.append(next(each for each in results.measured if each.choice == results.chosen))
    assert [each.share for each in choices] == sorted((each.share for each in choices), reverse=True)
    assert choices[-1].share < choices[0].share


def test_whole_models_are_checked_on_another_text(finished: Search) -> None:
    parts = split_text(finished.given.text)
    assert all(part.batches for part in parts)
    batches = [batch for part in parts for batch in part.batches]
    assert all(own is given for own, given in zip(batches, finished.given.text.batches, strict=True))
    choice = (0, 4, 8)  # of each layer another one
    model, new = (
        finished.weights,
        put_together(finished.weights, [finished.items[i] for i in choice], finished.given.folder),
    )
    batch = parts[2].batches[0]
    with torch.no_grad():
        models = (build_model(model), build_model(new))
        old, changed = (each.head(each(batch, parts[2].layouts[0])[0]).log_softmax(-1) for each in models)
    kl = (old.exp() * (old - changed)).sum(-1).mean(-1)
    assert finished.kl(choice, True)[: len(kl)] == pytest.approx(kl.numpy(), rel=1e-3, abs=1e-6)


def test_what_a_search_refuses(workspace: Path, finished: Search, tmp_path: Path) -> None:
    with quiet():
        with pytest.raises(ConfigError, match=r"state@64=1% reaches"):
            Search(given(workspace, tmp_path, "state@64=1%"))
        with pytest.raises(ConfigError, match="--budget"):
            Search(given(workspace, tmp_path, budget=TimeBudget(0.0, 0.0))).run()
        with pytest.raises(CheckpointError, match="another search"):
            Search(given(workspace, finished.given.folder, only=("kv_heads=1",)))


@pytest.mark.parametrize(
    "goals",
    [
        ("state=25%",), ("state@32k=250%",), ("flops=1.2.3",), ("state@0=25%",), ("speed=2x",), ("quality<=0.1",),
        ("quality", "flops"),
        ("state@32k",), ("flops=50%", "flops=25%"),
    ],
)  # fmt: skip
def test_goals_that_say_too_little(goals: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--search"):
        parse_goals(goals)


def test_options_of_a_search(workspace: Path, tmp_path: Path) -> None:
    source = open_source(workspace / "run")
    assert [goal.cost for goal in parse_goals(["flops=80%", "state@1k"])] == ["flops@1024", "state@1024"]
    assert kept_layers("0,2", source.config) == (0, 2)
    for wrong in ("3", "last"):
        with pytest.raises(ConfigError, match="--keep"):
            kept_layers(wrong, source.config)
    out = tmp_path / "out"
    for words in (["--search", GOAL, "--to", "kv_heads=1"], ["--to", "kv_heads=1", "--keep", "0"]):
        assert run_command(command(workspace, out, *words)) == 2
