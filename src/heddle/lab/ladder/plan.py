"""The plan of a ladder: which designs, at which sizes, on how many seeds; and how a ladder grows in its folder."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from heddle.config import DesignError
from heddle.errors import CheckpointError, ConfigError
from heddle.lab.compare.equal_size import scale_even, with_mixers, with_width
from heddle.lab.compare.plan import DesignEntry
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.model.size import flops_per_token, parameter_counts
from heddle.parts.mixers import MixerConfig
from heddle.settings import shared
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.storage.run_log import first_difference, to_plain_json
from heddle.tokenization import DEFAULT_VOCAB_SIZE
from heddle.training.settings import Settings
from heddle.training.width_transfer import scale_to_width

# A design at another size: its width is chosen, and everything that grows with it follows.
#
# Depth, head widths, experts, states, windows and positions stay; heads, hidden channels and the ranks of latents are
# in proportion to the width (`training/width_transfer.py`). Where a number of heads would not be whole, or would become
# 1 after being several, the nearest number that divides the width is taken, and the widths of heads change instead.
# Groups of heads that share keys keep their size.
#
# Size is the number of parameters that act on one token, with the embedding (a tied one once): all of them except in a
# mixture of experts. Counts without the embedding bend the curve at small sizes, where it is most of the model, and are
# one reason why Kaplan et al. (2020) found another law than Hoffmann et al. (2022) (Pearce & Song 2024).


MAX_WIDTH_FACTOR = 64  # times the design's own width
MAX_SIZE_RATIO = 1.6  # of a size to the requested one, or the inverse
NEAREST_WIDTHS = 4  # widths that are tried to each side: sizes do not grow evenly where numbers of heads change


@dataclass(frozen=True)
class Rung:
    """A design at one size. parameters: that act on one token."""

    config: ModelConfig
    parameters: int
    sequence_length: int

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs per token of a training forward pass over a sequence of `sequence_length` tokens."""
        return flops_per_token(build(self.config, device="meta"), self.sequence_length, training=True)

    @property
    def width(self) -> int:
        """The model's width."""
        return self.config.width


