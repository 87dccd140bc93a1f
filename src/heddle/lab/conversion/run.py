"""Measure the models of one or several conversions, and write the report; a killed call resumes."""

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from heddle import __version__
from heddle.config import DesignError
from heddle.conversion.convert import (
    CONVERSION_FILE,
    Conversion,
    ConversionSource,
    holds_conversion,
    open_source,
    saved_conversion,
)
from heddle.conversion.heal import CONVERTED_FOLDER, interrupted_rows, partial_folder, remove_work
from heddle.conversion.targets import ConversionVariant
from heddle.conversion.weights import CalibrationText, build_model
from heddle.data.corpus import Corpus
from heddle.data.samples import RowProtocol
from heddle.errors import CheckpointError, ConfigError, DataError
from heddle.lab.compare.probes import Samples, expected_seconds, measure_speeds, time_reading
from heddle.lab.compare.results import plain
from heddle.lab.conversion.measure import (
    MeasurementSettings,
    MeasurementText,
    ModelToMeasure,
    ReadScores,
    measure_model,
    measured_rows,
)
from heddle.lab.conversion.results import (
    CONVERTED,
    HEALED,
    ORIGINAL,
    SEARCH,
    ConversionResults,
    MeasuredText,
    ModelResult,
    harmed_models,
    parse_results,
)
from heddle.lab.pages.conversion import PAGE_FILE, write_conversion_page
from heddle.lab.search.results import SearchResults
from heddle.progress import print_status, progress_bar
from heddle.storage.file_io import read_json_file, refuse_existing, sync_folder, write_json_file
from heddle.storage.run_log import to_plain_json
from heddle.training.evaluation.text_recall import NEEDLE_TOKENS

SPEED_ROUNDS = 2
PART_SECONDS = 10.0  # between two saves of a model that is being measured
REMEDY = "free some space or choose another folder"


@dataclass(frozen=True)
class ConversionReport:
    """How conversions are measured, and the origin that the results name.

    command: the user's command. source: the name of the original. hardware: of the machine. search: how the design was
    chosen.
    """

    corpus: Corpus
    settings: MeasurementSettings
    device: str = "cpu"
    command: str = ""
    source: str = ""
    hardware: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    search: SearchResults | None = None


def check_report_text(report: ConversionReport) -> None:
    """Raise DataError if the corpus has no text to measure on."""
    if not MeasurementText(report.corpus, report.settings).windows:
        raise DataError(f"{report.corpus.name}: has no held-out text to measure on; give a longer text")


def measure_conversion(models: Sequence[ModelToMeasure], report: ConversionReport, path: Path) -> ConversionResults:
    """Measure every model on the same held-out text and save the results after each.

    models: the first one is the original. path: of convert.json. A model with weights that were measured before, on
    the same text and with the same settings, is not measured again. Raises DataError if the corpus has no text to
    measure on, MachineError if the file cannot be written.
    """
    assert models[0].stage == ORIGINAL, "the first model is the one that was converted"
    check_report_text(report)
    text = MeasurementText(report.corpus, report.settings)
    results = _new_results(text, report)
    earlier = _earlier_results(path, results)
    measured = {(model.name, model.stage, model.key): model for model in earlier.models} if earlier else {}
    results.speeds = {} if earlier is None else earlier.speeds
    original = models[0].weights
    for model in models:
        result = measured.get((model.name, model.stage, model.key))
        if result is None:
            part = _Part(path, model, results)
            with progress_bar(f"measuring {model.name}", measured_rows(text), "rows") as bar:
                result = measure_model(model, original, text, report.device, bar, part.begun(), part.save)
        results.models.append(result)
        _save(results, path, measured)
    part_path(path).unlink(missing_ok=True)
    _measure_all_speeds(models, results, text.settings, report.device, lambda: _save(results, path, {}))
    return results


