"""The page of published models for the documentation: which config.json files were read, and how many parameters."""

from collections.abc import Iterator

from heddle.exchange.family import family_of
from heddle.exchange.family_match import design_from_config
from heddle.model.size import size
from tests.exchange.published import Published, published_configs
from tools.markdown import joined, table

INTRO = """These `config.json` files of published models are read or refused as the tables say; no weights were
downloaded. `tests/exchange/test_published.py` compares each design with transformers' reading of the same file, and the
number of parameters with the published total where brackets name one: exactly, or to the last digit of a rounded one
such as 671B. *Hub* is the hub's count in the headers of the weights, from the list HUB.

The files, with all their fields and the public repository where each was seen, are in `tests/exchange/published`. A
note says what differs from the model's own file, or what stands for it where no total is compared. *Saved again* means
a file that another version of transformers wrote."""
HUB = "r-pedro17/llmatch: `data/hf_models.json`, the hub's counts"
READ = ("model", "family", "parameters", "note")
REFUSED_INTRO = """## Refused

Other architectures are refused by their name, and quantized weights by theirs. Nothing is guessed, and no code of a
folder is run."""
REFUSED = ("model", "refused because")


def page(written: str) -> str:
    """docs/huggingface/published.md."""
    entries = published_configs()
    read = [row(entry) for entry in entries if entry.refused is None]
    compared = [entry for entry in entries if entry.refused is None and entry.published is not None]
    exact = sum(isinstance(entry.published, int) for entry in compared)
    counted = f"**{len(compared)} totals are compared**, {exact} of them to the last parameter."
    refused = [(entry.name, str(entry.refused)) for entry in entries if entry.refused is not None]
    return joined(
        "# Published models",
        written,
        INTRO.replace("HUB", HUB.partition(",")[0]),
        counted,
        table(READ, list(by_family(read))),
        REFUSED_INTRO,
        table(REFUSED, refused),
    )


def by_family(rows: list[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """The rows in the order of their families' names."""
    yield from sorted(rows, key=lambda cells: cells[1])


def row(entry: Published) -> tuple[str, ...]:
    """The cells of a model that is read."""
    family = family_of(entry.config, entry.name)
    parameters = size(design_from_config(entry.config, family, entry.name), context_length=8, batch=1).parameters
    exact = "hub" if entry.counted_in == HUB else "published"
    published = exact if isinstance(entry.published, int) else entry.published
    total = f"{parameters:,} ({published})" if published else f"{parameters:,}"
    notes = [entry.edited] if published else [entry.source, entry.edited]
    note = ", ".join(text for text in notes if text)
    return entry.name, f"[`{family.model_type}`](families.md#{family.model_type})", total, note
