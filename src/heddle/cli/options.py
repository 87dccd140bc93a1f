"""Options that several verbs share."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heddle.errors import ConfigError

if TYPE_CHECKING:
    from heddle.model.config import ModelConfig
    from heddle.runtime import Runtime

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
        help="A file or folder of text, or hf:PATH, with a weight as PATH@2; repeat for several. [stdlib]",
    ),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json instead of a BPE learned from the text."),
]
VocabSize = Annotated[
    int | None,
    typer.Option("--vocab-size", metavar="N", help="Vocabulary to learn where the design names none. [4096]"),
]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda or mps.")]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="CPU threads. [torch's own choice]")]
Precision = Annotated[str, typer.Option("--precision", metavar="NAME", help="fp32 or bf16.")]
Kernel = Annotated[
    list[str] | None,
    typer.Option("--kernel", metavar="NAME=FORM", help="Force a form: attention=reference; repeat for several."),
]
OptimizerName = Annotated[str, typer.Option("--optimizer", metavar="NAME", help="adamw or muon.")]
Schedule = Annotated[str, typer.Option("--schedule", metavar="NAME", help="wsd, cosine or linear.")]
Warmup = Annotated[
    int | None, typer.Option("--warmup", metavar="N", help="Steps to reach --lr. [a twentieth, at least 10]")
]
LrScale = Annotated[
    list[str] | None,
    typer.Option("--lr-scale", metavar="PATH=X", help="Factor of --lr, such as layers.*.mixer=0.5; repeat."),
]
PartFile = Annotated[
    list[Path] | None, typer.Option("--part", metavar="FILE", help="A .py file with a part of your own; repeat.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]

DEFAULT_VOCABULARY = 4096


def open_session(
    stack: ExitStack,
    *,
    device: str = "auto",
    threads: int | None = None,
    kernels: list[str] | None = None,
    parts: list[Path] | None = None,
    quiet: bool = False,
) -> "Runtime":
    """Set up the process for a verb; what must be undone is left with `stack`."""
    from heddle import progress
    from heddle.config import load_part
    from heddle.numerics.kernels import kernels as forcing
    from heddle.runtime import prepare

    if quiet:
        stack.enter_context(progress.quiet())
    for file in parts or []:
        load_part(file)
    runtime = prepare(device, threads)
    stack.enter_context(forcing(**parse_kernels(kernels)))
    return runtime


def parse_kernels(kernels: list[str] | None) -> dict[str, str]:
    """`attention=reference` as a mapping. Raises ConfigError for another form."""
    pairs = {}
    for text in kernels or []:
        name, equals, form = text.partition("=")
        if not equals:
            raise ConfigError(f"--kernel {text}: expected operation=form, such as attention=reference")
        pairs[name] = form
    return pairs


def parse_scales(scales: list[str] | None) -> tuple[tuple[str, float], ...]:
    """`layers.*.mixer=0.5` as pairs, in order. Raises ConfigError for another form."""
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


def dtype_of(precision: str) -> Any:
    """torch's dtype of a --precision. Raises ConfigError for an unknown one."""
    import torch

    from heddle.training.settings import PRECISIONS

    if precision not in PRECISIONS:
        raise ConfigError(f"--precision {precision}: unknown precision; choices: {', '.join(PRECISIONS)}")
    return torch.float32 if precision == "fp32" else torch.bfloat16


def read_config(design: str, overrides: list[str] | None) -> "ModelConfig":
    """The config of a design with overrides."""
    from heddle.model.load_config import load_config

    return load_config(design, overrides or [])


def with_vocabulary(config: "ModelConfig", size: int) -> "ModelConfig":
    """A design that names no vocabulary takes the tokenizer's."""
    return config if config.vocab_size is not None else config.replace(vocab_size=size)
