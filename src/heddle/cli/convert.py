"""`heddle convert`: turn a trained model into one of another design."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heddle.cli.convert_report import (
    Method,
    ReportTokens,
    SpeedContexts,
    Sweep,
    can_report,
    check_report_tokens,
    conversion_report,
    is_all_methods,
    print_results,
    require_report,
)
from heddle.cli.counts import token_count
from heddle.cli.options import Data, Device, Json, PartFile, Quiet, Threads, open_session, parse_loss_weights
from heddle.errors import CheckpointError, ConfigError
from heddle.progress import print_text, print_warning

if TYPE_CHECKING:
    from heddle.conversion.rewrite import Rewrite
    from heddle.conversion.sources import ConversionSource
    from heddle.data.corpus import Corpus
    from heddle.data.samples import RowProtocol

DRY_RUN_CONTEXT = 2048  # tokens; of the costs that a dry run prints


def convert(  # noqa: PLR0913 - one parameter per option
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="A run, a model folder or a folder of transformers.")
    ] = None,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.")] = None,
    to: Annotated[
        list[str] | None,
        typer.Option("--to", metavar="FIELD=VALUE", help="What to change, such as kv_heads=2,merge=mean; repeatable."),
    ] = None,
    sweep: Sweep = None,
    method: Method = None,
    list_: Annotated[bool, typer.Option("--list", help="List the rewrites and their options.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print sizes and costs before and after; write nothing.")
    ] = False,
    data: Data = None,
    calibration_tokens: Annotated[
        int | None,
        typer.Option("--calibration-tokens", metavar="N", help="Tokens of the text to calibrate on. [65536]"),
    ] = None,
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", metavar="N", help="Tokens per row of the text.")
    ] = 256,
    heal: Annotated[
        int | None,
        typer.Option("--heal", metavar="TOKENS", parser=token_count, help="Then train it this long towards MODEL."),
    ] = None,
    heal_loss: Annotated[
        str | None,
        typer.Option("--heal-loss", metavar="NAME[=X],...", help="Weights of logits, text and layers. [logits=1]"),
    ] = None,
    heal_parameters: Annotated[
        str | None,
        typer.Option("--heal-parameters", metavar="NAME", help="all, or touched: what the conversion changed. [all]"),
    ] = None,
    heal_lr: Annotated[
        float | None,
        typer.Option(
            "--heal-lr",
            metavar="X",
            help="Its peak learning rate. [at most 0.003 × 96 / width, less after a small loss]",
        ),
    ] = None,
    report_tokens: ReportTokens = 2**16,
    speed_context_length: SpeedContexts = None,
    device: Device = "auto",
    threads: Threads = None,
    part: PartFile = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Convert a trained model: fewer key/value heads, latent attention, windows, recurrences and exact rewrites.

    OUT is written whole or not at all; MODEL is only read.
    """
    with ExitStack() as stack:
        runtime = open_session(stack, device=device, threads=threads, parts=part, quiet=quiet)
        if list_:
            _print_rewrites()
            return
        _check_heal_options(heal, {"loss": heal_loss, "lr": heal_lr, "parameters": heal_parameters})
        if model is None:
            raise ConfigError("MODEL: is missing; give a run, a model folder or a folder of transformers")
        from heddle.analysis.conversion.report import (
            interrupted_report_rows,
            is_converted,
            report_conversion,
            report_variants,
        )
        from heddle.conversion.calibration import CALIBRATION_TOKENS, calibration_from_corpus, calibration_samples
        from heddle.conversion.convert import Conversion
        from heddle.conversion.convert import convert as convert_model
        from heddle.conversion.heal import Original, convert_and_heal, healing_rate, healing_settings
        from heddle.conversion.sources import open_source
        from heddle.conversion.variants import conversion_variants
        from heddle.training.distillation import Distillation

        if not to and not sweep:
            raise ConfigError(
                "--to: is missing; say what to change, such as --to kv_heads=2 (--list prints the choices)"
            )
        variants = conversion_variants(to or [], sweep or [], is_all_methods(method))
        is_comparison = bool(sweep or method)
        check_report_tokens(report_tokens, sequence_length, is_comparison)
        if out is None and not dry_run:
            raise ConfigError("OUT: is missing; name the folder to write")
        source = open_source(model)
        rows = None if out is None else interrupted_report_rows(out)
        text = corpus = settings = None
        count = CALIBRATION_TOKENS if calibration_tokens is None else calibration_tokens
        design = source.weights.design
        loss_weights = parse_loss_weights(heal_loss, "--heal-loss")
        distillation = Distillation(Original(source), loss_weights, heal_parameters or "all")
        if heal is not None:
            rate = healing_rate(design.width) if heal_lr is None else heal_lr
            settings = healing_settings(heal, sequence_length, rate, calibration_samples(count, sequence_length))
        rewrites = [rewrite for variant in variants for rewrite in variant.rewrites]
        if any(rewrite.needs_text and not rewrite.is_exact(design) for rewrite in rewrites):
            corpus = _corpus(source, data, count, heal, rows)
            text = calibration_from_corpus(corpus, count, sequence_length, runtime.device)
        if dry_run:
            plans = {v.name: Conversion(source, v.rewrites, text).plan().design for v in variants}
            _print_costs({name: _costs(source, plan) for name, plan in plans.items()}, as_json)
            return
        assert out is not None
        with_report = report_tokens > 0 and can_report(source)
        if corpus is None and (settings is not None or with_report):
            corpus = _corpus(source, data, count, heal, rows)

        def write(conversion: Conversion, folder: Path) -> None:
            if settings is None:
                convert_model(conversion, folder)
            else:
                assert corpus is not None
                healed = convert_and_heal(
                    conversion, distillation, corpus, settings, folder, runtime.device, heal_lr is None
                )
                if not (is_comparison or as_json):
                    print_text(f"{healed.bits_per_byte:.4f} bits per byte on held-out text after healing")

        report = results = None
        if with_report:
            assert corpus is not None
            report = conversion_report(source, corpus, report_tokens, sequence_length, speed_context_length, runtime)
        if is_comparison:
            results = report_variants(source, variants, text, write, out, require_report(report))
        else:
            conversion = Conversion(source, variants[0].rewrites, text)
            if report is None or not is_converted(conversion, out, healed=settings is not None):
                write(conversion, out)
            if report is not None:
                results = report_conversion(conversion, out, report)
    print_results(results, out, as_json)


