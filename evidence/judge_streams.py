"""Streams of proposals judged on the noise of real runs: `python -m evidence.judge_streams train`, then `simulate`.

`train` writes the [seeds, windows] losses of one small design. `simulate` draws pairs from that table (two rows, one
block of windows; a proposal's row is shifted by its true effect), judges streams of proposals by `heddle.lab.judge`,
and writes what was measured. Effects are in standard deviations of a run over seeds.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evidence.row import attention, stack
from heddle.lab.judge.evidence import (
    MAX_PAIRS,
    MIN_CHANCE,
    Decision,
    log_evidence,
    needed_sum,
    next_level,
    planned_chance,
    predicted_chance,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RESULTS = Path(__file__).parent / "results"
SEEDS, WINDOWS, LENGTH = 64, 128, 64  # LENGTH: tokens of a window
DESIGN = stack(*[attention(4, kv_heads=2)] * 2, hidden=176)
SETTINGS: dict[str, Any] = {"steps": 80, "batch_size": 8, "sequence_length": LENGTH, "learning_rate": 5e-3}

STREAMS, PROPOSALS, ALPHA = 2000, 50, 0.1
BLOCK = 64  # windows of a pair
CALIBRATION = 32  # runs of the first incumbent, for the noise
TRUE_SHARE, RESUBMISSIONS, NEAR = 0.1, 3, 3.0  # NEAR: evidence of what nearly won


def train_table(out: Path) -> None:
    """Train the design with each seed. A line of `out` is a finished run; it is not trained again."""
    import torch

    from heddle import progress
    from heddle.data.corpus import prepare_corpus
    from heddle.model.load_config import load_config
    from heddle.training.evaluation.scores import EvaluationBudget
    from heddle.training.job import TrainingJob
    from heddle.training.loop import train
    from heddle.training.settings import Settings

    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "runs.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    with progress.quiet():
        corpus = prepare_corpus(["stdlib"], vocab_size=512, max_train_tokens=None)
        config = load_config(dict(DESIGN)).replace(vocab_size=corpus.tokenizer.vocab_size)
    for seed in sorted(set(range(SEEDS)) - {line["seed"] for line in lines}):
        start, folder = time.process_time(), out / f"run-{seed}"
        budget = EvaluationBudget(final_tokens=WINDOWS * LENGTH)
        with progress.quiet():
            trained = train(TrainingJob(config, corpus, Settings(seed=seed, **SETTINGS), folder, evaluation=budget))
        bits, sizes = zip(*trained.scores, strict=True)
        line = {"seed": seed, "bits": [round(value, 1) for value in bits], "bytes": sizes}
        line["seconds"] = round(time.process_time() - start, 1)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        lines.append(line)
        print(f"seed {seed}: {sum(bits) / sum(sizes):.4f} bits per byte, {line['seconds']} s", flush=True)
    lines.sort(key=lambda line: line["seed"])
    table = [[round(bits / size, 3) for bits, size in zip(x["bits"], x["bytes"], strict=True)] for x in lines]
    result = {"design": DESIGN, "settings": SETTINGS, "data": "stdlib", "seconds": sum(x["seconds"] for x in lines)}
    (RESULTS / "judge_noise.json").write_text(json.dumps({**result, "bits_per_byte": table}) + "\n", encoding="utf-8")


@dataclass
class Source:
    """Draws pairs. table: [seeds, windows]. scale: of the noise of pairs against the calibration's.

    tails: degrees of freedom of Student's t instead of the table. spread: of a proposal's runs against the incumbent's.
    """

    table: Floats
    rng: np.random.Generator
    scale: float = 1.0
    tails: float = 0.0
    spread: float = 1.0
    seed_deviation: float = field(init=False)

    def __post_init__(self) -> None:
        self.table = self.table - self.table.mean(0)
        self.seed_deviation = float(self.table.mean(1).std(ddof=1))

    def runs(self, count: int, windows: Ints | None = None) -> Floats:
        """[count]: means of runs on blocks of windows, [count, BLOCK]; None: of blocks drawn for each."""
        rows = self.rng.integers(len(self.table), size=count)
        if windows is None:
            windows = self.rng.integers(self.table.shape[1], size=(count, BLOCK))
        return np.asarray(self.table[rows[:, None], windows].mean(1))

    def pairs(self, count: int) -> Floats:
        """[count]: differences of equal designs."""
        if self.tails:
            shape = math.sqrt((self.tails - 2) / self.tails) * math.sqrt(2) * self.seed_deviation
            return shape * self.rng.standard_t(self.tails, count)
        windows = self.rng.integers(self.table.shape[1], size=(count, BLOCK))
        return self.scale * (self.runs(count, windows) - self.spread * self.runs(count, windows))

    def calibration(self, streams: int, runs: int = CALIBRATION) -> Floats:
        """[streams]: the standard deviation of a pair, from runs of one design on one block."""
        windows = self.rng.integers(self.table.shape[1], size=(streams, BLOCK))
        losses = np.stack([self.runs(streams, windows) for _ in range(runs)])
        return np.asarray(math.sqrt(2) * losses.std(0, ddof=1))


class Trials:
    """The pairs of one proposal of each stream, with the noise of its first submission."""

    def __init__(self, levels: Floats, deviation: Floats, degrees: Floats, effects: Floats) -> None:
        self.levels, self.deviation, self.degrees, self.effects = levels, deviation, degrees, effects
        streams = len(levels)
        self.sums, self.squares, self.evidence, self.peak = (np.zeros(streams) for _ in range(4))
        self.counts = np.zeros(streams, dtype=np.int64)
        self.better = np.zeros(streams, dtype=bool)

    def submit(self, members: Ints, source: Source, max_pairs: int = MAX_PAIRS, min_chance: float = MIN_CHANCE) -> None:
        """Buy pairs for these streams until each is better, has `max_pairs` more, or no chance (as what is worse)."""
        final = self.counts + max_pairs
        while len(members):
            values = (source.pairs(len(members)) + self.effects[members]) / self.deviation[members]
            self.sums[members] += values
            self.squares[members] += values**2
            self.counts[members] += 1
            for count in np.unique(self.counts[members]):
                self._weigh(members[self.counts[members] == count], int(count))
            self.peak[members] = np.maximum(self.peak[members], self.evidence[members])
            self.better[members] = self.evidence[members] * self.levels[members] >= 1
            members = members[~self.better[members] & (self.counts[members] < final[members])]
            needed = needed_sum(1, self.degrees[members], self.levels[members]) * np.sqrt(final[members])
            chances = predicted_chance(self.sums[members], self.counts[members], needed, final[members])
            members = members[chances >= min_chance]

    def _weigh(self, group: Ints, count: int) -> None:
        """Set the evidence of streams with `count` pairs."""
        sums, squares, degrees = self.sums[group], self.squares[group], self.degrees[group]
        self.evidence[group] = np.exp(np.minimum(log_evidence(sums, squares, count, degrees), 600)) / 2
        if count <= MAX_PAIRS:
            chances = planned_chance(sums, squares, count, degrees, self.levels[group], MAX_PAIRS)
            self.evidence[group] += chances / np.maximum(self.levels[group], 1e-300)


@dataclass
class Outcome:
    """What streams came to. false, better: [streams] at the end; worst: the largest false / max(1, better) on the way.

    effects, verdicts, pairs: [streams, proposals] of each proposal: its true effect, whether it was called better, and
    the pairs it took with its resubmissions.
    """

    false: Floats
    better: Floats
    worst: Floats
    effects: Floats
    verdicts: npt.NDArray[np.bool_]
    pairs: Ints
    quality: Floats

    @property
    def shares(self) -> Floats:
        return np.asarray(self.false / np.maximum(1, self.better))


def draw_effects(rng: np.random.Generator, count: int, harmful: bool = False) -> Floats:
    """A tenth are 1, 2 or 3; others are 0, or half of them −1, −2 or −3 where some are harmful."""
    sizes, kinds = rng.integers(1, 4, count), rng.random(count)
    worse = harmful & (kinds > (1 + TRUE_SHARE) / 2)
    return np.asarray(np.where(kinds < TRUE_SHARE, sizes, np.where(worse, -sizes, 0.0)))


def run_streams(source: Source, proposer: str, rule: str = "e-lond", streams: int = STREAMS) -> Outcome:
    """Judge streams. A proposer sees every verdict, and here all evidence and all true effects, too.

    null: nothing has an effect. mixed, harmful: `draw_effects`. greedy: mixed, and after what nearly won it resubmits,
    or proposes a variation, which has the same effect in half of the cases. adversarial: two proposals of effect 3 are
    called better first, which raises the levels; then nothing has an effect, and what nearly won is resubmitted.
    """
    rng, everyone = source.rng, np.arange(streams)
    deviation, degrees = source.calibration(streams), np.full(streams, CALIBRATION - 1.0)
    past: list[list[Decision]] = [[] for _ in everyone]
    false, better, worst, quality = (np.zeros(streams) for _ in range(4))
    all_effects, verdicts = np.zeros((streams, PROPOSALS)), np.zeros((streams, PROPOSALS), dtype=bool)
    pairs = np.zeros((streams, PROPOSALS), dtype=np.int64)
    near, last = np.zeros(streams, dtype=bool), np.zeros(streams)
    for number in range(PROPOSALS):
        effects = np.zeros(streams) if proposer == "null" else draw_effects(rng, streams, proposer == "harmful")
        if proposer == "greedy":
            effects = np.where(near, last * (rng.random(streams) < 0.5), effects)
        elif proposer == "adversarial":
            effects = np.where(better < 2, 3.0, 0.0)
        levels = np.array([next_level(history, ALPHA, rule, PROPOSALS) for history in past])
        trials = Trials(levels, deviation, degrees, effects * source.seed_deviation)
        trials.submit(everyone, source)
        for _ in range(RESUBMISSIONS if proposer in ("greedy", "adversarial") else 0):
            again = ~trials.better & (trials.peak >= NEAR)
            if proposer == "greedy":
                again &= rng.random(streams) < 0.5
            trials.submit(np.flatnonzero(again), source)
        near, last = ~trials.better & (trials.peak >= NEAR), effects
        for stream, history in enumerate(past):
            peak = float(trials.peak[stream])
            history.append(Decision(float(levels[stream]), int(better[stream]), peak, bool(trials.better[stream])))
        better += trials.better
        false += trials.better & (effects <= 0)
        quality += trials.better * effects
        worst = np.maximum(worst, false / np.maximum(1, better))
        all_effects[:, number], verdicts[:, number], pairs[:, number] = effects, trials.better, trials.counts
        extra = np.maximum(trials.counts - 1, 0)
        rest = trials.squares - trials.sums**2 / np.maximum(trials.counts, 1)
        deviation = deviation * np.sqrt((degrees + rest) / (degrees + extra))
        degrees = degrees + extra
    return Outcome(false, better, worst, all_effects, verdicts, pairs, quality)


def keep_if_lower(source: Source, effects: Floats, repeats: int, runs: Ints | None = None) -> Floats:
    """[streams]: true quality when what is lower than the lowest loss so far is kept, all read on one block of windows.

    effects: [streams, proposals]. repeats: runs of each, averaged. runs: after so many runs a stream stops.
    """
    streams = len(effects)
    windows = source.rng.integers(source.table.shape[1], size=(streams, BLOCK))

    def measure() -> Floats:
        return np.mean([source.runs(streams, windows) for _ in range(repeats)], axis=0)

    best, quality = measure(), np.zeros(streams)
    for number in range(effects.shape[1]):
        true = quality + effects[:, number]
        loss = measure() - true * source.seed_deviation
        kept = loss < best
        if runs is not None:
            kept &= (number + 2) * repeats <= runs
        best, quality = np.where(kept, loss, best), np.where(kept, true, quality)
    return quality


def upper_bound(values: Floats) -> float:
    """One-sided 95 % bound of a mean, by the normal distribution."""
    return float(values.mean() + 1.645 * values.std(ddof=1) / math.sqrt(len(values)))


def error_rates(outcome: Outcome) -> dict[str, float]:
    """The false discovery rate at the end of the streams, and where each is at its worst."""
    null = outcome.effects <= 0
    return {
        "fdr": round(float(outcome.shares.mean()), 4),
        "fdr_upper_95": round(upper_bound(outcome.shares), 4),
        "worst_moment": round(float(outcome.worst.mean()), 4),
        "worst_moment_upper_95": round(upper_bound(outcome.worst), 4),
        "better_per_stream": round(float(outcome.better.mean()), 3),
        "pairs_per_null": round(float(outcome.pairs[null].mean()), 3),
    }


def power(source: Source, number: int = 1, streams: int = STREAMS) -> dict[str, Any]:
    """The share called better within MAX_PAIRS, by effect, at the level of proposal 1 (nothing called better yet)."""
    shares: dict[str, Any] = {"level": ALPHA / PROPOSALS, "degrees": CALIBRATION - 1}
    for effect in (3, 2, 1):
        deviation, degrees = source.calibration(streams), np.full(streams, CALIBRATION - 1.0)
        levels, effects = np.full(streams, ALPHA / PROPOSALS), np.full(streams, effect * source.seed_deviation)
        trials = Trials(levels, deviation, degrees, effects)
        trials.submit(np.arange(streams), source)
        shares[str(effect)] = {"share": round(float(trials.better.mean()), 3)}
        shares[str(effect)]["pairs"] = round(float(trials.counts.mean()), 2)
    return shares


def power_in_streams(outcome: Outcome) -> dict[str, float]:
    """The share of true effects called better, at the levels that the streams had."""
    return {str(k): round(float(outcome.verdicts[outcome.effects == k].mean()), 3) for k in (3, 2, 1)}


def quality(source: Source, outcome: Outcome, harmful: bool) -> dict[str, Any]:
    """The judge's final true quality against keep-if-lower with as many runs (calibration included)."""
    runs = 2 * outcome.pairs.sum(1) + CALIBRATION
    repeats = max(1, round(float(runs.mean()) / PROPOSALS))
    longest = int(runs.max())
    more = draw_effects(source.rng, len(runs) * longest, harmful).reshape(-1, longest)
    baselines = {
        f"same ideas, {repeats} runs each": keep_if_lower(source, outcome.effects, repeats),
        "one run each, more ideas": keep_if_lower(source, more, 1, runs),
        "same ideas, one run each (less compute)": keep_if_lower(source, outcome.effects, 1),
    }
    result: dict[str, Any] = {"runs": round(float(runs.mean()), 1), "judge": round(float(outcome.quality.mean()), 3)}
    for name, other in baselines.items():
        wins, ties = float((outcome.quality > other).mean()), float((outcome.quality == other).mean())
        result[name] = {
            "quality": round(float(other.mean()), 3),
            "judge_higher": round(wins, 3),
            "equal": round(ties, 3),
        }
    return result


