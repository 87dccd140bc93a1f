"""`heddle explore`: choose parts and options on a page, and see what follows."""

from pathlib import Path
from typing import Annotated

import typer

from heddle.cli.options import Overrides, PartFile, with_vocab_size
from heddle.errors import ConfigError
from heddle.progress import print_text
from heddle.tokenization import DEFAULT_VOCAB_SIZE


def explore(
    design: Annotated[str | None, typer.Argument(metavar="DESIGN", help="A file, preset:NAME or a folder.")] = None,
    overrides: Overrides = None,
    slot: Annotated[
        str | None, typer.Option("--slot", metavar="SLOT", help="Only this slot, such as mixers. [a whole design]")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="HTML file to write.")] = Path("explore.html"),
    part: PartFile = None,
) -> None:
    """Write a page on which parts and options are chosen: formulas, pictures, sizes and costs, in one offline file."""
    from heddle.config import load_part

    for file in part or []:
        load_part(file)
    from heddle.lab.explore.choices import SLOTS
    from heddle.lab.explore.page import explorer_page
    from heddle.model.load_config import load_config
    from heddle.storage.file_io import write_file

    if slot is not None and slot not in SLOTS:
        raise ConfigError(f"--slot: '{slot}' has no page; choose one of {', '.join(SLOTS)}")
    config = None if design is None else with_vocab_size(load_config(design, overrides or []), DEFAULT_VOCAB_SIZE)
    write_file(out, explorer_page(slot, config), "choose another file")
    print_text(str(out))
