"""The settings of `heddle convert`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from heddle.settings import Argument, Json, Option, SessionSettings, SpeedContexts, parse_length, parse_tokens
from heddle.training.settings import Data, LossWeightsText


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
