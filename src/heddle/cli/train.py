"""`heddle train`: train a design, from new weights or a checkpoint's; the same command again resumes the run."""

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heddle.cli.options import (
    CudaOptions,
    Data,
    Deterministic,
    Device,
    Json,
    Kernel,
    LrScale,
    OptimizerName,
    Overrides,
    PartFile,
    Quiet,
    Schedule,
    Tf32,
    Threads,
    TokenizerFile,
    TrainingPrecision,
    VocabSize,
    Warmup,
    open_session,
    parse_scales,
    with_vocab_size,
)
from heddle.cli.train_options import (
    CompileModel,
    DistillationLoss,
    Fp8,
    Lora,
    LoraTargets,
    StochasticRounding,
    TeacherFolder,
    Transfer,
    distillation_of,
    lora_settings_of,
    steps_of,
    tokenizer_of,
    transfer_width_of,
)
from heddle.errors import ConfigError
from heddle.progress import print_text
from heddle.tokenization import DEFAULT_VOCAB_SIZE

if TYPE_CHECKING:
    from heddle.data.chat import ChatDataset
    from heddle.data.corpus import Corpus
    from heddle.data.recall import TaskStream
    from heddle.model.config import ModelConfig
    from heddle.tokenization.tokenizer import Tokenizer
    from heddle.training.distillation import Distillation
    from heddle.training.init_checkpoint import InitCheckpoint
    from heddle.training.loop import TrainingJob
    from heddle.training.settings import Settings
    from heddle.training.training_result import TrainingResult

DEFAULT_SEQUENCE_LENGTH = 256


