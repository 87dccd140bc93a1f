"""The page of published models for the documentation: which config.json files were read, and how many parameters."""

from itertools import groupby

from heddle.exchange.family import Family, family_of
from heddle.exchange.family_match import design_from_config
from heddle.model.size import size
from tests.exchange.published import Published, published_configs
from tools.markdown import joined

INTRO = """The `config.json` files of `tests/exchange/published`, where each was seen, and what *differs* from the
model's own. `tests/exchange/test_published.py` compares each design with transformers' reading, and its parameters with
the published total where brackets name one: exactly, or to the last digit of one such as 671B. *Hub* is the hub's count
in the headers of the weights, from the list HUB."""
HUB = "r-pedro17/llmatch: `data/hf_models.json`, the hub's counts"
REFUSED_INTRO = """## Refused

Nothing is guessed, and no code of a folder is run."""


def page(written: str) -> str:
    """docs/huggingface/published.md."""
    entries = published_configs()
    read = sorted((entry for entry in entries if entry.refused is None), key=_model_type)
    compared = [entry for entry in entries if entry.refused is None and entry.published is not None]
    exact = sum(isinstance(entry.published, int) for entry in compared)
    counted = f"**{len(compared)} totals are compared**, {exact} of them to the last parameter."
    refused = [f"- {entry.name}: {entry.refused}" for entry in entries if entry.refused is not None]
    return joined(
        "# Published models",
        written,
        INTRO.replace("HUB", HUB.partition(",")[0]),
        counted,
        "\n".join(f"- {_link(name)}: {'; '.join(map(line, group))}" for name, group in groupby(read, _model_type)),
        REFUSED_INTRO,
        "\n".join(refused),
    )


def _family(entry: Published) -> Family:
    return family_of(entry.config, entry.name)


def _model_type(entry: Published) -> str:
    return _family(entry).model_type


def _link(name: str) -> str:
    return f"[`{name}`](families.md#{name})"


def line(entry: Published) -> str:
    """A model that is read, and its parameters."""
    parameters = size(design_from_config(entry.config, _family(entry), entry.name), context_length=8).parameters
    exact = "hub" if entry.counted_in == HUB else "published"
    published = exact if isinstance(entry.published, int) else entry.published
    facts = [*([published] if published else []), *(["differs"] if entry.edited else [])]
    brackets = f" ({', '.join(facts)})" if facts else ""
    return f"{entry.name}: {parameters:,}{brackets}"
