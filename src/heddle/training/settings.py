"""The settings of `heddle train`, the subset that determines the result, and the learning rate of each step."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from heddle.errors import ConfigError
from heddle.settings import (
    PRECISIONS,
    Argument,
    Deterministic,
    Json,
    Kernel,
    Option,
    SessionSettings,
    Tf32,
    TrainingPrecision,
    parse_length,
    parse_tokens,
)
from heddle.tokenization import size_problem

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("wsd", "cosine", "linear", "constant")
_LATER_FIELDS = (
    "first_sample",
    "transfer_width",
    "stochastic_rounding",
    "fp8",
    "spike_guard",
    "qk_clip",
    "whole_graph",
)  # earlier runs do not have them
MAX_COUNT = 10**12
FLOAT8_MULTIPLE = 16  # what sizes of float8 matrices must be multiples of


def parse_vocab_size(text: str) -> int:
    """Parse the size of a tokenizer that is to be trained, such as 4096 or 32k. Raises ValueError."""
    size = parse_tokens(text)
    if problem := size_problem(size):
        raise ValueError(problem)
    return size


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that determines the result of training, except the design and the data.

    steps: optimizer steps of batch_size sequences of sequence_length tokens. gradient_accumulation_steps: equal
    micro-batches of a batch, which save memory and do not change the gradients. warmup: steps (None: a twentieth of
    all, at least 10). lr_scale: pairs (path, factor of the learning rate); the last matching path wins. save_every:
    steps between checkpoints (None: only the end). evaluate_every: steps between evaluations on a part of the held-out
    data (None: only the end). max_gradient_norm: the global norm to which gradients are clipped. precision: 'bf16'
    runs the forward pass under autocast; weights stay float32. 'bf16-params' stores weights and gradients in bfloat16,
    and updates float32 copies of the weights; with stochastic_rounding there are no copies. fp8: projections multiply
    in float8. first_sample: index of the first step's first sample, from 0, in the order of the data. transfer_width:
    the width at which the learning rate was chosen; the learning rate, initial std and weight decay of each weight are
    scaled to the model's width (`heddle.training.width_transfer`). None: no scaling.
    spike_guard: after a loss this many deviations above the previous ones, the run returns to its last checkpoint and
    skips the data since then (`heddle.training.loop`). None: never.
    qk_clip: after a step, q and k of each head whose largest logit in it exceeded this are scaled down to it
    (`Optimizer.clip_logits`). None: never.
    compile: each layer by itself; with whole_graph all layers as one graph (`heddle.model.copies.compiled`).
    """

    steps: int
    batch_size: int = 8
    sequence_length: int = 256
    learning_rate: float = 3e-3
    seed: int = 0
    save_every: int | None = None
    gradient_accumulation_steps: int = 1
    precision: str = "fp32"
    stochastic_rounding: bool = False
    fp8: bool = False
    compile: bool = False
    whole_graph: bool = False
    checkpoint_activations: bool = False
    optimizer: str = "adamw"
    schedule: str = "wsd"
    warmup: int | None = None
    lr_scale: Sequence[tuple[str, float]] = ()
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0
    evaluate_every: int | None = None
    first_sample: int = 0
    transfer_width: int | None = None
    spike_guard: float | None = None
    qk_clip: float | None = None

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "sequence_length", "gradient_accumulation_steps")
        for name in (*counts, "save_every", "evaluate_every", "transfer_width"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_COUNT:
                raise ConfigError(f"{name} {value}: must be {'at least 1' if value < 1 else 'at most 10^12'}")
        if self.batch_size % self.gradient_accumulation_steps:
            raise ConfigError(
                f"gradient_accumulation_steps {self.gradient_accumulation_steps}: does not divide "
                f"batch_size {self.batch_size}; choose a divisor of it"
            )
        if not 0 < self.learning_rate < float("inf"):
            raise ConfigError(f"learning_rate {self.learning_rate}: must be a number above 0")
        if not 0 <= self.weight_decay < float("inf"):
            raise ConfigError(f"weight_decay {self.weight_decay}: must be a number of at least 0")
        if not self.max_gradient_norm > 0:
            raise ConfigError(f"max_gradient_norm {self.max_gradient_norm}: must be a number above 0")
        if self.warmup is not None and self.warmup < 0:
            raise ConfigError(f"warmup {self.warmup}: must be at least 0")
        if not 0 <= self.first_sample <= MAX_COUNT:
            raise ConfigError(f"first_sample {self.first_sample}: must be at least 0 and at most 10^12")
        for path, factor in self.lr_scale:
            if not 0 <= factor < float("inf"):
                raise ConfigError(f"lr_scale {path}={factor:g}: the factor must be a number of at least 0")
        if self.seed < 0 or self.seed >= 2**62:
            raise ConfigError(f"seed {self.seed}: must be at least 0 and below 2^62")
        if self.spike_guard is not None and not 0 < self.spike_guard < float("inf"):
            raise ConfigError(f"spike_guard {self.spike_guard}: must be a number above 0, such as 10")
        if self.qk_clip is not None and not 0 < self.qk_clip < float("inf"):
            raise ConfigError(f"qk_clip {self.qk_clip}: must be a number above 0, such as 100")
        if self.spike_guard is not None and self.save_every is None:
            raise ConfigError("spike_guard: returns to a checkpoint, and none is saved; set save_every")
        choices_of = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "precision": PRECISIONS}
        for name, choices in choices_of.items():
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{name} {value}: unknown {name}; choices: {', '.join(choices)}")
        if self.stochastic_rounding and self.precision != "bf16-params":
            raise ConfigError(
                f"stochastic_rounding: rounds bfloat16 weights, and with precision {self.precision} there are none; "
                "set precision bf16-params"
            )
        if self.fp8 and self.precision == "fp32":
            raise ConfigError("fp8: all other operations use bfloat16; set precision bf16 or bf16-params")
        rows = self.tokens_per_step // self.gradient_accumulation_steps
        if self.fp8 and rows % FLOAT8_MULTIPLE:
            raise ConfigError(
                f"fp8: needs a multiple of {FLOAT8_MULTIPLE} tokens per micro-batch, and batch_size · sequence_length "
                f"/ gradient_accumulation_steps is {rows}; change one of them"
            )

    @property
    def constant_steps(self) -> int:
        """Steps before the decay of schedule wsd."""
        return self.steps - self._decay_steps

    @property
    def _decay_steps(self) -> int:
        return max(1, self.steps // 5)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.sequence_length

    def samples_before(self, step: int) -> int:
        """Return the index of the first sample of a step, counted from 0."""
        return self.first_sample + step * self.batch_size

    def is_save_step(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step, counted from 1; always True after the last one."""
        return step == self.steps or (self.save_every is not None and step % self.save_every == 0)

    def is_evaluation_step(self, step: int) -> bool:
        """Whether an evaluation follows a step, counted from 1."""
        interval = self.evaluate_every
        return interval is not None and (step == self.steps or step % interval == 0)

    def identity(self) -> dict[str, Any]:
        """Return what two runs must share to be the same run. `save_every` counts only with a spike guard."""
        fields = asdict(self)
        if self.spike_guard is None:
            del fields["save_every"]
        for name in _LATER_FIELDS:
            if not fields[name]:
                del fields[name]
        return fields


def scheduled_learning_rate(settings: Settings, step: int) -> float:
    """Return the learning rate of a step, counted from 0: linear warmup, then the schedule.

    wsd (warmup, stable, decay): constant, then linear to 0 over the last fifth of all steps. cosine: to a tenth.
    linear: to 0. constant: no decay. The rate of a step is never 0.
    """
    warmup = settings.warmup if settings.warmup is not None else max(10, settings.steps // 20)
    warmup = min(warmup, settings.steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    schedule_steps = settings.steps - warmup
    progress = (step - warmup) / max(1, schedule_steps)
    if settings.schedule == "linear":
        return settings.learning_rate * (1 - progress)
    if settings.schedule == "cosine":
        return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))
    if settings.schedule == "constant":
        return settings.learning_rate
    steps_left = settings.steps - step
    return settings.learning_rate * min(1.0, steps_left / settings._decay_steps)


Design = Annotated[Any, Argument("DESIGN", "A YAML, TOML or JSON file, preset:NAME, or a checkpoint folder.")]
Overrides = Annotated[tuple[str, ...], Argument("FIELD=VALUE", "Overrides, such as layers.0.mixer.kv_heads=1.")]
Data = Annotated[
    tuple[str, ...],
    Option("PATH", "A text file or folder, or hf:PATH; PATH@2 doubles its weight; repeatable. [stdlib]"),
]
TokenizerFile = Annotated[Path | None, Option("FILE", "A tokenizer.json, instead of training a BPE tokenizer.")]
VocabSize = Annotated[
    int | None, Option("N", "Tokenizer size, if the design sets no vocab_size. [4096]", parse_vocab_size)
]
OptimizerName = Annotated[str, Option("NAME", "adamw or muon.")]
Schedule = Annotated[str, Option("NAME", "wsd, cosine, linear or constant.")]
Warmup = Annotated[int | None, Option("N", "Warmup steps. [a twentieth of the steps, at least 10]")]
LearningRate = Annotated[float, Option("X", "Peak learning rate.")]
LrScale = Annotated[tuple[str, ...], Option("PATH=X", "Factor on --lr, such as layers.*.mixer=0.5; repeatable.")]
Transfer = Annotated[str | None, Option("width=N", "The width at which --lr was chosen; rates and weights are scaled.")]
Track = Annotated[tuple[str, ...], Option("NAME", "Also log to tensorboard, wandb, trackio or mlflow; repeatable.")]
BatchSize = Annotated[int, Option("N", "Sequences per step.")]
LossWeightsText = Annotated[str | None, Option("NAME[=X],...", "Weights of logits, text and layers. [logits=1]")]
Reserved = Annotated[int, Option("N", "Reserved: refused unless it is 1.", hidden=True)]


@dataclass(frozen=True, kw_only=True)
class TrainSettings(SessionSettings):
    """Settings of `heddle train` and `heddle.train`."""

    SHOWN: ClassVar = (
        "data", "steps", "tokens", "batch_size", "sequence_length", "lr", "seed", "out", "from_", "part", "device",
        "precision",
    )  # fmt: skip

    design: Annotated[Any, Argument("DESIGN", "A file, preset:NAME or a folder; leave out with --from.")] = None
    overrides: Overrides = ()
    from_: Annotated[Path | None, Option("FOLDER", "Start from the weights of this model or run.")] = None
    out: Annotated[Path, Option("FOLDER", "The run's folder.")] = Path("runs/train")
    lora: Annotated[int | None, Option("RANK", "With --from: train only LoRA adapters of this rank.")] = None
    lora_targets: Annotated[
        tuple[str, ...], Option("PATH", "Projections with LoRA; repeatable. [layers.*.mixer.q, .v]")
    ] = ()
    distill: Annotated[Path | None, Option("FOLDER", "Distill from this model or run, the teacher.")] = None
    distill_loss: LossWeightsText = None
    data: Data = ()
    tokenizer: TokenizerFile = None
    vocab_size: VocabSize = None
    steps: Annotated[int | None, Option("N", "Optimizer steps. [500]")] = None
    tokens: Annotated[int | None, Option("N", "Training tokens, such as 2M, instead of --steps.", parse_tokens)] = None
    batch_size: BatchSize = Settings.batch_size
    sequence_length: Annotated[
        int | None, Option("N", "Tokens per sequence. [256; a recall task has its own]", parse_length)
    ] = None
    gradient_accumulation_steps: Annotated[int, Option("N", "Micro-batches per step; same result.")] = 1
    lr: LearningRate = Settings.learning_rate
    lr_scale: LrScale = ()
    transfer: Transfer = None
    optimizer: OptimizerName = Settings.optimizer
    schedule: Schedule = Settings.schedule
    warmup: Warmup = None
    seed: Annotated[int, Option("N", "Random seed of weights, data order and dropout.")] = 0
    save_every: Annotated[int | None, Option("N", "Steps between checkpoints.")] = 100
    async_save: Annotated[bool | None, Option("", "Save checkpoints in the background. [on an accelerator]")] = None
    evaluate_every: Annotated[int | None, Option("N", "Steps between evaluations.")] = None
    spike_guard: Annotated[
        float | None, Option("X", "On a loss X deviations above the previous ones, rewind and skip the data.")
    ] = None
    qk_clip: Annotated[
        float | None, Option("X", "QK-clip: scale q and k of heads whose largest logit exceeds X, such as 100.")
    ] = None
    track: Track = ()
    compile: Annotated[bool | None, Option("", "Compile layers with torch.compile. [where it pays: on CUDA]")] = None
    checkpoint_activations: Annotated[bool, Option("", "Recompute activations in backward; saves memory.")] = False
    precision: TrainingPrecision = Settings.precision
    stochastic_rounding: Annotated[bool, Option("", "With bf16-params: stochastic rounding, no float32 copies.")] = (
        False
    )
    fp8: Annotated[bool, Option("", "With bf16: projections in float8, by torchao on a recent GPU.")] = False
    tf32: Tf32 = False
    deterministic: Deterministic = False
    kernel: Kernel = ()
    nproc: Annotated[int | None, Option("N", "Train on N ranks of this machine, one per GPU. [1]")] = None
    data_parallel_replicate_degree: Annotated[int, Option("N", "Copies of the model's state.")] = 1
    data_parallel_shard_degree: Annotated[int, Option("N", "Shards of each copy. [-1: the rest]")] = -1
    tensor_parallel_degree: Reserved = 1
    pipeline_parallel_degree: Reserved = 1
    context_parallel_degree: Reserved = 1
    expert_parallel_degree: Reserved = 1
    max_restarts: Annotated[int, Option("N", "With --nproc: how often ranks restart after one died.")] = 3
    rank_timeout: Annotated[float, Option("SECONDS", "A rank that keeps others waiting longer is lost.")] = 45.0
    json: Json = False
