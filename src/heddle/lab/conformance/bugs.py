"""Usual mistakes of engines, planted one at a time: what a model computes with each, so that an answer is named.

Every option of a design is one when it has another value: a window one too wide, the other layout of RoPE, a router
that renormalizes. Beside them stand mistakes of the cache, of masks, of numbers, and of batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from heddle.config import Part
from heddle.errors import HeddleError
from heddle.exchange.family_match import TRAINING_FIELDS
from heddle.laws.options import Option, Steps, alternatives, config_at, options, with_values
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.attention.softmax import reference
from heddle.numerics.rotary import apply_rotary
from heddle.parts.layout import Layout
from heddle.parts.mixers.attention import Attention, AttentionConfig
from heddle.parts.norms.rms import RMSNorm
from heddle.parts.positions import Rotation
from heddle.parts.positions.rope import Rope

CUTS = ((1,), (7, 8, 10, 19), tuple(range(1, 48)))  # where rows are cut: after the first token, unevenly, everywhere
GOES_ON = 3  # tokens of each row of a padded batch that are read from its cache
ROLLBACK_FROM, ROLLBACK_TO = 20, 12
TILE = 64  # keys, from which on kernels take another path
TRIES = 12  # values of an option that is a choice or a part
VALUES = 3  # of an option, each a mistake of its own
SAME = 1e-9  # less is no change
SHOWN = 32  # tokens whose logits a kit holds of a bug


@torch.no_grad()
def logits_of(model: Decoder, row: Sequence[int], layout: Layout | None = None) -> Tensor:
    """Logits [T, vocab] of one row."""
    logits: Tensor = model.head(model(torch.tensor([list(row)]), layout)[0])[0]
    return logits


def shown(logits: Tensor) -> Tensor:
    """What a kit holds of a bug's logits [T, vocab]: of SHOWN tokens, and the logarithm of the exponentials' sum."""
    return torch.cat((logits[:, :SHOWN], logits.logsumexp(1, keepdim=True)), 1)


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
    """The mistakes that change some logit by more than the tolerance, and the names of the others."""
    found = [*_option_bugs(model, rows[0], goldens[0]), *_feeding_bugs(model, rows, goldens)]
    found += [*_mask_bugs(model, rows, goldens), *_number_bugs(model, rows, goldens)]
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
    """Wrong values that engines may compute with: another number or none, another choice, another part."""
    value = option.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return [other for group in alternatives(option) for other in group][:TRIES]
    near = [value + 1, value - 1] if isinstance(value, int) else [1.0, 0.0, 2 * value]
    left_out = [other for group in alternatives(option) for other in group if other is None]
    return [*(other for other in near if other != value), *left_out]


def _places(design: ModelConfig, option: Option) -> Iterator[Steps]:
    """The paths of an option in all layers that have it: an engine makes its mistake in each."""
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


def _logits(model: Decoder, row: Sequence[int], layout: Layout | None = None) -> Tensor | None:
    """Logits [T, vocab]; None where the model refuses the row or gives no numbers."""
    try:
        logits = logits_of(model, row, layout)
    except (HeddleError, RuntimeError, ValueError):
        return None
    return logits if bool(logits.isfinite().all()) else None


def _distance(logits: Tensor, golden: Tensor) -> float:
    return float((logits - golden).abs().max())


def _feeding_bugs(model: Decoder, rows: Sequence[Sequence[int]], goldens: Sequence[Tensor]) -> Iterator[Bug]:
    """Mistakes in how rows are fed. `logits` are the whole row's, if the mistake comes after its start."""

    def bug(name: str, what: str, row: int, fed: Sequence[int], start: int = 0, kept: int = 0) -> Iterator[Bug]:
        """fed: the tokens that the engine reads at positions from `start` on, of which the last are the row's."""
        logits = _logits(model, fed, Layout.causal(1, len(fed), start))
        if logits is not None:
            length = len(rows[row])
            whole = torch.cat((goldens[row][:kept], logits[len(fed) - (length - kept) :]))
            yield Bug(name, what, row, whole, _distance(whole, goldens[row]))

    def turned(name: str, what: str, row: int, positions: list[int], fed: Sequence[int] = ()) -> Iterator[Bug]:
        """Queries and keys are rotated by other positions than the mask's. fed: texts that end with the row."""

        def by_positions(module: nn.Module, arguments: tuple[Tensor, Layout]) -> tuple[Tensor, Layout]:
            x, layout = arguments
            return x, replace(layout, positions=torch.tensor([positions]), start=None, is_checked=True, cache={})

        rotations = [module for module in model.modules() if isinstance(module, Rotation)]
        handles = [module.register_forward_pre_hook(by_positions) for module in rotations]
        try:
            logits = _logits(model, fed or rows[row]) if rotations else None
        finally:
            for handle in handles:
                handle.remove()
        if logits is not None:
            last = logits[-len(rows[row]) :]
            yield Bug(name, what, row, last, _distance(last, goldens[row]))

    first, second = rows[:2]
    padding = [0] * (len(first) - len(second))
    yield from bug("padding is read as text", "padding", 1, [*padding, *second])
    yield from bug("positions begin after the padding", "padding", 1, second, start=len(padding))
    yield from bug("packed texts see each other", "packing", 0, [*second, *first])
    if model.causal:
        cut, kept = 7, ROLLBACK_TO
        pieces = list(pairwise([0, *CUTS[1], len(first)]))
        restarted = [position - start for start, stop in pieces for position in range(start, stop)]
        later = [position + (position >= kept) * (ROLLBACK_FROM - kept) for position in range(len(rows[3]))]
        yield from bug("the text before is still in the cache", "logits", 1, [*first, *second])
        yield from bug("the cache is lost at a cut", "cuts", 0, first[cut:], start=cut, kept=cut)
        yield from bug("positions restart at a cut, without the cache", "cuts", 0, first[cut:], kept=cut)
        yield from turned("positions restart at each cut", "cuts", 0, restarted)
        yield from bug("removed tokens stay in the cache", "rollback", 3, [*first[:20], *rows[3][kept:]], kept=kept)
        yield from turned("removed tokens still count as positions", "rollback", 3, later)
        again = [*range(len(first)), *range(len(second))]
        name = "the text before is still in the cache, positions restart"
        yield from turned(name, "logits", 1, again, [*first, *second])
        late = [*range(len(second) - GOES_ON), *range(len(first) - GOES_ON, len(first))]
        yield from turned("a padded batch continues at the positions of its longest row", "padding", 1, late)
        mixers = [layer.mixer for _, layer in model.config.expand()]
        for window in {each.window for each in mixers if isinstance(each, AttentionConfig) and each.window is not None}:
            inside = [min(start, window - 1) + index for start, stop in pieces for index in range(stop - start)]
            yield from turned("positions are counted within the window", "cuts", 0, inside)
    again = [*range(len(second)), *range(len(first))]
    yield from turned("packed texts see each other, positions restart", "packing", 0, again, [*second, *first])