class DesignScale:
    """All sizes of one design. config: its vocab_size is set. Raises ConfigError for a design that cannot be scaled."""

    def __init__(self, name: str, config: ModelConfig, sequence_length: int) -> None:
        self.name, self.config, self.sequence_length = name, config, sequence_length
        try:
            scale_to_width(config, 2 * config.width)
        except DesignError as error:
            raise ConfigError(f"{name}: cannot be scaled to other sizes: {error}") from None
        self.width_step = max(2, config.width // _smallest_heads(config) // 4)  # a quarter of the widest head
        self.rung = cache(self._rung)

    def _rung(self, width: int) -> Rung | None:
        """The design at a width; None where it cannot be built."""
        try:
            config = design_at_width(self.config, width)
            model = build(config, device="meta")
        except ConfigError:
            return None
        return Rung(config, parameter_counts(model)[1], self.sequence_length)

    def nearest_rung(self, parameters: float, most: float = MAX_SIZE_RATIO) -> Rung:
        """The rung whose size is nearest, as a ratio. Raises ConfigError if that is above `most`, or its inverse."""
        low, high = 1, MAX_WIDTH_FACTOR * self.config.width // self.width_step
        while high - low > 1:
            middle = (low + high) // 2
            rung = next(self._rungs(range(middle, high)), None)
            if rung is None or rung.parameters >= parameters:
                high = middle
            else:
                low = rung.width // self.width_step
        nearby = [
            *self._rungs(range(high, high + NEAREST_WIDTHS)),
            *self._rungs(range(high - 1, max(0, high - NEAREST_WIDTHS), -1)),
        ]
        if not nearby:
            raise ConfigError(
                f"{self.name}: cannot be built at any width near {high * self.width_step}; choose other sizes"
            )
        best = min(nearby, key=lambda rung: abs(math.log(rung.parameters / parameters)))
        if abs(math.log(best.parameters / parameters)) > math.log(most):
            raise ConfigError(
                f"sizes {parameters:.0f}: {self.name} gets no closer than {best.parameters} parameters, at width "
                f"{best.width}; choose sizes that it has, or give it more heads or a smaller vocabulary"
            )
        return best

    def _rungs(self, multiples: range) -> Iterator[Rung]:
        for multiple in multiples:
            if (rung := self.rung(multiple * self.width_step)) is not None:
                yield rung


def design_at_width(config: ModelConfig, width: int) -> ModelConfig:
    """The design at another width, by `scale_to_width` if that leaves whole numbers of heads, else as near as possible.

    Raises ConfigError where it cannot be built.
    """
    if width == config.width:
        return config
    try:
        scaled = scale_to_width(config, width)
        if _smallest_heads(scaled) < min(2, _smallest_heads(config)):
            raise DesignError("heads", "1 for several")
        build(scaled, device="meta")
    except DesignError:
        resized = with_width(config, width)
        return with_mixers(resized, lambda mixer: mixer_near_width(mixer, config.width, width))
    return scaled


KEY_HEADS = ("kv_heads", "key_heads", "groups")  # numbers of groups of heads that share keys
HEAD_WIDTHS = ("head_dim", "value_dim", "nope_dim", "rope_dim")  # of one head


def mixer_near_width(mixer: MixerConfig, width: int, new_width: int) -> MixerConfig:
    """A resolved config for a model of another width, if the numbers of heads in proportion are not whole.

    It has the number of heads that keeps their widths nearest to the original ones, in whole groups of heads that share
    keys. Other `width_fields` are in proportion, rounded.
    """
    values = {name: getattr(mixer, name) for name in type(mixer).model_fields}
    inner = {name: value for name, value in values.items() if isinstance(value, MixerConfig)}
    changes: dict[str, Any] = {name: mixer_near_width(value, width, new_width) for name, value in inner.items()}
    numbers = {name: value for name, value in values.items() if type(value) is int}
    if "heads" not in numbers:
        return mixer.replace(**changes)
    heads, ratio = numbers["heads"], new_width / width
    key_heads = {name: numbers[name] for name in KEY_HEADS if name in numbers}
    group_size = math.lcm(*(heads // count for count in key_heads.values() if count > 1))
    new_heads = _nearest_head_count(heads, group_size, ratio, new_width)
    dims = ratio * heads / new_heads
    ranks = set(mixer.width_fields) - {"heads", *KEY_HEADS}
    changes |= {name: max(1, round(numbers[name] * ratio)) for name in ranks & numbers.keys()}
    changes |= {name: scale_even(numbers[name], dims) for name in HEAD_WIDTHS if name in numbers}
    changes |= {name: max(1, count * new_heads // heads) for name, count in key_heads.items()}
    return mixer.replace(**changes, heads=new_heads)


def _nearest_head_count(heads: int, group_size: int, ratio: float, width: int) -> int:
    """The number nearest to heads · ratio, as a ratio, that has whole groups and divides the width into even parts."""
    counts = range(group_size, width // 2 + 1, group_size)
    choices = [count for count in counts if width % (2 * count) == 0 and count >= min(2, heads)]
    return min(choices or [heads], key=lambda count: abs(math.log(count / (heads * ratio))))


def _smallest_heads(config: ModelConfig) -> int:
    """The smallest number of heads of any mixer that states one; 1 where none does."""
    mixers = [layer.mixer for _, layer in config.expand() if layer.mixer is not None]
    return min((count for mixer in mixers if (count := mixer.head_shape(config.width)[0])), default=1)


MIN_SIZES, MAX_SIZES = 4, 20
SIZE_STEP = 2  # between sizes, if only their number is given
MAX_SEEDS = 100
CHECKPOINTS_PER_RUN = 4
MIN_STEPS = 20  # of the smallest run: a shorter one is only warmup and decay
WARMUP_TOKENS = 0.5  # per parameter: of all branches of a trunk, unless warmup is given
MIN_WARMUP = 10  # steps
TEXT_FACTOR = 4  # how much more text than needed is prepared if tokens may be added: with more text its order changes


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """The settings that all runs of a ladder share; another value makes another ladder.

    tokens_per_parameter: D / N of every run, ascending. If there are several, the runs of a size and seed are
    branches that decay from one trunk, and more may be added. learning_rate: at each design's own width; at another
    width it is multiplied by (own width / width)^rate_exponent.
    """

    data: tuple[str, ...]
    tokens_per_parameter: tuple[float, ...]
    batch_size: int
    sequence_length: int
    learning_rate: float
    rate_exponent: float
    optimizer: str
    schedule: str
    warmup: int | None
    precision: str
    vocab_size: int | None
    tokenizer: str | None
    device: str
    part_files: tuple[str, ...]

    def __post_init__(self) -> None:
        for ratio in self.tokens_per_parameter:
            if not 0 < ratio < float("inf"):
                raise ConfigError(f"tokens_per_parameter {ratio:g}: must be a number above 0")
        if not -4 <= self.rate_exponent <= 4:
            raise ConfigError(f"rate_exponent {self.rate_exponent:g}: must be from -4 to 4")
        if self.shares_trunk and self.schedule != "wsd":
            raise ConfigError(
                f"schedule {self.schedule}: several tokens_per_parameter decay from one constant learning rate; set wsd"
            )
        self.training(1, 1, 1.0, 0)

    @property
    def shares_trunk(self) -> bool:
        """Whether each size has runs of several numbers of tokens, for L(N, D)."""
        return len(self.tokens_per_parameter) > 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step; at least 1, so that `Settings` can refuse what is not."""
        return max(1, self.batch_size * self.sequence_length)

    def steps(self, parameters: float, ratio: float) -> int:
        """Optimizer steps of a design of this size at one of the `tokens_per_parameter`."""
        return max(1, round(ratio * parameters / self.tokens_per_step))

    def training(self, parameters: float, ratio: float, width_ratio: float, seed: int) -> Settings:
        """The settings of one run. ratio: its tokens per parameter. width_ratio: its width over the design's own."""
        steps, warmup = self.steps(parameters, ratio), self.warmup
        if warmup is None and self.shares_trunk:  # the warmup must not depend on the number of steps
            warmup = max(MIN_WARMUP, round(WARMUP_TOKENS * parameters / self.tokens_per_step))
        return Settings(
            **shared(self, Settings)
            | {
                "steps": steps,
                "learning_rate": self.learning_rate * width_ratio**-self.rate_exponent,
                "seed": seed,
                "warmup": warmup,
                "save_every": max(1, steps // CHECKPOINTS_PER_RUN),
            }
        )

    def check_steps(self, sizes: Sequence[int]) -> None:
        """Raise ConfigError where runs of the smallest of these sizes are too short, or branches have no trunk."""
        smallest, ratios = min(sizes), self.tokens_per_parameter
        if self.steps(smallest, ratios[0]) < MIN_STEPS:
            raise ConfigError(
                f"tokens_per_parameter {ratios[0]:g}: gives the smallest size, {smallest} parameters, only "
                f"{self.steps(smallest, ratios[0])} steps of {self.tokens_per_step} tokens; give more, a smaller "
                "batch_size or larger sizes"
            )
        for ratio, larger in pairwise(ratios):
            if self.steps(smallest, ratio) == self.steps(smallest, larger):
                raise ConfigError(
                    f"tokens_per_parameter {ratio:g} and {larger:g}: give the same number of steps at {smallest} "
                    "parameters; choose fewer, or further apart"
                )
        for size in sizes if self.shares_trunk else ():
            settings = self.training(size, ratios[0], 1.0, 0)
            if settings.warmup is not None and settings.warmup > settings.constant_steps:
                raise ConfigError(
                    f"tokens_per_parameter {ratios[0]:g}: {size} parameters have {settings.constant_steps} steps "
                    f"before the decay, and the warmup takes {settings.warmup}; give more, or a shorter warmup"
                )

    def plain(self) -> dict[str, Any]:
        """As plain values; a single number of tokens per parameter is not a list."""
        values: dict[str, Any] = to_plain_json(asdict(self))
        ratios = values["tokens_per_parameter"]
        return values | {"tokens_per_parameter": ratios if self.shares_trunk else ratios[0]}


@dataclass(frozen=True, kw_only=True)
class LadderPlan:
    """A ladder as requested.

    entries: the designs; the first is the baseline. sizes: numbers of parameters, or how many sizes, from the first
    design's own size downwards by halves. target: the number of parameters to predict; None: 10 × the largest.
    share_irreducible: whether the designs share an irreducible loss. threads: CPU threads; None: torch's default.
    names_tokens: whether tokens_per_parameter was set by the user; if not, the folder's values stay. With several
    tokens_per_parameter: target_tokens: tokens to predict; None: the target times the most per parameter. target_flops:
    the budget, 6·N·D, for which the best size is predicted; None: the target's. text_tokens: how much text was prepared
    when the ladder was started.
    """

    entries: tuple[DesignEntry, ...]
    sizes: int | tuple[float, ...]
    seeds: int
    settings: SharedSettings
    target: float | None = None
    share_irreducible: bool = True
    threads: int | None = None
    names_tokens: bool = True
    target_tokens: float | None = None
    target_flops: float | None = None
    text_tokens: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.sizes, int) and not MIN_SIZES <= self.sizes <= MAX_SIZES:
            raise ConfigError(f"sizes {self.sizes}: must be from {MIN_SIZES} to {MAX_SIZES}, or numbers of parameters")
        if not isinstance(self.sizes, int) and (not self.sizes or min(self.sizes) < 1):
            raise ConfigError("sizes: must be numbers of parameters of at least 1")
        if not 1 <= self.seeds <= MAX_SEEDS:
            raise ConfigError(f"seeds {self.seeds}: must be from 1 to {MAX_SEEDS}")
        if self.target is not None and not 1 <= self.target < float("inf"):
            raise ConfigError(f"target {self.target:g}: must be a number of parameters of at least 1")

    def requested_sizes(self, scale: DesignScale) -> tuple[float, ...]:
        """The sizes as numbers, in ascending order. scale: of the first design."""
        if not isinstance(self.sizes, int):
            return tuple(sorted(set(self.sizes)))
        own = scale.rung(scale.config.width)
        if own is None:
            raise ConfigError(f"{scale.name}: cannot be built")
        return tuple(own.parameters / SIZE_STEP**index for index in reversed(range(self.sizes)))


def join_with_saved(path: Path, plan: LadderPlan) -> LadderPlan:
    """The plan joined with what was planned before in this folder. path: its file, which need not exist.

    Designs, sizes, seeds and, if there are several, tokens per parameter are joined. Raises CheckpointError if the
    settings of runs, or a design, differ.
    """
    if not path.is_file():
        return plan
    saved = read_json_file(path)
    settings = _join_tokens(plan, saved["settings"]["tokens_per_parameter"])
    before = saved["settings"]
    if isinstance(before["tokens_per_parameter"], list):
        before = before | {"tokens_per_parameter": list(settings.tokens_per_parameter)}
    difference = first_difference(before, settings.plain())
    if difference:
        raise CheckpointError(f"{path.parent}: holds another ladder: {difference}; use the same, or another folder")
    entries = {entry.name: entry for entry in plan.entries}
    for name, design in saved["designs"].items():
        if name not in entries:
            entries[name] = DesignEntry(name, design["source"], load_config(design["config"]))
        elif to_plain_json(entries[name].config.dump()) != design["config"]:
            reason = f"the design {name} was different"
            raise CheckpointError(f"{path.parent}: holds another ladder: {reason}; rename yours, or use another folder")
    sizes = plan.sizes
    if isinstance(sizes, int):
        smallest, count = min(saved["sizes"]), sizes - len(saved["sizes"])
        sizes = tuple(smallest / SIZE_STEP**index for index in range(1, count + 1))
    return replace(
        plan,
        entries=tuple(entries.values()),
        sizes=tuple(sorted({*saved["sizes"], *sizes})),
        seeds=max(plan.seeds, saved["seeds"]),
        settings=settings,
        text_tokens=saved.get("text_tokens"),
    )


def _join_tokens(plan: LadderPlan, saved: float | list[float]) -> SharedSettings:
    """The plan's settings with the folder's tokens per parameter, joined with its own if the folder has several."""
    asked = plan.settings.tokens_per_parameter
    if isinstance(saved, list):
        joined = tuple(sorted({*saved, *(asked if plan.names_tokens else ())}))
    else:
        joined = asked if plan.names_tokens else (saved,)
    return replace(plan.settings, tokens_per_parameter=joined)


def save_plan(path: Path, plan: LadderPlan, sizes: Sequence[float]) -> None:
    """Write a plan, to which later calls may add."""
    designs = {entry.name: {"source": entry.source, "config": entry.config.dump()} for entry in plan.entries}
    content = {"settings": plan.settings.plain(), "designs": designs, "sizes": list(sizes), "seeds": plan.seeds}
    if plan.settings.shares_trunk:
        content["text_tokens"] = plan.text_tokens
    write_json_file(path, to_plain_json(content))


def find_rungs(scales: Sequence[DesignScale], sizes: Sequence[float]) -> dict[str, list[Rung]]:
    """By design its rungs, in ascending order. Raises ConfigError if two sizes get the same width."""
    rungs: dict[str, list[Rung]] = {}
    for scale in scales:
        rungs[scale.name] = []
        for size in sorted(sizes):
            rung = scale.nearest_rung(size)
            if rung in rungs[scale.name]:
                raise ConfigError(
                    f"sizes: two of them are nearest to width {rung.width} of {scale.name}, which has "
                    f"{rung.parameters} parameters; choose fewer sizes, or further apart"
                )
            rungs[scale.name].append(rung)
    return rungs


def equal_rungs(rungs: dict[str, list[Rung]]) -> list[str]:
    """A sentence for each pair of designs that become the same at some width."""
    sentences = []
    for (name, own), (other, others) in combinations(rungs.items(), 2):
        widths = ", ".join(str(rung.width) for rung in own if any(rung.config == each.config for each in others))
        if widths:
            sentences.append(
                f"{name} and {other} are the same design at width {widths}, which has too few heads to differ in."
            )
    return sentences


def model_vocab_size(settings: SharedSettings) -> int:
    """The vocabulary of designs that leave it open, before the text is read."""
    from heddle.tokenization.tokenizer import Tokenizer

    if settings.tokenizer is not None:
        return Tokenizer.load(Path(settings.tokenizer)).vocab_size
    return settings.vocab_size or DEFAULT_VOCAB_SIZE


def design_scales(plan: LadderPlan, vocab_size: int) -> list[DesignScale]:
    """The scale of each design, with this vocabulary where it leaves its own open."""
    return [
        DesignScale(
            entry.name,
            entry.config if entry.config.vocab_size is not None else entry.config.replace(vocab_size=vocab_size),
            plan.settings.sequence_length,
        )
        for entry in plan.entries
    ]
