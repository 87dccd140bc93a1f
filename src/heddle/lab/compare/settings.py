"""The settings of `heddle compare`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from heddle.errors import ConfigError
from heddle.settings import (
    Argument,
    Deterministic,
    Json,
    Option,
    SessionSettings,
    SpeedContexts,
    Tf32,
    TrainingPrecision,
    parse_length,
    parse_port,
    parse_tokens,
)
from heddle.training.settings import (
    BatchSize,
    Data,
    LearningRate,
    LrScale,
    OptimizerName,
    Schedule,
    TokenizerFile,
    Track,
    Transfer,
    VocabSize,
    Warmup,
)

DEFAULT_SEEDS = 3
DEFAULT_TUNING_BUDGET = "1"  # as much training as the comparison itself

Designs = Annotated[
    tuple[str, ...], Argument("DESIGN|FIELD=VALUE", "Designs, the baseline first; overrides apply to all.")
]
SequenceLength = Annotated[int, Option("N", "Tokens per sequence.", parse_length)]


@dataclass(frozen=True, kw_only=True)
class CompareSettings(SessionSettings):
    """Settings of `heddle compare` and `heddle.compare`."""

    SHOWN: ClassVar = (
        "vary", "baseline", "equal", "tokens", "seeds", "budget", "dry_run", "data", "lr", "tune", "out", "open",
    )  # fmt: skip

    designs: Designs
    vary: Annotated[
        tuple[str, ...], Option("FIELD=VALUE,VALUE", "Train one design per value; repeat for every combination.")
    ] = ()
    baseline: Annotated[str | None, Option("NAME", "The design that all others are compared with.")] = None
    equal: Annotated[str | None, Option("SIZE", "Equal parameters, active-parameters, flops, state or state@N.")] = None
    out: Annotated[Path, Option("FOLDER", "The comparison's folder.")] = Path("runs/compare")
    data: Data = ()
    tokenizer: TokenizerFile = None
    vocab_size: VocabSize = None
    tokens: Annotated[int | None, Option("N", "Training tokens of each run. [100k]", parse_tokens)] = None
    seconds: Annotated[float | None, Option("X", "Or the training time of each run.")] = None
    flops: Annotated[float | None, Option("X", "Or the training FLOPs of each run.")] = None
    seeds: Annotated[int | None, Option("N", "Runs of each design, with random seeds 0 to N-1. [3]")] = None
    until_resolved: Annotated[
        float | None, Option("X", "Add seeds until each difference to the best is known to ± X.")
    ] = None
    budget: Annotated[
        str | None, Option("TIME", "Time of the whole command (90s, 7m, 2h); chooses tokens and seeds not given.")
    ] = None
    dry_run: Annotated[bool, Option("", "Print the plan and how long it takes; train nothing.")] = False
    batch_size: BatchSize = 4
    sequence_length: SequenceLength = 256
    lr: LearningRate = 3e-3
    lr_scale: LrScale = ()
    transfer: Transfer = None
    optimizer: OptimizerName = "adamw"
    schedule: Schedule = "wsd"
    warmup: Warmup = None
    tune: Annotated[
        tuple[str, ...], Option("FIELD=VALUES", "Tune for each design: lr=0.001..0.02 or lr=0.001,0.004; repeatable.")
    ] = ()
    tune_budget: Annotated[str | None, Option("X", "Share of the comparison's training, or a time (10m). [1]")] = None
    speed_context_length: SpeedContexts = ()
    recall: Annotated[str, Option("NAMES", "Recall tasks: auto, all, none, mqar, parity …")] = "auto"
    extrapolate: Annotated[int, Option("N", "Test sequences up to N times as long: 1 (off), 2, 4, 8 …")] = 8
    track: Track = ()
    devices: Annotated[str | None, Option("NAMES", "One run on each: 0-7, cuda:0,cuda:2, or cpu:4 (4 at a time).")] = (
        None
    )
    share: Annotated[str | None, Option("K/N", "Run as process K of N sharing the folder. [from a Slurm array]")] = None
    precision: TrainingPrecision = "fp32"
    tf32: Tf32 = False
    deterministic: Deterministic = False
    workers: Annotated[int | None, Option("N", "Runs at the same time. [one per CPU thread, at most 4]")] = None
    nproc: Annotated[int, Option("N", "Processes that share each training run, one device each.")] = 1
    port: Annotated[int | None, Option("N", "Port of the live report on 127.0.0.1. [any free one]", parse_port)] = None
    open: Annotated[bool, Option("", "Open the live report in the browser.")] = False
    json: Json = False

    @classmethod
    def read(cls, values: Mapping[Any, Any], source: str = "options") -> Self:
        """Read settings. Also raises ConfigError for an option that a tuned field overrides."""
        settings = super().read(values, source)
        for field in settings.tune:
            name = field.partition("=")[0]
            if values.get(name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} and --tune {name}: both set {name}; leave one out")
        return settings
