"""config.json files of published models: facts that were seen in public repositories, with where, and their sizes.

A file per family, and one for those that are refused. `published`: the parameters that the publisher or the hub counts.
`counted_in`: where that number was seen, if it is a count of stored weights. `refused`: what the refusal says.
`edited`: what the source changed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Published:
    """One config.json."""

    name: str
    source: str
    config: dict[str, Any]
    published: int | str | None = None
    counted_in: str | None = None
    refused: str | None = None
    edited: str | None = None

    def counts(self, parameters: int) -> bool:
        """Whether a number of parameters is the published one, to the digits that were published ("7.24B")."""
        if isinstance(self.published, str):
            decimals = len(self.published.partition(".")[2].removesuffix("B"))
            return f"{parameters / 1e9:.{decimals}f}B" == self.published
        return self.published in (None, parameters)


def published_configs() -> list[Published]:
    """Every config, those of a family together."""
    files = sorted(Path(__file__).parent.glob("*.json"))
    return [Published(**entry) for file in files for entry in json.loads(file.read_text(encoding="utf-8"))]