def train(  # noqa: PLR0913 - one parameter per option
    design: Annotated[
        str | None, typer.Argument(metavar="DESIGN", help="A file, preset:NAME or a folder; leave out with --from.")
    ] = None,
    overrides: Overrides = None,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="Start from the weights of this model or run.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The run's folder.")] = Path("runs/train"),
    lora: Lora = None,
    lora_targets: LoraTargets = None,
    teacher: TeacherFolder = None,
    distillation_loss: DistillationLoss = None,
    data: Data = None,
    tokenizer: TokenizerFile = None,
    vocab_size: VocabSize = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Optimizer steps. [500]")] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", help="Training tokens, instead of --steps.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", help="Sequences per step.")] = 8,
    sequence_length: Annotated[
        int | None,
        typer.Option("--sequence-length", metavar="N", help="Tokens per sequence. [256; a recall task has its own]"),
    ] = None,
    gradient_accumulation_steps: Annotated[
        int, typer.Option("--gradient-accumulation-steps", metavar="N", help="Micro-batches per step; same result.")
    ] = 1,
    lr: Annotated[float, typer.Option("--lr", metavar="X", help="Peak learning rate.")] = 3e-3,
    lr_scale: LrScale = None,
    transfer: Transfer = None,
    optimizer: OptimizerName = "adamw",
    schedule: Schedule = "wsd",
    warmup: Warmup = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Random seed of weights, data order and dropout.")
    ] = 0,
    save_every: Annotated[
        int | None, typer.Option("--save-every", metavar="N", help="Steps between checkpoints.")
    ] = 100,
    evaluate_every: Annotated[
        int | None, typer.Option("--evaluate-every", metavar="N", help="Steps between evaluations.")
    ] = None,
    compile_model: CompileModel = None,
    checkpoint_activations: Annotated[
        bool, typer.Option("--checkpoint-activations", help="Recompute activations in backward; saves memory.")
    ] = False,
    device: Device = "auto",
    precision: TrainingPrecision = "fp32",
    stochastic_rounding: StochasticRounding = False,
    fp8: Fp8 = False,
    tf32: Tf32 = False,
    deterministic: Deterministic = False,
    threads: Threads = None,
    kernel: Kernel = None,
    part: PartFile = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a design; prints its bits per byte on held-out text and a sample of its text.

    With --data chat:FILE.jsonl it trains on conversations, with a loss on the assistant's text; with --data
    recall:mqar,pairs=8 on a synthetic recall task, and prints the accuracy.
    """
    with ExitStack() as stack:
        cuda = CudaOptions(tf32, deterministic)
        runtime = open_session(
            stack, device=device, threads=threads, kernels=kernel, parts=part, quiet=quiet, cuda=cuda
        )
        from heddle.model.compiled import should_compile
        from heddle.runtime import versions
        from heddle.training.init_checkpoint import open_init_checkpoint
        from heddle.training.loop import TrainingJob
        from heddle.training.loop import train as run
        from heddle.training.settings import Settings

        task = _recall_task(data, tokenizer, vocab_size, sequence_length)
        length = DEFAULT_SEQUENCE_LENGTH if sequence_length is None else sequence_length
        length = length if task is None else task.task.length
        settings = Settings(
            steps=steps_of(steps, tokens, batch_size * length),
            batch_size=batch_size,
            sequence_length=length,
            learning_rate=lr,
            seed=seed,
            save_every=save_every,
            gradient_accumulation_steps=gradient_accumulation_steps,
            precision=precision,
            stochastic_rounding=stochastic_rounding,
            fp8=fp8,
            compile=should_compile(runtime.device) if compile_model is None else compile_model,
            checkpoint_activations=checkpoint_activations,
            optimizer=optimizer,
            schedule=schedule,
            warmup=warmup,
            lr_scale=parse_scales(lr_scale),
            evaluate_every=evaluate_every,
            transfer_width=transfer_width_of(transfer),
        )
        lora_settings = lora_settings_of(lora, lora_targets, from_)
        init_checkpoint = None if from_ is None else open_init_checkpoint(from_)
        distillation = distillation_of(teacher, distillation_loss)
        config = _config(design, overrides, init_checkpoint, distillation)
        source: Corpus | ChatDataset | TaskStream
        if task is None:
            source_tokenizer = tokenizer_of(tokenizer, vocab_size, init_checkpoint, distillation)
            documents = {} if init_checkpoint is None else init_checkpoint.documents
            sizes = (config.vocab_size, vocab_size)
            source = _open_data(data or ["stdlib"], settings, sizes, source_tokenizer, documents)
            source_vocab_size = source.tokenizer.vocab_size
        else:
            source, source_vocab_size = task, task.vocab_size
            task.check_vocab_size(config.vocab_size)
        environment = {"command": shlex.join(["heddle", *sys.argv[1:]]), "versions": versions()}
        environment["runtime"] = runtime.describe()
        job = TrainingJob(
            config=with_vocab_size(config, source_vocab_size),
            source=source,
            settings=settings,
            out=out,
            device=runtime.device,
            environment=environment,
            init_checkpoint=init_checkpoint,
            lora=lora_settings,
            distillation=distillation,
        )
        _report(run(job), job, as_json)


def _recall_task(
    data: list[str] | None, tokenizer: Path | None, vocab_size: int | None, sequence_length: int | None
) -> "TaskStream | None":
    """The recall task that --data names; None for other data. Raises ConfigError for options that only text takes."""
    from heddle.data.recall import is_recall_argument, parse_recall

    if data is None or len(data) != 1 or not is_recall_argument(data[0]):
        return None
    task = parse_recall(data[0])
    for option, value in (("tokenizer", tokenizer), ("vocab-size", vocab_size)):
        if value is not None:
            raise ConfigError(f"--{option} {value}: {data[0]} has a vocabulary of its own; leave --{option} out")
    if sequence_length not in (None, task.task.length):
        raise ConfigError(
            f"--sequence-length {sequence_length}: {data[0]} has sequences of {task.task.length} tokens; "
            f"give length={sequence_length} in --data"
        )
    return task


def _config(
    design: str | None,
    overrides: list[str] | None,
    checkpoint: "InitCheckpoint | None",
    distillation: "Distillation | None",
) -> "ModelConfig":
    """The config to train, with a teacher's vocabulary. Raises ConfigError if neither DESIGN nor --from is given."""
    from heddle.model.load_config import load_config

    overrides = list(overrides or [])
    if checkpoint is None:
        if design is None:
            raise ConfigError("DESIGN: is missing; give a file, preset:NAME or a folder, or --from FOLDER")
        config = load_config(design, overrides)
        vocab_size = None if distillation is None else distillation.teacher.config.vocab_size
        return config if vocab_size is None else with_vocab_size(config, vocab_size)
    if design is not None and "=" in design and not Path(design).exists():  # without DESIGN, an override comes first
        return checkpoint.resolve_config(None, [design, *overrides])
    return checkpoint.resolve_config(design, overrides)


