"""Random designs drawn from the published JSON Schema alone: nothing here reads a config class or names a kind.

python -m tests.schema_designs 2000 0 2      draws designs 0, 2, 4, … of 2,000 and runs the grid on each; resumable
python -m tests.schema_designs 2000          writes the counts of what was run to tests/goldens/schema_designs.json

A field's bounds, choices and nested parts come from the schema. Numbers are small, so that a design fits a law's texts.
The grid of a design is every law but `low_precision`; `options_have_effect` for a few of its fields, drawn anew for
each design; two layouts made from tensors; and that each refusal on the way to the design is a sentence. It takes 1 to
5 seconds of one core.
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from heddle.errors import ConfigError
from heddle.laws import LAWS, LawViolation, run
from heddle.laws.harness import assert_close, forward_no_grad, model_under_test, random_tokens
from heddle.laws.options import Behavior, has_effect, options
from heddle.model.config import ModelConfig, schema
from heddle.model.load_config import load_config
from heddle.parts.layout import Layout
from tests.random_layouts import random_layout

LINES = Path("runs/schema_designs.jsonl")
COUNTS = Path(__file__).parent / "goldens/schema_designs.json"
SENTENCE = re.compile(r"[a-z][\w.\[\]]*: [^\n]{10,400}")

INTEGERS = (1, 1, 2, 2, 3, 4, 4, 6, 8, 12)
NUMBERS = (0.25, 0.5, 1.0, 1.25, 2.0)
# A text needs tokens to choose from, and learned positions for all of them. Weights of a usual size keep rounding and
# curvature within the laws' tolerances. Where angles depend on the final length, a call without a state knows that of
# the text, and a state that of its cache: they agree below the original length, which is more than any law's text.
VOCAB_SIZE = 61
FIELDS: dict[str, tuple[Any, ...]] = {
    "vocab_size": (37, VOCAB_SIZE),
    "length": (128,),
    "repeat": (1, 1, 2),
    "std": (0.02, 0.1),
    "eps": (1e-6, 1e-5, 0.01),
    "base": (2.0, 100.0, 10000.0),
    "original_length": (500, 1000, 4096),
}
# A random design may magnify rounding by any factor, so `low_precision` says nothing about it. `options_have_effect`
# builds a design anew for each field, so only a few fields of each are tried.
LEFT_OUT = ("low_precision", "options_have_effect")
FIELDS_TRIED = 8
# Every second design may have heads of one dim.
NARROW: dict[str, tuple[int, ...]] = {"width": (12, 24)}
WIDE: dict[str, tuple[int, ...]] = {
    "width": (24, 36),
    "heads": (1, 2, 3, 4),
    "dim": (6, 8, 12),
    "rank": (4, 6, 8, 12),
}
OPTIONAL = 0.25  # how often a field is given that may be left out
OFTEN = {
    "mixer": 0.9,
    "feedforward": 0.7,
    "position": 0.9,
    "scaling": 0.8,
    "layers": 0.1,
    "encoder": 0.3,
    "shared": 0.1,
}
DEEP = 10  # levels of parts below which the schema's recursion ends
TRIES = 1000


class Draw:
    """Random instances of the schema. refused: the error of everything drawn that no design can hold."""

    def __init__(self, generator: random.Random, widths: dict[str, tuple[int, ...]]) -> None:
        self.generator, self.widths, self.definitions = generator, widths, _schema()["$defs"]
        self.refused: list[str] = []

    def design(self) -> ModelConfig:
        """A design that is accepted."""
        for _ in range(TRIES):
            if config := self.accepted(self.instance(_schema(), "", 0)):
                return config
        raise AssertionError(f"none of {TRIES} was accepted, at last: {self.refused[-1]}")

    def accepted(self, data: Any) -> ModelConfig | None:
        """The config of a design, or None if it is refused."""
        try:
            config = load_config(data)
        except ConfigError as error:
            self.refused.append(str(error))
            return None
        return config.replace(vocab_size=config.vocab_size or VOCAB_SIZE)

    def instance(self, node: dict[str, Any], name: str, level: int) -> Any:
        """A value that a node of the schema allows, for the field `name`."""
        if "$ref" in node:
            return self.instance(self.definitions[node["$ref"].rpartition("/")[2]], name, level + 1)
        for union in ("anyOf", "oneOf"):
            if union in node:
                return self.instance(self.member(node[union], level), name, level)
        if "const" in node:
            return node["const"]
        if "enum" in node:
            return self.generator.choice(node["enum"])
        return getattr(self, f"_{node['type']}")(node, name, level)

    def member(self, members: list[dict[str, Any]], level: int) -> dict[str, Any]:
        """A member of a union, seldom null; far down, one that does not recurse."""
        null = [node for node in members if node.get("type") == "null"]
        values = [node for node in members if node.get("type") != "null"]
        if level > DEEP:
            values = [node for node in values if not _recurses(node)]
        return self.generator.choice(
            null if null and (not values or self.generator.random() < 0.1) else values or members
        )

    def _object(self, node: dict[str, Any], name: str, level: int) -> dict[str, Any]:
        required = node.get("required", [])
        fields = {
            field: value
            for field, value in node["properties"].items()
            if field in required or self.generator.random() < OFTEN.get(field, OPTIONAL)
        }
        layers = fields.pop("layers") if "width" in fields else None
        data = {field: self.instance(value, field, level) for field, value in fields.items()}
        if layers is not None:
            number = self.generator.choice((1, 2, 2, 3))
            data["layers"] = [self.layer(layers["items"], data["width"]) for _ in range(number)]
        return data

    def layer(self, node: dict[str, Any], width: int) -> Any:
        """An entry of a design's layers that a design of this width accepts, so that whole designs are not too rare."""
        for _ in range(TRIES):
            entry = self.instance(node, "layers", 0)
            if self.accepted({"width": width, "layers": [entry]}):
                return entry
        raise AssertionError(f"none of {TRIES} layers was accepted, at last: {self.refused[-1]}")

    def _array(self, node: dict[str, Any], name: str, level: int) -> list[Any]:
        return [self.instance(node["items"], name, level) for _ in range(self.generator.choice((1, 2, 2, 3)))]

    def _integer(self, node: dict[str, Any], name: str, level: int) -> int:
        last_word = name.rpartition("_")[2]
        choices = FIELDS.get(name) or self.widths.get(name) or self.widths.get(last_word) or INTEGERS
        value: int = self.generator.choice([value for value in choices if _within(node, value)])
        return value

    def _number(self, node: dict[str, Any], name: str, level: int) -> float:
        value: float = self.generator.choice([value for value in FIELDS.get(name, NUMBERS) if _within(node, value)])
        return value

    def _string(self, node: dict[str, Any], name: str, level: int) -> str:
        return self.generator.choice(("attention", "gated_delta", "linear_attention"))  # names of mixers

    def _boolean(self, node: dict[str, Any], name: str, level: int) -> bool:
        return self.generator.random() < 0.5

    def _null(self, node: dict[str, Any], name: str, level: int) -> None:
        return None


