"""The settings of `heddle judge`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from heddle.settings import (
    Argument,
    Json,
    Option,
    SessionSettings,
    TrainingPrecision,
    parse_length,
    parse_tokens,
)
from heddle.training.settings import (
    BatchSize,
    Data,
    LearningRate,
    OptimizerName,
    Schedule,
    TokenizerFile,
    VocabSize,
    Warmup,
)

ACTIONS = ("init", "submit", "show", "final", "mcp")
MATCHES = ("tokens", "flops", "parameters", "seconds")
RULES = ("e-lond", "e-lord", "e-saffron")
ADOPTED = ("better", "leading")


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(SessionSettings):
    """Settings of `heddle judge`. All but `words`, `more` and where to run belong to `init`."""

    SHOWN: ClassVar = (
        "out", "more", "data", "tokens", "match", "alpha", "pairs", "windows", "second", "tune", "workers", "json",
    )  # fmt: skip

    action: Annotated[str, Argument("ACTION", "init, submit, show, final or mcp.")]
    words: Annotated[
        tuple[str, ...], Argument("DESIGN|PROPOSAL|FIELD=VALUE", "init: a design, overrides; submit: a YAML file.")
    ] = ()
    out: Annotated[Path, Option("FOLDER", "The ledger.")] = Path("runs/judge")
    more: Annotated[bool, Option("", "submit: buy more pairs for a proposal without a clear difference.")] = False
    data: Data = ()
    tokenizer: TokenizerFile = None
    vocab_size: VocabSize = None
    tokens: Annotated[int, Option("N", "Training tokens of each run.", parse_tokens)] = 100_000
    match: Annotated[str, Option("BUDGET", "What both sides share: tokens, flops, parameters or seconds.")] = "tokens"
    alpha: Annotated[float, Option("X", "False discovery rate of all 'better' verdicts.")] = 0.1
    rule: Annotated[str, Option("NAME", "e-lond, e-lord or e-saffron.")] = "e-lond"
    adopt: Annotated[str, Option("WHICH", "What becomes the incumbent: better, or leading without a claim.")] = "better"
    pairs: Annotated[int, Option("N", "Most pairs of runs for one decision.")] = 8
    windows: Annotated[int | None, Option("N", "Held-out windows of each pair. [from the measured variance]")] = None
    second: Annotated[float, Option("X", "A winner must also win at X times the parameters; 0: off.")] = 2.0
    tune: Annotated[tuple[str, ...], Option("FIELD=VALUES", "Tune for each side: lr=0.001,0.003; repeatable.")] = ()
    seconds: Annotated[float, Option("X", "Limit of each run of a proposal's own code.")] = 3600.0
    memory: Annotated[float, Option("GB", "Memory limit of each run of a proposal's own code.")] = 16.0
    batch_size: BatchSize = 4
    sequence_length: Annotated[int, Option("N", "Tokens per sequence, and per held-out window.", parse_length)] = 256
    lr: LearningRate = 3e-3
    optimizer: OptimizerName = "adamw"
    schedule: Schedule = "wsd"
    warmup: Warmup = None
    precision: TrainingPrecision = "fp32"
    workers: Annotated[int | None, Option("N", "Runs at the same time. [one per CPU thread, at most 4]")] = None
    json: Json = False
