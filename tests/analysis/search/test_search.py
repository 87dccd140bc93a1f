"""`heddle convert --search`: what it writes, that it continues after kills, and which goals it refuses."""

import copy
import itertools
import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from heddle.cli.main import run_command
from heddle.conversion import mixer_replacement
from heddle.conversion.convert import FolderWeights, open_source
from heddle.conversion.fit import fit_mixer
from heddle.conversion.heal import calibration_from_corpus, convert_and_heal
from heddle.conversion.weights import CalibrationText, build_model
from heddle.data.corpus import prepare_corpus
from heddle.errors import CheckpointError, ConfigError
from heddle.lab.compare.budget import TimeBudget
from heddle.lab.compare.results import plain
from heddle.lab.compare.tables import format_percent, format_signed
from heddle.lab.conversion import convert as convert_module
from heddle.lab.conversion.results import parse_results
from heddle.lab.pages.conversion import conversion_page
from heddle.lab.pages.search import distinct_points
from heddle.lab.search import goals as goals_module
from heddle.lab.search import search as search_module
from heddle.lab.search.goals import decode_speed, parse_goals, recall_rows
from heddle.lab.search.plan import SearchInput, expected_seconds, kept_layers, search_tokens, split_text
from heddle.lab.search.results import SearchResults
from heddle.lab.search.scores import TIMED_STEPS, Evaluator, put_together
from heddle.lab.search.search import Search, added_interval
from heddle.lab.search.solve import solve
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.size import size
from heddle.parts.layout import Layout
from heddle.progress import quiet
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.storage.model import load
from heddle.training.evaluation.loss_profile import frequency_groups, token_frequencies
from heddle.training.evaluation.scores import finite_ratio
from tests import small
from tests.analysis.conversion.conversions import single as results_page
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
    found = SearchInput(source, text, parse_goals(goals or [GOAL]), ONLY, (), 16, folder, corpus)
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert_module, "remove_work", lambda *_: None)  # tests read what was converted
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
    assert re.findall(r"(?<![\w-])-\d\S*|[+−]0\.0+(?!\d)", page) == []  # a minus is a minus, and zero has no sign
    assert found.frontier[0].budget == 1.0
    assert (found.frontier[0].kl, found.frontier[0].added_bits) == (0.0, 0.0)
    for point in found.frontier:
        assert point.share <= point.budget + 1e-9
        assert point.share == point.shares["state@64"]
        assert len(point.positions) == len(found.positions)
    for point in distinct_points(found)[1:]:
        assert f"frontier, budget {format_percent(point.budget)}" in page
    assert len({tuple(point.choice) for point in found.frontier}) == len(distinct_points(found))
    assert (found.tried, found.recall, found.decode_context, found.second) == ([], None, None, None)
    assert "Loss by frequency of the token" in page
    assert not (written.with_name("out.work") / "search").exists()


def test_the_choice_is_a_conversion_of_its_own(workspace: Path, written: Path, tmp_path: Path) -> None:
    rewrites = json.loads((written / "conversion.json").read_text(encoding="utf-8"))["rewrites"]
    target = f"layerwise,choices={json.dumps(rewrites[0]['choices'])}"
    assert run_command(command(workspace, tmp_path / "again", "--to", target, "--report-tokens", "0")) == 0
    ours, again = weights_of(written.with_name("out.work") / "converted"), weights_of(tmp_path / "again")
    assert ours.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in ours.items())