def _check_heal_options(heal: int | None, options: dict[str, Any]) -> None:
    """Raise ConfigError for an option that says how to heal, without --heal."""
    for name, value in options.items():
        if heal is None and value is not None:
            raise ConfigError(f"--heal-{name} {value}: says how to heal; give --heal too")


def _corpus(
    source: "ConversionSource",
    data: list[str] | None,
    calibration_tokens: int,
    heal: int | None,
    rows: "RowProtocol | None",
) -> "Corpus":
    """The text to calibrate and heal on, in the model's own tokens; how far it is encoded decides its order.

    rows: how rows begin in the conversion that is continued.
    """
    from heddle.data.corpus import prepare_corpus

    if source.tokenizer is None:
        raise CheckpointError(f"{source.folder}: holds no tokenizer.json, so it cannot read a text")
    max_tokens = 4 * calibration_tokens + (heal or 0)
    data = data or ["stdlib"]
    corpus = prepare_corpus(data, vocab_size=None, max_train_tokens=max_tokens, tokenizer=source.tokenizer)
    if rows is None or rows == corpus.rows:
        return corpus
    print_warning(
        "rows begin without the model's BOS token, as in the conversion that is continued, so losses are not those of "
        "its use; remove what is there, to convert again"
    )
    return replace(corpus, rows=rows)


def _print_rewrites() -> None:
    """Every rewrite with its targets and options."""
    from heddle.conversion.rewrite import rewrites

    for name, cls in rewrites().items():
        targets = [f"{target}={option.upper()}" for target, option in cls.targets.items()] or [name]
        print_text(f"{', '.join(targets)}")
        print_text(f"    {_first_line(cls)}")
        for option, field in cls.model_fields.items():
            if option not in ("layers", *cls.targets.values()):
                print_text(f"        {_describe_option(option, field.annotation, field.get_default())}")


def _describe_option(option: str, annotation: Any, default: Any) -> str:
    """The option with its choices and its default, such as `merge=mean|first [mean]`."""
    from heddle.annotations import literal_values

    choices = "|".join(map(str, literal_values(annotation))) or ("true|false" if annotation is bool else "…")
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    return f"{option}={choices}" + ("" if default is None else f" [{shown}]")


def _first_line(cls: "type[Rewrite]") -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


def _costs(source: "ConversionSource", design: Any) -> dict[str, dict[str, Any]]:
    """Sizes and costs of both designs."""
    from heddle.exchange.family_match import match_report
    from heddle.model.size import size

    columns = {}
    for label, config in (("before", source.weights.design), ("after", design)):
        costs = size(config, DRY_RUN_CONTEXT, dtype=source.weights.dtype)
        columns[label] = {
            "parameters": costs.parameters,
            "state bytes a token": costs.state_bytes_per_token,
            f"state bytes at {DRY_RUN_CONTEXT}": costs.state_bytes,
            "FLOPs a token": round(costs.flops_per_token),
            "exports as": match_report(config).architecture,
        }
    return columns


def _print_costs(costs: dict[str, dict[str, dict[str, Any]]], as_json: bool) -> None:
    """The costs of each conversion; of a single one without its name."""
    import json

    if as_json:
        print_text(json.dumps(next(iter(costs.values())) if len(costs) == 1 else costs, indent=2))
        return
    for name, columns in costs.items():
        if len(costs) > 1:
            print_text(name)
        print_text(f"{'':22}{'before':>24}{'after':>24}")
        for row, before in columns["before"].items():
            shown = [f"{value:,}" if isinstance(value, int) else value for value in (before, columns["after"][row])]
            print_text(f"{row:22}{shown[0]:>24}{shown[1]:>24}")
