"""Charts that need no script: the geometry of lines, markers and ticks, in percent of the plot's width and height.

The template draws them as SVG. Text and lines have the same size at every width of the page.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from heddle.lab.pages.render import DesignStyle

TICKS = 5
MIN_DISTANCE = 9.0  # percent of the plot's height


@dataclass(frozen=True)
class Scale:
    """Maps values between low and high to 0 to 100."""

    low: float
    high: float
    transform: Callable[[float], float] = float

    def percent(self, value: float) -> float:
        """Where a value lies."""
        start, end = self.transform(self.low), self.transform(self.high)
        return 100 * (self.transform(value) - start) / (end - start)


@dataclass(frozen=True)
class ChartPoint:
    """A marker. low, high: the ends of its interval, or None. title: shown under the pointer."""

    x: float
    y: float
    low: float | None
    high: float | None
    title: str


@dataclass(frozen=True)
class ChartLine:
    """Points in the style of a model.

    name: in the legend, "" for a line that is not listed. has_line: whether a line connects the points. filled:
    whether the markers are. is_curve: whether it has no markers, and a band for its intervals. is_behind: whether it is
    thin and pale, behind others.
    """

    name: str
    style: DesignStyle
    points: list[ChartPoint]
    has_line: bool = True
    filled: bool = True
    is_curve: bool = False
    is_behind: bool = False

    @property
    def path(self) -> str:
        """The corners of the line as SVG's points."""
        return " ".join(f"{point.x:.2f},{point.y:.2f}" for point in self.points)

    @property
    def band(self) -> str:
        """The corners of a curve's band as SVG's points; "" without one."""
        ends = [(point.x, point.low, point.high) for point in self.points if self.is_curve]
        lower = [f"{x:.2f},{low:.2f}" for x, low, _ in ends if low is not None]
        upper = [f"{x:.2f},{high:.2f}" for x, _, high in reversed(ends) if high is not None]
        return " ".join([*lower, *upper])


@dataclass(frozen=True)
class Chart:
    """A chart. Ticks and dotted lines across the plot are (percent, text)."""

    label: str
    x_title: str
    y_title: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[ChartLine]
    dotted: list[tuple[float, str]]

    @property
    def is_measured(self) -> bool:
        """Whether there is anything to draw."""
        return any(line.points for line in self.lines)


@dataclass(frozen=True)
class Value:
    """A point before it is scaled, with its interval and its text."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    title: str = ""


@dataclass(frozen=True)
class Series:
    """The values of one line of a chart."""

    name: str
    style: DesignStyle
    values: Sequence[Value]
    has_line: bool = True
    filled: bool = True
    is_curve: bool = False
    is_behind: bool = False


def scaled_lines(series: Iterable[Series], x_scale: Scale, y_scale: Scale) -> list[ChartLine]:
    """The lines of a chart, with what lies outside of the scales drawn at their ends."""

    def height(value: float | None) -> float | None:
        return None if value is None else min(100.0, max(0.0, 100 - y_scale.percent(value)))

    lines = []
    for each in series:
        points = [
            ChartPoint(
                x_scale.percent(value.x), height(value.y) or 0.0, height(value.low), height(value.high), value.title
            )
            for value in each.values
            if math.isfinite(value.y)
        ]
        lines.append(
            ChartLine(each.name, each.style, points, each.has_line, each.filled, each.is_curve, each.is_behind)
        )
    return lines


def value_range(series: Iterable[Series], include: Iterable[float] = (), margin: float = 0.06) -> tuple[float, float]:
    """The lowest and the highest value with its interval, with a margin on both sides."""
    ends = [end for each in series for value in each.values for end in (value.y, value.low, value.high)]
    finite = [*include, *(end for end in ends if end is not None and math.isfinite(end))]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    room = margin * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def linear_ticks(scale: Scale, text: Callable[[float], str] | None = None) -> list[tuple[float, str]]:
    """About TICKS round values, as (percent from above, text)."""
    rough = (scale.high - scale.low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first = math.ceil(scale.low / step - 1e-9)
    last = math.floor(scale.high / step + 1e-9)
    values = [round(number * step, digits) for number in range(first, last + 1)]
    return [(100 - scale.percent(value), text(value) if text else f"{value:.{digits}f}") for value in values]


def symlog_ticks(scale: Scale) -> list[tuple[float, str]]:
    """0 and 1, 2, 5 times powers of ten on a scale that is stretched around 0, none closer than MIN_DISTANCE."""
    sizes = [factor * 10.0**power for power in range(-6, 4) for factor in (1, 2, 5)]
    ticks: list[tuple[float, str]] = []
    for value in [0.0, *sorted([*sizes, *(-size for size in sizes)], key=lambda size: -abs(size))]:
        percent = 100 - scale.percent(value) if scale.low <= value <= scale.high else math.inf
        if math.isfinite(percent) and all(abs(percent - other) >= MIN_DISTANCE for other, _ in ticks):
            ticks.append((percent, f"{value:g}".replace("-", "−")))
    return ticks


def line_chart(
    series: Sequence[Series],
    x_scale: Scale,
    x_ticks: list[tuple[float, str]],
    titles: tuple[str, str],
    *,
    y_scale: Scale | None = None,
    y_text: Callable[[float], str] | None = None,
    dotted: Sequence[tuple[float, str]] = (),
) -> Chart:
    """A chart of lines. titles: of the two axes. y_scale: by default it shows all values.

    dotted: (value, text) of dotted lines across the plot.
    """
    y_scale = y_scale or Scale(*value_range(series, [value for value, _ in dotted]))
    return Chart(
        label=f"{titles[1]} over {titles[0]}",
        x_title=titles[0],
        y_title=titles[1],
        x_ticks=x_ticks,
        y_ticks=linear_ticks(y_scale, y_text),
        lines=scaled_lines(series, x_scale, y_scale),
        dotted=[(100 - y_scale.percent(value), text) for value, text in dotted],
    )
