"""The page of a profile: a flame graph and a table of operations for each profiled step, without a script."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from heddle.analysis.pages.render import render
from heddle.analysis.profile import Frame, Profile

MIN_SHARE = 0.002  # of the step; narrower bars are left out
MAX_DEPTH = 14
TABLE_ROWS = 30
HUE_OF_PART = 47  # degrees from one part's color to the next


@dataclass(frozen=True)
class FlameBar:
    """A rectangle of a flame graph: where it begins and how wide it is, in percent; its row; its text and color."""

    left: float
    width: float
    depth: int
    text: str
    title: str
    hue: int


def profile_page(design: str, precision: str, profiles: list[Profile]) -> str:
    """The page as one HTML document."""
    graphs: list[dict[str, Any]] = []
    for profile in profiles:
        bars = list(_bars(profile.flames, 0.0, 0, profile.flames.seconds, 0))
        graphs.append(
            {
                "profile": profile,
                "bars": bars,
                "rows": 1 + max(bar.depth for bar in bars),
                "operations": profile.operations[:TABLE_ROWS],
            }
        )
    return render("profile.html", title=f"heddle show: {design}", design=design, precision=precision, graphs=graphs)


def _bars(frame: Frame, left: float, depth: int, total: float, hue: int) -> Iterator[FlameBar]:
    """The bar of a frame and those within it, the longest first."""
    width = 100 * frame.seconds / total
    yield FlameBar(left, width, depth, frame.name, f"{frame.name}: {1e3 * frame.seconds:.3f} ms, {width:.1f} %", hue)
    if depth + 1 == MAX_DEPTH:
        return
    for index, child in enumerate(sorted(frame.children.values(), key=lambda each: -each.seconds)):
        if child.seconds >= MIN_SHARE * total:
            child_hue = (hue + HUE_OF_PART * (index + 1)) % 360 if depth < 2 else hue
            yield from _bars(child, left, depth + 1, total, child_hue)
        left += 100 * child.seconds / total
