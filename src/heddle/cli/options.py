"""Options that several commands share, and what they set up."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from heddle.errors import ConfigError

if TYPE_CHECKING:
    from heddle.model.config import ModelConfig
    from heddle.runtime import Runtime
    from heddle.training.distillation import LossWeights

DesignArgument = Annotated[
    str, typer.Argument(metavar="DESIGN", help="A YAML, TOML or JSON file, preset:NAME, or a checkpoint folder.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="FIELD=VALUE", help="Overrides, such as layers.0.mixer.kv_heads=1.")
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="A text file or folder, or hf:PATH; PATH@2 doubles its weight; repeatable. [stdlib]",
    ),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json, instead of training a BPE tokenizer."),
]
VocabSize = Annotated[
    int | None,
    typer.Option("--vocab-size", metavar="N", help="Tokenizer size, if the design sets no vocab_size. [4096]"),
]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:N or mps.")]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="CPU threads. [torch's default]")]
Precision = Annotated[str, typer.Option("--precision", metavar="NAME", help="fp32 or bf16.")]
TrainingPrecision = Annotated[
    str,
    typer.Option("--precision", metavar="NAME", help="fp32, bf16 (autocast) or bf16-params (weights, too)."),
]
Tf32 = Annotated[bool, typer.Option("--tf32", help="On CUDA: float32 products in TF32, faster and less precise.")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Equal bits on CUDA, too: slower; refuses what cannot be.")
]
Kernel = Annotated[
    list[str] | None,
    typer.Option("--kernel", metavar="OPERATION=KERNEL", help="Force a kernel: attention=reference; repeatable."),
]
OptimizerName = Annotated[str, typer.Option("--optimizer", metavar="NAME", help="adamw or muon.")]
Schedule = Annotated[str, typer.Option("--schedule", metavar="NAME", help="wsd, cosine, linear or constant.")]
Warmup = Annotated[
    int | None, typer.Option("--warmup", metavar="N", help="Warmup steps. [a twentieth of the steps, at least 10]")
]
LrScale = Annotated[
    list[str] | None,
    typer.Option("--lr-scale", metavar="PATH=X", help="Factor on --lr, such as layers.*.mixer=0.5; repeatable."),
]
PartFile = Annotated[
    list[Path] | None,
    typer.Option("--part", metavar="FILE", help="A .py file that defines a part of your own; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress on stderr.")]


class CudaOptions(NamedTuple):
    """How a GPU computes: --tf32 and --deterministic."""

    tf32: bool = False
    deterministic: bool = False


def open_session(
    stack: ExitStack,
    *,
    device: str = "auto",
    threads: int | None = None,
    kernels: list[str] | None = None,
    parts: list[Path] | None = None,
    quiet: bool = False,
    cuda: CudaOptions | None = None,
) -> "Runtime":
    """Set up the process for a command. `stack` undoes it when it closes."""
    from heddle import progress
    from heddle.config import load_part
    from heddle.data.cache import use_own_compile_cache
    from heddle.numerics.kernels import kernels as force_kernels
    from heddle.runtime import set_up_runtime

    if quiet:
        stack.enter_context(progress.quiet())
    for file in parts or []:
        load_part(file)
    cuda = cuda or CudaOptions()
    if cuda.deterministic:  # cuBLAS reads it when a process first uses the GPU
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # read when the compiler is imported
    use_own_compile_cache()
    runtime = set_up_runtime(device, threads, cuda.tf32, cuda.deterministic)
    if cuda.tf32:
        progress.print_status(f"{runtime.device}: float32 products in TF32, with 10 bits of mantissa instead of 23")
    stack.enter_context(force_kernels(**parse_kernels(kernels)))
    return runtime


def parse_kernels(kernels: list[str] | None) -> dict[str, str]:
    """Parse `attention=reference` into a mapping from operation to kernel. Raises ConfigError if there is no `=`."""
    forced = {}
    for text in kernels or []:
        operation, equals, kernel = text.partition("=")
        if not equals:
            raise ConfigError(f"--kernel {text}: expected operation=kernel, such as attention=reference")
        forced[operation] = kernel
    return forced


def parse_scales(scales: list[str] | None) -> tuple[tuple[str, float], ...]:
    """Parse `layers.*.mixer=0.5` into (path, factor) pairs, in order. Raises ConfigError for anything else."""
    pairs = []
    for text in scales or []:
        path, equals, factor = text.partition("=")
        if not equals or not path:
            raise ConfigError(f"--lr-scale {text}: expected path=factor, such as layers.*.mixer=0.5")
        try:
            pairs.append((path, float(factor)))
        except ValueError:
            raise ConfigError(f"--lr-scale {text}: the factor must be a number of at least 0") from None
    return tuple(pairs)


def parse_loss_weights(text: str | None, option: str) -> "LossWeights":
    """Parse `logits=0.9,text=0.1`; a name alone has weight 1, None is the default. Raises ConfigError."""
    from heddle.training.distillation import LossWeights

    if text is None:
        return LossWeights()
    weights = {"logits": 0.0, "text": 0.0, "layers": 0.0}
    for term in text.split(","):
        name, equals, number = term.strip().partition("=")
        if name not in weights:
            raise ConfigError(f"{option} {text}: unknown loss '{name}'; choices: {', '.join(weights)}")
        try:
            weights[name] = float(number) if equals else 1.0
        except ValueError:
            raise ConfigError(f"{option} {text}: the weight of {name} must be a number of at least 0") from None
    return LossWeights(**weights)


def dtype_of(precision: str) -> Any:
    """The torch dtype of a --precision. Raises ConfigError for an unknown precision."""
    import torch

    from heddle.training.settings import PRECISIONS

    if precision not in PRECISIONS:
        raise ConfigError(f"--precision {precision}: unknown precision; choices: {', '.join(PRECISIONS)}")
    return torch.float32 if precision == "fp32" else torch.bfloat16


def with_vocab_size(config: "ModelConfig", vocab_size: int) -> "ModelConfig":
    """The config, with this vocab_size if it sets none."""
    return config if config.vocab_size is not None else config.replace(vocab_size=vocab_size)
