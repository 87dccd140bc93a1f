"""The covering array over the choices of tests/pairs.py: greedy, and the same on every machine.

python -m tests.covering      writes tests/goldens/refused_pairs.txt: the pairs of choices that no design can have
                              and tests/goldens/designs.jsonl: a few designs that have nearly every option of the cases
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from heddle.config import Config, Part, parse_config
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from tests.cases import CASES, case
from tests.pairs import (
    DEPTH,
    ENCODER,
    FORWARD,
    MIXER,
    MODEL,
    NONE,
    POSITION,
    RATES,
    Choice,
    Draft,
    Pair,
    Site,
    catalogue,
    fields_of,
    is_bidirectional,
    joined,
    mixers_of,
    rates,
    reads_encoder,
    refusal,
)

Key = TypeVar("Key", int, str)

GOLDEN = Path(__file__).parent / "goldens/refused_pairs.txt"
DESIGNS = Path(__file__).parent / "goldens/designs.jsonl"
IN_LAYERS = (MIXER, POSITION, FORWARD)
RESIDUAL = "residual"
SIZES = ("repeat", "vocab_size")  # of which any other number is as good
PATIENCE = 24  # designs that were refused in a row, after which the options left are those of single cases
TRIES = 4  # variants tried for a plain design around two choices


class Covering(NamedTuple):
    """Designs in which every pair of choices meets, and the error of each pair that cannot."""

    designs: list[tuple[ModelConfig, Draft]]
    refused: dict[Pair, str]


def all_pairs() -> list[Pair]:
    """Every two choices of different factors, in the catalogue's order."""
    factors = [[(factor, label) for label in labels] for factor, labels in catalogue().items()]
    return [frozenset(pair) for first, second in combinations(factors, 2) for pair in product(first, second)]


@cache
def sites() -> list[Site]:
    """Every site of a design, those with the most labels first."""
    all_sites = [(where, f) for f in catalogue() for where in (range(DEPTH) if f in IN_LAYERS else (MODEL,))]
    return sorted(all_sites, key=lambda site: -len(catalogue()[site[1]]))


def fits(labels: dict[Site, str]) -> bool:
    """Whether each layer's mixer can have its position, where both are chosen."""
    for index in range(DEPTH):
        mixer, position = labels.get((index, MIXER)), labels.get((index, POSITION))
        if mixer is not None and position is not None and not mixers_of(mixer, position):
            return False
    return True


def encoder_is_read(labels: dict[Site, str]) -> bool:
    """Whether a layer reads the encoder output, if there is one and all mixers are chosen."""
    mixers = [labels.get((index, MIXER)) for index in range(DEPTH)]
    if None in mixers or labels.get((MODEL, ENCODER), NONE) == NONE:
        return True
    return any(reads_encoder(mixer) for mixer in mixers if mixer is not None)


