"""`heddle convert` measures what it wrote, compares methods and sizes, and continues after it was killed."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from heddle.cli.main import run_command
from heddle.conversion import weights as weights_module
from heddle.conversion.convert import Conversion, FolderWeights, conversion_difference
from heddle.conversion.heal import calibration_from_corpus, convert_and_heal
from heddle.conversion.targets import conversion_variants
from heddle.conversion.weights import Weights
from heddle.data.corpus import Corpus, prepare_corpus
from heddle.data.token_file import TokenFile
from heddle.errors import ConfigError, DataError
from heddle.lab.compare import probes as speed_module
from heddle.lab.compare.probes import time_training_steps
from heddle.lab.conversion import budget as budget_module
from heddle.lab.conversion import convert as convert_module
from heddle.lab.conversion import measure as measure_module
from heddle.lab.conversion import run as run_module
from heddle.lab.conversion.convert import _ConversionJob
from heddle.lab.conversion.results import ConversionResults, harmed_models, parse_results
from heddle.model.decoder import Decoder, Layer, build
from heddle.model.load_config import load_config
from heddle.storage.file_io import read_json_file
from heddle.storage.folder import read_folder
from heddle.storage.model import find_model_folder, load, save
from heddle.storage.run_log import read_log
from heddle.tokenization.tokenizer import Tokenizer
from heddle.training import loop
from heddle.training.built_models import BuiltModels, build_models
from heddle.training.evaluation.scores import Scores
from heddle.training.job import TrainingJob
from heddle.training.loop import TrainingResult, evaluate
from heddle.training.step import apply_gradients
from tests import small
from tests.training.test_resume import dying

QUICK = ["--sequence-length", "16", "--report-tokens", "128", "--calibration-tokens", "256", "--quiet"]
SPEED = ["--speed-context-length", "4", "--speed-context-length", "8", "--device", "cpu"]
FEWER = ["--to", "kv_heads=2,groups=contiguous,merge=mean"]
SWEEP = ["--sweep", "kv_heads=2,1,groups=contiguous,merge=mean"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and a run of four heads that trained on it."""
    return small.trained_run(tmp_path_factory.mktemp("workspace"), 2)


@pytest.fixture(autouse=True)
def _short_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heddle.lab.compare.probes.DECODED_TOKENS", 4)


def command(workspace: Path, out: Path, *options: str) -> list[str]:
    return ["convert", f"{workspace}/run", str(out), "--data", f"{workspace}/text", *QUICK, *SPEED, *options]


def aloud(words: list[str]) -> list[str]:
    """The same command, which says what it does."""
    return [word for word in words if word != "--quiet"]


def report_of(out: Path) -> ConversionResults:
    """What a conversion reported."""
    return parse_results(read_json_file(out / "convert.json"))


def stages_of(out: Path) -> list[str]:
    """The stage of each model in a report."""
    return [model.stage for model in report_of(out).models]


def steps_take(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """As if a step of training took so long."""
    monkeypatch.setattr(budget_module, "time_training_steps", lambda job, built: [seconds])


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Weights]:
    """The models that were measured; the third time is interrupted."""
    measured: list[Weights] = []

    def watch(weights: Weights) -> Decoder:
        measured.append(weights)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return weights_module.build_model(weights)

    monkeypatch.setattr(measure_module, "build_model", watch)
    return measured


def test_one_conversion_is_measured_before_and_after_healing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fewer"
    assert run_command(command(workspace, out, *FEWER, "--heal", "256")) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith(
        "bits per byte on held-out text after healing (beginning mid-text, without BOS, on other sequences than "
        "the report's)"
    )
    assert printed[1].startswith("The original is hardly trained (")
    assert printed[2].startswith("With half of the state (128 B per token at 8k), the model ")
    assert printed[-2:] == [f"report: {out}/convert.html", str(out)]
    results = report_of(out)
    assert [model.stage for model in results.models] == ["original", "converted", "healed"]
    keys = [model.key for model in results.models]
    assert len(set(keys)) == 3
    assert {len(model.windows) for model in results.models} == {results.text.windows}
    assert "heddle convert" in (out / "convert.html").read_text(encoding="utf-8")
    model, tokenizer = load(out)
    assert tokenizer is not None
    assert model.config.resolved().layers[0].mixer.dump()["kv_heads"] == 2  # type: ignore[union-attr]
    for again, sentence in (
        ([*FEWER, "--heal", "256"], f"{out}: exists already: this conversion is finished, see {out}/convert.html; "),
        (FEWER, f"{out}: exists already: another conversion, of `heddle convert "),
    ):
        assert run_command(command(workspace, out, *again)) == 2
        assert sentence in capsys.readouterr().err


