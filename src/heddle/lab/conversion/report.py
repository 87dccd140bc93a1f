"""From a model to the report of its conversion: of one, which is a model folder, or of several, in a folder of models.

What is finished lies in the folder OUT.work beside OUT until all is, so the same call continues after a kill.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heddle.config import DesignError
from heddle.conversion.convert import (
    CONVERSION_FILE,
    Conversion,
    ConversionSource,
    open_source,
    refuse_existing,
    saved_conversion,
)
from heddle.conversion.heal import CONVERTED_FOLDER, interrupted_rows, partial_folder
from heddle.conversion.targets import ConversionVariant
from heddle.conversion.weights import CalibrationText
from heddle.data.corpus import Corpus
from heddle.data.samples import RowProtocol
from heddle.errors import CheckpointError, ConfigError
from heddle.lab.conversion.measure import MeasurementSettings, ModelToMeasure
from heddle.lab.conversion.results import CONVERTED, HEALED, ORIGINAL, ConversionResults
from heddle.lab.conversion.run import ConversionRecord, measure_conversion
from heddle.lab.pages.conversion import PAGE_FILE, write_conversion_page
from heddle.progress import print_status
from heddle.storage.file_io import read_json_file, sync_folder
from heddle.storage.run_log import first_difference, to_plain_json

RESULTS_FILE = "convert.json"
RESULT_FOLDER, MODELS_FOLDER = "result", "models"

WriteModel = Callable[[Conversion, Path], None]  # converts, and heals where that is asked for, into a folder


@dataclass(frozen=True)
class ConversionReport:
    """How conversions are measured. record: its path is that of the file within the folder of the report."""

    corpus: Corpus
    record: ConversionRecord
    settings: MeasurementSettings
    device: str = "cpu"


def interrupted_report_rows(out: Path) -> RowProtocol | None:
    """How rows began in what an interrupted call for `out` has read; None if there is none, or it has read no text."""
    result = partial_folder(out) / RESULT_FOLDER
    models = {path.with_name(path.name.removesuffix(".work")) for path in (result / MODELS_FOLDER).glob("*")}
    for model in (out, *sorted(models)):
        if rows := interrupted_rows(model):
            return rows
    for folder in (out, result):
        with suppress(CheckpointError, KeyError):  # what cannot be read is measured again
            return RowProtocol.parse(read_json_file(folder / RESULTS_FILE)["text"])
    return None


def is_converted(conversion: Conversion, out: Path, healed: bool) -> bool:
    """Whether `out` holds this conversion, but not its whole report: a killed call left it."""
    if not (out / CONVERSION_FILE).is_file() or (out / PAGE_FILE).exists():
        return False
    saved = saved_conversion(out)
    return (saved.pop("healing", None) is not None) == healed and saved == _identity(conversion)


def report_conversion(conversion: Conversion, out: Path, report: ConversionReport) -> ConversionResults:
    """Measure a conversion that was written to `out`, before and after healing, and write the page into it.

    Raises what `measure_conversion` raises.
    """
    method = conversion.rewrites[0].name
    models = [original_model(conversion.source), *_written_models(method, method, out, with_stage=True)]
    record = replace(report.record, path=out / RESULTS_FILE)
    results = measure_conversion(models, report.corpus, record, report.settings, report.device)
    write_conversion_page(results, out)
    return results


def original_model(source: ConversionSource) -> ModelToMeasure:
    """The model that is converted."""
    return ModelToMeasure("original", ORIGINAL, source.weights, source.weights_sha256, source=str(source.folder))


def _written_models(name: str, method: str, folder: Path, with_stage: bool = False) -> list[ModelToMeasure]:
    """The model in a folder; if it was healed, the converted one in `folder`.work before it."""
    converted = partial_folder(folder) / CONVERTED_FOLDER
    folders = {CONVERTED: converted, HEALED: folder} if converted.is_dir() else {CONVERTED: folder}
    models = []
    for stage, path in folders.items():
        source = open_source(path)
        label = stage if with_stage else name if stage == CONVERTED else f"{name}, healed"
        models.append(ModelToMeasure(label, stage, source.weights, source.weights_sha256, method, str(path.name)))
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

    A variant that the model cannot be converted to is left out and named on the page. Raises ConfigError if that are
    all, CheckpointError if `out` exists or its work is of other conversions, and what `measure_conversion` raises.
    """
    refuse_existing(out)
    result = partial_folder(out) / RESULT_FOLDER
    folder = result / MODELS_FOLDER
    warnings: list[str] = []
    models = [original_model(source)]
    for number, variant in enumerate(variants, start=1):
        conversion = Conversion(source, variant.rewrites, text)
        path = folder / variant.file_name
        print_status(f"conversion {number} of {len(variants)}: {variant.name}")
        try:
            if not _is_complete(conversion, path):
                write(conversion, path)
        except (DesignError, ConfigError) as error:
            print_status(f"left out: {variant.name}: {error}")
            warnings.append(f"{variant.name} was left out: {error}.")
            continue
        models += _written_models(variant.name, variant.method, path)
    if len(models) == 1:
        raise ConfigError(f"no conversion is possible: {warnings[0]}")
    record = replace(report.record, path=result / RESULTS_FILE, warnings=(*report.record.warnings, *warnings))
    measured = measure_conversion(models, report.corpus, record, report.settings, report.device)
    write_conversion_page(measured, result)
    _move_work_aside(folder)
    refuse_existing(out)
    os.rename(result, out)
    with suppress(OSError):  # what healing left stays
        result.parent.rmdir()
    sync_folder(out.parent)
    return measured


def _is_complete(conversion: Conversion, folder: Path) -> bool:
    """Whether a folder holds this conversion. Raises CheckpointError if it holds another."""
    if not folder.is_dir():
        return False
    saved = saved_conversion(folder)
    saved.pop("healing", None)
    difference = first_difference(saved, _identity(conversion))
    if difference:
        raise CheckpointError(f"{folder}: holds another conversion: {difference}; remove it, or choose another name")
    return True


def _identity(conversion: Conversion) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain_json(conversion.describe())
    return plain


def _move_work_aside(folder: Path) -> None:
    """Move what healing left between the models to the folder that stays beside `out`."""
    work = folder.parent.parent / "healing"
    for path in sorted(folder.glob("*.work")):
        work.mkdir(exist_ok=True)
        os.rename(path, work / path.name)
