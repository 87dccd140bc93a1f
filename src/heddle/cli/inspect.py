"""`heddle inspect`: what every head of a trained model looks at on a text, as one page."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from heddle import __version__
from heddle.cli.options import Device, Kernel, PartFile, Precision, Quiet, Threads, dtype_of, open_session
from heddle.errors import CheckpointError, ConfigError, MachineError


def inspect(  # noqa: PLR0913 - one parameter an option
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's or a model's folder.")],
    text: Annotated[str, typer.Option("--text", metavar="TEXT", help="What the model reads.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = Path("inspect.html"),
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    kernel: Kernel = None,
    part: PartFile = None,
    quiet: Quiet = False,
) -> None:
    """Draw the attention weights of every layer and head on a text; the page is one file and loads nothing."""
    if not text:
        raise ConfigError("--text: is empty; give some words")
    with ExitStack() as stack:
        runtime = open_session(stack, device=device, threads=threads, kernels=kernel, parts=part, quiet=quiet)
        from heddle.analysis.comparison.frame import write_whole
        from heddle.analysis.inspection.collect import collect
        from heddle.analysis.inspection.page import Subject, page
        from heddle.storage.model import load

        model, tokenizer = load(run, dtype=dtype_of(precision), device=runtime.device)
        if tokenizer is None:
            raise CheckpointError(f"{run}: holds no tokenizer.json, so it cannot read a text; train it with heddle")
        spelled = tokenizer.encode(text)
        views = collect(model, [*tokenizer.opening, *spelled])
        words = [*("start" for _ in tokenizer.opening), *(tokenizer.decode([token]) for token in spelled)]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        made = page(Subject(run.resolve().name, parameters, words, __version__), views)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, made)
    except OSError as error:
        raise MachineError(f"--out {out}: cannot be written ({error.strerror}); choose another file") from error
    print(out)