def test_a_finished_conversion_without_a_report_says_so(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, target = tmp_path / "exact", ["--to", "position.layout=interleaved", "--report-tokens", "0"]
    assert run_command(command(workspace, out, *target)) == 0
    assert run_command(command(workspace, out, *target)) == 2
    assert f"{out}: exists already: this conversion is finished; to convert" in capsys.readouterr().err
    assert run_command(command(workspace, out, "--to", "fold_norms,final_norm=false", "--report-tokens", "0")) == 2
    assert f"{out}: exists already; choose another name" in capsys.readouterr().err


LATENT = "latent_attention,kv_rank=8,rope_dim=4"


@pytest.mark.parametrize(
    "target",
    [
        "kv_heads=2",
        "kv_heads=1,groups=contiguous,merge=mean",
        "shared_kv,every=2",
        LATENT,
        f"{LATENT},exportable=true",
    ],
)
def test_a_dry_run_reads_no_text_that_decides_no_size(
    workspace: Path, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", f"{workspace}/run", "--to", target, "--dry-run"]
    short = ["--calibration-tokens", "1024", "--sequence-length", "16"]
    monkeypatch.setattr(convert_module, "_corpus", lambda *arguments: pytest.fail("the text is read"))
    assert run_command([*words, "--data", f"{workspace}/text", *short]) == 0
    known = capsys.readouterr()
    files = list((workspace / "text").iterdir())
    size = sum(path.stat().st_size for path in files)
    assert f"text: {len(files)} files, {size / 1000:.1f} kB; listed, not read" in known.err
    assert run_command([*words, "--quiet"]) == 0
    assert capsys.readouterr().out == known.out
    assert "exports as" in known.out


def test_a_dry_run_reads_the_text_that_decides_sizes(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()
    corpus_of = convert_module._corpus

    def watch(*arguments: Any) -> Corpus:
        read.append(1)
        return corpus_of(*arguments)

    monkeypatch.setattr(convert_module, "_corpus", watch)
    words = ["convert", f"{workspace}/run", "--to", "kv_heads,state_budget=50%", "--dry-run", "--quiet"]
    words += ["--data", f"{workspace}/text", "--calibration-tokens", "256", "--sequence-length", "16"]
    assert run_command(words) == 0
    assert read


def test_other_options_are_named_as_the_command_line_names_them() -> None:
    base = {"source": {"name": "a"}, "rewrites": [{"rewrite": "window"}]}
    text = {"name": "t", "sha256": "0", "samples": 16, "tokens": 256}
    for path, change, named in (
        ("text", {**text, "samples": 32, "tokens": 512}, "--calibration-tokens was 256, now it is 512"),
        ("text", {**text, "samples": 32}, "--sequence-length (text.samples was 16, now it is 32)"),
        ("text", {**text, "sha256": "1"}, '--data (text.sha256 was "0", now it is "1")'),
        ("rewrites", [{"rewrite": "depth"}], '--to (rewrites[0].rewrite was "window", now it is "depth")'),
        ("source", {"name": "b"}, 'MODEL (source.name was "a", now it is "b")'),
    ):
        assert conversion_difference(base | {"text": text}, base | {"text": text} | {path: change}) == named
    assert conversion_difference(base, base) is None


def test_a_healing_is_evaluated_on_as_much_text_as_the_report(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And each of its two losses says which sequences it is of."""
    asked: list[int] = []

    def watch(model: Decoder, job: TrainingJob, tokens: int, *others: Any) -> Scores:
        asked.append(tokens)
        return evaluate(model, job, tokens, *others)

    monkeypatch.setattr(loop, "evaluate", watch)
    options = [*FEWER, "--heal", "128"]
    assert run_command(command(workspace, tmp_path / "fewer", *options)) == 0
    printed = capsys.readouterr().out
    assert "after healing (beginning mid-text, without BOS, on other sequences than the report's)" in printed
    assert re.search(r"Losses of this report: \d+ held-out sequences of 16 tokens, beginning mid-text", printed)
    assert run_command(command(workspace, tmp_path / "least", *options, "--report-tokens", "0")) == 0
    assert asked == [128, 4 * 16]


def test_a_budget_counts_what_is_read_after_healing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a report, too: four rows take as long as 1.3 steps of one row."""
    steps_take(monkeypatch, 60.0)
    monkeypatch.setattr(budget_module, "time_reading", lambda batch, model: 20.0 / 16)
    words = [*FEWER, "--heal-batch-size", "1", "--heal", "6400", "--report-tokens", "0", "--budget", "30m"]
    fits = []
    for name in ("counted", "not counted"):
        assert run_command(command(workspace, tmp_path / name, *words)) == 1
        fits.append(int(capsys.readouterr().err.partition("give --heal ")[2].partition(" ")[0]) // 16)
        monkeypatch.setattr(budget_module, "evaluation_tokens", lambda settings: 0)
    assert fits[1] - fits[0] in (1, 2)


@dataclass
class Clock:
    """Time that passes only as models run."""

    seconds: float = 0.0

    def perf_counter(self) -> float:
        """The time."""
        return self.seconds

    monotonic = perf_counter


@pytest.mark.parametrize("fault", [None, "a third of a step"])
def test_a_budget_knows_how_long_the_report_takes(
    workspace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fault: str | None,
) -> None:
    """Within 30 %, where a step is mostly the optimizer's: a token takes 0.01 s in each layer, an update a minute."""
    clock = Clock()

    def run(layer: Layer, stream: Any, *arguments: Any) -> Any:
        if stream.device.type != "meta":
            clock.seconds += 0.01 * stream.shape[0] * stream.shape[1]
        return forward(layer, stream, *arguments)

    def update(*arguments: Any) -> Any:
        clock.seconds += 60.0
        return apply_gradients(*arguments)

    forward = Layer.forward
    monkeypatch.setattr(Layer, "forward", run)
    monkeypatch.setattr(speed_module, "apply_gradients", update)
    for module in (speed_module, run_module):
        monkeypatch.setattr(module, "time", clock)
    if fault:
        step = 60.0 + 2 * 3 * 16 * 0.01
        monkeypatch.setattr(run_module, "time_reading", lambda batch, model: step / 3 / 16)
    words = command(workspace, tmp_path / "fewer", *FEWER, "--heal-batch-size", "1")
    assert run_command([*words, "--heal", "640000", "--budget", "60m"]) == 1
    said = capsys.readouterr().err.partition("the report, which takes about ")[2].partition(";")[0]
    number, unit = said.split()
    estimated = float(number) * {"s": 1, "min": 60}[unit]
    measured: list[float] = []

    def measure(*arguments: Any) -> Any:
        began = clock.seconds
        results = measure_conversion(*arguments)
        measured.append(clock.seconds - began)
        return results

    measure_conversion = run_module.measure_conversion
    monkeypatch.setattr(run_module, "measure_conversion", measure)
    assert run_command([*words, "--heal", "64"]) == 0
    assert (abs(estimated / measured[0] - 1) < 0.3) == (fault is None), (estimated, measured)


@pytest.mark.parametrize(("tokens", "steps"), [(256, 4), (2048, 32)])
def test_a_healing_says_how_long_it_takes(
    workspace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    steps: int,
) -> None:
    """From timed steps towards the teacher, before the first one; a short one is not timed, nor one that goes on."""
    timed: list[float] = []

    def time_steps(job: TrainingJob, built: BuiltModels) -> list[float]:
        timed.extend(time_training_steps(job, built))
        return [60.0, 50.0, 100.0]

    monkeypatch.setattr(budget_module, "time_training_steps", time_steps)
    words = aloud(command(workspace, tmp_path / "fewer", *FEWER, "--heal", str(tokens), "--heal-batch-size", "4"))
    assert run_command(words) == 0
    time = ", about 32 min (60 s/step)" if steps > 20 else "; the first will show how long they take"
    said = f"healing: {steps} steps of 64 tokens{time}"
    lines = capsys.readouterr().err.splitlines()
    assert said in lines
    assert "measuring the loss that the conversion added, which decides the learning rate" in lines
    assert ("timing the first steps of the healing" in lines) == bool(timed) == (steps > 20)
    assert all(seconds > 0 for seconds in timed)


def test_a_healing_longer_than_the_budget_is_refused_with_what_fits(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first step; what was converted is kept, and a command with as many tokens as are named goes on."""
    steps_take(monkeypatch, 60.0)
    words = aloud(command(workspace, tmp_path / "fewer", *FEWER, "--heal-batch-size", "4", "--budget", "30m"))
    assert run_command([*words, "--heal", "6400"]) == 1
    err = capsys.readouterr().err
    assert "--heal 6400: takes about 100 min, and --budget 30m leaves" in err
    assert "converted models are kept" in err
    fits = int(err.partition("give --heal ")[2].partition(" ")[0])
    assert 0.8 * 30 * 64 < fits <= 30 * 64
    assert not (tmp_path / "fewer").exists()
    assert (tmp_path / "fewer.work").is_dir()
    assert run_command([*words, "--heal", str(fits)]) == 0
    assert f"healing: {fits // 64} steps of 64 tokens, about" in capsys.readouterr().err
    steps_take(monkeypatch, 1e6)
    words[2] = str(tmp_path / "other")
    assert run_command([*words, "--heal", "6400"]) == 1
    assert re.search(r"; give --budget \d+m or more, or --heal 0; ", capsys.readouterr().err)


def test_a_sweep_is_refused_by_the_time_of_all_healings(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_take(monkeypatch, 60.0)
    words = command(workspace, tmp_path / "sweep", *SWEEP, "--heal-batch-size", "4", "--budget", "30m")
    assert run_command([*words, "--heal", "1280"]) == 1
    assert "--heal 1280: takes about 40 min" in capsys.readouterr().err


def test_a_budget_alone_heals_for_what_it_leaves(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All variants as long, also those that a later call heals, whatever a step takes then."""
    steps_take(monkeypatch, 15.0)
    words = aloud(command(workspace, tmp_path / "sweep", *SWEEP, "--heal-batch-size", "4", "--budget", "30m"))
    with dying(monkeypatch, "apply_gradients", 3, before=True):
        assert run_command(words) != 0
    said = capsys.readouterr().err
    steps = int(said.partition("the budget chose: --heal ")[2].partition(" ")[0]) // 64
    assert 50 <= steps < 60  # of 15 s twice, in 30 minutes less the report of five models
    assert f"{steps * 64} (what the budget leaves)" in said
    steps_take(monkeypatch, 1.0)
    assert run_command(words) == 0
    assert "the budget chose" not in capsys.readouterr().err
    documents = sorted((tmp_path / "sweep").rglob("conversion.json"))
    healings = [json.loads(path.read_text(encoding="utf-8")).get("healing") for path in documents]
    assert [healing["steps"] for healing in healings if healing] == [steps, steps]


def test_a_sweep_that_chose_not_to_heal_keeps_to_it(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later call has more time for the variants that are left, and would heal these alone; the next one is new."""
    steps_take(monkeypatch, 600.0)
    words = aloud(command(workspace, tmp_path / "sweep", *SWEEP, "--heal-batch-size", "4", "--budget", "30m"))
    with monkeypatch.context() as patch:
        chosen: list[Path] = []

        def convert_one(conversion: Conversion, *arguments: Any) -> TrainingResult | None:
            if chosen:
                raise KeyboardInterrupt
            chosen.append(arguments[3])
            return convert_and_heal(conversion, *arguments)

        patch.setattr(convert_module, "convert_and_heal", convert_one)
        assert run_command(words) != 0
    assert "the budget chose: no healing" in capsys.readouterr().err
    assert (chosen[0] / "conversion.json").is_file()
    steps_take(monkeypatch, 1e-3)
    assert run_command(words) == 0
    assert stages_of(tmp_path / "sweep") == ["original", "converted", "converted"]
    (tmp_path / "sweep").rename(tmp_path / "first")
    steps_take(monkeypatch, 15.0)
    assert run_command(words) == 0
    assert "the budget chose: --heal" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "sweep"]


def test_a_budget_chooses_the_calibration_and_refuses_one_that_does_not_fit(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the shortest text, 64 tokens, it takes 40 s; a later call keeps to what was chosen."""
    monkeypatch.setattr(budget_module, "calibration_seconds", lambda *_: 40.0)
    steps_take(monkeypatch, 1e4)
    words = command(workspace, tmp_path / "fewer", "--to", "kv_heads=2")
    words = [word for word in words if word not in ("--quiet", "--calibration-tokens", "256")]
    assert run_command([*words, "--budget", "30s"]) == 2
    refusal = capsys.readouterr().err.splitlines()[-1]
    assert "--budget 30 s: is too short to calibrate: 64 tokens take about 40 s" in refusal
    assert not (tmp_path / "fewer.work").exists()
    assert run_command([*words, "--budget", "30s", "--calibration-tokens", "256", "--dry-run"]) == 0  # as it is given
    assert "the budget chose" not in capsys.readouterr().err
    enough = refusal.partition("; give ")[2].split()[0]
    assert run_command([*words, "--budget", enough, "--dry-run"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "report_conversion", dying_report)
        assert run_command([*words, "--budget", "10m"]) != 0
    tokens = int(capsys.readouterr().err.rpartition("the budget chose: --calibration-tokens ")[2].split()[0])
    assert 0.9 * 0.3 * 588 / 40 * 64 < tokens <= 0.3 * 588 / 40 * 64
    monkeypatch.setattr(budget_module, "calibration_seconds", lambda *_: 60.0)
    assert run_command([*words, "--budget", "10m"]) == 0
    text = json.loads((tmp_path / "fewer/conversion.json").read_text(encoding="utf-8"))["text"]
    assert 0 <= text["tokens"] - tokens < 16 * 16
    assert not (tmp_path / "fewer.work/budget.json").exists()


def dying_report(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_a_long_budget_reads_the_text_once(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_take(monkeypatch, 1e-3)
    words = command(workspace, tmp_path / "fewer", *FEWER, "--budget", "9h")
    assert run_command(aloud(words)) == 0
    said = capsys.readouterr().err
    chosen = int(said.partition("the budget chose: --heal ")[2].partition(" ")[0])
    assert f"{chosen} (the whole text once, in less than the budget)" in said
    assert chosen <= sum(len(tokens) for tokens in text_of(workspace).train) < chosen + 8 * 16


def text_of(workspace: Path) -> Corpus:
    tokenizer = load(workspace / "run")[1]
    return prepare_corpus([f"{workspace}/text"], vocab_size=None, max_train_tokens=10**6, tokenizer=tokenizer)


@pytest.mark.parametrize(("steps", "named"), [(100, "the text has 10 steps"), (9, "the budget leaves 9 steps")])
def test_what_is_too_little_to_heal_is_named(steps: int, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan: Any = SimpleNamespace(text_tokens=640)
    assert budget_module.HealingPlan._choose(plan, steps, 64) == 0
    assert named in capsys.readouterr().err


def test_a_budget_without_room_converts_alone(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], built: list[Weights]
) -> None:
    """Also a call whose report was interrupted goes on with the model as it is."""
    words = command(workspace, tmp_path / "fewer", *FEWER, "--budget", "1s")
    assert run_command(aloud(words)) == 0
    assert "the budget chose: no healing" in capsys.readouterr().err
    assert "healing" not in (tmp_path / "fewer/conversion.json").read_text(encoding="utf-8")
    assert stages_of(tmp_path / "fewer") == ["original", "converted"]
    assert len(built) == 2
    (tmp_path / "fewer/convert.html").unlink()  # as a call leaves it that ended before the page
    assert run_command(words) == 0
    assert (tmp_path / "fewer/convert.html").is_file()


def test_an_exact_conversion_has_nothing_to_heal(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(workspace, tmp_path / "exact", "--to", "rope_layout,layout=interleaved", "--budget", "30m")
    assert run_command(aloud(words)) == 0
    assert "an exact conversion needs no healing" in capsys.readouterr().err
    assert "healing" not in (tmp_path / "exact/conversion.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (["--budget", "x", "--heal", "256"], 2, "--budget x: must be a time"),
        (["--heal-lr", "0.1"], 2, "give --heal or --budget too"),
    ],
)
def test_budgets_that_cannot_be(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, named: str
) -> None:
    assert run_command([*command(workspace, tmp_path / "fewer", *FEWER), *options]) == code
    assert named in capsys.readouterr().err


def test_a_sweep_continues_where_it_was_killed(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], built: list[Weights]
) -> None:
    out = tmp_path / "sweep"
    words = command(workspace, out, "--sweep", "kv_heads=2,1,3,groups=contiguous,merge=mean")
    assert run_command(words) != 0
    assert not out.exists()
    assert len(built) == 3
    capsys.readouterr()
    assert run_command(words) == 0
    assert len(built) == 4  # only the interrupted model is measured again
    printed = capsys.readouterr().out
    assert f"report: {out}/convert.html" in printed
    results = report_of(out)
    names = ["original", *(f"kv_heads={count}, groups=contiguous, merge=mean" for count in (2, 1))]
    assert [model.name for model in results.models] == names
    (warning,) = results.warnings
    assert "kv_heads=3, groups=contiguous, merge=mean" in warning
    assert "3 does not divide heads = 4" in warning
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep"]
    folders = sorted(folder.name for folder in (out / "models").iterdir())
    assert folders == [f"kv_heads-{count}-groups-contiguous-merge-mean" for count in (1, 2)]
    model, _ = load(out / "models" / folders[0])
    assert model.config.depth == 2


def test_methods_are_compared_before_and_after_healing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = ["convert", f"{workspace}/run", "--data", f"{workspace}/text", *QUICK, "--dry-run", "--json"]
    assert run_command([*dry, "--to", "kv_heads=2", "--method", "all"]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert len(costs) == 7
    assert {table["after"]["state_bytes_per_token"] for table in costs.values()} == {2 * 2 * 2 * 4 * 4}
    out = tmp_path / "two"
    words = ["--sweep", "kv_heads=2,groups=contiguous,merge=mean,first", "--heal", "256", "--json"]
    assert run_command(command(workspace, out, *words)) == 0
    printed = json.loads(capsys.readouterr().out)
    models = [(model["method"], model["stage"]) for model in printed["models"]]
    mean, first = "kv_heads, contiguous, mean", "kv_heads, contiguous, first"
    stages = ["converted", "healed"]
    assert models == [("", "original"), *((mean, stage) for stage in stages), *((first, stage) for stage in stages)]
    names = [f"kv_heads-2-groups-contiguous-merge-{word}" for word in ("first", "mean")]
    assert sorted(path.name for path in (out / "models").iterdir()) == names
    assert [path.name for path in tmp_path.iterdir()] == ["two"]
    assert all((out / "models" / name / "healing/log.jsonl").is_file() for name in names)


def files_beside(out: Path) -> list[str]:
    """What the work folder of a conversion holds."""
    work = out.with_name(f"{out.name}.work")
    return sorted(str(path.relative_to(work)) for path in work.rglob("*") if path.is_file())


@pytest.mark.parametrize("stages", [[], ["--heal-stage", "50%:layers", "--heal-stage", "50%:logits"]])
def test_a_finished_healing_leaves_its_log_and_no_checkpoint(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: list[str]
) -> None:
    """What a resume needs stays while a killed call can continue, also in the report."""
    out = tmp_path / "out"
    words = command(workspace, out, *FEWER, "--heal", "512", *stages)
    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "report_conversion", dying_report)
        assert run_command(words) == 130
    assert any(name.startswith("heal/checkpoints/") for name in files_beside(out))
    assert any(name.startswith("converted/") for name in files_beside(out))
    assert run_command(words) == 0
    assert stages_of(out) == ["original", "converted", "healed"]
    assert not harmed_models(report_of(out))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    folders = ["healing", "healing-1"] if stages else ["healing"]
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == folders
    for name in folders:
        assert read_log(out / name)[-1]["step"] == 4 // len(folders)
        assert not (out / name / "checkpoints").exists()
    assert run_command(["verify", str(out)]) == 0
    assert run_command(["runs", str(out)]) == 0


def test_what_healing_made_worse_is_kept_as_it_was(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a sweep, too; without a report nobody knows, and one that comes later says that the model is healed."""
    harm = ["--heal", "512", "--heal-lr", "0.5"]
    out = tmp_path / "one"
    assert run_command(command(workspace, out, *FEWER, *harm)) == 0
    assert "kept in the folder that ends in .work" in capsys.readouterr().out
    assert {name.partition("/")[0] for name in files_beside(out)} == {"converted"}
    assert load(tmp_path / "one.work/converted")[0].config == load(out)[0].config
    out = tmp_path / "two"
    words = command(workspace, out, *SWEEP, *harm)
    assert run_command(words) == 0
    harmed = {model.source for model in harmed_models(report_of(out))}
    assert harmed
    assert {name.split("/")[1] for name in files_beside(out)} == {f"{name}.work" for name in harmed}
    assert {name.split("/")[2] for name in files_beside(out)} == {"converted"}
    out = tmp_path / "three"
    words = command(workspace, out, *FEWER, "--heal", "256")
    index = words.index("--report-tokens")
    assert run_command([*words[:index], "--report-tokens", "0", *words[index + 2 :]]) == 0
    assert not (tmp_path / "three.work").exists()
    assert run_command(words) == 0
    assert stages_of(out) == ["original", "healed"]


def test_a_refused_healing_is_left_out_as_the_refusal_says(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model that was kept is not called healed, and one model is built to time steps and reading."""
    builds = list[int]()

    def build_once(job: TrainingJob) -> BuiltModels:
        builds.append(1)
        return build_models(job)

    monkeypatch.setattr(budget_module, "build_models", build_once)
    steps_take(monkeypatch, 1e6)
    out = tmp_path / "out"
    words = command(workspace, out, *FEWER, "--budget", "30m")
    assert run_command([*words, "--heal", "6400"]) == 1
    assert "or --heal 0; converted models are kept" in capsys.readouterr().err
    assert builds == [1]
    assert run_command([*words, "--heal", "0"]) == 0
    assert stages_of(out) == ["original", "converted"]
    assert not out.with_name("out.work").joinpath("converted").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--to", "kv_heads=2", "--method", "mean"], "--method mean:"),
        (["--sweep", "kv_heads=2,2"], "'kv_heads=2':"),
        (["--sweep", "kv_heads=2", "--report-tokens", "0"], "--report-tokens 0:"),
        (["--to", "kv_heads=2", "--report-tokens", "60"], "--report-tokens 60:"),
        ([*FEWER, "--speed-context-length", "0"], "--speed-context-length 0:"),
        (["--sweep", "kv_heads=3,groups=contiguous,merge=mean"], "kv_heads"),
        (["--to", "kv_heads=3"], "kv_heads"),
        (["--to", "kv_heads=2", "--to", "kv_heads=3"], "kv_heads"),
        (["--to", "vocab_size=3"], "vocab_size: 3"),
        (["--search", "state@1k=50%", "--keep", "7"], "--keep 7:"),
        (["--search", "state@1k=50%", "--only", "foo", "--calibration-tokens", "1k"], "foo"),
        (
            ["--search", "state@1k=50%", "--calibration-tokens", "64"],
            "--calibration-tokens 64: is too few for a search",
        ),
        (["--to", "kv_heads=2", "--calibration-tokens", "0"], "--calibration-tokens 0:"),
        (["--to", "kv_heads=2", "--sequence-length", "0"], "--sequence-length 0:"),
        (["--to", "kv_heads=2", "--heal", "100"], "--heal 100: is less than one step of 128 tokens"),
        (["--to", "kv_heads=2", "--heal", "200", "--heal-lr", "0"], "--heal-lr 0.0:"),
        (["--to", "kv_heads=2", "--heal", "200", "--heal-parameters", "foo"], "parameters foo:"),
    ],
)
def test_bad_requests_are_one_sentence_before_anything_is_read(
    workspace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    sentence: str,
) -> None:
    for cls, name in ((FolderWeights, "tensor"), (_ConversionJob, "_encoded_text")):
        monkeypatch.setattr(cls, name, lambda *arguments: pytest.fail("a weight or the text is read"))
    assert run_command(command(workspace, tmp_path / "out", *options)) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_options_alone_are_refused_before_the_library_is_imported(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_module, "convert", lambda settings: pytest.fail("the conversion begins"))
    words = ["convert", f"{workspace}/run", str(tmp_path / "out"), *FEWER]
    for options, said in (
        (["--report-tokens", "1000"], "--report-tokens 1000: is under 4 sequences"),
        (["--heal", "1000", "--report-tokens", "64"], "; and --heal 1000: is less than one step of 2,048 tokens"),
        (["--heal-lr", "0.1"], "--heal-lr 0.1:"),
    ):
        assert run_command([*words, *options]) == 2
        assert said in capsys.readouterr().err


def test_a_report_without_a_text_is_refused_before_anything_is_converted(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus_of = convert_module._corpus

    def without_held_out(*arguments: Any) -> Corpus:
        return replace(corpus_of(*arguments), validation=cast(TokenFile, [0]))

    monkeypatch.setattr(convert_module, "_corpus", without_held_out)
    monkeypatch.setattr(convert_module, "convert_model", lambda *arguments: pytest.fail("it is converted"))
    assert run_command(command(workspace, tmp_path / "out", *FEWER)) == 2
    assert "held-out text" in capsys.readouterr().err


def test_a_window_that_chooses_layers_needs_few_tokens(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is fitted: layers are compared."""
    few = ["--calibration-tokens", "32", "--report-tokens", "0"]
    assert run_command(command(workspace, tmp_path / "out", "--to", "window=4,keep=1", *few)) == 0
    assert run_command(command(workspace, tmp_path / "heads", "--to", "kv_heads,state_budget=50%", *few)) == 2
    assert "--calibration-tokens 32: is too few to fit" in capsys.readouterr().err


def test_a_budget_says_what_remains_of_the_whole_state(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", f"{workspace}/run", "--to", "kv_heads,state_budget=50%", "--dry-run", "--device", "cpu"]
    words += ["--data", f"{workspace}/text", "--calibration-tokens", "256", "--sequence-length", "16"]
    assert run_command(words) == 0
    said = re.search(r"at 8,192 tokens (\d+)% of the whole state remains", capsys.readouterr().err)
    assert said is not None
    assert 25 <= int(said[1]) <= 50
    assert run_command([*words[:3], "kv_heads=2", *words[4:]]) == 0
    assert "state_budget" not in capsys.readouterr().err


def test_a_window_that_no_sequence_of_the_report_fills_is_said(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "wide"
    assert run_command(command(workspace, out, "--to", "window=64")) == 0
    printed = capsys.readouterr()
    results = report_of(out)
    length = results.text.sequence_length
    assert length <= 64
    (warning,) = results.warnings
    assert f"sequences of {length} tokens fit in a window of 64" in warning
    assert "--sequence-length 128" in warning
    assert warning in printed.err
    assert f"has the loss of the original on sequences of {length} tokens" in printed.out
    assert run_command(command(workspace, tmp_path / "kept", "--to", "window=64,keep=1")) == 2
    assert "keep: sequences of" in capsys.readouterr().err


def test_a_report_can_be_left_out(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bare"
    words = command(workspace, out, *FEWER, "--report-tokens", "0")
    assert run_command(words) == 0
    assert capsys.readouterr().out.splitlines() == [str(out)]
    assert not (out / "convert.html").exists()


def test_the_list_says_which_options_are_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["convert", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "Undefined" not in printed
    assert "models=… [required]" in printed


@pytest.mark.parametrize("target", ["kv_heads=2", "latent_attention,kv_rank=4,rope_dim=2", "gated_delta,fit_steps=1"])
def test_a_text_too_short_names_the_option_and_what_is_enough(
    target: str, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", f"{workspace}/run", "--data", f"{workspace}/text", *QUICK, "--to", target]
    assert run_command([*words, "--dry-run", "--calibration-tokens", "16"]) == 2
    enough = capsys.readouterr().err.rpartition("--calibration-tokens ")[2].split()[0]
    assert run_command([*words, "--dry-run", "--calibration-tokens", enough]) == 0
    assert run_command([*words, "--calibration-tokens", "100M", str(tmp_path / "out")]) == 2
    assert "give more text, or --calibration-tokens " in capsys.readouterr().err


def test_all_that_is_too_few_is_said_at_once_and_what_is_proposed_works(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a target that chooses on the text, which no plan without one can refuse."""
    target = ["--to", "latent_attention,state_budget=50%", "--device", "cpu", "--speed-context-length", "4"]
    words = ["convert", f"{workspace}/run", "--data", f"{workspace}/text", *target, "--sequence-length", "16"]
    few = ["--report-tokens", "16", "--calibration-tokens", "16", "--heal", "16"]
    with monkeypatch.context() as patched:
        patched.setattr(_ConversionJob, "_encoded_text", lambda job: pytest.fail("the text is read"))
        assert run_command([*words, *few, str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    asked = [re.search(each, error) for each in (r"at least (\d+), or 0", r"tokens (\d+) or more", r"of (\d+) tokens")]
    enough = [option for each in zip(few[::2], [match[1] for match in asked if match], strict=True) for option in each]
    assert run_command([*words, *enough, str(tmp_path / "out")]) == 0


def test_a_text_too_short_for_any_calibration_proposes_no_number_that_is_refused(workspace: Path) -> None:
    tokenizer = Tokenizer.from_files(read_folder(find_model_folder(workspace / "run")).documents)
    corpus = prepare_corpus((f"{workspace}/text",), vocab_size=None, max_train_tokens=10**6, tokenizer=tokenizer)
    windows = sum((len(file) - 1) // 16 for file in corpus.train)
    with pytest.raises(DataError, match=rf"or --calibration-tokens {windows // 2 * 16}$"):
        calibration_from_corpus(corpus, 10**8, 16, least=32)
    least = 16 * windows
    with pytest.raises(DataError, match=rf"text: {2 * windows} windows are enough with --calibration-tokens {least}$"):
        calibration_from_corpus(corpus, 10**8, 16, least=least)


def test_a_refused_layer_of_a_repeated_entry_is_called_a_layer(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--to", "layers.1.mixer.kv_heads=3,groups=contiguous,merge=mean"]
    assert run_command(command(workspace, tmp_path / "out", *target)) == 2
    assert "layers.1.mixer.kv_heads (layer 1 of 2, from 0): 3 does not divide" in capsys.readouterr().err


def test_a_refusal_of_multi_token_modules_names_the_command_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(build(load_config(small.design(multi_token={"depth": 1}))), tmp_path / "model")
    assert run_command(["convert", str(tmp_path / "model"), *FEWER, "--dry-run"]) == 2
    assert "give --to drop_multi_token before it" in capsys.readouterr().err
    first = ["--to", "drop_multi_token"]
    assert run_command(["convert", str(tmp_path / "model"), *first, *FEWER, "--dry-run"]) == 0


def test_a_state_that_grows_is_said_without_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model with fewer learned positions than the context at which states are compared."""
    design = small.design(embedding={"position": {"kind": "learned", "length": 32}})
    save(build(load_config(design)), tmp_path / "model")
    assert run_command(["convert", str(tmp_path / "model"), *FEWER, "--dry-run", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)["before"]
    assert before["context_length"] == 32
    assert before["state_bytes"] > 0
    assert run_command(["convert", str(tmp_path / "model"), *FEWER, "--dry-run"]) == 0
    assert "\nFLOPs per token at 32 " in capsys.readouterr().out
    assert all(name.isidentifier() for name in before)
    words = ["convert", str(tmp_path / "model"), str(tmp_path / "more"), *FEWER, "--report-tokens", "0", "--quiet"]
    assert run_command(words) == 0
    assert "the state grows to 2.0 times" in capsys.readouterr().err


def test_a_dry_run_prints_the_lengths_that_a_window_saves_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8k and 32k as far as an imported model goes, and a length that was asked for; and what llama.cpp runs."""
    save(build(load_config(small.design()), dtype=torch.bfloat16), tmp_path / "model")
    words = ["convert", str(tmp_path / "model"), "--to", "window=4096", "--dry-run"]
    assert run_command([*words, "--json", "--speed-context-length", "5000"]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert [costs[label]["dtype"] for label in ("before", "after")] == ["bfloat16", "bfloat16"]
    before, after = (costs[label]["states"] for label in ("before", "after"))
    assert list(before) == ["2048", "5000", "8192", "32768"]
    assert [after[length] < before[length] for length in before] == [False, True, True, True]
    assert run_command(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in printed if line.startswith("state bytes at 32,768")] == [f"{after['32768']:,}"]
    assert [line.split()[-2:] for line in printed if line.startswith("GGUF")] == [["llama", "no"]]
    imported = build(load_config(small.design()))
    imported.imported_config = {"max_position_embeddings": 8192}
    save(imported, tmp_path / "imported")
    assert run_command(["convert", str(tmp_path / "imported"), *words[2:], "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["before"]["states"]) == ["2048", "8192"]


def test_a_killed_report_is_finished_by_the_same_command(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = command(workspace, out, *FEWER)

    def interrupt(weights: Weights) -> Decoder:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(measure_module, "build_model", interrupt)
        assert run_command(words) != 0
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert run_command([*words[:-1], "kv_heads=1,groups=contiguous,merge=mean"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert run_command(words) == 0
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    assert (out / "convert.html").is_file()


def test_a_sweep_is_every_combination_of_its_values() -> None:
    variants = conversion_variants([], ["kv_heads=8,4,merge=mean,first", "window=64"])
    assert [(variant.name, variant.method) for variant in variants] == [
        ("kv_heads=8, merge=mean", "kv_heads, mean"),
        ("kv_heads=8, merge=first", "kv_heads, first"),
        ("kv_heads=4, merge=mean", "kv_heads, mean"),
        ("kv_heads=4, merge=first", "kv_heads, first"),
        ("window=64", "window"),
    ]
    both = conversion_variants(["position.layout=interleaved"], ["kv_heads=8,4"], all_methods=True)
    assert len(both) == 14
    assert {len(variant.rewrites) for variant in both} == {2}
    assert both[0].file_name == "kv_heads-8-groups-contiguous-merge-mean"
    layers = conversion_variants([], ["layers.0,2.mixer.kv_heads=2,1"])
    assert [variant.rewrites[0].layers for variant in layers] == [(0, 2)] * 2
    with pytest.raises(ConfigError, match="given twice"):
        conversion_variants([], ["kv_heads=8", "kv_heads=8,4"])
