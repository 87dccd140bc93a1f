"""`heddle import`: a folder of transformers as a model of ours."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from heddle.cli.options import Quiet, open_session


def import_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="config.json, safetensors and a tokenizer.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to write.")],
    quiet: Quiet = False,
) -> None:
    """Read a model that transformers wrote, check every field and tensor of it, and write it as a model of heddle.

    No code of the folder runs, no pickle is read. OUT is written whole or not at all.
    """
    with ExitStack() as stack:
        open_session(stack, device="cpu", quiet=quiet)
        from heddle.exchange.carried import save_imported
        from heddle.exchange.load import load

        given = load(folder)
        save_imported(given, out)
        count = sum(parameter.numel() for parameter in given.model.parameters())
        print(f"{out}: {given.carried['model_type']} of {count:,} parameters, {given.model.config.depth} layers")
