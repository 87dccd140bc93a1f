"""The settings of `heddle ladder`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

from heddle.errors import ConfigError
from heddle.lab.compare.settings import Designs, SequenceLength
from heddle.settings import Json, Option, Precision, SessionSettings, parse_count, parse_named, shorten
from heddle.training.settings import BatchSize, Data, OptimizerName, Schedule, TokenizerFile, VocabSize, Warmup

DEFAULT_SIZES, DEFAULT_SEEDS = "5", 2
MAX_COUNT = 20  # a larger number given as sizes is a number of parameters


def parse_ratios(text: str) -> tuple[float, ...]:
    """Parse `20` or `5,10,20`, in any order. Raises ValueError."""
    try:
        ratios = sorted(map(float, text.split(",")))
    except ValueError:
        raise ValueError("must be numbers such as 20, or 5,10,20") from None
    if len({*ratios}) < len(ratios):
        raise ValueError("has a number twice; give each once")
    return tuple(ratios)


def parse_sizes(text: str) -> int | tuple[float, ...]:
    """Parse `5` as a count, and `60k,120k` or a number above 20 as sizes. Raises ConfigError, naming the size."""
    if text.isdecimal() and len(text) <= 2 and int(text) <= MAX_COUNT:
        return int(text)
    sizes = tuple(parse_named("--sizes", size.strip(), parse_count) for size in text.split(","))
    if len({*sizes}) < len(sizes):
        raise ConfigError(f"--sizes {shorten(text)}: has a size twice; give each once")
    return sizes


@dataclass(frozen=True, kw_only=True)
class LadderSettings(SessionSettings):
    """Settings of `heddle ladder` and `heddle.ladder`."""

    SHOWN: ClassVar = (
        "sizes", "tokens_per_parameter", "target", "seeds", "data", "budget", "lr", "sequence_length", "out",
        "dry_run",
    )  # fmt: skip

    designs: Designs
    sizes: Annotated[
        str | None, Option("N|N,N,...", "Number of sizes, halving from the first design; or sizes. [5]")
    ] = None
    tokens_per_parameter: Annotated[
        str | None,
        Option("X|X,X,...", "Training tokens per parameter; several give L(N, D), as branches of one run. [20]"),
    ] = None
    target: Annotated[
        float | None, Option("N", "Parameters to predict, such as 20M. [10 times the largest size]", parse_count)
    ] = None
    target_tokens: Annotated[
        float | None,
        Option(
            "D", "Tokens to predict. [the most per parameter, times --target]", partial(parse_count, unit_name="tokens")
        ),
    ] = None
    target_flops: Annotated[
        float | None,
        Option(
            "C", "Predict the best size for this budget. [6·N·D of the target]", partial(parse_count, unit_name="FLOPs")
        ),
    ] = None
    irreducible: Annotated[str, Option("NAME", "Irreducible loss of the designs: shared or separate.")] = "shared"
    seeds: Annotated[int | None, Option("N", "Runs of each size, with random seeds 0 to N-1. [2]")] = None
    budget: Annotated[
        str | None, Option("TIME", "Time of the whole command (30m, 12h, 1d); chooses sizes, tokens, seeds not given.")
    ] = None
    out: Annotated[Path, Option("FOLDER", "The ladder's folder; a later call may add to it.")] = Path("runs/ladder")
    dry_run: Annotated[bool, Option("", "Print sizes, tokens and the time they take; train nothing.")] = False
    data: Data = ()
    tokenizer: TokenizerFile = None
    vocab_size: VocabSize = None
    batch_size: BatchSize = 4
    sequence_length: SequenceLength = 256
    lr: Annotated[float, Option("X", "Peak learning rate at each design's own width.")] = 3e-3
    lr_exponent: Annotated[float, Option("X", "At other widths --lr is in proportion to width to the -X.")] = 0.5
    optimizer: OptimizerName = "adamw"
    schedule: Schedule = "wsd"
    warmup: Warmup = None
    precision: Precision = "fp32"
    json: Json = False