def report_seconds(source: ConversionSource, report: ConversionReport, models: int, designs: int) -> float:
    """About how long `measure_conversion` takes, from reading one batch and the shortest context's speed.

    models: with the original. designs: that differ.
    """
    text, settings = MeasurementText(report.corpus, report.settings), report.settings
    if not text.windows:
        return 0.0
    started = time.monotonic()
    model = build_model(source.weights).to(report.device)
    loading, design = time.monotonic() - started, source.weights.design
    batch = text.windows[0]
    read = time_reading(batch, model)
    del model
    tokens = sum(batch.targets.size for batch in text.windows) + text.recall.row_count * text.recall.row_length
    compared = 2 * (loading + read * sum(rows.targets.size for rows in text.layer_rows))  # with the original's layers
    seconds = models * (loading + read * tokens) + (models - 1) * compared
    if contexts := settings.speed_contexts:
        each = expected_seconds(design, contexts, report.device, source.weights.dtype)
        seconds += SPEED_ROUNDS * designs * each
    return seconds


def part_path(path: Path) -> Path:
    """The file that stores the scored rows of the model that is being measured."""
    return path.with_name(f"{path.stem}.part.json")


class _Part:
    """The scored rows of one model, so that a killed run resumes within it."""

    def __init__(self, path: Path, model: ModelToMeasure, results: ConversionResults) -> None:
        of_results = plain(results)
        described = {name: of_results[name] for name in ("text", "settings", "heddle", "hardware")}
        self.path, self._saved = part_path(path), time.monotonic()
        self._model = to_plain_json(described | {"model": [model.name, model.stage, model.key]})

    def begun(self) -> ReadScores | None:
        """The scores of this model on this text from an earlier run; None without usable ones."""
        try:
            part = read_json_file(self.path) if self.path.is_file() else {}
            if part.get("of") != self._model:
                return None
            scores = TypeAdapter(ReadScores).validate_python(part["scores"])
        except (CheckpointError, ValidationError):  # they can be scored again
            return None
        return scores

    def save(self, scores: ReadScores, is_all: bool) -> None:
        """Save the scores so far, at most every `PART_SECONDS`, and all of them at the end."""
        if is_all or time.monotonic() - self._saved >= PART_SECONDS:
            write_json_file(self.path, {"of": self._model, "scores": plain(scores)}, REMEDY)
            self._saved = time.monotonic()


def _new_results(text: MeasurementText, report: ConversionReport) -> ConversionResults:
    corpus, recall = text.corpus, text.recall
    measured_text = MeasuredText(
        name=corpus.name,
        sha256=corpus.hash,
        sequence_length=text.settings.sequence_length,
        windows=text.window_count,
        bytes=text.text_bytes,
        positions=text.position_ranges,
        row_length=recall.row_length,
        span_rows=recall.spans if recall.row_length else 0,
        span_length=recall.span_length,
        needle_rows=recall.needles if recall.row_length else 0,
        needle_length=NEEDLE_TOKENS,
        note=recall.note,
        bos_ids=corpus.rows.bos_ids,
        vocab_size=corpus.tokenizer.vocab_size,
    )
    return ConversionResults(
        heddle=__version__,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=report.command,
        source=report.source,
        hardware=report.hardware | {"torch": str(torch.__version__)},
        text=measured_text,
        settings=to_plain_json(asdict(text.settings)),
        warnings=list(report.warnings),
        search=report.search,
    )


def _earlier_results(path: Path, results: ConversionResults) -> ConversionResults | None:
    """The results of an earlier run on the same text with the same settings; None without usable ones."""
    if not path.is_file():
        return None
    try:
        earlier = parse_results(read_json_file(path))
    except (CheckpointError, ValidationError):  # they can be measured again
        return None
    same = earlier.text == results.text and earlier.settings == results.settings
    return earlier if same and earlier.hardware == results.hardware and earlier.heddle == results.heddle else None


def _save(results: ConversionResults, path: Path, measured: dict[tuple[str, str, str], ModelResult]) -> None:
    """Save the results so far, and an earlier run's results for models that are not measured again yet."""
    names = {(model.name, model.stage, model.key) for model in results.models}
    content = plain(results)
    content["models"] += [plain(model) for key, model in measured.items() if key not in names]
    write_json_file(path, content, REMEDY)


