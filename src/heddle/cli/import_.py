"""`heddle import`: convert a transformers checkpoint into a heddle model."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from heddle.cli.options import Quiet, open_session
from heddle.progress import print_text


def import_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="config.json, safetensors and a tokenizer.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to write.")],
    quiet: Quiet = False,
) -> None:
    """Convert a checkpoint that transformers wrote into a heddle model; every field and tensor of it is checked.

    No code of the folder runs and no pickle is read. OUT is written whole or not at all.
    """
    with ExitStack() as stack:
        open_session(stack, device="cpu", quiet=quiet)
        from heddle.exchange.imported_checkpoint import save_imported
        from heddle.exchange.load import load

        imported = load(folder)
        save_imported(imported, out)
        parameters = sum(parameter.numel() for parameter in imported.model.parameters())
        model_type, layers = imported.preserved_config["model_type"], imported.model.config.depth
        print_text(f"{out}: {model_type} of {parameters:,} parameters, {layers} layers")
