"""Options of `heddle train` that name other models: adapters on one's weights, a teacher, and whose tokenizer reads."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heddle.cli.options import parse_loss_weights
from heddle.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from heddle.tokenization.tokenizer import Tokenizer
    from heddle.training.distillation import Distillation
    from heddle.training.init_checkpoint import InitCheckpoint, LoraSettings

DEFAULT_STEPS = 500

Lora = Annotated[
    int | None, typer.Option("--lora", metavar="RANK", help="With --from: train only LoRA adapters of this rank.")
]
LoraTargets = Annotated[
    list[str] | None,
    typer.Option("--lora-targets", metavar="PATH", help="Projections with LoRA; repeatable. [layers.*.mixer.q, .v]"),
]
TeacherFolder = Annotated[
    Path | None, typer.Option("--distill", metavar="FOLDER", help="Train towards this model or run, the teacher.")
]
DistillationLoss = Annotated[
    str | None,
    typer.Option("--distill-loss", metavar="NAME[=X],...", help="Weights of logits, text and layers. [logits=1]"),
]
CompileModel = Annotated[
    bool | None,
    typer.Option("--compile/--no-compile", help="Compile each layer with torch.compile. [where it pays: on CUDA]"),
]
StochasticRounding = Annotated[
    bool, typer.Option("--stochastic-rounding", help="With bf16-params: round at random, without float32 copies.")
]
Fp8 = Annotated[bool, typer.Option("--fp8", help="With bf16: projections in float8, by torchao on a recent GPU.")]
SpikeDeviations = Annotated[
    float | None,
    typer.Option(
        "--spike-guard", metavar="X", help="Go back and past the data when the loss rises X deviations above the last."
    ),
]
AsyncSave = Annotated[
    bool | None,
    typer.Option("--async-save/--no-async-save", help="Train on while a checkpoint is written. [on an accelerator]"),
]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", metavar="NAME", help="Log to tensorboard, wandb, trackio or mlflow, too; repeatable."),
]
Transfer = Annotated[
    str | None,
    typer.Option("--transfer", metavar="width=N", help="The width at which --lr was chosen; weights scale from there."),
]


def steps_of(steps: int | None, tokens: int | None, tokens_per_step: int) -> int:
    """The number of steps that --steps or --tokens gives. Raises ConfigError for both, or too few tokens."""
    if steps is not None and tokens is not None:
        raise ConfigError("--steps and --tokens: both set the length of the training; give one of them")
    if tokens is None:
        return DEFAULT_STEPS if steps is None else steps
    if tokens < max(1, tokens_per_step):
        raise ConfigError(f"--tokens {tokens}: is less than one step of {tokens_per_step} tokens; give more")
    return tokens // max(1, tokens_per_step)


def trackers_of(track: list[str] | None) -> tuple[str, ...]:
    """The trackers of --track. Raises ConfigError for one that is unknown or not installed."""
    from heddle.training.trackers import check_trackers

    try:
        return check_trackers(track or [])
    except ConfigError as error:
        raise ConfigError(f"--{error}") from None


def transfer_width_of(transfer: str | None) -> int | None:
    """The width that --transfer names. Raises ConfigError for anything else."""
    if transfer is None:
        return None
    name, _, number = transfer.partition("=")
    if name != "width" or not number.isdecimal() or not int(number):
        raise ConfigError(f"--transfer {transfer}: is no width; write width=64, where --lr was chosen at width 64")
    return int(number)


def lora_settings_of(rank: int | None, targets: list[str] | None, checkpoint: Path | None) -> "LoraSettings | None":
    """The adapters that --lora asks for. Raises ConfigError without --from."""
    from heddle.training.init_checkpoint import LoraSettings

    if rank is None:
        if targets:
            raise ConfigError(f"--lora-targets {targets[0]}: needs the rank of the adapters; give --lora too")
        return None
    if checkpoint is None:
        raise ConfigError(f"--lora {rank}: adapters need trained weights; give them with --from")
    return LoraSettings(rank, tuple(targets)) if targets else LoraSettings(rank)


def distillation_of(teacher: Path | None, loss: str | None) -> "Distillation | None":
    """The teacher of --distill and its loss. Raises ConfigError or CheckpointError."""
    from heddle.training.distillation import Distillation
    from heddle.training.init_checkpoint import open_init_checkpoint

    if teacher is None:
        if loss is not None:
            raise ConfigError(f"--distill-loss {loss}: needs a teacher; give --distill too")
        return None
    return Distillation(open_init_checkpoint(teacher), parse_loss_weights(loss, "--distill-loss"))


def tokenizer_of(
    tokenizer: Path | None,
    vocab_size: int | None,
    init_checkpoint: "InitCheckpoint | None",
    distillation: "Distillation | None",
) -> "Tokenizer | Path | None":
    """The tokenizer of --from, --distill or --tokenizer. Raises ConfigError for options that conflict."""
    teacher = None if distillation is None else distillation.teacher
    checkpoint = teacher if init_checkpoint is None else init_checkpoint
    if checkpoint is None:
        return tokenizer
    source = "--distill" if init_checkpoint is None else "--from"
    for option, value in (("tokenizer", tokenizer), ("vocab-size", vocab_size)):
        if value is not None:
            raise ConfigError(f"--{option} {value}: {source} brings its own tokenizer; leave --{option} out")
    if checkpoint.tokenizer is None:
        raise CheckpointError(
            f"{checkpoint.folder}: holds no tokenizer.json, so it cannot read text; train a new model"
        )
    return checkpoint.tokenizer
