"""What `heddle convert` measures and reports, of one conversion or of several."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heddle.cli.counts import token_count
from heddle.errors import ConfigError
from heddle.progress import print_status, print_text

if TYPE_CHECKING:
    from heddle.conversion.convert import ConversionSource
    from heddle.data.corpus import Corpus
    from heddle.lab.conversion.report import ConversionReport
    from heddle.lab.conversion.results import ConversionResults
    from heddle.runtime import Runtime

MIN_WINDOWS = 4  # fewer give no interval

Sweep = Annotated[
    list[str] | None,
    typer.Option("--sweep", metavar="FIELD=VALUE,VALUE", help="Convert to each value, and compare all; repeatable."),
]
Method = Annotated[
    str | None, typer.Option("--method", metavar="NAME", help="all: convert in every way there is, and compare.")
]
ReportTokens = Annotated[
    int,
    typer.Option("--report-tokens", metavar="N", parser=token_count, help="Held-out tokens of the report; 0: none."),
]
SpeedContexts = Annotated[
    list[int] | None,
    typer.Option("--speed-context-length", metavar="N", help="Context length for the speed test; repeatable."),
]


def is_all_methods(method: str | None) -> bool:
    """Whether all methods are compared. Raises ConfigError for another word."""
    if method not in (None, "all"):
        raise ConfigError(f"--method {method}: must be all; for one, give an option: --to kv_heads=2,merge=mean")
    return method == "all"


def check_report_tokens(tokens: int, sequence_length: int, is_required: bool) -> None:
    """Raise ConfigError for too few tokens, or for none where a report is all that is asked for."""
    if tokens == 0 and is_required:
        raise ConfigError("--report-tokens 0: a comparison needs a report; give more, or one target with --to")
    if tokens and tokens < MIN_WINDOWS * sequence_length:
        least = MIN_WINDOWS * sequence_length
        raise ConfigError(f"--report-tokens {tokens}: is less than {MIN_WINDOWS} rows; give at least {least}, or 0")


def can_report(source: "ConversionSource") -> bool:
    """Whether a model has bits per byte on a text; says why if not."""
    from heddle.model.decoder import build

    model = build(source.weights.design, device="meta")
    reason = ""
    if source.tokenizer is None:
        reason = "the model has no tokenizer"
    elif not model.causal or model.encoder_width is not None:
        reason = "the model is not a causal language model"
    if reason:
        print_status(f"no report: {reason}")
    return not reason


def conversion_report(
    source: "ConversionSource",
    corpus: "Corpus",
    tokens: int,
    sequence_length: int,
    speed_contexts: Sequence[int] | None,
    runtime: "Runtime",
) -> "ConversionReport":
    """How the conversions of a model are measured. Raises ConfigError for a context that is not positive."""
    from heddle.lab.conversion.measure import MeasurementSettings
    from heddle.lab.conversion.report import ConversionReport
    from heddle.lab.conversion.run import ConversionRecord

    default = MeasurementSettings()
    contexts = tuple(sorted(set(speed_contexts or default.speed_contexts)))
    if min(contexts) < 1:
        raise ConfigError("--speed-context-length: must be at least 1")
    windows = tokens // sequence_length
    settings = MeasurementSettings(
        sequence_length=sequence_length,
        windows=windows,
        span_rows=max(4, min(default.span_rows, windows // 4)),
        needle_rows=max(4, min(default.needle_rows, windows // 8)),
        speed_contexts=contexts,
    )
    command = shlex.join(["heddle", *sys.argv[1:]])
    record = ConversionRecord(Path(), command, str(source.folder), runtime.describe())
    return ConversionReport(corpus, record, settings, runtime.device)


def require_report(report: "ConversionReport | None") -> "ConversionReport":
    """The report. Raises ConfigError where there is none."""
    if report is None:
        raise ConfigError("--sweep and --method: need a report on a text; convert with --to instead")
    return report


def print_results(results: "ConversionResults | None", out: Path, as_json: bool) -> None:
    """What was found, and where it lies."""
    if results is None:
        print_text(str(out))
        return
    from heddle.lab.conversion.results import conversion_verdict

    if as_json:
        print_text(json.dumps(results.to_plain(), indent=2))
        return
    for sentence in conversion_verdict(results):
        print_text(sentence)
    print_text(f"report: {out / 'convert.html'}")
    print_text(str(out))
