"""Train as `heddle train` does, from settings: `heddle.train`."""

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from heddle.data.chat import ChatDataset, is_chat_argument, prepare_chat
from heddle.data.corpus import MANY_BYTES_PER_CHARACTER, Corpus, check_tokenizer_fits, prepare_corpus
from heddle.data.recall import TaskStream, is_recall_argument, parse_recall
from heddle.data.samples import PLAIN_ROWS, RowProtocol
from heddle.distributed import enter_ranks
from heddle.distributed.ranks import ParallelDegrees, Ranks
from heddle.errors import ConfigError
from heddle.generation.generate import generate, sample_text
from heddle.machine import measured_choices, recorded_choices, slow_precision
from heddle.model import copies
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config, with_vocab_size
from heddle.model.lora import add_lora
from heddle.notebook import html_table
from heddle.progress import print_status, print_text
from heddle.runtime import Choices, Runtime, device_name, versions, with_choices
from heddle.session import TRAINING_NEEDS, open_session
from heddle.settings import shared
from heddle.storage.file_io import read_json_file
from heddle.storage.model import require_tokenizer
from heddle.storage.run_log import RUN_FILE, read_log, read_options, refuse_other_content
from heddle.tokenization import DEFAULT_VOCAB_SIZE
from heddle.tokenization.tokenizer import Tokenizer
from heddle.training.distillation import Distillation, LossWeights
from heddle.training.evaluation.scores import EvaluationBudget
from heddle.training.init_checkpoint import InitCheckpoint, LoraSettings, model_rows, open_init_checkpoint
from heddle.training.job import TrainingJob
from heddle.training.loop import FINAL_EVALUATION_TOKENS, TrainingResult
from heddle.training.loop import train as run_job
from heddle.training.optimizer import learning_rate_factors
from heddle.training.settings import Settings, TrainSettings
from heddle.training.trackers import check_trackers

DEFAULT_STEPS = 500
DEFAULT_SEQUENCE_LENGTH = 256
# A run has diverged if its loss over the last steps exceeds this factor times the first step's, plus this many nats.
DIVERGED_FACTOR, DIVERGED_NATS = 1.1, 0.1
LAST_STEPS = 10


@dataclass(frozen=True)
class TrainedRun:
    """A finished run in `folder`. report: what `heddle train --json` prints, as plain values.

    tokenizer: None if a task made the tokens.
    """

    folder: Path
    model: Decoder = field(repr=False)
    report: dict[str, Any] = field(repr=False)
    tokenizer: Tokenizer | None = field(default=None, repr=False)

    def generate(self, prompts: str | Sequence[str], **options: Any) -> Any:
        """Continue one or several prompts: `heddle.generate` with the model and the tokenizer of this run.

        options: as for `heddle.generate`, such as `max_new_tokens=100` or `temperature=0.8`. Returns the new text, a
        string or a list of strings. Raises ConfigError for a wrong option, and if the run has no tokenizer.
        """
        if self.tokenizer is None:
            raise ConfigError(f"{self.folder}: was trained on tokens without text; call heddle.generate with tokens")
        texts: Any = prompts
        return generate(self.model, texts, self.tokenizer, **options)

    def _repr_html_(self) -> str:
        plain = [(name, value) for name, value in self.report.items() if isinstance(value, int | float | str)]
        return html_table(("training", ""), plain, str(self.folder))


def train(
    design: TrainSettings | ModelConfig | str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    config: str | Path | None = None,
    **options: Any,
) -> TrainedRun:
    """Train a design as `heddle train` does, with its options, defaults and output.

    design: a config, plain data, a file, preset:NAME or a folder; or complete `TrainSettings`. config: a file of
    options, or the folder of a run. options: as on the command line, such as `steps=200`; `from` is `from_` here.
    Raises ConfigError for an unknown or invalid option, CheckpointError and MachineError.
    """
    if isinstance(design, TrainSettings):
        return _train(design)
    if "nproc" in options:
        raise ConfigError("nproc: is an option of the command line only; use heddle train in a terminal")
    options = {name.rstrip("_"): value for name, value in options.items()}
    if design is not None:
        options["design"] = design.dump() if isinstance(design, ModelConfig) else design
    if overrides:
        options["overrides"] = list(overrides)
    if config is None:
        settings = TrainSettings.read(options)
    else:
        TrainSettings.read(options)
        settings = TrainSettings.read({**read_options(config), **options}, str(config))
    if (settings.nproc or 1) > 1:  # from a file: ranks run a command line, and there is none here
        hint = "start heddle train in a terminal, or leave nproc out"
        raise ConfigError(f"nproc: {settings.nproc} ranks are an option of the command line only; {hint}")
    return _train(settings)


