"""The plan of a ladder: which designs, at which sizes, on how many seeds; and how a ladder grows in its folder."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from heddle.analysis.comparison.plan import DesignEntry
from heddle.analysis.ladder.scaling import DesignScale, Rung
from heddle.errors import CheckpointError, ConfigError
from heddle.model.load_config import load_config
from heddle.storage.json_file import read_json_file, write_json_file
from heddle.storage.run_log import first_difference, to_plain_json
from heddle.training.settings import Settings

MIN_SIZES, MAX_SIZES = 4, 20
SIZE_STEP = 2  # between sizes, where only their number is given
MAX_SEEDS = 100
CHECKPOINTS_PER_RUN = 4


@dataclass(frozen=True, kw_only=True)
class LadderSettings:
    """What all runs of a ladder share; another value makes another ladder.

    tokens_per_parameter: D / N of every run. learning_rate: at each design's own width; at another width it is
    multiplied by (own width / width)^rate_exponent.
    """

    data: tuple[str, ...]
    tokens_per_parameter: float
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
        ratio = self.tokens_per_parameter
        if not 0 < ratio < float("inf"):
            raise ConfigError(f"tokens_per_parameter {ratio:g}: must be a number above 0")
        if not -4 <= self.rate_exponent <= 4:
            raise ConfigError(f"rate_exponent {self.rate_exponent:g}: must be from -4 to 4")
        self.training(1, 1.0, 0)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.sequence_length

    def steps(self, parameters: float) -> int:
        """Optimizer steps of a design of this size."""
        return max(1, round(self.tokens_per_parameter * parameters / self.tokens_per_step))

    def training(self, steps: int, width_ratio: float, seed: int) -> Settings:
        """The settings of one run. width_ratio: its width divided by the design's own."""
        return Settings(
            steps=steps,
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            learning_rate=self.learning_rate * width_ratio**-self.rate_exponent,
            seed=seed,
            optimizer=self.optimizer,
            schedule=self.schedule,
            warmup=self.warmup,
            precision=self.precision,
            save_every=max(1, steps // CHECKPOINTS_PER_RUN),
        )


@dataclass(frozen=True, kw_only=True)
class LadderPlan:
    """A ladder as it is asked for.

    entries: the designs; the first is the baseline. sizes: numbers of parameters, or how many sizes, from the first
    design's own size downwards by halves. target: the number of parameters to predict; None: 10 × the largest.
    share_irreducible: whether the designs share an irreducible loss. threads: of the CPU; None: torch's default.
    """

    entries: tuple[DesignEntry, ...]
    sizes: int | tuple[float, ...]
    seeds: int
    settings: LadderSettings
    target: float | None = None
    share_irreducible: bool = True
    threads: int | None = None

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

    Designs, sizes and seeds are joined. Raises CheckpointError where the settings of runs, or a design, differ.
    """
    if not path.is_file():
        return plan
    saved = read_json_file(path)
    settings = to_plain_json(asdict(plan.settings))
    difference = first_difference(saved["settings"], settings)
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
    )


def save_plan(path: Path, plan: LadderPlan, sizes: Sequence[float]) -> None:
    """Write a plan, to which later calls may add."""
    designs = {entry.name: {"source": entry.source, "config": entry.config.dump()} for entry in plan.entries}
    content = {"settings": asdict(plan.settings), "designs": designs, "sizes": list(sizes), "seeds": plan.seeds}
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


def model_vocab_size(settings: LadderSettings, default: int) -> int:
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