Visible = Callable[[Tensor, int | None], Tensor]  # which keys queries see [1 or H, T, T], the window -> with a mistake


def _mask_bugs(model: Decoder, rows: Sequence[Sequence[int]], goldens: Sequence[Tensor]) -> Iterator[Bug]:
    """Queries that see other keys, where a row is read in pieces, or beyond TILE keys; and heads with others' keys."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not (model.causal and layers):
        return
    pieces = list(pairwise([0, *CUTS[1], len(rows[0])]))
    time = torch.arange(len(rows[0]))
    start = torch.tensor([start for start, stop in pieces for _ in range(start, stop)])[:, None]
    stop = torch.tensor([stop for start, stop in pieces for _ in range(start, stop)])[:, None]

    def planted(name: str, what: str, row: int, change: Visible | None, unused: Tensor | None = None) -> Iterator[Bug]:
        """change None: heads are tiled. unused: the slots of zeros [T, S] that queries see as well."""

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, *rest: Any) -> Tensor:
            if change is None:
                k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
                return reference(q, k, v, mask, scale, *rest)
            seen, positions = change(mask.visible(q.shape[1])[0], mask.window), mask.k_positions
            if unused is not None:
                seen = torch.cat((seen, unused.expand(len(seen), -1, -1)), 2)
                k, v = (pad(x, (0, 0, 0, unused.shape[1])) for x in (k, v))
                positions = pad(positions, (0, unused.shape[1]))
            shown = AttentionMask(mask.q_positions, positions, causal=False, selected=seen[None])
            return reference(q, k, v, shown, scale, *rest)

        backend: Any = lambda layer: attend  # noqa: E731
        layout = replace(Layout.causal(1, len(rows[row])), attention_backend=backend)
        if (logits := _logits(model, rows[row], layout)) is not None:
            yield Bug(name, what, row, logits, _distance(logits, goldens[row]))

    def attributed(shift: Tensor | int) -> Visible:
        """A piece takes each key of a full ring buffer for the one `shift` slots before; one token sees all of it."""

        def change(seen: Tensor, window: int | None) -> Tensor:
            if window is None:
                return seen
            slot = time[None] - (start - window)
            other = start - window + (slot - shift) % window
            in_ring = (slot >= 0) & (slot < window) & (start >= window) & (stop > start + 1)
            return torch.where(in_ring, seen.take_along_dim(torch.where(in_ring, other, 0)[None], 2), seen)

        return change

    yield from planted("each piece sees itself alone", "cuts", 0, lambda seen, _: seen & (time[None] >= start))
    name = "the causal mask of a piece begins at the first key"
    yield from planted(name, "cuts", 0, lambda seen, _: seen & (time[None] <= time[:, None] - start))
    later = time[None] <= time[:, None] + len(time) - stop
    if all(layer.window is None for layer in layers):
        name = "the causal mask of a piece ends at the last slot of the cache"
        full = later & (time[None] < stop)
        yield from planted(name, "cuts", 0, lambda seen, _: full.expand_as(seen), later & (time[None] >= stop))
    else:
        for name, change in {
            "a ring buffer is overwritten before it is read": lambda seen, window: (
                seen & (window is None or time[None] >= stop - window)
            ),
            "a ring buffer is unrolled one slot too far": attributed(1),
            "keys are one slot too far in a ring buffer": attributed(-1),
            "a ring buffer is unrolled the wrong way": attributed(2 * start),
            "a ring buffer is read in the order of its slots": attributed(-start),
        }.items():
            yield from planted(name, "cuts", 0, change)
    if any(1 < layer.kv_heads < layer.heads for layer in layers):
        yield from planted("key and value heads are tiled, not repeated", "logits", 0, None)
    if len(rows[-1]) > TILE:
        next_one = torch.tensor([*range(TILE), *range(TILE + 1, len(rows[-1])), len(rows[-1]) - 1])
        name = f"beyond {TILE} keys, a query has the mask of the next"
        yield from planted(name, "long positions", len(rows) - 1, lambda seen, _: seen[:, next_one])


def _number_bugs(model: Decoder, rows: Sequence[Sequence[int]], goldens: Sequence[Tensor]) -> Iterator[Bug]:
    """Epsilons in the wrong place, angles in half precision, and RoPE that stays as a longer text had it."""

    def planted(name: str, what: str, row: int, kind: type[nn.Module], hook: Any) -> Iterator[Bug]:
        modules = [module for module in model.modules() if isinstance(module, kind)]
        handles = [module.register_forward_hook(hook) for module in modules]
        try:
            logits = _logits(model, rows[row]) if modules else None
        finally:
            for handle in handles:
                handle.remove()
        if logits is not None:
            yield Bug(name, what, row, logits, _distance(logits, goldens[row]))

    def outside(norm: RMSNorm, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        square = inputs[0].square().mean(-1, keepdim=True)
        return output * (square + norm.eps).sqrt() / (square.sqrt() + norm.eps)

    def halved(rope: Rope, inputs: tuple[Tensor, Layout], output: Tensor) -> Tensor:
        x, layout = inputs
        frequencies = torch.tensor(rope.scaled_frequencies(layout.length).inv_freq).bfloat16()
        angles = layout.positions.bfloat16()[:, None, :, None] * frequencies
        cosine, sine = ((each * rope.attention_factor).to(x.dtype) for each in (angles.cos(), angles.sin()))
        return apply_rotary(x, cosine, sine, rope.layout)

    def longer(rope: Rope, inputs: tuple[Tensor, Layout], output: Tensor) -> Tensor:
        x, layout = inputs
        lengths: Any = ((len(rows[-1]),),)
        return rope.forward(x, replace(layout, start=None, doc_lengths=lengths, cache={}))

    yield from planted("an epsilon is added to the root", "logits", 0, RMSNorm, outside)
    if len(rows[-1]) > TILE:
        yield from planted("angles of RoPE are in bfloat16", "long positions", len(rows) - 1, Rope, halved)
    for what in ("logits", "padding"):
        yield from planted("RoPE stays as a longer text had it", what, 1, Rope, longer)