def _measure_all_speeds(
    models: Sequence[ModelToMeasure],
    results: ConversionResults,
    settings: MeasurementSettings,
    device: str,
    save: Callable[[], None],
) -> None:
    """Measure each design once per round, because a machine's speed varies over time. Models may share a design."""
    weights = {result.design_key: model.weights for result, model in zip(results.models, models, strict=True)}
    if not settings.speed_contexts:
        return
    missing = sum(SPEED_ROUNDS - len(results.speeds.get(key, [])) for key in weights)
    with progress_bar("measuring prefill and decode", missing, "measurements") as bar:
        for number in range(SPEED_ROUNDS):
            for key, design_weights in weights.items():
                rounds: list[dict[str, Samples]] = results.speeds.setdefault(key, [])
                if len(rounds) <= number:
                    contexts = settings.speed_contexts
                    rounds.append(measure_speeds(design_weights.design, contexts, device, design_weights.dtype))
                    save()
                    bar.advance(1)


# From a model to the report of its conversion: one conversion in a model folder, or several in a folder of models.
#
# Unfinished work lies in the folder OUT.work beside OUT, so that the same call resumes after a kill.

RESULTS_FILE = "convert.json"
RESULT_FOLDER, MODELS_FOLDER, BASELINES_FOLDER = "result", "models", "baselines"

AGAIN = "to convert again, choose another name or remove it"

WriteModel = Callable[[Conversion, Path], None]  # converts, and heals if requested, into a folder


def interrupted_report_rows(out: Path) -> RowProtocol | None:
    """How rows began in the text that an interrupted call for `out` read; None without one, or if it read none."""
    result = partial_folder(out) / RESULT_FOLDER
    models = {path.with_name(path.name.removesuffix(".work")) for path in (result / MODELS_FOLDER).glob("*")}
    for model in (out, *sorted(models)):
        if rows := interrupted_rows(model):
            return rows
    for folder in (out, result):
        with suppress(CheckpointError, KeyError):  # an unreadable file is measured again
            return RowProtocol.parse(read_json_file(folder / RESULTS_FILE)["text"])
    return None


def refuse_finished(out: Path, command: str) -> None:
    """Raise CheckpointError if `out` holds a conversion with its complete report. command: the user's."""
    if (out / PAGE_FILE).is_file():
        wrote = read_json_file(out / RESULTS_FILE).get("command") if (out / RESULTS_FILE).is_file() else None
        what = "this conversion" if wrote == command else f"another conversion, of `{wrote}`,"
        raise CheckpointError(f"{out}: exists already: {what} is finished, see {out / PAGE_FILE}; {AGAIN}")


def is_converted(conversion: Conversion, out: Path, healed: bool | None) -> bool:
    """Whether `out` holds this conversion without its complete report, because a call was killed.

    healed: whether the model must be healed; None if a budget decided.
    """
    if not (out / CONVERSION_FILE).is_file() or (out / PAGE_FILE).exists():
        return False
    saved = saved_conversion(out)
    was_healed = saved.pop("healing", None) is not None
    return healed in (None, was_healed) and saved == to_plain_json(conversion.describe())


def write_baselines(baselines: Mapping[str, Conversion], write: WriteModel, folder: Path) -> dict[str, Path]:
    """Write a search's baselines, all healed in the same way; return the folders by name."""
    paths = {}
    for number, (name, conversion) in enumerate(baselines.items(), start=1):
        paths[name] = path = folder / str(number)
        print_status(f"baseline {number} of {len(baselines)}: {name}")
        if not holds_conversion(path, conversion):
            write(conversion, path)
    return paths