def _open_data(
    data: list[str],
    settings: "Settings",
    sizes: tuple[int | None, int | None],
    tokenizer: "Tokenizer | Path | None",
    documents: dict[str, str],
) -> "Corpus | ChatDataset":
    """Text or conversations, ready to train on. sizes: the design's vocab_size, and --vocab-size."""
    from heddle.data.chat import is_chat_argument, prepare_chat
    from heddle.data.corpus import check_tokenizer_fits, prepare_corpus
    from heddle.tokenization.tokenizer import Tokenizer

    if not any(map(is_chat_argument, data)):
        vocab_size = sizes[0] or sizes[1] or (None if tokenizer else DEFAULT_VOCAB_SIZE)
        max_tokens = settings.steps * settings.tokens_per_step
        corpus = prepare_corpus(data, vocab_size=vocab_size, max_train_tokens=max_tokens, tokenizer=tokenizer)
        check_tokenizer_fits(corpus.tokenizer, sizes[0])
        return corpus
    for argument in data:
        if not is_chat_argument(argument):
            raise ConfigError(
                f"--data {argument}: is not chat data, which cannot be mixed with text; leave it out, or write chat:"
            )
    if tokenizer is None:
        raise ConfigError(f"--data {data[0]}: needs a trained tokenizer; give --from or --tokenizer")
    loaded = Tokenizer.load(tokenizer) if isinstance(tokenizer, Path) else tokenizer
    check_tokenizer_fits(loaded, sizes[0])
    return prepare_chat(data, loaded, settings.sequence_length, documents)


def _report(training: "TrainingResult", job: "TrainingJob", as_json: bool) -> None:
    import json

    from heddle.data.chat import ChatDataset
    from heddle.data.corpus import Corpus
    from heddle.generation.generate import sample_text

    steps, skipped = training.progress.step, training.progress.skipped_steps
    report: dict[str, Any] = {"run": str(job.out), "steps": steps, "skipped_steps": skipped}
    if isinstance(job.source, Corpus):
        report["bits_per_byte"] = training.bits_per_byte
        report["sample"] = sample_text(training.model, job.source.tokenizer, job.settings.sequence_length)
        score = f"{training.bits_per_byte:.4f} bits per byte on held-out text"
    elif isinstance(job.source, ChatDataset):
        report["bits_per_byte"] = training.bits_per_byte
        score = f"{training.bits_per_byte:.4f} bits per byte of the assistant's text in held-out conversations"
    else:
        chance = job.source.describe()["chance"]
        report |= {"accuracy": training.task_accuracy, "chance": chance}
        score = f"{training.task_accuracy:.1%} accuracy on held-out sequences (by chance {chance:.1%})"
    if as_json:
        print_text(json.dumps(report, indent=2, ensure_ascii=False))
        return
    print_text(f"{job.out}: {score} after {steps} steps")
    if skipped:
        print_text(f"{skipped} steps were skipped: their loss or gradient was not finite")
    if "sample" in report:
        print_text(f"a sample:\n{report['sample']}")
