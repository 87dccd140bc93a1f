"""`heddle train`: one design on a text, from fresh weights or a model's; the same command again continues."""

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heddle.cli.options import (
    DEFAULT_VOCABULARY,
    Data,
    Device,
    Json,
    Kernel,
    LrScale,
    OptimizerName,
    Overrides,
    PartFile,
    Precision,
    Quiet,
    Schedule,
    Threads,
    TokenizerFile,
    VocabSize,
    Warmup,
    open_session,
    parse_scales,
    read_config,
    with_vocabulary,
)
from heddle.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from heddle.data.chat import Chat
    from heddle.data.corpus import Corpus
    from heddle.data.recall import Practice
    from heddle.model.config import ModelConfig
    from heddle.tokenization.tokenizer import Tokenizer
    from heddle.training.init_checkpoint import Base, Lora
    from heddle.training.loop import Job, Outcome
    from heddle.training.settings import Settings


def train(  # noqa: PLR0913 - one parameter an option
    design: Annotated[
        str | None, typer.Argument(metavar="DESIGN", help="A file, preset:NAME or a folder; with --from, left out.")
    ] = None,
    overrides: Overrides = None,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="Start from this model's or run's weights.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The run's folder.")] = Path("runs/train"),
    lora: Annotated[
        int | None, typer.Option("--lora", metavar="RANK", help="With --from: learn adapters of this rank alone.")
    ] = None,
    lora_targets: Annotated[
        list[str] | None,
        typer.Option(
            "--lora-targets", metavar="PATH", help="Projections with adapters; repeat. [layers.*.mixer.q, .v]"
        ),
    ] = None,
    data: Data = None,
    tokenizer: TokenizerFile = None,
    vocab_size: VocabSize = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Optimizer steps. [500]")] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", help="Tokens to train on, instead of --steps.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", help="Rows of a step.")] = 8,
    context: Annotated[
        int | None, typer.Option("--context", metavar="N", help="Tokens of a row. [256; a recall task's own length]")
    ] = None,
    accumulate: Annotated[
        int, typer.Option("--accumulate", metavar="N", help="Pieces a batch is cut into; same result.")
    ] = 1,
    lr: Annotated[float, typer.Option("--lr", metavar="X", help="Highest learning rate.")] = 3e-3,
    lr_scale: LrScale = None,
    optimizer: OptimizerName = "adamw",
    schedule: Schedule = "wsd",
    warmup: Warmup = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of weights, order and dropout.")] = 0,
    save_every: Annotated[
        int | None, typer.Option("--save-every", metavar="N", help="Steps between checkpoints.")
    ] = 100,
    evaluate_every: Annotated[
        int | None, typer.Option("--evaluate-every", metavar="N", help="Steps between evaluations.")
    ] = None,
    compile_model: Annotated[bool, typer.Option("--compile", help="Compile each layer with torch.compile.")] = False,
    checkpoint_activations: Annotated[
        bool, typer.Option("--checkpoint-activations", help="Recompute layers in the backward pass: less memory.")
    ] = False,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    kernel: Kernel = None,
    part: PartFile = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a design; ends with its bits per byte on held-out text and a sample of what it writes.

    Or train it on conversations (--data chat:FILE.jsonl), learning what the assistant says; or on a recall task, such
    as --data recall:mqar,pairs=8, which ends with the share of right answers.
    """
    with ExitStack() as stack:
        runtime = open_session(stack, device=device, threads=threads, kernels=kernel, parts=part, quiet=quiet)
        from heddle.runtime import versions
        from heddle.training.init_checkpoint import open_base
        from heddle.training.loop import Job
        from heddle.training.loop import train as run
        from heddle.training.settings import Settings

        practice = _practice(data, tokenizer, vocab_size, context)
        length = practice.task.length if practice is not None else 256 if context is None else context
        settings = Settings(
            steps=_steps(steps, tokens, batch_size * length),
            batch_size=batch_size,
            context=length,
            learning_rate=lr,
            seed=seed,
            save_every=save_every,
            accumulate=accumulate,
            precision=precision,
            compile=compile_model,
            checkpoint_activations=checkpoint_activations,
            optimizer=optimizer,
            schedule=schedule,
            warmup=warmup,
            lr_scale=parse_scales(lr_scale),
            evaluate_every=evaluate_every,
        )
        adapters = _lora(lora, lora_targets, from_)
        base = None if from_ is None else open_base(from_)
        config = _config(design, overrides, base)
        corpus: Corpus | Chat | Practice
        if practice is None:
            known = _tokenizer(tokenizer, vocab_size, base)
            texts = {} if base is None else base.documents
            corpus = _texts(data or ["stdlib"], settings, (config.vocab_size, vocab_size), known, texts)
            size = corpus.tokenizer.vocab_size
        else:
            corpus, size = practice, practice.vocab_size
            practice.check_vocabulary(config.vocab_size)
        circumstances = {"command": shlex.join(["heddle", *sys.argv[1:]]), "versions": versions()}
        circumstances["runtime"] = runtime.describe()
        job = Job(
            config=with_vocabulary(config, size),
            corpus=corpus,
            settings=settings,
            out=out,
            device=runtime.device,
            circumstances=circumstances,
            base=base,
            lora=adapters,
        )
        _report(run(job), job, as_json)


def _practice(
    data: list[str] | None, tokenizer: Path | None, vocab_size: int | None, context: int | None
) -> "Practice | None":
    """The recall task that --data names, or None for text. Raises where an option speaks of text alone."""
    from heddle.data.recall import is_recall, open_recall

    if data is None or len(data) != 1 or not is_recall(data[0]):
        return None
    practice = open_recall(data[0])
    for option, value in (("tokenizer", tokenizer), ("vocab-size", vocab_size)):
        if value is not None:
            raise ConfigError(f"--{option} {value}: {data[0]} has a vocabulary of its own; leave --{option} out")
    if context not in (None, practice.task.length):
        raise ConfigError(
            f"--context {context}: {data[0]} has rows of {practice.task.length} tokens; say length={context} in --data"
        )
    return practice


def _config(design: str | None, overrides: list[str] | None, base: "Base | None") -> "ModelConfig":
    """What is to be trained. Raises ConfigError where neither DESIGN nor --from says it."""
    given = list(overrides or [])
    if base is None:
        if design is None:
            raise ConfigError("DESIGN: is missing; give a file, preset:NAME or a folder, or --from FOLDER")
        return read_config(design, given)
    if design is not None and "=" in design and not Path(design).exists():  # an override stands first
        return base.design(None, [design, *given])
    return base.design(design, given)


def _lora(rank: int | None, targets: list[str] | None, base: Path | None) -> "Lora | None":
    from heddle.training.init_checkpoint import Lora

    if rank is None:
        if targets:
            raise ConfigError(f"--lora-targets {targets[0]}: says where adapters go; give their rank with --lora too")
        return None
    if base is None:
        raise ConfigError(f"--lora {rank}: adapters learn beside weights that have learned; give these with --from")
    return Lora(rank, tuple(targets)) if targets else Lora(rank)


def _tokenizer(given: Path | None, vocab_size: int | None, base: "Base | None") -> "Tokenizer | Path | None":
    """What text is to be read with, where that is known. Raises ConfigError for an option beside a base's own."""
    if base is None:
        return given
    for option, value in (("tokenizer", given), ("vocab-size", vocab_size)):
        if value is not None:
            raise ConfigError(f"--{option} {value}: --from brings a tokenizer along; leave --{option} out")
    if base.tokenizer is None:
        raise CheckpointError(f"{base.contents.folder}: holds no tokenizer.json, so it cannot read text; train it anew")
    return base.tokenizer