def _train(settings: TrainSettings) -> TrainedRun:
    with ExitStack() as stack:
        ranks, device = enter_ranks(stack, settings.device, settings.rank_timeout)
        runtime = open_session(
            stack,
            settings,
            device=device,
            kernels=settings.kernel,
            tf32=settings.tf32,
            deterministic=settings.deterministic,
        )
        warn_of_precision(runtime, settings.precision)
        degrees = ParallelDegrees(**shared(settings, ParallelDegrees))
        task = open_recall_task(settings)
        resolved = _resolve(settings, runtime, task)
        trackers = trackers_of(settings.track)
        degrees.mesh_shape(ranks.count)
        ranks.rows(resolved.batch_size, resolved.gradient_accumulation_steps)
        lora = _lora_settings(settings)
        init_checkpoint = None if settings.from_ is None else open_init_checkpoint(settings.from_, ranks)
        distillation = _distillation(settings)
        config = _design(settings, init_checkpoint, distillation)
        _check_paths(settings.out, config, resolved, lora)
        source: Corpus | ChatDataset | TaskStream
        text_tokenizer: Tokenizer | None = None
        if task is None:
            source_tokenizer = _tokenizer(settings, init_checkpoint, distillation)
            documents = {} if init_checkpoint is None else init_checkpoint.documents
            source = ranks.in_order(lambda: _open_data(settings, resolved, config, source_tokenizer, documents))
            text_tokenizer, source_vocab_size = source.tokenizer, source.tokenizer.vocab_size
        else:
            source, source_vocab_size = task, task.vocab_size
            task.check_vocab_size(config.vocab_size)
        if resolved.compile and runtime.device == "cpu":
            resolved = _with_graphs(settings, resolved, config, ranks)
        if (choices := _choices(settings, device, ranks)) is not None:
            runtime = with_choices(runtime, choices)
        evaluation = EvaluationBudget(final_tokens=_final_tokens(settings.out, resolved))
        job = TrainingJob(
            config=with_vocab_size(config, source_vocab_size),
            source=source,
            settings=resolved,
            out=settings.out,
            device=runtime.device,
            environment={
                "command": _command(settings),
                "versions": versions(),
                "options": settings.dump_for_any_folder(),
                "runtime": runtime.describe(),
                "ranks": {"count": ranks.count, **asdict(degrees)},
                "final_tokens": evaluation.final_tokens,
            },
            evaluation=evaluation,
            init_checkpoint=init_checkpoint,
            lora=lora,
            distillation=distillation,
            ranks=ranks,
            degrees=degrees,
            async_save=settings.async_save,
            trackers=trackers,
        )
        training = run_job(job)
        return TrainedRun(job.out, training.model, _report(training, job, settings.json), text_tokenizer)


def _final_tokens(out: Path, resolved: Settings) -> int:
    """Held-out tokens of the final evaluation: at most as many as are trained on. A continued run keeps its number."""
    if (run := out / RUN_FILE).is_file():
        return int(read_json_file(run).get("final_tokens", FINAL_EVALUATION_TOKENS))  # earlier runs record none
    return min(FINAL_EVALUATION_TOKENS, resolved.steps * resolved.tokens_per_step)


def _choices(settings: TrainSettings, device: str, ranks: Ranks) -> Choices | None:
    """The fastest choices on this CPU, equal on all ranks; a continued run keeps its first choices."""
    if settings.deterministic or device_name(device) != "cpu":
        return None
    if ranks.rank == 0:
        choices = recorded_choices(settings.out) or measured_choices(settings.threads, TRAINING_NEEDS)
    text = ranks.first_text(json.dumps(choices.dump()) if ranks.rank == 0 else None)
    return Choices.read(json.loads(text or "{}"))


def warn_of_precision(runtime: Runtime, precision: str) -> None:
    """Print a warning if bfloat16 is slower than float32 on this CPU."""
    if precision == "bf16" and runtime.device == "cpu" and (sentence := slow_precision(runtime.threads)):
        print_status(f"warning: {sentence}")


