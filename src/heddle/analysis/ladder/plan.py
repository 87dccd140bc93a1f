"""The plan of a ladder: which designs, at which sizes, on how many seeds; and how a ladder grows in its folder."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from heddle.analysis.comparison.plan import DesignEntry
from heddle.analysis.ladder.scaling import DesignScale, Rung
from heddle.errors import CheckpointError, ConfigError
from heddle.model.load_config import load_config
from heddle.settings import shared
from heddle.storage.json_file import read_json_file, write_json_file
from heddle.storage.run_log import first_difference, to_plain_json
from heddle.training.settings import Settings

MIN_SIZES, MAX_SIZES = 4, 20
SIZE_STEP = 2  # between sizes, where only their number is given
MAX_SEEDS = 100
CHECKPOINTS_PER_RUN = 4
MIN_STEPS = 20  # of the smallest run: fewer are warmup and decay alone
WARMUP_TOKENS = 0.5  # per parameter: of all branches of a trunk, unless warmup is given
MIN_WARMUP = 10  # steps
TEXT_FACTOR = 4  # how much more text than needed is made ready where tokens may be added: more of it is another order


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """What all runs of a ladder share; another value makes another ladder.

    tokens_per_parameter: D / N of every run, ascending. Where there are several, the runs of a size and seed are
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
                f"schedule {self.schedule}: runs of several tokens_per_parameter decay from one constant rate; set wsd"
            )
        self.training(1, 1, 1.0, 0)

    @property
    def shares_trunk(self) -> bool:
        """Whether each size has runs of several numbers of tokens, for L(N, D)."""
        return len(self.tokens_per_parameter) > 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.sequence_length

    def steps(self, parameters: float, ratio: float) -> int:
        """Optimizer steps of a design of this size at one of the `tokens_per_parameter`."""
        return max(1, round(ratio * parameters / self.tokens_per_step))

    def training(self, parameters: float, ratio: float, width_ratio: float, seed: int) -> Settings:
        """The settings of one run. ratio: its tokens per parameter. width_ratio: its width over the design's own."""
        steps, warmup = self.steps(parameters, ratio), self.warmup
        if warmup is None and self.shares_trunk:  # one that does not depend on the steps
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
                f"tokens_per_parameter {ratios[0]:g}: gives the smallest size, {smallest} parameters, "
                f"{self.steps(smallest, ratios[0])} steps of {self.tokens_per_step} tokens; give more, a smaller "
                "batch_size or larger sizes"
            )
        for ratio, larger in pairwise(ratios):
            if self.steps(smallest, ratio) == self.steps(smallest, larger):
                raise ConfigError(
                    f"tokens_per_parameter {ratio:g} and {larger:g}: are the same number of steps at {smallest} "
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
        """As plain values: one number of tokens per parameter is no list."""
        values: dict[str, Any] = to_plain_json(asdict(self))
        ratios = values["tokens_per_parameter"]
        return values | {"tokens_per_parameter": ratios if self.shares_trunk else ratios[0]}


@dataclass(frozen=True, kw_only=True)
class LadderPlan:
    """A ladder as it is asked for.

    entries: the designs; the first is the baseline. sizes: numbers of parameters, or how many sizes, from the first
    design's own size downwards by halves. target: the number of parameters to predict; None: 10 × the largest.
    share_irreducible: whether the designs share an irreducible loss. threads: of the CPU; None: torch's default.
    names_tokens: whether the settings' tokens_per_parameter were asked for; if not, those of the folder stay. Where
    there are several: target_tokens: to predict; None: as many per parameter as there are at most. target_flops: the
    budget, 6·N·D, for which the best size is predicted; None: that of the target. text_tokens: how much text was made
    ready when the ladder was begun.
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
    """The plan together with what was planned before in this folder. path: of its file; it need not exist.

    Designs, sizes, seeds and, where there are several, tokens per parameter are joined. Raises CheckpointError where
    the settings of runs, or a design, differ.
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
            reason = f"the design {name} was another one"
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
    """The plan's settings with the tokens per parameter of a folder, and its own where the folder has several."""
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
    """By design its rungs, in ascending order. Raises ConfigError where two sizes have one width."""
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
    """A sentence for each pair of designs that are one design at some width."""
    sentences = []
    names = list(rungs)
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            shared = [rung.width for rung in rungs[name] if any(rung.config == each.config for each in rungs[other])]
            if shared:
                widths = ", ".join(map(str, shared))
                sentences.append(
                    f"{name} and {other} are one design at width {widths}, for want of heads to differ in."
                )
    return sentences


def model_vocab_size(settings: SharedSettings, default: int) -> int:
    """The vocabulary of designs that leave it open, before the text is read."""
    from heddle.tokenization.tokenizer import Tokenizer

    if settings.tokenizer is not None:
        return Tokenizer.load(Path(settings.tokenizer)).vocab_size
    return settings.vocab_size or default


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
