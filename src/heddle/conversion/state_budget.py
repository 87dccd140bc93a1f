"""A budget for the state of all layers, given to the layers where it saves most."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from heddle.config import refuse

Size = tuple[int, float]  # elements of state per token, and what a layer loses with them


def parse_share(value: Any) -> Any:
    """`25%` -> 0.25; anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return float(value.removesuffix("%")) / 100 if value.endswith("%") else float(value)
    except ValueError:
        refuse("", f"'{value}' is no share; write 25% or 0.25")


# The share of the source's state that is left.
StateBudget = Annotated[float, Field(gt=0.0, le=1.0), BeforeValidator(parse_share)]


def plan_sizes(choices: Sequence[Sequence[Size]], budget: int) -> list[int] | None:
    """Choose a size for each layer, so that the losses sum to nearly the least and the sizes to at most `budget`.

    choices: of each layer, in order of their sizes. Of each only the convex hull is used: from the smallest sizes on,
    the step of any layer that saves most per element is taken. None if the smallest sizes exceed the budget.
    """
    hulls = [_lower_hull(sizes) for sizes in choices]
    taken = [0] * len(hulls)
    rest = budget - sum(hull[0][0] for hull in hulls)
    if rest < 0:
        return None
    while True:
        steps = [
            ((hull[at][1] - hull[at + 1][1]) / (hull[at + 1][0] - hull[at][0]), index)
            for index, (hull, at) in enumerate(zip(hulls, taken, strict=True))
            if at + 1 < len(hull) and hull[at + 1][0] - hull[at][0] <= rest
        ]
        if not steps:
            return [hull[at][0] for hull, at in zip(hulls, taken, strict=True)]
        _, index = max(steps)
        hull, at = hulls[index], taken[index]
        rest -= hull[at + 1][0] - hull[at][0]
        taken[index] += 1


def _lower_hull(sizes: Sequence[Size]) -> list[Size]:
    """The choices that no mix of two others beats."""
    hull: list[Size] = []
    for size, loss in sizes:
        if hull and loss >= hull[-1][1]:
            continue  # more state, and nothing saved
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (size - hull[-2][0]) >= (loss - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((size, loss))
    return hull
