"""The file of published designs for the explorer: of each family of published models at most `MOST`."""

import json
from collections import Counter
from contextlib import suppress
from typing import Any

from heddle.config import DesignError
from heddle.exchange.family import family_of
from heddle.exchange.family_match import design_from_config
from heddle.lab.explore.choices import explorer_design
from tests.exchange.published import published_configs

MOST = 12


def page() -> str:
    """src/heddle/lab/explorer/published.json."""
    counts: Counter[str] = Counter()
    designs: list[dict[str, Any]] = []
    for entry in published_configs():
        if entry.refused is not None or "," in entry.name or " " in entry.name:
            continue
        family = family_of(entry.config, entry.name)
        counts[family.model_type] += 1
        if counts[family.model_type] <= MOST:
            config = design_from_config(entry.config, family, entry.name)
            name = entry.name.rpartition("/")[2]
            with suppress(DesignError):  # of a design that the page cannot show
                designs.append({"name": name, "family": family.model_type, "design": explorer_design(config)})
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in designs)
    return f"[\n{lines}\n]\n"
