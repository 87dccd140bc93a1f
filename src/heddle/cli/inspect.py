"""`heddle inspect`: the attention maps of a trained model on a text, as one page."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from heddle.cli.options import Device, Kernel, PartFile, Precision, Quiet, Threads, dtype_of, open_session
from heddle.errors import CheckpointError, ConfigError
from heddle.progress import print_text


def inspect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's or a model's folder.")],
    text: Annotated[str, typer.Option("--text", metavar="TEXT", help="Text that the model reads.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="HTML file to write.")] = Path("inspect.html"),
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    kernel: Kernel = None,
    part: PartFile = None,
    quiet: Quiet = False,
) -> None:
    """Plot the attention maps of every layer and head on a text, as one HTML file that works offline."""
    if not text:
        raise ConfigError("--text: is empty; give some words")
    with ExitStack() as stack:
        runtime = open_session(stack, device=device, threads=threads, kernels=kernel, parts=part, quiet=quiet)
        from heddle.lab.inspect import InspectedModel, inspect_layers, inspect_page
        from heddle.storage.file_io import write_file
        from heddle.storage.model import load

        model, tokenizer = load(run, dtype=dtype_of(precision), device=runtime.device)
        if tokenizer is None:
            raise CheckpointError(f"{run}: holds no tokenizer.json, so it cannot read a text; train it with heddle")
        text_ids = tokenizer.encode(text)
        views = inspect_layers(model, [*tokenizer.bos_ids, *text_ids])
        labels = [*("start" for _ in tokenizer.bos_ids), *(tokenizer.decode([token]) for token in text_ids)]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        page = inspect_page(InspectedModel(run.resolve().name, parameters, labels), views)
        write_file(out, page, "choose another file")
    print_text(str(out))
