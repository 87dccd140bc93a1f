"""`heddle export`: a model of ours as a folder or a file that others read."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heddle.cli.options import Quiet, open_session
from heddle.errors import ConfigError

if TYPE_CHECKING:
    from heddle.exchange.imported import Imported

FORMATS = ("hf", "gguf")
DTYPES = ("fp32", "bf16", "fp16")


def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A run's or a model's folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="What to write.")],
    form: Annotated[
        str, typer.Option("--format", metavar="NAME", help="hf, a folder for transformers; gguf, a file for llama.cpp.")
    ] = "hf",
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help="fp32, bf16 or fp16. [as in the checkpoint]")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write a model as the family that it is, where there is one, else as our own class; told which and why.

    OUT is written whole or not at all.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format {form}: unknown format; choices: {', '.join(FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: unknown; choices: {', '.join(DTYPES)}")
    with ExitStack() as stack:
        open_session(stack, device="cpu", quiet=quiet)
        import torch

        from heddle.exchange.carried import open_checkpoint
        from heddle.exchange.export import export as write
        from heddle.exchange.fit import service

        kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        wanted = None if dtype is None else kinds[dtype]
        given = open_checkpoint(checkpoint, wanted if form == "hf" else None)
        _tell_length(checkpoint, given)
        if form == "gguf":  # it rounds matrices alone
            from heddle.exchange.gguf import export_gguf

            _, graph = export_gguf(given.model, out, given.tokenizer, given, wanted)
            print(f"{out}: llama.cpp runs it as {graph}")
            return
        found = write(given.model, out, given.tokenizer, given)
        print(f"{out}: serves as: {found.family.architecture}")
        if found.family.model_type == "heddle":
            for line in service(given.model.config).lines()[1:]:
                print(f"  {line}")


def _tell_length(checkpoint: Path, given: "Imported") -> None:
    """A run was trained on texts of a length, which readers take for the longest that it can serve."""
    from heddle.storage.run_log import RUN, read_whole

    if (checkpoint / RUN).is_file():
        given.carried.setdefault("max_position_embeddings", read_whole(checkpoint / RUN)["settings"]["context"])
