"""`heddle presets`: list the designs that come with heddle, or print one as YAML to start your own from."""

import json
from dataclasses import dataclass
from typing import Annotated

from heddle.settings import Argument, Json, VerbSettings


@dataclass(frozen=True, kw_only=True)
class PresetsSettings(VerbSettings):
    """Settings of `heddle presets`."""

    name: Annotated[str | None, Argument("NAME", "Print this design instead, such as gqa-tiny.")] = None
    json: Json = False


def presets(settings: PresetsSettings) -> None:
    """List the presets, each in three sizes and some with 1 B parameters, or print one as YAML.

    To start your own design from one: heddle presets gqa-tiny > mine.yaml
    """
    from heddle.model.presets import KINDS, SIZES, names, preset

    if settings.name is not None:
        design = preset(settings.name.removeprefix("preset:"))
        print(json.dumps(design, indent=1) if settings.json else _yaml(design), end="\n" if settings.json else "")
    elif settings.json:
        print(json.dumps(names(), indent=1))
    else:
        width = max(map(len, KINDS))
        for kind, description in KINDS.items():
            print(f"{kind:{width}}  {description}")
        sizes = []
        for size_name, size in SIZES.items():
            kinds = "" if size.kinds is None else f" of {', '.join(size.kinds)}"
            sizes.append(f"{size_name}{kinds} (width {size.width}, {size.depth} layers)")
        print(f"\nsizes: {', '.join(sizes)}\na design is preset:KIND-SIZE, such as preset:{names()[0]}")


def _yaml(design: object) -> str:
    """YAML without anchors: repeated tables are written out."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    return yaml.dump(design, Dumper=Dumper, sort_keys=False, width=100)
