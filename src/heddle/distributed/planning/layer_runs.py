"""Fold a long row of layers: three repeats of each repeated block tell about all of them.

A quantity that each repeat changes by the same amount is that of three repeats, and for each further one the difference
that a fourth repeat made. Two would not do: the first layer of a backward pass finds other buffers of FSDP2 than the
second one, and the last one, at the bottom, holds the most gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_REPEATS = 3  # that stay: the first one, the last one and the one before it
_FEWEST_FOLDED = 8  # fewer repeats take no longer than three and four


@dataclass(frozen=True)
class Run:
    """A block of layers, each by its kind, and how often it comes."""

    block: tuple[int, ...]
    count: int

    @property
    def is_long(self) -> bool:
        """Whether a few repeats stand for all."""
        return self.count >= _FEWEST_FOLDED


def runs_of(kinds: Sequence[int]) -> list[Run]:
    """Cut a row of layers into repeated blocks: at each place the block whose repeats reach furthest."""
    runs, start = [], 0
    while start < len(kinds):
        best = Run(tuple(kinds[start : start + 1]), 1)
        for length in range(1, (len(kinds) - start) // _FEWEST_FOLDED + 1):
            block, count = tuple(kinds[start : start + length]), 1
            while tuple(kinds[start + count * length : start + (count + 1) * length]) == block:
                count += 1
            if count >= _FEWEST_FOLDED and count * length > best.count * len(best.block):
                best = Run(block, count)
        runs.append(best)
        start += best.count * len(best.block)
    return runs


@dataclass(frozen=True)
class FoldedLayer:
    """A layer of a folded row. label: its run, its repeat ("first", "inner" or "last"), and its position there.

    Layers of other repeats have no label.
    """

    kind: int
    label: tuple[int, str, int] | None


def folded(runs: Sequence[Run], extra: int | None = None) -> list[FoldedLayer]:
    """The layers with folded runs repeated three times, that of index `extra` four times."""
    layers = []
    for number, run in enumerate(runs):
        repeats = (_REPEATS + int(number == extra)) if run.is_long else run.count
        for repeat in range(repeats):
            for position, kind in enumerate(run.block):
                names = {0: "first", repeats - 2: "inner", repeats - 1: "last"}
                name = names.get(repeat) if run.is_long else str(repeat)
                layers.append(FoldedLayer(kind, None if name is None else (number, name, position)))
    return layers


def extrapolate(runs: Sequence[Run], base: float, with_extra: Callable[[int], float]) -> float:
    """A quantity of all layers, from that of the folded ones and of those with one run longer."""
    further = ((index, run.count - _REPEATS) for index, run in enumerate(runs) if run.is_long)
    return base + sum(count * (with_extra(index) - base) for index, count in further)