class Search:
    """The pairs left to cover, and how often each choice was used."""

    def __init__(self) -> None:
        self.left = dict.fromkeys(all_pairs())  # an ordered set
        self.uses: Counter[Choice] = Counter()
        self.result = Covering([], {})

    def gain(self, draft: Draft, site: Site, label: str, pairs: set[Pair]) -> int:
        """The number of pairs that a label at a site would newly cover, beside the pairs of the draft."""
        return sum(pair in self.left for pair in draft.pairs_at(site, label) - pairs)

    def ranked(self, draft: Draft, site: Site) -> list[str]:
        """Labels that fit at a site: the largest gain first, then those with most pairs left."""
        factor, pairs = site[1], draft.pairs()
        if pairs & self.result.refused.keys():
            return []
        fitting = [label for label in catalogue()[factor] if self.joins(draft, site, label)]
        pairs_left = Counter(choice for pair in self.left for choice in pair)
        return sorted(fitting, key=lambda label: (-self.gain(draft, site, label, pairs), -pairs_left[factor, label]))

    def joins(self, draft: Draft, site: Site, label: str) -> bool:
        """Whether a label is possible at a site: it fits, no pair was refused, and all mixers are causal or none is.

        A bidirectional design has no state, so it would hide what a causal mixer does with one.
        """
        extended = Draft(draft.labels | {site: label})
        directions = {
            is_bidirectional(mixer)
            for (_, factor), mixer in extended.labels.items()
            if factor == MIXER and mixer != NONE
        }
        return (
            len(directions) < 2
            and encoder_is_read(extended.labels)
            and fits(extended.labels)
            and not draft.pairs_at(site, label) & self.result.refused.keys()
        )

    def put(self, draft: Draft, site: Site, label: str) -> Draft:
        """The draft with a label at a site, in another variant than the last time."""
        self.uses[site[1], label] += 1
        return Draft(draft.labels | {site: label}, draft.picks | {site: self.uses[site[1], label]})

    def greedy(self, start: Draft) -> Draft | None:
        """Every other site filled with the label of the largest gain; None if no label is possible at a site."""
        draft = start
        for site in sites():
            if site not in draft.labels:
                ranked = self.ranked(draft, site)
                if not ranked:
                    return None
                draft = self.put(draft, site, ranked[0])
        return draft

    def plain(self, start: Draft) -> Iterator[Draft]:
        """Every other site filled with its most frequent label, for each mixer in the other layer."""
        encoder = start.labels.get((MODEL, ENCODER), NONE) != NONE
        for companion in sorted(catalogue()[MIXER], key=lambda label: encoder and not reads_encoder(label)):
            for _ in range(TRIES):
                draft = start
                for site in sorted(sites(), key=lambda site: site[1] != MIXER):
                    if site not in draft.labels:
                        first = {companion: 0} if site == (DEPTH - 1, MIXER) else {}
                        labels = [*first, *(label for label in catalogue()[site[1]] if label not in first)]
                        label = next(label for label in labels if fits(draft.labels | {site: label}))
                        draft = self.put(draft, site, label)
                yield draft

    def better(self, config: ModelConfig, draft: Draft, fixed: set[Site]) -> tuple[ModelConfig, Draft]:
        """A valid draft, with each site that is not fixed changed if that covers more and stays valid."""
        for site in sites():
            if site in fixed:
                continue
            without = Draft({other: label for other, label in draft.labels.items() if other != site})
            pairs = without.pairs()
            for label in self.ranked(without, site)[:2]:
                if self.gain(without, site, label, pairs) > self.gain(without, site, draft.labels[site], pairs):
                    changed = self.put(draft, site, label)
                    outcome = attempt(changed)
                    if isinstance(outcome, ModelConfig):
                        config, draft = outcome, changed
                        break
        return config, draft

    def cover(self, pair: Pair) -> None:
        """Find a design for two choices, or the error that refuses them."""
        labels = {(0 if factor in IN_LAYERS else MODEL, factor): label for factor, label in sorted(pair)}
        if not fits(labels):
            self.result.refused[pair] = no_position(labels[0, MIXER], labels[0, POSITION])
            self.left.pop(pair)
            return
        start = Draft({})
        for site, label in labels.items():
            start = self.put(start, site, label)
        filled = self.greedy(start)
        draft, outcome = filled or start, "" if filled is None else attempt(filled)
        if isinstance(outcome, str):
            for draft in self.plain(start):
                outcome = attempt(draft)
                if isinstance(outcome, ModelConfig):
                    outcome, draft = self.better(outcome, draft, {*labels, (DEPTH - 1, MIXER)})
                    break
        if isinstance(outcome, str):
            self.result.refused[pair] = outcome
            self.left.pop(pair)
            return
        self.result.designs.append((outcome, draft))
        for covered in draft.pairs():
            self.left.pop(covered, None)


def attempt(draft: Draft) -> ModelConfig | str:
    """The design, or the error that refuses it."""
    try:
        return draft.config()
    except ConfigError as error:
        return str(error)


def no_position(mixer: str, position: str) -> str:
    """Why a mixer cannot have this position: the error of the first variants."""
    bare, variant = catalogue()[MIXER][mixer][0], catalogue()[POSITION][position][0]
    return refusal(joined(bare, variant)) if mixer != NONE else "mixer: a layer without one has no position"


@cache
def covering() -> Covering:
    """The array, computed once per process."""
    search = Search()
    while search.left:
        search.cover(next(iter(search.left)))
    return search.result


def options_of(config: Config) -> set[str]:
    """Each field that is set, as `kind.field: value`. Numbers other than 0 and 1 count as one value.

    A dropout rate of zero is none: a design with a rate does in eval mode what one without a rate does.
    """
    options: set[str] = set()
    owner = config.kind if isinstance(config, Part) else type(config).__name__
    for name, value in fields_of(config):
        inner = [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, Config)]
        options = options.union(*(options_of(item) for item in inner))
        is_off = value is None or name in SIZES or (name in rates(type(config)) and value == 0)
        if not is_off and not (inner and isinstance(value, tuple)):
            options.add(f"{owner}.{name}: {label_of(value)}")
    return options


def label_of(value: Any) -> str:
    """What tells an option's value from others: a word, a truth value, a kind, or that it is a number or a list."""
    if isinstance(value, Config):
        return value.kind if isinstance(value, Part) else "a table"
    if isinstance(value, str | bool) or value in (0, 1):
        return str(value)
    return "a list" if isinstance(value, tuple) else "a number"


def fewest(options: Mapping[Key, Set[Any]]) -> list[Key]:
    """A few keys that have, together, every option: greedy."""
    left, chosen = dict(options), []
    while any(left.values()):
        richest = max(left, key=lambda key: len(left[key]))
        chosen.append(richest)
        left = {key: rest - left[richest] for key, rest in left.items()}
    return chosen


@cache
def options_of_cases() -> set[str]:
    """Every option of every case."""
    return set().union(*(options_of(case(name)) for name in CASES))


@cache
def uncovered_cases() -> list[str]:
    """A few cases that have, together, every option of the cases that no design of `designs_with_every_option` has."""
    return cases_beside(designs_with_every_option())


def cases_beside(designs: list[ModelConfig]) -> list[str]:
    """A few cases that have, together, every option of the cases that none of these designs has."""
    covered = set().union(*map(options_of, designs))
    return fewest({name: options_of(case(name)) - covered for name in CASES})


