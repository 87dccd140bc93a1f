"""A family of models as Hugging Face keeps them: two pure functions between configs, and rules between tensors."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from heddle.errors import ConfigError
from heddle.exchange.fields import Fields, shown
from heddle.exchange.rules import Rules
from heddle.model.config import ModelConfig

FOLDER = Path(__file__).parent / "families"


@dataclass(frozen=True)
class Family:
    """One family.

    read: the fields of a config.json -> the plain data of a design, every field read that decides what is computed.
    write: a design, written out (`ModelConfig.resolved`) -> the config.json that comes nearest to it. It may not
    fail: what the family cannot say is told by reading the result again and comparing. rules: names of tensors.
    left_out: beginnings of names of tensors that belong to no part of the model; each is told when met.
    preferred: of several families that fit a design exactly, the lowest is taken.
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    rules: Callable[[ModelConfig, Rules], None]
    left_out: tuple[str, ...] = ()
    preferred: int = 100


@cache
def families() -> Mapping[str, Family]:
    """Every family by its model_type, preferred ones first: the files of the folder, but those that begin with _."""
    names = sorted(file.stem for file in FOLDER.glob("*.py") if not file.stem.startswith("_"))
    found: list[Family] = [importlib.import_module(f"heddle.exchange.families.{name}").FAMILY for name in names]
    found.sort(key=lambda family: (family.preferred, family.model_type))
    return {family.model_type: family for family in found}


def family_of(config: Mapping[str, Any], place: str) -> Family:
    """The family that a config.json names. Raises ConfigError for one that heddle does not read."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in families():
        known = ", ".join(families())
        raise ConfigError(f"{place}: model_type {shown(kind)} is not read; heddle reads {known}")
    return families()[kind]
