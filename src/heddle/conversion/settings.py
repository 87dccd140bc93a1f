"""The settings of `heddle convert`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from heddle.errors import ConfigError
from heddle.settings import Argument, Json, Option, SessionSettings, SpeedContexts, parse_length, parse_tokens
from heddle.training.settings import Data, LossWeightsText

HEALING_BATCH = 8  # rows
MIN_WINDOWS = 4  # of a report; fewer give no interval


@dataclass(frozen=True, kw_only=True)
class ConvertSettings(SessionSettings):
    """Settings of `heddle convert` and `heddle.convert`."""

    SHOWN: ClassVar = (
        "to", "list_", "dry_run", "sweep", "search", "method", "data",
        "calibration_tokens", "heal", "report_tokens", "device",
    )  # fmt: skip

    model: Annotated[Path | None, Argument("MODEL", "A run, a model folder or a transformers folder.")] = None
    out: Annotated[Path | None, Argument("OUT", "The folder to write; it must not exist.")] = None
    to: Annotated[
        tuple[str, ...],
        Option(
            "FIELD=VALUE",
            "What to change, such as kv_heads=2,merge=mean, or kv_heads,state_budget=25% (of the state per token); "
            "repeatable.",
        ),
    ] = ()
    sweep: Annotated[
        tuple[str, ...], Option("FIELD=VALUE,VALUE", "Convert to each value, and compare all; repeatable.")
    ] = ()
    search: Annotated[
        tuple[str, ...],
        Option(
            "GOAL",
            "Instead of --to: choose what each layer becomes. Shares of MODEL's state@32k=25% (always with its context "
            "length), flops=80%, parameters=90%; of whole models decode@32k=2x (speed, measured here), recall=95% (of "
            "MODEL's accuracy), quality=0.02 (added bits per byte); repeatable.",
        ),
    ] = ()
    only: Annotated[tuple[str, ...], Option("NAME", "Search only this rewrite or target; repeatable.")] = ()
    keep: Annotated[str | None, Option("LAYERS", "Layers that a search does not change, such as 0,5.")] = None
    second_data: Annotated[
        tuple[str, ...],
        Option("PATH", "Search again on this text, to see whether the choice depends on the text; repeatable."),
    ] = ()
    method: Annotated[str | None, Option("NAME", "all: convert by every method, and compare.")] = None
    list_: Annotated[bool, Option("", "List the rewrites and their options.")] = False
    dry_run: Annotated[bool, Option("", "Print sizes and costs before and after; write nothing.")] = False
    data: Data = ()
    calibration_tokens: Annotated[
        int | None, Option("N", "Tokens of the text to calibrate on. [65536]", parse_tokens)
    ] = None
    sequence_length: Annotated[int, Option("N", "Tokens per sequence of the text.", parse_length)] = 256
    heal: Annotated[
        int | None, Option("TOKENS", "Then train the result for TOKENS tokens to match MODEL.", parse_tokens)
    ] = None
    heal_loss: LossWeightsText = None
    heal_stage: Annotated[
        tuple[str, ...],
        Option(
            "SHARE:LOSS",
            "Heal in stages, each a share of the tokens with a loss as of --heal-loss, and @LENGTH for longer "
            "sequences: 20%:layers 60%:logits 20%:logits@1024; repeatable.",
        ),
    ] = ()
    heal_baselines: Annotated[bool, Option("", "Also heal the baselines of a search, and report all.")] = False
    heal_parameters: Annotated[str | None, Option("NAME", "all, or touched: only what was converted. [all]")] = None
    heal_lr: Annotated[
        float | None,
        Option(
            "X",
            "Its peak learning rate. [at most 0.003 × 96 / width; lower after little added loss, or for small batches]",
        ),
    ] = None
    heal_batch_size: Annotated[
        int | None, Option("N", "Its sequences per step; fewer, or a shorter --sequence-length, need less memory. [8]")
    ] = None
    budget: Annotated[
        str | None,
        Option(
            "TIME",
            "Of the whole command, such as 30m: chooses --calibration-tokens if not given; healing gets the rest; a "
            "--heal that takes longer is refused.",
        ),
    ] = None
    report_tokens: Annotated[
        int,
        Option("N", "Held-out tokens of the report's losses; recall reads up to as many again; 0: none.", parse_tokens),
    ] = 2**16
    speed_context_length: SpeedContexts = ()
    json: Json = False


def check_options(settings: ConvertSettings) -> None:
    """Raise ConfigError for options that are missing, have no effect or are out of range, before anything is read."""
    healing = {
        "loss": settings.heal_loss,
        "lr": settings.heal_lr,
        "parameters": settings.heal_parameters,
        "batch-size": settings.heal_batch_size,
        "stage": " ".join(settings.heal_stage) or None,
        "baselines": "" if settings.heal_baselines else None,
    }
    heals = settings.heal or (settings.heal is None and settings.budget is not None)
    for name, value in healing.items():
        if not heals and value is not None:
            option = f"--heal-{name} {value}".rstrip()
            raise ConfigError(f"{option}: has no effect without healing; give --heal or --budget too")
    if settings.heal_stage and settings.heal_loss:
        raise ConfigError(f"--heal-loss {settings.heal_loss}: stages name their own losses; leave it out")
    if settings.heal_baselines and not (settings.search and settings.report_tokens):
        raise ConfigError("--heal-baselines: has no effect without --search and a report; leave it out")
    least = {"calibration-tokens": settings.calibration_tokens, "sequence-length": settings.sequence_length}
    least |= {
        "heal-batch-size": settings.heal_batch_size,
        "speed-context-length": min(settings.speed_context_length, default=1),
    }
    for name, value in least.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: must be at least 1")
    if settings.heal_lr is not None and not 0 < settings.heal_lr < math.inf:
        raise ConfigError(f"--heal-lr {settings.heal_lr}: must be a number above 0")
    if settings.report_tokens == 0 and (settings.sweep or settings.method):
        raise ConfigError("--report-tokens 0: a comparison needs a report; give more, or one target with --to")
    if settings.model is None:
        raise ConfigError("MODEL: is missing; give a run, a model folder or a transformers folder")
    if settings.search and (settings.to or settings.sweep or settings.method):
        raise ConfigError("--search: chooses the conversion itself; leave out --to, --sweep and --method")
    if not settings.search and (settings.only or settings.keep or settings.second_data):
        raise ConfigError("--only, --keep and --second-data: have no effect without --search; give a goal")
    if not settings.to and not settings.sweep and not settings.search:
        raise ConfigError("--to: is missing; say what to change, such as --to kv_heads=2 (--list prints the choices)")
    if settings.method not in (None, "all"):
        reason = "must be all; for one, give an option: --to kv_heads=2,merge=mean"
        raise ConfigError(f"--method {settings.method}: {reason}")
    if settings.calibration_tokens is None and (errors := token_errors(settings)):  # else with those about the model
        raise ConfigError("; and ".join(errors))


def token_errors(settings: ConvertSettings) -> list[str]:
    """What is wrong with the tokens of a report and of healing, whatever the model."""
    length, report, errors = settings.sequence_length, settings.report_tokens, []
    if 0 < report < MIN_WINDOWS * length:
        least = MIN_WINDOWS * length
        errors.append(f"--report-tokens {report}: is under {MIN_WINDOWS} sequences; give at least {least}, or 0")
    step = (settings.heal_batch_size or HEALING_BATCH) * length
    if settings.heal and settings.heal < step:
        errors.append(
            f"--heal {settings.heal}: is less than one step of {step:,} tokens; give more, 0 for none, or a "
            "smaller --heal-batch-size"
        )
    return errors
