"""The ledger of a judge: a folder with its settings, every proposal, and a log in which every line is chained.

`log.jsonl` is the state: a line for the start, for each proposal once it is fixed, for each verdict, and for the final
text. `proposals/N` holds the proposal as submitted, the results of its runs and, once it is known, verdict.json.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import yaml

from heddle.data.samples import GOLDEN_GAMMA, splitmix64
from heddle.errors import CheckpointError, ConfigError, DataError
from heddle.lab.compare.results import parse
from heddle.lab.judge.settings import JudgeSettings
from heddle.storage.file_io import write_file
from heddle.storage.run_log import LOG_FILE, RunLog, read_log, to_plain_json

LEDGER_FILE, AGENTS_FILE, TOKENIZER_FILE = "ledger.yaml", "AGENTS.md", "tokenizer.json"
CALIBRATION = "calibration"  # a folder, until `init` has ended
PROPOSALS = "proposals"
FINAL_SHARE, TUNING_SHARE = 4, 8  # of the held-out windows: a fourth is sealed, an eighth tunes and calibrates
MIN_WINDOWS = 8  # of a pair, where there are enough
MIN_DECISIONS = 20  # that the windows must allow, where their number follows from the variance
FIRST_SEED, FINAL_SEED = 1_000, 500_000  # of decisions and of the final runs; calibration has those below


@dataclass(frozen=True)
class Candidate:
    """What is trained: a design, or a foreign trainer.

    design: plain data. training: fields of `Settings` besides the ledger's. data: sources, () for the ledger's. parts:
    (file below the ledger, SHA-256). trainer: `train` and `score` commands and `files`, (file, SHA-256). changed:
    numbers of the accepted proposals that it is made of.
    """

    name: str
    design: dict[str, Any] | None = None
    training: dict[str, Any] = field(default_factory=dict)
    data: tuple[str, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    trainer: dict[str, Any] | None = None
    changed: tuple[int, ...] = ()

    def dump(self) -> dict[str, Any]:
        """As plain data."""
        plain: dict[str, Any] = to_plain_json(asdict(self))
        return plain

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        """Read what `dump` returned."""
        return parse(cls, data)

    def part_files(self, folder: Path) -> list[str]:
        """The absolute paths of its parts. Raises CheckpointError for one that was changed since it was accepted."""
        return [checked_file(folder, file, digest) for file, digest in self.parts]


def checked_file(folder: Path, file: str, digest: str) -> str:
    """The absolute path of a file of the ledger. Raises CheckpointError if its SHA-256 differs."""
    path = (folder / file).resolve()
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise CheckpointError(f"{path}: was changed or removed since it was submitted; restore the file")
    return str(path)


Spans = list[list[int]]  # of the held-out tokens: from and to


@dataclass(frozen=True)
class Windows:
    """How the windows of the held-out text are divided: tuning first, then one block for each decision, final last.

    count: of all. length: tokens of each. each: windows of one pair. pairs: of one decision. spread: whether all parts
    are drawn from the whole text: neighboring windows share a document, and an effect on that document alone would look
    like a general one.
    """

    count: int
    length: int
    each: int
    pairs: int
    spread: bool = False  # of older ledgers

    @property
    def tuning(self) -> Spans:
        """The tokens from and to that tune and calibrate."""
        return self._spans(0, self._first)

    @property
    def final(self) -> range:
        """The sealed windows."""
        return range(self.count - max(self.pairs, self.count // FINAL_SHARE), self.count)

    @property
    def decisions(self) -> int:
        """How many decisions the text allows."""
        return max(0, self.final.start - self._first) // (self.each * self.pairs)

    @property
    def _first(self) -> int:
        return max(1, self.count // TUNING_SHARE)

    def of_pair(self, block: int, pair: int) -> Spans:
        """The tokens from and to that only this pair of a decision reads."""
        first = self._first + (block * self.pairs + pair) * self.each
        return self._spans(first, first + self.each)

    def of_final_pair(self, pair: int) -> Spans:
        """The tokens from and to of a pair of the final runs."""
        each = len(self.final) // self.pairs
        first = self.final.start + pair * each
        return self._spans(first, first + each)

    @cached_property
    def _order(self) -> list[int]:
        """The windows in the order in which tuning, decisions and the final runs take them."""
        return sorted(range(self.count), key=lambda number: splitmix64(number * GOLDEN_GAMMA))

    def _spans(self, first: int, last: int) -> Spans:
        if not self.spread:
            return [[first * self.length, last * self.length + 1]]
        return [[number * self.length, (number + 1) * self.length + 1] for number in sorted(self._order[first:last])]


def windows_from(settings: JudgeSettings, count: int, seed_variance: float, window_variance: float) -> Windows:
    """The division of `count` windows. Raises DataError where they allow no decision.

    By default a pair reads at least MIN_WINDOWS, and enough windows that they add an eighth of the seed variance, if 20
    decisions remain possible. The variance is measured between two seeds; two designs differ more from text to text.
    """
    each, free = settings.windows, count - count // TUNING_SHARE - count // FINAL_SHARE
    if each is None:
        wanted = math.ceil(8 * window_variance / seed_variance) if seed_variance > 0 else 1
        each = max(1, min(max(MIN_WINDOWS, wanted), free // (settings.pairs * MIN_DECISIONS)))
    windows = Windows(count, settings.sequence_length, each, settings.pairs, spread=True)
    if windows.decisions < 1:
        raise DataError(
            f"the held-out text has {count} windows of {settings.sequence_length} tokens, too few for one decision of "
            f"{settings.pairs} pairs of {each}: give more text, fewer --pairs or --windows, or a shorter "
            "--sequence-length"
        )
    return windows


def ledger_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of a ledger's log; none without a log. Raises CheckpointError for the log of a training."""
    lines = read_log(folder) if (folder / LOG_FILE).is_file() else []
    if lines and "settings_sha256" not in lines[0]:
        raise CheckpointError(f"{folder}: holds a training run, not a ledger; name another folder with --out")
    return lines


