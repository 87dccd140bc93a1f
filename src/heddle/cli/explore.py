"""`heddle explore`: a page to choose parts and options on, which shows their sizes and costs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from heddle.errors import ConfigError
from heddle.progress import print_text
from heddle.session import load_parts
from heddle.settings import Argument, Option, PartFile, VerbSettings
from heddle.tokenization import DEFAULT_VOCAB_SIZE
from heddle.training.settings import Overrides


@dataclass(frozen=True, kw_only=True)
class ExploreSettings(VerbSettings):
    """Settings of `heddle explore`."""

    design: Annotated[
        str | None, Argument("DESIGN", "A YAML, TOML or JSON file, preset:NAME, or a checkpoint folder.")
    ] = None
    overrides: Overrides = ()
    slot: Annotated[str | None, Option("SLOT", "Only this slot, such as mixers. [a whole design]")] = None
    out: Annotated[Path, Option("FILE", "HTML file to write.")] = Path("explore.html")
    part: PartFile = ()


def explore(settings: ExploreSettings) -> None:
    """Write an offline page for choosing parts and options, with their formulas, pictures, sizes and costs."""
    load_parts(settings.part)
    from heddle.exchange.imported_checkpoint import context_length
    from heddle.lab.explore.choices import SLOTS
    from heddle.lab.explore.page import explorer_page
    from heddle.model.load_config import load_config, with_vocab_size
    from heddle.storage.file_io import refuse_no_page, write_file

    design, slot, out = settings.design, settings.slot, settings.out
    refuse_no_page(out)
    if slot is not None and slot not in SLOTS:
        raise ConfigError(f"--slot: '{slot}' has no page; choose one of {', '.join(SLOTS)}")
    config = None if design is None else with_vocab_size(load_config(design, settings.overrides), DEFAULT_VOCAB_SIZE)
    context = None if design is None else context_length(design)
    write_file(out, explorer_page(slot, config, context), "choose another file")
    print_text(str(out))
