"""Usual mistakes of engines, planted one at a time: what a kit's model computes with each, so that an answer is named.

Every option of a design is a mistake when it has another value: a window one too wide, the other layout of RoPE, a
router that renormalizes. Beside them stand mistakes of the cache and of batches.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heddle.config import Part
from heddle.errors import HeddleError
from heddle.exchange.family_match import TRAINING_FIELDS
from heddle.laws.options import Option, Steps, alternatives, config_at, options, with_values
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.layout import Layout

TRIES = 12  # values of an option that is a choice or a part
VALUES = 3  # of an option, each a mistake of its own
SAME = 1e-9  # less is no change


@dataclass(frozen=True)
class Bug:
    """A mistake and its logits [T, vocab] of a row. property: of the cases that show it."""

    name: str
    property: str
    row: int
    logits: Tensor
    distance: float


def bugs_of(
    model: Decoder, rows: Sequence[Sequence[int]], goldens: Sequence[Tensor], tolerance: float
) -> tuple[list[Bug], list[str]]:
    """The mistakes that move some logit by more than the tolerance, and the names of those that do not."""
    found = [*_option_bugs(model, rows[0], goldens[0]), *_feeding_bugs(model, rows, goldens)]
    seen = [bug for bug in found if bug.distance > tolerance]
    return seen, sorted({bug.name for bug in found} - {bug.name for bug in seen})


def _option_bugs(model: Decoder, row: Sequence[int], golden: Tensor) -> Iterator[Bug]:
    design = model.config.resolved()
    parameters = dict(model.named_parameters())
    groups: dict[tuple[str, str], list[Option]] = {}
    for option in options(design):
        if option.name not in TRAINING_FIELDS:
            groups.setdefault((_pattern(option.steps), repr(option.value)), []).append(option)
    for (path, _), same in groups.items():
        found = 0
        for value in _other_values(same[0]):
            wrong = _with(design, {steps: value for option in same for steps in _places(design, option)}, parameters)
            logits = None if wrong is None else _logits(wrong, row)
            if logits is not None and (distance := _distance(logits, golden)) > SAME:
                shown = f"{path} is {_shown(value)} instead of {_shown(same[0].value)}"
                yield Bug(shown, "logits", 0, logits, distance)
                found += 1
            if found == VALUES:
                break


def _other_values(option: Option) -> list[Any]:
    """Values that engines would compute with: a number one off or left out, another choice, another part."""
    value = option.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return [other for group in alternatives(option) for other in group][:TRIES]
    near = [value + 1, value - 1] if isinstance(value, int) else [1.0, 0.0, 2 * value]
    left_out = [other for group in alternatives(option) for other in group if other is None]
    return [*(other for other in near if other != value), *left_out]


def _places(design: ModelConfig, option: Option) -> Iterator[Steps]:
    """The paths of an option in all layers that have it: an engine has its mistake in each."""
    yield option.steps
    if option.steps[0] == "layers":
        for index in range(len(design.layers)):
            inner = option.steps[2:]
            with suppress(AttributeError, IndexError, AssertionError):
                if index != option.steps[1] and config_at(design, ("layers", index, *inner[:-1])) == option.config:
                    yield ("layers", index, *inner)


def _pattern(steps: Steps) -> str:
    return ".".join(step for step in steps if isinstance(step, str))


def _shown(value: Any) -> str:
    return str(value.dump()) if isinstance(value, Part) else repr(value)


def _with(design: ModelConfig, values: dict[Steps, Any], parameters: Mapping[str, Tensor]) -> Decoder | None:
    """The model with other options and the same weights; None where these do not fit."""
    try:
        with torch.device("meta"):
            model = Decoder(with_values(design, values))
    except (HeddleError, RuntimeError, ValueError):
        return None
    own = dict(model.named_parameters())
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in parameters.items()}:
        return None
    for name, value in parameters.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, value)
    model.tie()
    return model.eval()


@torch.no_grad()
def _logits(model: Decoder, row: Sequence[int], layout: Layout | None = None) -> Tensor | None:
    """Logits [T, vocab]; None where the model refuses the row or gives no numbers."""
    try:
        logits: Tensor = model.head(model(torch.tensor([list(row)]), layout)[0])[0]
    except (HeddleError, RuntimeError, ValueError):
        return None
    return logits if bool(logits.isfinite().all()) else None


def _distance(logits: Tensor, golden: Tensor) -> float:
    return float((logits - golden).abs().max())


def _feeding_bugs(model: Decoder, rows: Sequence[Sequence[int]], goldens: Sequence[Tensor]) -> Iterator[Bug]:
    """Mistakes in how rows are fed. `logits` are those of the whole row, where the mistake came after its start."""

    def bug(name: str, what: str, row: int, fed: Sequence[int], start: int = 0, kept: int = 0) -> Iterator[Bug]:
        """fed: the tokens that the engine reads at positions from `start` on, of which the last are the row's."""
        logits = _logits(model, fed, Layout.causal(1, len(fed), start))
        if logits is not None:
            length = len(rows[row])
            whole = torch.cat((goldens[row][:kept], logits[len(fed) - (length - kept) :]))
            yield Bug(name, what, row, whole, _distance(whole, goldens[row]))

    padding = [0] * (len(rows[0]) - len(rows[1]))
    yield from bug("padding is read as text", "padding", 1, [*padding, *rows[1]])
    yield from bug("positions begin after the padding", "padding", 1, rows[1], start=len(padding))
    yield from bug("packed texts see each other", "packing", 0, [*rows[1], *rows[0]])
    if model.causal:
        cut, kept = 7, 12
        yield from bug("the cache is lost at a cut", "cuts", 0, rows[0][cut:], start=cut, kept=cut)
        yield from bug("positions restart at a cut, without the cache", "cuts", 0, rows[0][cut:], kept=cut)
        yield from bug("removed tokens stay in the cache", "rollback", 3, [*rows[0][:20], *rows[3][kept:]], kept=kept)