@dataclass
class Ledger:
    """An open ledger. facts: the log's first line. entries: proposals by number, from 1, with "verdict" once known."""

    folder: Path
    settings: JudgeSettings
    facts: dict[str, Any]
    entries: list[dict[str, Any]]
    final: dict[str, Any] | None = None
    is_open: bool = False  # the sealed text

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read a ledger. Raises CheckpointError if there is none, or if its settings or log were altered."""
        lines = ledger_lines(folder)
        if not lines:
            raise CheckpointError(f"{folder}: holds no ledger; make one with `heddle judge init DESIGN --out {folder}`")
        text = (folder / LEDGER_FILE).read_bytes() if (folder / LEDGER_FILE).is_file() else b""
        if hashlib.sha256(text).hexdigest() != lines[0]["settings_sha256"]:
            raise CheckpointError(
                f"{folder / LEDGER_FILE}: was changed since `init`, which fixed it; restore it, or make another ledger"
            )
        settings = JudgeSettings.read(lines[0]["settings"], str(folder))
        ledger = cls(folder, settings, lines[0], [])
        for line in lines[1:]:
            ledger._add(line)
        return ledger

    def _add(self, line: dict[str, Any]) -> None:
        if line["event"] == "proposal":
            self.entries.append(line)
        elif line["event"] == "verdict":
            self.entries[line["number"] - 1]["verdict"] = line["verdict"]
        elif line["event"] == "open":
            self.is_open = True
        else:
            self.final = line

    def record(self, line: dict[str, Any]) -> None:
        """Append a line to the log, on the disk when this returns."""
        append(self.folder, line)
        self._add(to_plain_json(line))

    def proposal_folder(self, number: int) -> Path:
        """The folder of a proposal."""
        return self.folder / PROPOSALS / str(number)

    @property
    def windows(self) -> Windows:
        """The division of the held-out text."""
        return Windows(**self.facts["windows"])

    @property
    def accepted(self) -> list[dict[str, Any]]:
        """The proposals that became the incumbent."""
        return [entry for entry in self.entries if entry.get("verdict", {}).get("incumbent")]

    def has_adopted(self, entry: Mapping[str, Any]) -> bool:
        """Whether a proposal, or the one that it continues, became the incumbent."""
        return any(each["root"] == entry["root"] for each in self.accepted)

    @property
    def incumbent(self) -> Candidate:
        """What a proposal must beat."""
        accepted = self.accepted
        if not accepted:
            return Candidate.read(self.facts["candidate"])
        return Candidate.read(accepted[-1]["candidate"] | {"training": accepted[-1]["verdict"]["training"]})

    @property
    def reference(self) -> list[float] | None:
        """The incumbent's losses on the calibration text; None in older ledgers, which have no first look."""
        return (self.accepted[-1]["verdict"] if self.accepted else self.facts).get("reference")

    @property
    def incumbent_number(self) -> int:
        """The number of the proposal that is the incumbent; 0 for the first one."""
        return self.accepted[-1]["number"] if self.accepted else 0

    @property
    def decided(self) -> list[dict[str, Any]]:
        """The proposals that have used windows, in order."""
        return [entry for entry in self.entries if entry["block"] is not None]

    @property
    def decisions_left(self) -> int:
        """How many more proposals the windows allow."""
        return self.windows.decisions - len(self.decided)

    @property
    def unfinished(self) -> dict[str, Any] | None:
        """A proposal without a verdict; there is at most one."""
        return next((entry for entry in self.entries if "verdict" not in entry), None)


def append(folder: Path, line: dict[str, Any]) -> None:
    """Append a line to a ledger's log."""
    log = RunLog(folder)
    log.resume_at_end()
    try:
        log.write(line)
        log.sync()
    finally:
        log.close()


def write_settings(folder: Path, settings: JudgeSettings) -> str:
    """Write ledger.yaml; returns its SHA-256."""
    values = {name: value for name, value in settings.dump().items() if name not in ("action", "words", "out", "json")}
    text = yaml.safe_dump(values, sort_keys=False, width=100, allow_unicode=True)
    write_file(folder / LEDGER_FILE, text)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def check_settings(settings: JudgeSettings, choices: dict[str, Sequence[str]]) -> None:
    """Raise ConfigError for a setting of `init` that is out of range."""
    for name, values in choices.items():
        if getattr(settings, name) not in values:
            raise ConfigError(f"--{name} {getattr(settings, name)}: unknown; choices: {', '.join(values)}")
    if not 0 < settings.alpha < 1:
        raise ConfigError(f"--alpha {settings.alpha:g}: must be above 0 and below 1, such as 0.1")
    if not 2 <= settings.pairs <= 64:
        raise ConfigError(f"--pairs {settings.pairs}: must be from 2 to 64")
    if settings.windows is not None and settings.windows < 1:
        raise ConfigError(f"--windows {settings.windows}: must be at least 1")
    if settings.second and not 1 < settings.second <= 64:
        raise ConfigError(f"--second {settings.second:g}: must be 0, or above 1 and at most 64")
    if not (settings.seconds > 0 and settings.memory > 0):
        raise ConfigError("--seconds, --memory: must be above 0")
    if settings.tokens < settings.batch_size * settings.sequence_length:
        raise ConfigError(
            f"--tokens {settings.tokens}: is less than one step of {settings.batch_size * settings.sequence_length}"
        )