@cache
def _schema() -> dict[str, Any]:
    return schema()


def _recurses(node: dict[str, Any]) -> bool:
    """Whether a node leads to a table that may hold itself."""
    return "$ref" in node or "$ref" in node.get("items", {})


def _within(node: dict[str, Any], value: float) -> bool:
    return (
        node.get("minimum", value) <= value <= node.get("maximum", value)
        and not value <= node.get("exclusiveMinimum", value - 1)
        and not value >= node.get("exclusiveMaximum", value + 1)
    )


class Design(NamedTuple):
    """An accepted design, and the errors of what was drawn before it."""

    config: ModelConfig
    refused: list[str]


def design(number: int) -> Design:
    """Design `number`: the first accepted one drawn with this seed."""
    draw = Draw(random.Random(number), WIDE if number % 2 else NARROW)
    return Design(draw.design(), draw.refused)


def violations(number: int, laws: Iterable[str] | None = None) -> list[str]:
    """What is wrong with design `number`: laws it breaks, layouts of tensors it misreads, refusals that say little."""
    config, refused = design(number)
    names = [name for name in LAWS if name not in LEFT_OUT] if laws is None else laws
    broken = [f"{result.name}: {result.message}" for result in run(config, names) if not result.passed]
    generator = random.Random(number)
    for rows, length in ((3, 9), (2, 14)):
        broken += documents_alone(config, random_layout(generator, rows, length))
    if laws is None:
        broken += fields_without_effect(config, generator, FIELDS_TRIED)
    return broken + [f"not a sentence: {message}" for message in refused if not SENTENCE.fullmatch(message)]