def _resolve(settings: TrainSettings, runtime: Runtime, task: TaskStream | None) -> Settings:
    """The settings that determine the result, with every default resolved."""
    length = DEFAULT_SEQUENCE_LENGTH if settings.sequence_length is None else settings.sequence_length
    length = length if task is None else task.task.length
    resolved = Settings(
        **shared(settings, Settings)
        | {
            "steps": _steps(settings, settings.batch_size * length),
            "sequence_length": length,
            "learning_rate": settings.lr,
            "compile": copies.should_compile(runtime.device) if settings.compile is None else settings.compile,
            "lr_scale": parse_scales(settings.lr_scale),
            "transfer_width": transfer_width_of(settings.transfer),
        }
    )
    is_new = not (settings.out / RUN_FILE).is_file()  # older runs may have such a warmup, and continue
    if is_new and settings.warmup is not None and settings.warmup > resolved.steps:
        reason = f"is longer than the run of {resolved.steps} steps, which would never reach --lr"
        raise ConfigError(f"--warmup {settings.warmup}: {reason}; give fewer steps")
    return resolved


def _with_graphs(settings: TrainSettings, resolved: Settings, config: ModelConfig, ranks: Ranks) -> Settings:
    """Whether compiled layers are one graph on a CPU; prints the choice. A continued run keeps its first choice."""
    run = settings.out / RUN_FILE
    recorded = read_json_file(run).get("settings", {}).get("whole_graph", False) if run.is_file() else None
    reasons = {
        "ranks shard single layers": ranks.count > 1,
        "the run began so": recorded is False,
        "--checkpoint-activations recomputes single layers": settings.checkpoint_activations,
        "--qk-clip reads the logits of each layer": settings.qk_clip is not None,
        "--lora and --distill change single layers": settings.lora is not None or settings.distill is not None,
        "--kernel and --deterministic choose kernels call by call": bool(settings.kernel) or settings.deterministic,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is None:
        reason = copies.whole_graph_refusal(build(with_vocab_size(config, DEFAULT_VOCAB_SIZE), device="meta"))
    way = "all layers as one graph" if reason is None else f"each layer by itself, since {reason}"
    print_status(f"compile: {way}; compiling takes a minute or more, in the first steps")
    return replace(resolved, whole_graph=reason is None if recorded is None else recorded)


def _check_paths(out: Path, config: ModelConfig, resolved: Settings, lora: LoraSettings | None) -> None:
    """Raise for adapters, factors and folders that cannot be, before text and weights are read."""
    if not (out / RUN_FILE).is_file():
        refuse_other_content(out)
    if lora is None and not resolved.lr_scale:
        return
    model = build(with_vocab_size(config, DEFAULT_VOCAB_SIZE), device="meta")
    if lora is not None:
        model = add_lora(model, lora.targets, lora.rank)
    learning_rate_factors(model, resolved.lr_scale)


def _command(settings: TrainSettings) -> str:
    """The command that continues the run; a design that is a table is read from the run's record."""
    if isinstance(settings.design, dict):
        return shlex.join(["heddle", "train", "--config", str(settings.out)])
    return settings.command_line("train")


def _steps(settings: TrainSettings, tokens_per_step: int) -> int:
    """The number of steps that --steps or --tokens gives. Raises ConfigError for both, or too few tokens."""
    steps, tokens = settings.steps, settings.tokens
    if steps is not None and tokens is not None:
        raise ConfigError("--steps and --tokens: both set the length of training; give one of them")
    if tokens is None:
        return DEFAULT_STEPS if steps is None else steps
    if tokens < max(1, tokens_per_step):
        raise ConfigError(f"--tokens {tokens}: is less than one step of {tokens_per_step} tokens; give more")
    return tokens // max(1, tokens_per_step)


def parse_scales(scales: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Parse `layers.*.mixer=0.5` into (path, factor) pairs, in order. Raises ConfigError for anything else."""
    pairs = []
    for text in scales:
        path, equals, factor = text.partition("=")
        if not equals or not path:
            raise ConfigError(f"--lr-scale {text}: expected path=factor, such as layers.*.mixer=0.5")
        try:
            pairs.append((path, float(factor)))
        except ValueError:
            raise ConfigError(f"--lr-scale {text}: the factor must be a number of at least 0") from None
    return tuple(pairs)


def trackers_of(track: Sequence[str]) -> tuple[str, ...]:
    """The trackers of --track. Raises ConfigError for one that is unknown or not installed."""
    try:
        return check_trackers(track)
    except ConfigError as error:
        raise ConfigError(f"--{error}") from None


def transfer_width_of(transfer: str | None) -> int | None:
    """The width that --transfer names. Raises ConfigError for anything else."""
    if transfer is None:
        return None
    name, _, number = transfer.partition("=")
    if name != "width" or not number.isdecimal() or not int(number):
        raise ConfigError(f"--transfer {transfer}: is not a width; write width=64 if --lr was chosen at width 64")
    return int(number)


def _lora_settings(settings: TrainSettings) -> LoraSettings | None:
    """The adapters that --lora asks for. Raises ConfigError without --from."""
    rank, targets = settings.lora, settings.lora_targets
    if rank is None:
        if targets:
            raise ConfigError(f"--lora-targets {targets[0]}: needs the rank of the adapters; give --lora too")
        return None
    if settings.from_ is None:
        raise ConfigError(f"--lora {rank}: adapters need trained weights; give them with --from")
    return LoraSettings(rank, targets) if targets else LoraSettings(rank)


def _distillation(settings: TrainSettings) -> Distillation | None:
    """The teacher of --distill and its loss. Raises ConfigError or CheckpointError."""
    if settings.distill is None:
        if settings.distill_loss is not None:
            raise ConfigError(f"--distill-loss {settings.distill_loss}: needs a teacher; give --distill too")
        return None
    return Distillation(
        open_init_checkpoint(settings.distill), LossWeights.parse(settings.distill_loss, "--distill-loss")
    )


def _tokenizer(
    settings: TrainSettings, init_checkpoint: InitCheckpoint | None, distillation: Distillation | None
) -> Tokenizer | Path | None:
    """The tokenizer of --from, --distill or --tokenizer. Raises ConfigError for options that conflict."""
    teacher = None if distillation is None else distillation.teacher
    checkpoint = teacher if init_checkpoint is None else init_checkpoint
    if checkpoint is None:
        return settings.tokenizer
    source = "--distill" if init_checkpoint is None else "--from"
    for option, value in (("tokenizer", settings.tokenizer), ("vocab-size", settings.vocab_size)):
        if value is not None:
            raise ConfigError(f"--{option} {value}: {source} comes with its own tokenizer; leave --{option} out")
    return require_tokenizer(checkpoint.tokenizer, checkpoint.folder)


def open_recall_task(settings: TrainSettings) -> TaskStream | None:
    """The recall task that --data names; None for other data. Raises ConfigError for options that only text takes."""
    if len(settings.data) != 1 or not is_recall_argument(settings.data[0]):
        return None
    (argument,) = settings.data
    task = parse_recall(argument)
    for option, value in (("tokenizer", settings.tokenizer), ("vocab-size", settings.vocab_size)):
        if value is not None:
            raise ConfigError(f"--{option} {value}: {argument} has its own vocabulary; leave --{option} out")
    length = settings.sequence_length
    if length not in (None, task.task.length):
        raise ConfigError(
            f"--sequence-length {length}: {argument} has sequences of {task.task.length} tokens; "
            f"give length={length} in --data"
        )
    return task


def _design(
    settings: TrainSettings, checkpoint: InitCheckpoint | None, distillation: Distillation | None
) -> ModelConfig:
    """The config to train, with a teacher's vocabulary. Raises ConfigError if neither DESIGN nor --from is given."""
    design, overrides = settings.design, list(settings.overrides)
    if checkpoint is None:
        if design is None:
            raise ConfigError("DESIGN: is missing; give a file, preset:NAME or a folder, or --from FOLDER")
        config = load_config(design, overrides)
        vocab_size = None if distillation is None else distillation.teacher.config.vocab_size
        return config if vocab_size is None else with_vocab_size(config, vocab_size)
    if (
        isinstance(design, str) and "=" in design and not Path(design).exists()
    ):  # without DESIGN, an override comes first
        return checkpoint.resolve_config(None, [design, *overrides])
    return checkpoint.resolve_config(design, overrides)


def _open_data(
    settings: TrainSettings,
    resolved: Settings,
    config: ModelConfig,
    tokenizer: Tokenizer | Path | None,
    documents: dict[str, str],
) -> Corpus | ChatDataset:
    """Text or conversations, ready to train on."""
    data = settings.data or ("stdlib",)
    if not any(map(is_chat_argument, data)):
        if None not in (config.vocab_size, settings.vocab_size) and config.vocab_size != settings.vocab_size:
            remedy = f"leave it out, or give vocab_size={settings.vocab_size} after the design"
            raise ConfigError(f"--vocab-size {settings.vocab_size}: the design has {config.vocab_size}; {remedy}")
        vocab_size = config.vocab_size or settings.vocab_size or (None if tokenizer else DEFAULT_VOCAB_SIZE)
        max_tokens = resolved.steps * resolved.tokens_per_step
        corpus = prepare_corpus(
            data,
            vocab_size=vocab_size,
            max_train_tokens=max_tokens,
            tokenizer=tokenizer,
            rows=_rows(settings, tokenizer),
        )
        check_tokenizer_fits(corpus.tokenizer, config.vocab_size)
        return corpus
    for argument in data:
        if not is_chat_argument(argument):
            raise ConfigError(
                f"--data {argument}: is not chat data, and chat data cannot be mixed with text; leave it out, "
                "or write chat:"
            )
    if tokenizer is None:
        raise ConfigError(f"--data {data[0]}: needs a trained tokenizer; give --from or --tokenizer")
    loaded = Tokenizer.load(tokenizer) if isinstance(tokenizer, Path) else tokenizer
    check_tokenizer_fits(loaded, config.vocab_size)
    return prepare_chat(data, loaded, resolved.sequence_length, documents)


def _rows(settings: TrainSettings, tokenizer: Tokenizer | Path | None) -> RowProtocol:
    """How sequences begin: as in the run that continues, or as the --from or --distill model needs."""
    if (run := settings.out / RUN_FILE).is_file():
        return RowProtocol.parse(read_json_file(run).get("data", {}))
    folder = settings.from_ or settings.distill
    return model_rows(folder, tokenizer) if folder is not None and isinstance(tokenizer, Tokenizer) else PLAIN_ROWS


def say_if_diverged(job: TrainingJob) -> None:
    """Warn if the loss of a run's last steps is far above the loss of its first step."""
    losses = [line["loss"] for line in read_log(job.out) if line.get("loss") is not None]
    if not losses:
        return
    first, last = losses[0], fmean(losses[-LAST_STEPS:])
    if last > DIVERGED_FACTOR * first + DIVERGED_NATS:
        remedy = f"give a lower --lr than {job.settings.learning_rate:g}"
        print_status(f"warning: {job.out}: diverged: the loss rose from {first:.2f} to {last:.2f} nats/token; {remedy}")


def _report(training: TrainingResult, job: TrainingJob, as_json: bool) -> dict[str, Any]:
    steps, skipped = training.progress.step, training.progress.skipped_steps
    report: dict[str, Any] = {"run": str(job.out), "steps": steps, "skipped_steps": skipped}
    if isinstance(job.source, Corpus):
        report["bits_per_byte"] = training.bits_per_byte
        report["sample"] = sample_text(training.model, job.source.tokenizer, job.settings.sequence_length)
        report["bits_per_character"] = training.bits_per_byte * job.source.bytes_per_character
        score = f"{training.bits_per_byte:.4f} bits per byte on held-out text"
        score += f" ({job.source.rows})" if job.source.rows.bos_ids else ""
    elif isinstance(job.source, ChatDataset):
        report["bits_per_byte"] = training.bits_per_byte
        score = f"{training.bits_per_byte:.4f} bits per byte of the assistant's text in held-out conversations"
    else:
        chance = job.source.describe()["chance"]
        report |= {"accuracy": training.task_accuracy, "chance": chance}
        score = f"{training.task_accuracy:.1%} accuracy on held-out sequences (chance {chance:.1%})"
    if as_json:
        print_text(json.dumps(report, indent=2, ensure_ascii=False))
        return report
    print_text(f"{job.out}: {score} after {steps} steps")
    if "bits_per_byte" in report:
        say_if_diverged(job)
    if skipped:
        print_text(f"{skipped} steps were skipped: non-finite loss or gradient")
    if isinstance(job.source, Corpus) and job.source.bytes_per_character >= MANY_BYTES_PER_CHARACTER:
        print_text(f"about {report['bits_per_character']:.4f} bits per character")
    if "sample" in report:
        print_text(f"a sample:\n{report['sample']}")
    return report
