"""Measure the models of a conversion one after the other; results are saved, so that a killed run resumes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from heddle import __version__
from heddle.data.corpus import Corpus
from heddle.errors import CheckpointError, DataError
from heddle.lab.compare.results import plain
from heddle.lab.compare.speed import Samples, measure_speeds
from heddle.lab.conversion.measure import (
    MeasurementSettings,
    MeasurementText,
    ModelToMeasure,
    ReadScores,
    measure_model,
    measured_rows,
)
from heddle.lab.conversion.results import ORIGINAL, ConversionResults, MeasuredText, ModelResult, parse_results
from heddle.progress import progress_bar
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.storage.run_log import to_plain_json
from heddle.training.evaluation.text_recall import NEEDLE_TOKENS

SPEED_ROUNDS = 2
PART_SECONDS = 10.0  # between two saves of a model that is being measured
REMEDY = "free some space or choose another folder"


@dataclass(frozen=True)
class ConversionRecord:
    """Where the results are written, and the origin that they name.

    path: of convert.json. command: the user's command. source: the name of the original. hardware: of the machine.
    """

    path: Path
    command: str = ""
    source: str = ""
    hardware: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def measure_conversion(
    models: Sequence[ModelToMeasure],
    corpus: Corpus,
    record: ConversionRecord,
    settings: MeasurementSettings | None = None,
    device: str = "cpu",
) -> ConversionResults:
    """Measure every model on the same held-out text and save the results after each.

    models: the first one is the original. A model with weights that were measured before, on the same text and with
    the same settings, is not measured again. Raises DataError if the corpus has no text to measure on, MachineError if
    the file cannot be written.
    """
    assert models[0].stage == ORIGINAL, "the first model is the one that was converted"
    text = MeasurementText(corpus, settings or MeasurementSettings())
    if not text.windows:
        raise DataError(f"{corpus.name}: has no held-out text to measure on; give a longer text")
    results = _new_results(text, record)
    earlier = _earlier_results(record.path, results)
    measured = {(model.name, model.stage, model.key): model for model in earlier.models} if earlier else {}
    results.speeds = {} if earlier is None else earlier.speeds
    original = models[0].weights
    for model in models:
        result = measured.get((model.name, model.stage, model.key))
        if result is None:
            part = _Part(record.path, model, results)
            with progress_bar(f"measuring {model.name}", measured_rows(text), "rows") as bar:
                result = measure_model(model, original, text, device, bar, part.begun(), part.save)
        results.models.append(result)
        _save(results, record.path, measured)
    part_path(record.path).unlink(missing_ok=True)
    _measure_all_speeds(models, results, text.settings, device, lambda: _save(results, record.path, {}))
    return results


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


def _new_results(text: MeasurementText, record: ConversionRecord) -> ConversionResults:
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
    )
    return ConversionResults(
        heddle=__version__,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=record.command,
        source=record.source,
        hardware=record.hardware | {"torch": str(torch.__version__)},
        text=measured_text,
        settings=to_plain_json(asdict(text.settings)),
        warnings=list(record.warnings),
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
    """Save the results so far, and an earlier run's results for models that are still to come."""
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