def _texts(
    data: list[str],
    settings: "Settings",
    sizes: tuple[int | None, int | None],
    tokenizer: "Tokenizer | Path | None",
    documents: dict[str, str],
) -> "Corpus | Chat":
    """Text or conversations, ready to train on. sizes: the design's vocabulary, and the one asked for beside it."""
    from heddle.data.chat import is_chat, prepare_chat
    from heddle.data.corpus import check_vocabulary, prepare
    from heddle.tokenization.tokenizer import Tokenizer

    if not any(map(is_chat, data)):
        wanted = sizes[0] or sizes[1] or (None if tokenizer else DEFAULT_VOCABULARY)
        budget = settings.steps * settings.tokens_per_step
        corpus = prepare(data, vocab_size=wanted, budget=budget, tokenizer=tokenizer)
        check_vocabulary(corpus.tokenizer, sizes[0])
        return corpus
    for one in data:
        if not is_chat(one):
            raise ConfigError(f"--data {one}: is no conversations, and these train alone; leave it out, or write chat:")
    if tokenizer is None:
        raise ConfigError(f"--data {data[0]}: needs a tokenizer that is there already; give --from or --tokenizer")
    known = Tokenizer.load(tokenizer) if isinstance(tokenizer, Path) else tokenizer
    check_vocabulary(known, sizes[0])
    return prepare_chat(data, known, settings.context, documents)


def _steps(steps: int | None, tokens: int | None, tokens_per_step: int) -> int:
    if steps is not None and tokens is not None:
        raise ConfigError("--steps and --tokens: both say how long to train; give one of them")
    if tokens is None:
        return 500 if steps is None else steps
    if tokens < max(1, tokens_per_step):
        raise ConfigError(f"--tokens {tokens}: is less than one step of {tokens_per_step} tokens; give more")
    return tokens // max(1, tokens_per_step)


def _report(outcome: "Outcome", job: "Job", as_json: bool) -> None:
    import json

    from heddle.data.chat import Chat
    from heddle.data.corpus import Corpus
    from heddle.generation.sample import sample

    result: dict[str, Any] = {
        "run": str(job.out), "steps": outcome.progress.step, "steps_not_taken": outcome.progress.skipped
    }  # fmt: skip
    if isinstance(job.corpus, Corpus):
        result |= {"bits_per_byte": outcome.bits_per_byte}
        result |= {"sample": sample(outcome.model, job.corpus.tokenizer, job.settings.context)}
        score = f"{outcome.bits_per_byte:.4f} bits per byte on held-out text"
    elif isinstance(job.corpus, Chat):
        result |= {"bits_per_byte": outcome.bits_per_byte}
        score = f"{outcome.bits_per_byte:.4f} bits per byte of the assistant's text in held-out conversations"
    else:
        chance = job.corpus.describe()["chance"]
        result |= {"accuracy": outcome.accuracy, "chance": chance}
        score = f"{outcome.accuracy:.1%} right answers on held-out rows (blindly {chance:.1%})"
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
        return
    print(f"{job.out}: {score} after {outcome.progress.step} steps")
    if outcome.progress.skipped:
        print(f"{outcome.progress.skipped} steps were not taken: their loss or gradient was not finite")
    if "sample" in result:
        print(f"a sample:\n{result['sample']}")