def misspecify(source: Callable[..., Source], streams: int) -> dict[str, Any]:
    """Error rates of e-LOND where pairs are not what the calibration says."""
    noises: Mapping[str, dict[str, float]] = {
        "Student's t, 4 degrees": {"tails": 4},
        "proposals' runs spread 1.5 times wider": {"spread": 1.5},
        "deviation 1.5 times too small": {"scale": 1.5},
        "deviation 1.5 times too large": {"scale": 1 / 1.5},
    }
    figures: dict[str, Any] = {}
    for name, noise in noises.items():
        for proposer in ("null", "adversarial"):
            rates = error_rates(run_streams(source(**noise), proposer, streams=streams))
            figures[f"{name}, {proposer}"] = rates
            show(f"{name}, {proposer}", rates)
    return figures


def show(name: str, value: object) -> None:
    """Print a figure."""
    print(f"{name}: {json.dumps(value)}", flush=True)


def simulate(streams: int, seed: int) -> dict[str, Any]:
    """All figures."""
    table = np.array(json.loads((RESULTS / "judge_noise.json").read_text(encoding="utf-8"))["bits_per_byte"])

    def source(**noise: float) -> Source:
        return Source(table, np.random.default_rng(seed), **noise)

    figures: dict[str, Any] = {"streams": streams, "proposals": PROPOSALS, "alpha": ALPHA, "seed": seed}
    figures["seed_deviation"] = round(source().seed_deviation, 4)
    figures["power_at_first_level"] = power(source())
    show("power", figures["power_at_first_level"])
    figures["errors"], figures["quality"], figures["power_in_streams"] = {}, {}, {}
    for rule in ("e-lond", "e-lord", "e-saffron"):
        for proposer in ("null", "mixed", "harmful", "greedy", "adversarial"):
            one = source()
            outcome = run_streams(one, proposer, rule, streams)
            figures["errors"][f"{rule}, {proposer}"] = error_rates(outcome)
            show(f"{rule}, {proposer}", error_rates(outcome))
            if proposer in ("mixed", "harmful"):
                name = f"{rule}, {proposer}"
                figures["power_in_streams"][name] = power_in_streams(outcome)
                figures["quality"][name] = quality(one, outcome, proposer == "harmful")
                show(f"{name} power", figures["power_in_streams"][name])
                show(f"{name} quality", figures["quality"][name])
    figures["misspecified"] = misspecify(source, streams)
    return figures


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m evidence.judge_streams", description=__doc__)
    parser.add_argument("what", choices=("train", "simulate"))
    parser.add_argument("--out", type=Path, default=Path("runs/judge"), help="where runs are kept meanwhile")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--seed", type=int, default=0, help="of the simulation")
    arguments = parser.parse_args()
    if arguments.what == "train":
        train_table(arguments.out)
        return
    start = time.process_time()
    figures = simulate(arguments.streams, arguments.seed)
    figures["seconds"] = round(time.process_time() - start)
    (RESULTS / "judge_streams.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