def test_baselines_are_healed_alike_and_continue_after_a_kill(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    stages = [word for stage in ("50%:layers", "50%:logits") for word in ("--heal-stage", stage)]
    only = ["--only", "kv_heads=1", "--only", "window=4", "--search", GOAL, "--heal-baselines", *stages]
    words = command(workspace, out, *only, "--heal", "256")
    for name, calls in (("killed", 3), ("whole", 99)):
        left = iter(range(calls))

        def dying(*arguments: Any, left: Any = left) -> Any:
            if next(left) == 2:
                raise KeyboardInterrupt
            return convert_and_heal(*arguments)

        monkeypatch.setattr(convert_module, "convert_and_heal", dying if name == "killed" else convert_and_heal)
        monkeypatch.setattr(convert_module, "remove_work", lambda *_: None)
        monkeypatch.setattr("heddle.lab.conversion.convert.shutil.rmtree", lambda *_, **options: None)
        assert run_command(words) == (130 if name == "killed" else 0)
    results = parse_results(read_json_file(out / "convert.json"))
    assert results.search is not None
    names = [each.name for each in results.search.measured if each.is_baseline and each.choice != results.search.chosen]
    unlike = {tuple(each.choice) for each in results.search.measured if each.name in names}
    healed = [model.name for model in results.models if model.stage == "healed"]
    assert healed[0] == "search, healed"
    assert len(healed) == 1 + len(unlike) > 2
    assert set(healed[1:]) <= {f"{name}, healed" for name in names}
    folders = [out, *sorted((tmp_path / "out.work" / "baselines").glob("[0-9]"))]
    records = [json.loads((folder / "conversion.json").read_text(encoding="utf-8")) for folder in folders]
    assert len({json.dumps(each["rewrites"]) for each in records}) == len(healed)
    stages_of = [[{**stage, "learning_rate": 0} for stage in each["healing"]["stages"]] for each in records]
    assert all(stages == stages_of[0] for stages in stages_of)
    losses = {model.name: finite_ratio(model.windows) or 0.0 for model in results.models if model.stage == "healed"}
    best = min(healed[1:], key=lambda name: losses[name])
    sentence = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Against the best of"))
    assert f"{len(healed) - 1} baselines that were healed alike, “{best.removesuffix(', healed')}”" in sentence
    assert format_signed(losses[healed[0]] - losses[best]) in sentence


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
                with pytest.raises(ConfigError, match="MODEL unchanged"):
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
        late = Search(given(workspace, tmp_path, budget=TimeBudget(0.0, 0.0)))
        with pytest.raises(ConfigError, match="--budget"):
            late.run()
        assert sum((late.given.folder / item.file_name).is_file() for item in late.items) == 1  # it ends after a fit
        with pytest.raises(CheckpointError, match="another search"):
            Search(given(workspace, finished.given.folder, only=("kv_heads=1",)))
        with pytest.raises(CheckpointError, match="another search"):  # before anything is timed
            expected_seconds(given(workspace, finished.given.folder, only=("kv_heads=1",)))


def test_a_search_is_timed_by_a_few_steps_of_each_kind(
    workspace: Path, finished: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a default search, which tries every recurrence."""
    taken: list[int] = []

    def counted(*arguments: Any) -> Any:
        taken.append(arguments[2].steps)
        return fit_mixer(*arguments)

    monkeypatch.setattr(mixer_replacement, "fit_mixer", counted)
    with quiet():
        plan, seconds = expected_seconds(given(workspace, tmp_path, only=()))
        assert {*plan.targets} == {item.target for item in plan.items}
        assert len(taken) >= 4
        assert set(taken) == {TIMED_STEPS}
        assert not any(tmp_path.iterdir())
        plan, left = expected_seconds(finished.given)  # its fits are there
        assert [item.file_name for item in plan.items] == [item.file_name for item in finished.items]
        assert 0 < left < seconds
        with pytest.raises(ConfigError, match="--budget"):
            expected_seconds(given(workspace, tmp_path, budget=TimeBudget(0.0, 0.0)))


@pytest.mark.parametrize(
    "goals",
    [
        ("state=25%",), ("state@32k=250%",), ("flops=1.2.3",), ("state@0=25%",), ("speed=2x",), ("quality<=0.1",),
        ("decode=50%",), ("decode<=2x",), ("decode=0x",), ("decode",), ("decode@1k=2x", "decode@2k=2x"),
        ("recall>=95%",), ("recall>=120%", "state@1k"), ("recall<=95%", "state@1k"), ("flops@2k=50%",),
        ("quality>=0.1", "state@1k"), ("state@1k>=50%",), ("state@1k=2x",), ("recall>=95%", "quality<=0.1"),
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


def test_a_dry_run_says_what_a_search_tries_and_how_long_it_takes(
    workspace: Path, finished: Search, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run_command(searched(workspace, out, "--dry-run")) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for target in finished.targets:
        layers = sum(item.target == target for item in finished.items)
        assert f"{target} in {layers} layers" in printed
    assert re.search(r"about \d+ s, without healing and report. Nothing was written.", printed)
    assert run_command(searched(workspace, out, "--dry-run", "--json")) == 0
    plan = json.loads(capsys.readouterr().out)
    assert sum(plan["replacements"].values()) == len(finished.items)
    assert plan["seconds"] > 0
    assert not list(tmp_path.iterdir())


# Goals that whole models are measured for.


@cache
def bytes_of(design: ModelConfig, length: int) -> float:
    """What decoding reads, by another way than the search's costs."""
    model = build(design, device="meta")
    state = model.init_state(1, length)
    return float(sum(4 * parameter.numel() for parameter in model.parameters()) + sum(state.layer_bytes))


def timed(design: ModelConfig, context: int, device: str, dtype: torch.dtype) -> float:
    """A machine that reads a million bytes a second."""
    return 1e6 / bytes_of(design, context)


def again(workspace: Path, finished: Search, folder: Path, *goals: str, **fields: Any) -> Search:
    """Another search with the fits of a finished one."""
    shutil.copytree(finished.given.folder, folder)
    made = read_json_file(folder / "evaluations.json")
    kept = {key: value for key, value in made.items() if not key.startswith(("decode", "recall"))}
    write_json_file(folder / "evaluations.json", kept)
    with quiet():
        return Search(given(workspace, folder, *goals, **fields))


def check_decode(search: Search) -> SearchResults:
    """Of all assignments within the largest budget that is fast enough, the one that was tried has the least KL."""
    with quiet():
        conversion, found = search.run()
    _, table = search.scores()
    new = conversion.plan().design
    speed = timed(new, 64, "cpu", torch.float32) / timed(search.weights.design, 64, "cpu", torch.float32)
    assert speed >= 1.3
    chosen = next(each for each in found.measured if each.choice == found.chosen)
    assert chosen.decode == pytest.approx(speed)
    met = [tried for tried in found.tried if not tried.missed]
    largest = max(tried.budget for tried in met)
    assert largest < min(tried.budget for tried in found.tried if tried.missed)
    values = []
    for items in itertools.product(*[[None, *table.of_layer(layer)] for layer in range(3)]):
        choice = tuple(item for item in items if item is not None)
        design = put_together(search.weights, [search.items[item] for item in choice], search.given.folder).design
        if bytes_of(design, 64) <= largest * bytes_of(search.weights.design, 64):
            values.append(table.value(choice))
    assert min(table.value(search_choice(search, tried.choice)) for tried in met) == pytest.approx(min(values))
    return found


def search_choice(search: Search, targets: list[str]) -> tuple[int, ...]:
    """The numbers of replacements by layer."""
    by_place = {(item.layer, item.target): number for number, item in enumerate(search.items)}
    return tuple(by_place[place] for place in enumerate(targets) if place[1])


def test_a_model_that_decodes_faster_at_the_least_loss(workspace: Path, finished: Search, tmp_path: Path) -> None:
    found = check_decode(again(workspace, finished, tmp_path / "work", "decode@64=1.3x", timer=timed))
    assert found.axis == "reads@64"
    calls: list[Any] = []

    def counted(*arguments: Any) -> float:
        calls.append(arguments)
        return timed(*arguments)

    with quiet():  # as after a kill
        _, same = Search(given(workspace, tmp_path / "work", "decode@64=1.3x", timer=counted)).run()
    assert replace(same, seconds=0.0) == replace(found, seconds=0.0)
    assert not calls
    assert found.decode_context == 64
    assert [point.decode for point in found.frontier] == sorted(point.decode or 0.0 for point in found.frontier)
    assert found.frontier[0].decode == 1.0
    assert all(each.decode is None for each in found.measured if each.is_baseline)
    whole = parse_results(plain(replace(results_page(), search=found)))
    page = Page(conversion_page(whole)).text()
    for words in ("What was tried for the goals", "misses decode@64=1.3x", "meets all", "decode at 64", "not timed"):
        assert words in page


@pytest.mark.parametrize("fault", ["measured_is_ignored", "source_is_timed"])
def test_a_slow_choice_is_noticed(
    fault: str, workspace: Path, finished: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "measured_is_ignored":
        monkeypatch.setattr(Search, "meets", lambda self, choice, budget: True)
    else:
        monkeypatch.setattr(search_module, "put_together", lambda source, items, folder: source)
    with pytest.raises((AssertionError, ConfigError)):
        check_decode(again(workspace, finished, tmp_path / "work", "decode@64=1.3x", timer=timed))


def test_speed_is_that_of_the_context_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def speeds(design: Any, contexts: Any, device: str, dtype: Any) -> Any:
        return {"prefill": [], "decode": [(contexts[0], [1.0, float(contexts[0]), 1e6])]}

    monkeypatch.setattr(goals_module, "measure_speeds", speeds)
    assert decode_speed(small.config(), 96, "cpu", torch.float32) == 96.0
    assert [goal.cost for goal in parse_goals(["decode=2x", "state@4k=50%"])] == ["decode@4096", "state@4096"]


def test_the_cheapest_that_recalls_enough(
    workspace: Path, finished: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recall(self: Search, choice: tuple[int, ...]) -> Any:  # a window hurts far needles, others hurt less
        lost = sum(0.3 if "window" in self.items[item].target else 0.02 for item in choice)
        return np.array([[0.8 - 0.8 * lost] * 4, [0.8] * 4, [0.1, 0.1, 0.1, 0.2]])

    monkeypatch.setattr(Search, "recall", recall)
    monkeypatch.setattr(Search, "needles", [(0.1, [Rows()]), (0.9, [Rows()]), (None, [Rows()])])
    search = again(workspace, finished, tmp_path / "work", "state@64", "recall>=95%")
    with quiet():
        _, found = search.run()
    chosen = next(each for each in found.measured if each.choice == found.chosen)
    assert chosen.recall == pytest.approx(recall(search, search_choice(search, found.chosen))[:2, 0])
    assert sum(chosen.recall) / 1.6 >= 0.95
    met = {tried.budget for tried in found.tried if not tried.missed}
    assert all(tried.budget <= min(met) for tried in found.tried if tried.missed)
    assert found.recall is not None
    assert (found.recall.accuracy, found.recall.guessed, found.recall.depths) == ([0.8, 0.8], 0.125, [0.1, 0.9])
    page = Page(conversion_page(replace(results_page(), search=found))).text()
    for words in ("depth 10%", "without them 12 % are guessed", "recall"):
        assert words in page
    monkeypatch.setattr(Search, "recall", lambda self, choice: np.array([[0.3, 0.1, 0.2, 0.4]] * 3))
    with quiet(), pytest.raises(ConfigError, match="hardly recalls"):
        again(workspace, finished, tmp_path / "none", "state@64", "recall>=95%").run()


class Rows:
    """Needles of which only the shape is asked."""

    targets = np.zeros((2, 70))


def test_goals_that_no_model_meets_name_the_best(workspace: Path, finished: Search, tmp_path: Path) -> None:
    with quiet(), pytest.raises(ConfigError, match=r"decode@64=99x: the best of \d+ choices .* has \d+\.\d+ times"):
        again(workspace, finished, tmp_path / "work", "decode@64=99x", timer=timed).run()


def test_recall_is_that_of_a_plain_loop(workspace: Path, finished: Search, tmp_path: Path) -> None:
    corpus, tokens = finished.given.corpus, torch.arange(4 * 80).view(4, 80) % 200 + 20
    lengths = [[80], [80], [80], [30, 50]]
    text = CalibrationText([tokens], [Layout.packed(lengths, 80)])
    with quiet():
        rows = recall_rows(corpus, text, tmp_path / "recall.tokens")
    assert [depth for depth, _ in rows] == [0.1, 0.3, 0.5, 0.7, 0.9, None]
    documents = {bytes(row.numpy().astype(np.uint8)) for row in tokens}
    for depth, batches in rows:
        for row in np.concatenate([batch.tokens for batch in batches]):
            needle = row[-16:]
            assert any(bytes(needle.astype(np.uint8)) in document for document in documents)
            if depth is not None:
                start = round(depth * (len(row) - 32))
                assert (row[start : start + 16] == needle).all()
    search, choice = copy.copy(finished), (0, 4)
    vars(search)["needles"] = rows[2:3] + rows[-1:]
    model = build_model(put_together(search.weights, [search.items[i] for i in choice], search.given.folder))
    right = []
    for batch in rows[2][1]:
        with torch.no_grad():
            given_tokens = torch.from_numpy(batch.tokens[:, :-1].copy())
            predicted = model.head(model(given_tokens)[0]).argmax(-1).numpy()
        right += [(predicted[row, -8:] == batch.tokens[row, -8:]).mean() for row in range(len(batch.tokens))]
    assert search.recall(choice)[0] == pytest.approx(right)
    short = CalibrationText([tokens[:, :40]], [Layout.packed([[40]] * 4, 40)])
    with pytest.raises(ConfigError, match=r"recall.*66 tokens"):
        recall_rows(corpus, short, tmp_path / "short.tokens")


def test_a_second_text_says_how_much_the_choice_depends_on_the_first(
    workspace: Path, finished: Search, tmp_path: Path
) -> None:
    text = finished.given.text
    second = replace(text, batches=[batch % 5 + 40 for batch in text.batches], name="other", sha256="other")
    search = again(workspace, finished, tmp_path / "work", second=second)
    with quiet():
        _, found = search.run()
        other = Search(given(workspace, tmp_path / "work" / "second", text=second))
        tables = [each.scores()[1] for each in (search, other)]
    told = found.second
    assert told is not None
    assert (told.name, told.tokens) == ("other", text.tokens)
    correlation = spearmanr(tables[0].kl, tables[1].kl).statistic
    assert told.correlation == pytest.approx(correlation, abs=1e-12)
    assert correlation < 1 - 1e-9
    here, there = (solve(table, search.limits) for table in tables)
    assert here is not None
    assert there is not None
    assert search_choice(search, told.choice) == there.choice
    kinds = [search._by_layer(each.choice) for each in (here, there)]
    assert told.same_layers == sum(a == b for a, b in zip(*kinds, strict=True))
    row = next(each for each in found.measured if each.name == "search on other, the second text")
    assert row.kl == pytest.approx(float(search.kl(there.choice, True).mean()))
    assert (
        "the second text, the best choice agrees in"
        in Page(conversion_page(replace(results_page(), search=found))).text()
    )


def test_losses_by_group_are_those_of_a_plain_loop(finished: Search) -> None:
    choice, lengths = (0, 4), finished.given.corpus.tokenizer.byte_lengths
    groups = frequency_groups(token_frequencies(finished.given.corpus))
    items = [finished.items[item] for item in choice]
    model = build_model(put_together(finished.weights, items, finished.given.folder))
    expected, row, edges = np.zeros((1 + 5 + int(groups.max()) + 1, 64, 2)), 0, [0, 1, 2, 4, 8, 16]
    for batch, layout in zip(finished.check.batches, finished.check.layouts, strict=True):
        with torch.no_grad():
            losses = -model.head(model(batch, layout)[0]).log_softmax(-1) / np.log(2)
        for tokens, ids, positions, bits in zip(batch, layout.dense_segment_ids, layout.positions, losses, strict=True):
            for place in range(len(tokens) - 1):
                target = int(tokens[place + 1])
                if ids[place] == ids[place + 1] and lengths[target] > 0:
                    at = next(number for number in range(5) if positions[place] < edges[number + 1])
                    for group in (0, 1 + at, 6 + int(groups[target])):
                        expected[group, row] += (float(bits[place, target]), lengths[target])
            row += 1
    found = finished._losses(choice)
    assert found == pytest.approx(expected[:, :row], rel=1e-4, abs=1e-4)
    assert found[1:6].sum(0) == pytest.approx(found[0], rel=1e-9)
    added = finished.added(choice)
    base = finished._losses(())
    for group, interval in enumerate(added):
        if interval is not None:
            difference = found[group, :, 0].sum() - base[group, :, 0].sum()
            assert interval[0] == pytest.approx(difference / base[group, :, 1].sum())
    shifted = np.roll(expected, 1, axis=0)[:, :row]  # what groups of the wrong tokens would be
    assert found != pytest.approx(shifted, rel=1e-4, abs=1e-4)


def test_the_interval_of_added_bits_covers_the_truth_as_often_as_it_says() -> None:
    draw, hits = np.random.default_rng(0), 0
    for _ in range(400):
        sizes = draw.integers(20, 60, 30).astype(float)
        before = np.stack([2 * sizes + draw.normal(0, 5, 30), sizes], 1)
        after = before + np.stack([0.1 * sizes + draw.normal(0, 3, 30), np.zeros(30)], 1)
        found = added_interval(before, after)
        assert found is not None
        hits += abs(found[0] - 0.1) <= found[1]
    assert 0.92 <= hits / 400 <= 0.98
    assert added_interval(np.zeros((3, 2)), np.zeros((3, 2))) is None


def test_impossible_goals_are_refused_before_anything_is_read(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("was read")

    monkeypatch.setattr(convert_module, "prepare_corpus", read)
    monkeypatch.setattr(FolderWeights, "tensor", read)
    for options, words in (
        ("--search state@64=10% --only kv_heads", "state@64=10% reaches 25.0%"),
        ("--search state@64 --search recall>=95%", "recall>=95%: needs sequences of 66 tokens or more; give a longer"),
        ("--search decode=2", "decode=2: needs a multiple of MODEL's speed; write decode=2x"),
        ("--search parameters=10%", "parameters=10% reaches"),
        ("--search parameters=90% --only window=4", "window=4: saves nothing that the goals limit"),
    ):
        assert run_command(command(workspace, tmp_path / "out", *options.split())) == 2
        assert words in capsys.readouterr().err
