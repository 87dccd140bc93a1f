"""The page of published models for the documentation: which config.json files were read, and how many parameters."""

from heddle.exchange.family import Family, family_of
from heddle.exchange.family_match import design_from_config
from heddle.model.size import size
from tests.exchange.published import Published, published_configs
from tools.markdown import joined

INTRO = """These `config.json` files of published models are read or refused as follows; no weights were
downloaded. `tests/exchange/test_published.py` compares each design with transformers' reading of the same file, and the
number of parameters with the published total where brackets name one: exactly, or to the last digit of a rounded one
such as 671B. *Hub* is the hub's count in the headers of the weights, from the list HUB.

The files, with all their fields and the public repository where each was seen, are in `tests/exchange/published`.
They also say what *differs* from the model's own file."""
HUB = "r-pedro17/llmatch: `data/hf_models.json`, the hub's counts"
REFUSED_INTRO = """## Refused

Other architectures are refused by their name, and quantized weights by theirs. Nothing is guessed, and no code of a
folder is run."""


def page(written: str) -> str:
    """docs/huggingface/published.md."""
    entries = published_configs()
    read = sorted((entry for entry in entries if entry.refused is None), key=lambda entry: _family(entry).model_type)
    compared = [entry for entry in entries if entry.refused is None and entry.published is not None]
    exact = sum(isinstance(entry.published, int) for entry in compared)
    counted = f"**{len(compared)} totals are compared**, {exact} of them to the last parameter."
    refused = [f"- {entry.name}: {entry.refused}" for entry in entries if entry.refused is not None]
    return joined(
        "# Published models",
        written,
        INTRO.replace("HUB", HUB.partition(",")[0]),
        counted,
        "\n".join(line(entry) for entry in read),
        REFUSED_INTRO,
        "\n".join(refused),
    )


def _family(entry: Published) -> Family:
    return family_of(entry.config, entry.name)


def line(entry: Published) -> str:
    """A model that is read, its family and parameters."""
    name = _family(entry).model_type
    parameters = size(design_from_config(entry.config, _family(entry), entry.name), context_length=8).parameters
    exact = "hub" if entry.counted_in == HUB else "published"
    published = exact if isinstance(entry.published, int) else entry.published
    facts = [f"{parameters:,}{f' ({published})' if published else ''}", *(["differs"] if entry.edited else [])]
    return f"- {entry.name}, [`{name}`](families.md#{name}): {'; '.join(facts)}"
