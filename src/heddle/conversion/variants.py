"""Several conversions of one model: every combination of a sweep's values, and every method of a rewrite.

A sweep is written as a target of `--to`, with several values at a comma: `kv_heads=8,4,merge=mean,first` is four
conversions.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from heddle.conversion.rewrite import Rewrite
from heddle.conversion.targets import NEXT_OPTION, parse_rewrite, parse_rewrites
from heddle.errors import ConfigError

NOT_IN_A_FILE_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class ConversionVariant:
    """One of several conversions. name: all that it is asked for. method: how, without sizes and numbers."""

    name: str
    method: str
    rewrites: tuple[Rewrite, ...]

    @property
    def file_name(self) -> str:
        """The name as that of a folder."""
        return NOT_IN_A_FILE_NAME.sub("-", self.name).strip("-.")


def conversion_variants(
    targets: Sequence[str], sweep: Sequence[str] = (), all_methods: bool = False
) -> tuple[ConversionVariant, ...]:
    """The conversions that a command asks for. Raises ConfigError.

    targets: what each of them changes first. sweep: what they differ in. all_methods: whether a rewrite that has
    methods, and is not told which, is applied in each of them.
    """
    variants: dict[str, ConversionVariant] = {}
    swept = [text for values in sweep for text in _combinations(values)]
    for texts in [[*targets, text] for text in swept] or [list(targets)]:
        choices = [list(_with_methods(text)) if all_methods else [text] for text in texts]
        for chosen in itertools.product(*choices):
            rewrites = parse_rewrites(chosen)
            own = chosen[len(targets) :] if sweep else chosen
            name = "; ".join(own).replace(",", ", ")
            if name in variants:
                raise ConfigError(f"'{name}': is asked for twice; leave one out")
            variants[name] = ConversionVariant(name, "; ".join(map(_method, rewrites[-len(own) :])), rewrites)
    file_names = [variant.file_name.lower() for variant in variants.values()]
    for name, file_name in zip(variants, file_names, strict=True):
        if file_names.count(file_name) > 1:
            raise ConfigError(f"'{name}': has the file name of another conversion, {file_name}; leave one out")
    return tuple(variants.values())


def _combinations(text: str) -> Iterator[str]:
    """A target for every combination of the values in `text`."""
    pairs = [piece.partition("=") for piece in NEXT_OPTION.split(text)]
    choices = [[f"{name}{equals}{value}" for value in values.split(",")] for name, equals, values in pairs]
    for combination in itertools.product(*choices):
        yield ",".join(combination)


def _with_methods(text: str) -> Iterator[str]:
    """The target with each of its rewrite's methods, or alone if it has none or names one of their options."""
    rewrite = parse_rewrite(text)
    methods: Sequence[Mapping[str, str]] = type(rewrite).methods
    if not methods or any(name in rewrite.model_fields_set for method in methods for name in method):
        yield text
        return
    for method in methods:
        yield ",".join([text, *(f"{name}={value}" for name, value in method.items())])


def _method(rewrite: Rewrite) -> str:
    """A rewrite with the options that are words: how it converts, and not to what size."""
    order = list(type(rewrite).model_fields)
    named = sorted(rewrite.model_fields_set, key=order.index)
    words = [str(value) for name in named if isinstance(value := getattr(rewrite, name), str)]
    return ", ".join([rewrite.name, *words])