def fields_without_effect(config: ModelConfig, generator: random.Random, count: int) -> list[str]:
    """Those of `count` random fields of a design for which `options_have_effect` does not hold."""
    fields = list(options(config))
    try:
        behavior = Behavior(config)
        drawn = generator.sample(fields, min(count, len(fields)))
        return [f"{field.path}: no other value has an effect" for field in drawn if not has_effect(field, behavior)]
    except Exception as error:  # as in a law: any other error is a violation too
        return [f"options: stopped by {type(error).__name__}: {error}"]


def documents_alone(config: ModelConfig, layout: Layout) -> list[str]:
    """How the documents of a layout differ from the same documents computed alone."""
    model, tokens = model_under_test(config), random_tokens(config, layout.batch, layout.length)
    try:
        hidden = forward_no_grad(model, tokens, layout)
    except ConfigError as error:  # a position beyond the learned ones
        return [] if SENTENCE.fullmatch(str(error)) else [f"not a sentence: {error}"]
    is_token, broken = layout.positions >= 0, []
    documents = layout.positions * 0 if layout.segment_ids is None else layout.segment_ids
    for row in range(layout.batch):
        for document in documents[row][is_token[row]].unique():
            columns = (is_token[row] & (documents[row] == document)).nonzero()[:, 0]
            start = int(layout.positions[row, columns[0]])
            alone = forward_no_grad(model, tokens[row : row + 1, columns], Layout.causal(1, len(columns), start))
            try:
                assert_close(
                    hidden[row : row + 1, columns], alone, f"document {int(document)} of row {row}, by tensors"
                )
            except LawViolation as error:
                broken.append(str(error))
    return broken


def kinds_of(data: Any) -> Iterator[str]:
    """The kind of every part within plain data."""
    if isinstance(data, dict):
        yield from [data["kind"]] if "kind" in data else []
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else []:
        yield from kinds_of(value)


def _lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()] if LINES.is_file() else []


def run_share(count: int, share: int, shares: int) -> None:
    """Run the designs of a share that have not been run: one line each, and what is wrong on the screen."""
    torch.set_num_threads(1)  # more would only wait for each other: these tensors are tiny
    LINES.parent.mkdir(parents=True, exist_ok=True)
    finished = {line["design"] for line in _lines()}
    for number in (number for number in range(share, count, shares) if number not in finished):
        config, refused = design(number)
        broken, kinds = violations(number), sorted(set(kinds_of(config.dump())))
        entry = {"design": number, "refused": len(refused), "kinds": kinds, "violations": broken}
        with LINES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        for violation in broken:
            print(f"design {number}: {violation}", flush=True)


def write_counts(count: int) -> None:
    """Write how many of the first `count` designs were run, and what they were."""
    entries = {line["design"]: line for line in _lines() if line["design"] < count}
    kinds = Counter(kind for entry in entries.values() for kind in entry["kinds"])
    counts = {
        "designs": len(entries),
        "refused before them": sum(entry["refused"] for entry in entries.values()),
        "layouts of tensors": 2 * len(entries),
        "designs with a violation": sum(bool(entry["violations"]) for entry in entries.values()),
        "designs with this kind": dict(sorted(kinds.items())),
    }
    COUNTS.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", metavar="N", nargs="+", type=int)
    count, *share = parser.parse_args().numbers
    if share:
        run_share(count, *share)
    else:
        write_counts(count)
