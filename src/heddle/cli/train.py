"""`heddle train`: train a design, from new weights or a checkpoint's; the same command again resumes the run."""

import shlex
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heddle.cli.calls import TrainedRun
from heddle.cli.counts import token_count
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
from heddle.cli.ranks import (
    DEFAULT_RESTARTS,
    ContextDegree,
    ExpertDegree,
    MaxRestarts,
    PipelineDegree,
    Processes,
    RankTimeout,
    ReplicateDegree,
    ShardDegree,
    TensorDegree,
    enter_ranks,
    launch_ranks,
)
from heddle.cli.run_config import ConfigFile, PrintConfig, options_of, plain_design, print_options
from heddle.cli.train_data import design_of, open_data, open_recall_task
from heddle.cli.train_options import (
    AsyncSave,
    CompileModel,
    DistillationLoss,
    Fp8,
    Lora,
    LoraTargets,
    SpikeDeviations,
    StochasticRounding,
    TeacherFolder,
    Track,
    Transfer,
    distillation_of,
    lora_settings_of,
    steps_of,
    tokenizer_of,
    trackers_of,
    transfer_width_of,
)
from heddle.progress import print_text

if TYPE_CHECKING:
    from heddle.data.chat import ChatDataset
    from heddle.data.corpus import Corpus
    from heddle.data.recall import TaskStream
    from heddle.tokenization.tokenizer import Tokenizer
    from heddle.training.job import TrainingJob
    from heddle.training.loop import TrainingResult

DEFAULT_SEQUENCE_LENGTH = 256


def train(
    context: typer.Context,
    design: Annotated[
        Any,
        typer.Argument(
            metavar="DESIGN", parser=plain_design, help="A file, preset:NAME or a folder; leave out with --from."
        ),
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
        int | None,
        typer.Option("--tokens", metavar="N", parser=token_count, help="Training tokens, as 2M, instead of --steps."),
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
    async_save: AsyncSave = None,
    evaluate_every: Annotated[
        int | None, typer.Option("--evaluate-every", metavar="N", help="Steps between evaluations.")
    ] = None,
    spike_guard: SpikeDeviations = None,
    track: Track = None,
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
    nproc: Processes = None,
    data_parallel_replicate_degree: ReplicateDegree = 1,
    data_parallel_shard_degree: ShardDegree = -1,
    tensor_parallel_degree: TensorDegree = 1,
    pipeline_parallel_degree: PipelineDegree = 1,
    context_parallel_degree: ContextDegree = 1,
    expert_parallel_degree: ExpertDegree = 1,
    max_restarts: MaxRestarts = DEFAULT_RESTARTS,
    rank_timeout: RankTimeout = 45.0,
    config_file: ConfigFile = None,
    print_config: PrintConfig = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> "TrainedRun | None":
    """Train a design; prints its bits per byte on held-out text and a sample of its text.

    With --data chat:FILE.jsonl it trains on conversations, with a loss on the assistant's text; with --data
    recall:mqar,pairs=8 on a synthetic recall task, and prints the accuracy.
    """
    if print_config:
        print_options(context)
        return None
    launch_ranks(context.find_root().obj, nproc, max_restarts)
    with ExitStack() as stack:
        ranks, device = enter_ranks(stack, device, rank_timeout)
        cuda = CudaOptions(tf32, deterministic)
        runtime = open_session(
            stack, device=device, threads=threads, kernels=kernel, parts=part, quiet=quiet, cuda=cuda
        )
        from heddle.distributed.degrees import ParallelDegrees
        from heddle.model.copies import should_compile
        from heddle.runtime import versions
        from heddle.training.init_checkpoint import open_init_checkpoint
        from heddle.training.job import TrainingJob
        from heddle.training.loop import train as run
        from heddle.training.settings import Settings

        degrees = ParallelDegrees(
            data_parallel_replicate_degree=data_parallel_replicate_degree,
            data_parallel_shard_degree=data_parallel_shard_degree,
            tensor_parallel_degree=tensor_parallel_degree,
            pipeline_parallel_degree=pipeline_parallel_degree,
            context_parallel_degree=context_parallel_degree,
            expert_parallel_degree=expert_parallel_degree,
        )
        task = open_recall_task(data, tokenizer, vocab_size, sequence_length)
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
            spike_guard=spike_guard,
        )
        trackers = trackers_of(track)
        degrees.mesh_shape(ranks.count)
        ranks.rows(batch_size, gradient_accumulation_steps)
        lora_settings = lora_settings_of(lora, lora_targets, from_)
        init_checkpoint = None if from_ is None else open_init_checkpoint(from_, ranks)
        distillation = distillation_of(teacher, distillation_loss)
        config = design_of(design, overrides, init_checkpoint, distillation)
        source: Corpus | ChatDataset | TaskStream
        text_tokenizer: Tokenizer | None = None
        if task is None:
            source_tokenizer = tokenizer_of(tokenizer, vocab_size, init_checkpoint, distillation)
            documents = {} if init_checkpoint is None else init_checkpoint.documents
            sizes = (config.vocab_size, vocab_size)

            def open_text() -> "Corpus | ChatDataset":
                return open_data(data or ["stdlib"], settings, sizes, source_tokenizer, documents)

            source = ranks.in_order(open_text)
            text_tokenizer, source_vocab_size = source.tokenizer, source.tokenizer.vocab_size
        else:
            source, source_vocab_size = task, task.vocab_size
            task.check_vocab_size(config.vocab_size)
        environment = {"command": shlex.join(["heddle", *context.find_root().obj]), "versions": versions()}
        environment["options"] = options_of(context)
        environment["runtime"] = runtime.describe()
        environment["ranks"] = {"count": ranks.count, **asdict(degrees)}
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
            ranks=ranks,
            degrees=degrees,
            async_save=async_save,
            trackers=trackers,
        )
        training = run(job)
        report = _report(training, job, as_json)
        return TrainedRun(job.out, training.model, report, text_tokenizer)


def _report(training: "TrainingResult", job: "TrainingJob", as_json: bool) -> dict[str, Any]:
    import json

    from heddle.data.chat import ChatDataset
    from heddle.data.corpus import MANY_BYTES_PER_CHARACTER, Corpus
    from heddle.generation.generate import sample_text

    steps, skipped = training.progress.step, training.progress.skipped_steps
    report: dict[str, Any] = {"run": str(job.out), "steps": steps, "skipped_steps": skipped}
    if isinstance(job.source, Corpus):
        report["bits_per_byte"] = training.bits_per_byte
        report["sample"] = sample_text(training.model, job.source.tokenizer, job.settings.sequence_length)
        report["bits_per_character"] = training.bits_per_byte * job.source.bytes_per_character
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
        return report
    print_text(f"{job.out}: {score} after {steps} steps")
    if skipped:
        print_text(f"{skipped} steps were skipped: their loss or gradient was not finite")
    if isinstance(job.source, Corpus) and job.source.bytes_per_character >= MANY_BYTES_PER_CHARACTER:
        print_text(f"about {report['bits_per_character']:.4f} bits per character")
    if "sample" in report:
        print_text(f"a sample:\n{report['sample']}")
    return report