@cache
def each_option() -> list[Any]:
    """Cases as parameters of a test: a few that have, together, every option; the others are for the night."""
    by_day = fewest({name: options_of(case(name)) for name in CASES})
    return [pytest.param(name, marks=() if name in by_day else pytest.mark.nightly) for name in CASES]


class Unit(NamedTuple):
    """A variant of a factor, with the choices that decide what options it has, and these options."""

    labels: dict[str, str]
    pick: int
    options: set[str]


def plain_labels() -> dict[Site, str]:
    """The most frequent choice at every site."""
    return {site: next(iter(catalogue()[site[1]])) for site in sites()}


@cache
def units() -> dict[str, list[Unit]]:
    """The variants of each factor: a mixer with its position, a residual connection with its dropout rates."""
    together: dict[str, list[dict[str, str]]] = {
        factor: [{factor: label} for label in labels]
        for factor, labels in catalogue().items()
        if factor not in (MIXER, POSITION, RATES)
    }
    rates = catalogue()[RATES]
    together[RESIDUAL] = [labels | {RATES: rate} for labels in together[RESIDUAL] for rate in rates]
    pairs = dict.fromkeys((m, p) for m in catalogue()[MIXER] for p in catalogue()[POSITION] if mixers_of(m, p))
    together[MIXER] = [{MIXER: mixer, POSITION: position} for mixer, position in pairs]
    found: dict[str, list[Unit]] = {}
    for factor, choices in together.items():
        where = 0 if factor in IN_LAYERS else MODEL
        for labels in choices:
            draft = Draft(plain_labels() | {(where, name): label for name, label in labels.items()})
            for pick in range(len(draft.variants((where, factor)))):
                draft.picks = {(where, factor): pick}
                try:
                    unit = Unit(labels, pick, options_of(draft.parsed()))
                except ConfigError:
                    continue
                found.setdefault(factor, []).append(unit)
    return found


def richest(left: set[str], generator: random.Random, plain: float) -> Draft:
    """The draft whose sites have most of the options left, each; with a probability, the plain choice at a site."""
    draft, left = Draft(plain_labels()), set(left)
    for site in sorted(sites(), key=lambda site: generator.random()):
        where, factor = site
        if factor in (POSITION, RATES) or generator.random() < plain:
            continue
        mixers = [draft.labels[index, MIXER] for index in range(DEPTH) if (index, MIXER) in draft.picks]
        fitting = [
            unit
            for unit in units()[factor]
            if factor != MIXER
            or all(is_bidirectional(mixer) == is_bidirectional(unit.labels[MIXER]) for mixer in mixers)
        ]
        best = max(fitting, key=lambda unit: len(unit.options & left))
        draft.labels |= {(where, name): label for name, label in best.labels.items()}
        draft.picks[site] = best.pick
        left -= best.options
    return draft


@cache
def designs_with_every_option() -> list[ModelConfig]:
    """A few designs that have, together, nearly every option of the cases: those of the golden file."""
    lines = DESIGNS.read_text(encoding="utf-8").splitlines()
    return [parse_config(ModelConfig, json.loads(line)) for line in lines]


def greedy_designs() -> list[ModelConfig]:
    """Designs that have, together, nearly every option of the cases, each with what is left of them."""
    generator, chosen, left, failures = random.Random(0), [], set(options_of_cases()), 0
    while left and failures < PATIENCE:
        outcome = attempt(richest(left, generator, plain=0.5 * failures / PATIENCE))
        failures += 1
        if isinstance(outcome, ModelConfig) and options_of(outcome) & left:
            chosen.append(outcome)
            left, failures = left - options_of(outcome), 0
    return chosen


def random_designs(number: int, seed: int) -> Iterator[ModelConfig | str]:
    """Designs drawn uniformly from all choices and variants; or the error of a design that is refused."""
    generator = random.Random(seed)
    for _ in range(number):
        draft = Draft({})
        for site in sites():
            fitting = [label for label in catalogue()[site[1]] if fits(draft.labels | {site: label})]
            draft.labels[site] = generator.choice(fitting)
            draft.picks[site] = generator.randrange(10**6)
        yield attempt(draft)


def refused_lines() -> list[str]:
    """The refused pairs: for each choice and each other factor, one line with the choices that do not go with it."""
    order = {choice: number for number, choice in enumerate((f, l) for f in catalogue() for l in catalogue()[f])}
    partners: dict[tuple[Choice, str], list[str]] = {}
    for pair in covering().refused:
        first, second = sorted(pair, key=lambda choice: order[choice])
        if second[0] == MIXER:
            first, second = second, first
        partners.setdefault((first, second[0]), []).append(second[1])
    lines = [
        f"{' '.join(choice)}: no {factor} {', '.join(sorted(labels))}" for (choice, factor), labels in partners.items()
    ]
    return sorted(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("".join(f"{line}\n" for line in refused_lines()), encoding="utf-8")
    print(f"{GOLDEN.name}: {len(covering().refused)} pairs are refused")
    from tests.merged_designs import write_designs

    print(f"{DESIGNS.name}: {write_designs()} designs")