def report_conversion(
    conversion: Conversion, out: Path, report: ConversionReport, baselines: Mapping[str, Path] | None = None
) -> ConversionResults:
    """Measure a conversion that was written to `out`, before and after healing, and write the page into it.

    baselines: folders of other models, by name. Raises what `measure_conversion` raises.
    """
    method = conversion.rewrites[0].name
    models = [original_model(conversion.source)]
    if baselines:
        folders = {SEARCH: out, **baselines}
        models += [model for name, folder in folders.items() for model in _written_models(name, name, folder)]
    else:
        models += _written_models(method, method, out, with_stage=True)
    results = measure_conversion(models, report, out / RESULTS_FILE)
    write_conversion_page(results, out)
    return results


def original_model(source: ConversionSource) -> ModelToMeasure:
    """The model to convert."""
    return ModelToMeasure(
        "original", ORIGINAL, source.weights, source.weights_sha256, "", str(source.folder), source.family
    )


def _written_models(name: str, method: str, folder: Path, with_stage: bool = False) -> list[ModelToMeasure]:
    """The model in a folder; if it was healed, preceded by the converted one while it is in `folder`.work."""
    converted = partial_folder(folder) / CONVERTED_FOLDER
    is_healed = saved_conversion(folder).get("healing") is not None
    folders = {HEALED: folder} if is_healed else {CONVERTED: folder}
    if is_healed and converted.is_dir():
        folders = {CONVERTED: converted, **folders}
    models = []
    for stage, path in folders.items():
        source = open_source(path)
        label = stage if with_stage else name if stage == CONVERTED else f"{name}, healed"
        weights, key = source.weights, source.weights_sha256
        models.append(ModelToMeasure(label, stage, weights, key, method, str(path.name), source.family))
    return models


def report_variants(
    source: ConversionSource,
    variants: Sequence[ConversionVariant],
    text: CalibrationText | None,
    write: WriteModel,
    out: Path,
    report: ConversionReport,
) -> ConversionResults:
    """Convert a model in several ways, measure all, and write the folder `out`: the page, its numbers and the models.

    A variant to which the model cannot be converted is left out and named on the page. Raises ConfigError if none
    is left, CheckpointError if `out` exists or its work is for other conversions, and what `measure_conversion` raises.
    """
    refuse_existing(out, "the report")
    result = partial_folder(out) / RESULT_FOLDER
    folder = result / MODELS_FOLDER
    warnings: list[str] = []
    models = [original_model(source)]
    for number, variant in enumerate(variants, start=1):
        conversion = Conversion(source, variant.rewrites, text)
        path = folder / variant.file_name
        print_status(f"conversion {number} of {len(variants)}: {variant.name}")
        try:
            if not holds_conversion(path, conversion):
                write(conversion, path)
        except (DesignError, ConfigError) as error:
            print_status(f"left out: {variant.name}: {error}")
            warnings.append(f"{variant.name} was left out: {error}.")
            continue
        models += _written_models(variant.name, variant.method, path)
    if len(models) == 1:
        raise ConfigError(f"no conversion is possible: {warnings[0]}")
    report = replace(report, warnings=(*report.warnings, *warnings))
    measured = measure_conversion(models, report, result / RESULTS_FILE)
    write_conversion_page(measured, result)
    aside = _move_work_aside(folder)
    refuse_existing(out, "the report")
    os.rename(result, out)
    sync_folder(out.parent)
    harmed = {model.source for model in harmed_models(measured)}
    for work in aside.glob("*"):
        name = work.name.removesuffix(".work")
        remove_work(work, out / MODELS_FOLDER / name, name in harmed)
    for left in (aside, result.parent):
        with suppress(OSError):  # it holds what healing made worse
            left.rmdir()
    return measured


def _move_work_aside(folder: Path) -> Path:
    """Move the work of healing out of the models' folder, into a new one in the work folder; return its path."""
    names = itertools.chain(["healing"], (f"healing-{number}" for number in itertools.count(2)))
    work = next(path for path in (folder.parent.parent / name for name in names) if not path.exists())
    work.mkdir()
    for path in sorted(folder.glob("*.work")):
        os.rename(path, work / path.name)
    return work
