"""Streams of proposals judged on the noise of real runs: `python -m evidence.judge_streams train`, then `simulate`.

`train` writes the [seeds, windows] losses of one small design and of variants of it, each as a proposal would be.
`simulate` draws pairs from these tables: a run of the design and one of a variant on one block of windows. What the
variant gains varies over windows as it did in training, with either sign; its mean over the text is shifted to the
proposal's true effect. Streams are judged by `heddle.lab.judge`, and what was measured is written. Effects are in
standard deviations of a run over seeds; those of random proposals are measured, too (`examples/judge_loop.py`).
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
from scipy.special import stdtrit

from evidence.row import attention, stack
from heddle.lab.judge.evidence import (
    LEAD,
    LOOK,
    LOOK_LEADING,
    LOOKS,
    MAX_PAIRS,
    MIN_CHANCE,
    MIN_CHANCE_POOLED,
    PLANNED,
    Decision,
    log_evidence,
    needed_sum,
    next_level,
    planned_chance,
    planned_test,
    predicted_chance,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RESULTS = Path(__file__).parent / "results"
SEEDS, WINDOWS, LENGTH = 64, 128, 64  # LENGTH: tokens of a window
DESIGN = stack(*[attention(4, kv_heads=2)] * 2, hidden=176)
SETTINGS: dict[str, Any] = {"steps": 80, "batch_size": 8, "sequence_length": LENGTH, "learning_rate": 5e-3}

VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {  # as proposals: overrides and settings
    "muon": ((), {"optimizer": "muon"}),
    "lr 0.012": ((), {"learning_rate": 0.012}),
    "lr 0.002": ((), {"learning_rate": 0.002}),
    "hidden 352": (("layers.*.feedforward.hidden=352",), {}),
    "mlp, relu": (("layers.*.feedforward.kind=mlp", "layers.*.feedforward.activation=relu"), {}),
    "window 8": (("layers.*.mixer.window=8",), {}),
    "no positions": (("layers.*.mixer.position=null",), {}),
    "layer norm": (("norm.kind=layer",), {}),
    "one kv head": (("layers.*.mixer.kv_heads=1",), {}),
}
VARIANT_SEEDS = 16
DRAWN, DRAWN_SEEDS = 48, 2  # random proposals
UNCHANGED = ("lr=0.005", "optimizer=adamw", "schedule=wsd")  # of these, copies of the design

STREAMS, PROPOSALS, ALPHA = 2000, 50, 0.1
BLOCK, TUNING = 48, 32  # windows of a pair, by the judge's rule, and of the first look
CALIBRATION, REFERENCE = 6, 4  # runs of the first incumbent, for the noise; of later ones, for the first look
TRUE_SHARE, RESUBMISSIONS, NEAR = 0.1, 3, 3.0  # NEAR: evidence of what nearly won
MIXES = ("mixed", "harmful", "worse", "drawn")
TURNS = 8  # through all ideas, of a loop that runs them again


def train_table(out: Path) -> None:
    """Train the design and its variants with each seed. A line of `out` is a finished run; it is not trained again."""
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
    done = {(line["name"], line["seed"]) for line in lines}
    with progress.quiet():
        corpus = prepare_corpus(["stdlib"], vocab_size=512, max_train_tokens=None)
    budget = EvaluationBudget(final_tokens=WINDOWS * LENGTH)
    drawn = drawn_proposals()
    for name, (overrides, changed) in {"": ((), {}), **VARIANTS, **drawn}.items():
        config = load_config(dict(DESIGN), list(overrides)).replace(vocab_size=corpus.tokenizer.vocab_size)
        for seed in range(DRAWN_SEEDS if name in drawn else VARIANT_SEEDS if name else SEEDS):
            if (name, seed) in done:
                continue
            start, folder = time.process_time(), out / "run"
            settings = Settings(seed=seed, **{**SETTINGS, **changed})
            with progress.quiet():
                trained = train(TrainingJob(config, corpus, settings, folder, evaluation=budget))
            bits, sizes = zip(*trained.scores, strict=True)
            rates = [round(value / size, 3) for value, size in zip(bits, sizes, strict=True)]
            line = {"name": name, "seed": seed, "rates": rates, "seconds": round(time.process_time() - start, 1)}
            line["loss"] = sum(bits) / sum(sizes)
            with file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            shutil.rmtree(folder, ignore_errors=True)
            lines.append(line)
            print(f"{name} {seed}: {sum(bits) / sum(sizes):.4f} bits per byte, {line['seconds']} s", flush=True)
    tables = {name: [x["rates"] for x in lines if x["name"] == name] for name in ("", *VARIANTS)}
    result = {"design": DESIGN, "settings": SETTINGS, "data": "stdlib", "seconds": sum(x["seconds"] for x in lines)}
    result |= {"bits_per_byte": tables.pop(""), "variants": tables}
    result["drawn"] = {name: [round(x["loss"], 4) for x in lines if x["name"] == name] for name in drawn}
    (RESULTS / "judge_noise.json").write_text(json.dumps(result) + "\n", encoding="utf-8")


def drawn_proposals() -> dict[str, tuple[tuple[str, ...], dict[str, Any]]]:
    """The first of the example's random proposals that can be built on the design, each once."""
    import random

    from examples.judge_loop import draw_proposal
    from heddle.errors import ConfigError
    from heddle.model.load_config import load_config

    found: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {}
    known, seed = set[str](), 0
    while len(found) < DRAWN:
        proposal, seed = draw_proposal(random.Random(seed)), seed + 1
        overrides, training = proposal.get("overrides", []), dict(proposal.get("training", {}))
        try:
            design = load_config(dict(DESIGN), list(overrides)).dump()
        except ConfigError:
            continue
        key = json.dumps([design, training], sort_keys=True)
        if "lr" in training:
            training["learning_rate"] = training.pop("lr")
        if key not in known:
            known.add(key)
            found[proposal["name"]] = (tuple(overrides), training)
    return found


def deconvolved(means: Floats, error: float) -> tuple[Floats, Floats]:
    """(effects, shares) under which means with normal errors of this deviation are likeliest (Kiefer and Wolfowitz)."""
    grid = np.arange(math.floor(means.min()), math.ceil(means.max()) + 0.05, 0.1)
    density = np.exp(-(((means[:, None] - grid) / error) ** 2) / 2)
    shares = np.full(len(grid), 1 / len(grid))
    for _ in range(2000):
        posterior = density * shares
        shares = (posterior / posterior.sum(1, keepdims=True)).mean(0)
    return grid, shares


@dataclass
class Source:
    """Draws runs. tables: [kinds, seeds, windows] of noise around a design's mean; profiles: [kinds, windows].

    The first kind is the incumbent. tails: degrees of freedom of Student's t instead of the runs' noise. skew: noise of
    a pair that is exponential, on the side of its sign. spread: of the runs of one in nine proposals. rare: a share of
    windows where a proposal loses what it gains in all others, 2 standard deviations over seeds. drawn: (effects,
    shares) of random proposals.
    """

    tables: list[Floats]
    profiles: Floats
    rng: np.random.Generator
    drawn: tuple[Floats, Floats] = field(init=False)
    tails: float = 0.0
    skew: float = 0.0
    spread: float = 1.0
    rare: float = 0.0
    seed_deviation: float = field(init=False)

    @classmethod
    def read(cls, rng: np.random.Generator, **noise: float) -> "Source":
        """From the runs that `train` wrote."""
        result = json.loads((RESULTS / "judge_noise.json").read_text(encoding="utf-8"))
        tables = [np.array(table) for table in (result["bits_per_byte"], *result["variants"].values())]
        means = np.array([table.mean(0) for table in tables])
        profiles = means[0] - means
        # deviations from the mean of n seeds are too small by this factor
        rests = [(table - table.mean(0)) * math.sqrt(len(table) / (len(table) - 1)) for table in tables]
        source = cls(rests, profiles - profiles.mean(1, keepdims=True), rng, **noise)
        losses = {name: np.array(values) for name, values in result["drawn"].items()}
        base = next(losses[name] for name in losses if name == UNCHANGED[0])
        gains = np.array([base - values for name, values in losses.items() if name not in UNCHANGED])
        gains /= source.seed_deviation
        effects, shares = deconvolved(gains.mean(1), math.sqrt(gains.var(1, ddof=1).mean() / gains.shape[1]))
        shares = np.where(effects < 0.95, shares, 0)
        source.drawn = effects, shares / shares.sum()
        return source

    def __post_init__(self) -> None:
        self.seed_deviation = float(np.sqrt((self.tables[0].mean(1) ** 2).mean()))

    def windows(self, count: int, block: int = BLOCK) -> Ints:
        """[count, block]: blocks drawn from the whole text."""
        return self.rng.integers(self.profiles.shape[1], size=(count, block))

    def kinds(self, count: int) -> Ints:
        """[count]: which variant a proposal is; negative: what it gains over the text has the other sign."""
        return self.rng.integers(1, len(self.tables), count) * self.rng.choice((-1, 1), count)

    def runs(self, windows: Ints, kinds: Ints | int = 0) -> Floats:
        """[count]: means of runs on blocks of windows, [count, block], around the mean of the incumbent."""
        kinds = np.broadcast_to(kinds, len(windows))
        losses = np.zeros(len(windows))
        for kind in np.unique(np.abs(kinds)):
            of = np.flatnonzero(np.abs(kinds) == kind)
            table = self.tables[kind]
            rows = self.rng.integers(len(table), size=len(of))
            losses[of] = (self.spread if kind == 1 else 1.0) * table[rows[:, None], windows[of]].mean(1)
            losses[of] -= np.sign(kinds[of]) * self.profiles[kind][windows[of]].mean(1)
        if self.rare:
            gain = self.rng.random(windows.shape) >= self.rare
            losses -= (kinds != 0) * 2 * self.seed_deviation * (gain - (1 - self.rare)).mean(1) / self.rare
        return losses

    def pairs(self, kinds: Ints) -> Floats:
        """[count]: differences of the incumbent and proposals of these kinds, without their effects."""
        windows = self.windows(len(kinds))
        if self.tails or self.skew:
            if self.tails:
                draws = math.sqrt((self.tails - 2) / self.tails) * self.rng.standard_t(self.tails, len(kinds))
            else:
                draws = self.skew * (self.rng.exponential(size=len(kinds)) - 1)
            return math.sqrt(2) * self.seed_deviation * draws
        return self.runs(windows) - self.runs(windows, kinds)

    def calibration(self, streams: int) -> tuple[Floats, Ints]:
        """[streams]: the standard deviation of a pair, from runs of the incumbent on a block of windows; the blocks."""
        windows, table = self.windows(streams, TUNING), self.tables[0]
        losses = np.stack([self.runs(windows) for _ in range(CALIBRATION)])
        text = 2 * float((table - table.mean(1, keepdims=True)).var())  # of two seeds on one window
        return np.sqrt(2 * losses.var(0, ddof=1) + text / BLOCK), windows


class Trials:
    """The pairs of one proposal of each stream, with the noise of its first submission. own: by its own spread."""

    def __init__(self, levels: Floats, noise: tuple[Floats, Floats], effects: Floats, kinds: Ints, own: bool) -> None:
        self.levels, (self.deviation, self.degrees), self.own = levels, noise, own
        self.effects, self.kinds = effects, kinds
        streams = len(levels)
        self.sums, self.squares, self.evidence, self.peak = (np.zeros(streams) for _ in range(4))
        self.counts = np.zeros(streams, dtype=np.int64)
        self.better = np.zeros(streams, dtype=bool)

    def look(self, source: Source, windows: Ints, runs: Ints) -> Ints:
        """The streams whose first run is low enough against the mean of so many runs of the incumbent."""
        reference = np.zeros(len(windows))
        for index in range(int(runs.max())):
            reference += (index < runs) * source.runs(windows) / runs
        losses = source.runs(windows, self.kinds) - self.effects
        spread = self.deviation * np.sqrt((1 + 1 / runs) / 2)
        return np.flatnonzero(reference - losses >= LOOK * spread)

    def submit(self, members: Ints, source: Source, max_pairs: int = MAX_PAIRS) -> None:
        """Buy pairs for these streams until each is better, has `max_pairs` more, or no chance (as what is worse)."""
        final = self.counts + max_pairs
        while len(members):
            values = (source.pairs(self.kinds[members]) + self.effects[members]) / self.deviation[members]
            self.sums[members] += values
            self.squares[members] += values**2
            self.counts[members] += 1
            for count in np.unique(self.counts[members]):
                self._weigh(members[self.counts[members] == count], int(count))
            self.peak[members] = np.maximum(self.peak[members], self.evidence[members])
            self.better[members] = self.evidence[members] * self.levels[members] >= 1
            members = members[~self.better[members] & (self.counts[members] < final[members])]
            if self.own:
                is_first = self.counts[members] < MAX_PAIRS
                ahead = np.where(is_first, MAX_PAIRS, final[members])
                level = self.levels[members] * np.where(is_first, 1, (1 - PLANNED) / 10)
                needed = stdtrit(ahead - 1, 1 - PLANNED * level) * np.sqrt(ahead)
            else:
                ahead = final[members]
                needed = needed_sum(1, self.degrees[members], self.levels[members]) * np.sqrt(ahead)
            chances = predicted_chance(self.sums[members], self.counts[members], needed, ahead)
            members = members[chances >= (MIN_CHANCE if self.own else MIN_CHANCE_POOLED)]

    def _weigh(self, group: Ints, count: int) -> None:
        """Set the evidence of streams with `count` pairs."""
        sums, squares, degrees, levels = (x[group] for x in (self.sums, self.squares, self.degrees, self.levels))
        ratio = np.exp(np.minimum(log_evidence(sums, squares, count, 0.0 if self.own else degrees), 600))
        if self.own:
            is_planned = planned_test(sums, squares, count, levels) if count == MAX_PAIRS else np.zeros(len(group))
            self.evidence[group] = (1 - PLANNED) * ratio + is_planned / np.maximum(levels, 1e-300)
            return
        self.evidence[group] = ratio / 2
        if count <= MAX_PAIRS:
            chances = planned_chance(sums, squares, count, degrees, levels, MAX_PAIRS)
            self.evidence[group] += chances / np.maximum(levels, 1e-300)


class Leads:
    """The incumbents of streams that adopt what leads, and the text of first runs."""

    def __init__(self, source: Source, streams: int) -> None:
        self.source, self.windows = source, source.windows(streams, MAX_PAIRS * BLOCK)
        self.losses, self.runs = np.zeros(streams), np.zeros(streams, dtype=np.int64)  # of the incumbents
        self.renew(np.arange(streams), CALIBRATION)

    def renew(self, members: Ints, runs: int = REFERENCE) -> None:
        """Runs of new incumbents, around which later losses are."""
        self.runs[members], self.losses[members] = runs, 0.0
        for _ in range(runs):
            self.losses[members] += self.source.runs(self.windows[members]) / runs

    def look(self, trials: Trials) -> Ints:
        """The streams whose first runs buy pairs."""
        members, streams = np.arange(len(self.runs)), len(self.runs)
        self.looks, totals, self.gains = np.zeros(streams, dtype=np.int64), np.zeros(streams), np.zeros(streams)
        for least in (*LOOKS, -math.inf):
            kinds = trials.kinds[members]
            totals[members] += self.source.runs(self.windows[members], kinds) - trials.effects[members]
            self.looks[members] += 1
            self.gains[members] = self.losses[members] - totals[members] / self.looks[members]
            members = members[self.gains[members] >= least * self._run(trials, members)]
        return members[self.gains[members] >= LOOK_LEADING * self._run(trials, members)]

    def _run(self, trials: Trials, members: Ints) -> Floats:
        return np.asarray(trials.deviation[members] / math.sqrt(2))

    def adopt(self, trials: Trials) -> npt.NDArray[np.bool_]:
        """[streams]: which proposals become the incumbents: those that are better or lead after all of their runs."""
        looks, pairs = 1 / (1 / self.looks + 1 / self.runs), trials.counts / 2
        gains = (looks * self.gains + trials.sums * trials.deviation / 2) / (looks + pairs)
        return np.asarray(trials.better | (gains >= LEAD * self._run(trials, np.arange(len(gains)))))


@dataclass
class Outcome:
    """What streams came to. false, better: [streams] at the end; worst: the largest false / max(1, better) on the way.

    effects, verdicts, adopted, pairs: [streams, proposals] of each proposal: its true effect, whether it was called
    better, whether it became the incumbent, and the pairs it took with its resubmissions; a first run is half a pair.
    """

    false: Floats
    better: Floats
    worst: Floats
    effects: Floats
    verdicts: npt.NDArray[np.bool_]
    adopted: npt.NDArray[np.bool_]
    pairs: Floats

    @property
    def quality(self) -> Floats:
        return np.asarray((self.adopted * self.effects).sum(1))

    @property
    def runs(self) -> Floats:
        """[streams]: all, with those of the incumbents."""
        return np.asarray(2 * self.pairs.sum(1) + REFERENCE * self.adopted.sum(1) + CALIBRATION)

    @property
    def shares(self) -> Floats:
        return np.asarray(self.false / np.maximum(1, self.better))


def draw_effects(source: Source, count: int, mix: str) -> Floats:
    """A tenth are 1, 2 or 3. Others are 0; `harmful`: half are −1, −2 or −3; `worse`: all are from −2 to 0.

    `drawn`: they are random proposals, as measured.
    """
    rng = source.rng
    sizes, kinds = rng.integers(1, 4, count), rng.random(count)
    others = np.where((mix == "harmful") & (kinds > (1 + TRUE_SHARE) / 2), -sizes, 0.0)
    if mix == "worse":
        others = -2 * rng.random(count)
    elif mix == "drawn":
        others = rng.choice(source.drawn[0], count, p=source.drawn[1])
    return np.asarray(np.where(kinds < TRUE_SHARE, sizes, others))


def run_streams(
    source: Source,
    proposer: str,
    rule: str = "e-lond",
    streams: int = STREAMS,
    own: bool = True,
    leading: bool = False,
) -> Outcome:
    """Judge streams. A proposer sees every verdict, and here all evidence and all true effects, too.

    null: nothing has an effect. One of MIXES: `draw_effects`. greedy: mixed, and after what nearly won it resubmits, or
    proposes a variation, which has the same effect in half of the cases. adversarial: two proposals of effect 3 are
    called better first, which raises the levels; then nothing has an effect, and what nearly won is resubmitted.
    own: as ledgers are judged; False: by the pooled spread and without a first look, as older ones. leading: with
    `--adopt leading`.
    """
    rng, everyone = source.rng, np.arange(streams)
    (deviation, tuning), degrees = source.calibration(streams), np.full(streams, CALIBRATION - 1.0)
    past: list[list[Decision]] = [[] for _ in everyone]
    false, better, worst = (np.zeros(streams) for _ in range(3))
    all_effects, pairs = np.zeros((streams, PROPOSALS)), np.zeros((streams, PROPOSALS))
    verdicts, adopted = np.zeros((2, streams, PROPOSALS), dtype=bool)
    leads = Leads(source, streams) if leading else None
    near, last = np.zeros(streams, dtype=bool), np.zeros(streams)
    for number in range(PROPOSALS):
        effects = np.zeros(streams) if proposer == "null" else draw_effects(source, streams, proposer)
        if proposer == "greedy":
            effects = np.where(near, last * (rng.random(streams) < 0.5), effects)
        elif proposer == "adversarial":
            effects = np.where(better < 2, 3.0, 0.0)
        levels = np.array([next_level(history, ALPHA, rule, PROPOSALS) for history in past])
        noise = (deviation, degrees)
        trials = Trials(levels, noise, effects * source.seed_deviation, source.kinds(streams), own)
        if leads is not None:
            looked = leads.look(trials)
        else:
            looked = trials.look(source, tuning, np.where(better, REFERENCE, CALIBRATION)) if own else everyone
        trials.submit(looked, source)
        is_adopted = leads.adopt(trials) if leads is not None else trials.better
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
        is_adopted = is_adopted | trials.better
        if leads is not None:
            leads.renew(np.flatnonzero(is_adopted))
        worst = np.maximum(worst, false / np.maximum(1, better))
        all_effects[:, number], verdicts[:, number], adopted[:, number] = effects, trials.better, is_adopted
        pairs[:, number] = trials.counts + (own if leads is None else leads.looks) / 2
        extra = np.maximum(trials.counts - 1, 0)
        rest = trials.squares - trials.sums**2 / np.maximum(trials.counts, 1)
        deviation = deviation * np.sqrt((degrees + rest) / (degrees + extra))
        degrees = degrees + extra
    return Outcome(false, better, worst, all_effects, verdicts, adopted, pairs)


def keep_if_lower(
    source: Source, effects: Floats, repeats: int, runs: Ints | None = None, again: bool = False
) -> Floats:
    """[streams]: true quality when what is lower than the lowest loss so far is kept, all read on one text.

    effects: [streams, proposals]. repeats: runs of each, averaged. runs: after so many runs a stream stops. again: what
    was not kept is run once more, in turn, while there are runs.
    """
    streams = len(effects)
    windows = source.windows(streams, MAX_PAIRS * BLOCK)

    def measure(kinds: Ints | int = 0) -> Floats:
        return np.mean([source.runs(windows, kinds) for _ in range(repeats)], axis=0)

    best, quality, kept_text = measure(), np.zeros(streams), np.zeros(streams)
    count, has_kept, used = effects.shape[1], np.zeros(effects.shape, dtype=bool), np.full(streams, repeats)
    of = np.stack([source.kinds(streams) for _ in range(count)], axis=1)
    for number in [*range(count)] * (TURNS if again else 1):
        is_run = ~has_kept[:, number] & (True if runs is None else used + repeats <= runs)
        if not is_run.any():
            continue
        used += repeats * is_run
        true, kinds = quality + effects[:, number], of[:, number]
        text = kept_text + np.sign(kinds) * np.take_along_axis(source.profiles[np.abs(kinds)], windows, 1).mean(1)
        loss = measure(kinds) - true * source.seed_deviation - kept_text
        kept = is_run & (loss < best)
        has_kept[:, number] |= kept
        best, quality = np.where(kept, loss, best), np.where(kept, true, quality)
        kept_text = np.where(kept, text, kept_text)
    return quality


def upper_bound(values: Floats) -> float:
    """One-sided 95 % bound of a mean, by the normal distribution."""
    return float(values.mean() + 1.645 * values.std(ddof=1) / math.sqrt(len(values)))


def error_rates(outcome: Outcome) -> dict[str, float]:
    """The false discovery rate at the end of the streams, and where each is at its worst."""
    null = outcome.effects <= 0
    cost = outcome.pairs + REFERENCE / 2 * outcome.adopted
    return {
        "fdr": round(float(outcome.shares.mean()), 4),
        "fdr_upper_95": round(upper_bound(outcome.shares), 4),
        "worst_moment": round(float(outcome.worst.mean()), 4),
        "worst_moment_upper_95": round(upper_bound(outcome.worst), 4),
        "better_per_stream": round(float(outcome.better.mean()), 3),
        "pairs_per_null": round(float(cost[null].mean()), 3),
    }


def power(source: Source, streams: int = STREAMS) -> dict[str, Any]:
    """The share called better within MAX_PAIRS, by effect, at the level of proposal 1 (nothing called better yet)."""
    shares: dict[str, Any] = {"level": ALPHA / PROPOSALS}
    for effect in (3, 2, 1):
        (deviation, tuning), degrees = source.calibration(streams), np.full(streams, CALIBRATION - 1.0)
        levels, effects = np.full(streams, ALPHA / PROPOSALS), np.full(streams, effect * source.seed_deviation)
        trials = Trials(levels, (deviation, degrees), effects, source.kinds(streams), own=True)
        trials.submit(trials.look(source, tuning, np.full(streams, CALIBRATION)), source)
        shares[str(effect)] = {"share": round(float(trials.better.mean()), 3)}
        shares[str(effect)]["pairs"] = round(float(trials.counts.mean()) + 0.5, 2)
    return shares


def power_in_streams(outcome: Outcome) -> dict[str, float]:
    """The share of true effects called better, at the levels that the streams had."""
    return {str(k): round(float(outcome.verdicts[outcome.effects == k].mean()), 3) for k in (3, 2, 1)}


def quality(source: Source, outcome: Outcome, mix: str) -> dict[str, Any]:
    """The judge's final true quality against keep-if-lower with as many runs, and against all true gains.

    No policy is higher than all true gains, so `all gains, higher` bounds what any judge could have there.
    """
    runs, ideas, effects = outcome.runs.astype(np.int64), outcome.effects.shape[1], outcome.effects
    repeats = max(1, round(float(runs.mean()) / ideas))
    longest = int(runs.max())
    more = draw_effects(source, len(runs) * longest, mix).reshape(-1, longest)
    baselines = {
        "same ideas, one run each, again in turn": keep_if_lower(source, effects, 1, runs, again=True),
        f"same ideas, {repeats} runs each": keep_if_lower(source, effects, repeats),
        "one run each, more ideas": keep_if_lower(source, more, 1, runs),
    }
    best = np.maximum(effects, 0).sum(1)
    result: dict[str, Any] = {"runs": round(float(runs.mean()), 1), "judge": round(float(outcome.quality.mean()), 3)}
    result |= {"all gains": round(float(best.mean()), 3), "adopted": round(float(outcome.adopted.sum(1).mean()), 2)}
    for name, other in baselines.items():
        wins, ties = (outcome.quality > other + 1e-9), np.abs(outcome.quality - other) <= 1e-9
        result[name] = {
            "quality": round(float(other.mean()), 3),
            "judge_higher": round(float(wins.mean()), 3),
            "equal": round(float(ties.mean()), 3),
        }
        if "same" in name:
            result[name]["all gains, higher"] = round(float((best > other + 1e-9).mean()), 3)
    return result


def misspecify(source: Callable[..., Source], streams: int) -> dict[str, Any]:
    """Error rates of e-LOND where pairs are not Gaussian, or proposals' runs spread otherwise."""
    noises: Mapping[str, dict[str, float]] = {
        "Student's t, 4 degrees": {"tails": 4},
        "exponential, towards gains": {"skew": 1},
        "exponential, towards losses": {"skew": -1},
        "one proposal in nine spreads 5 times wider": {"spread": 5},
        "gains everywhere but in 1 of 20 windows": {"rare": 0.05},
        "gains everywhere but in 1 of 200 windows": {"rare": 0.005},
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


def simulate(streams: int, seed: int, only: str = "") -> dict[str, Any]:
    """All figures, or those of the streams (rule and proposer) whose name starts with `only`, where it is not empty."""

    def source(**noise: float) -> Source:
        return Source.read(np.random.default_rng(seed), **noise)

    figures: dict[str, Any] = {"streams": streams, "proposals": PROPOSALS, "alpha": ALPHA, "seed": seed}
    figures["seed_deviation"] = round(source().seed_deviation, 4)
    if not only:
        figures["power_at_first_level"] = power(source(), streams)
        show("power", figures["power_at_first_level"])
    figures["errors"], figures["quality"], figures["power_in_streams"] = {}, {}, {}
    for rule, leading in (("e-lond", False), ("e-lond", True), ("e-lord", False), ("e-saffron", False)):
        for proposer in ("null", *MIXES, "greedy", "adversarial"):
            name = f"{rule}{' leading' * leading}, {proposer}"
            if not name.startswith(only):
                continue
            one = source()
            outcome = run_streams(one, proposer, rule, streams, leading=leading)
            figures["errors"][name] = error_rates(outcome)
            show(name, error_rates(outcome))
            if proposer in MIXES:
                figures["power_in_streams"][name] = power_in_streams(outcome)
                show(f"{name} power", figures["power_in_streams"][name])
                if rule == "e-lond":
                    figures["quality"][name] = quality(one, outcome, proposer)
                    show(f"{name} quality", figures["quality"][name])
    for proposer in () if only else ("null", "adversarial"):
        rates = error_rates(run_streams(source(), proposer, streams=streams, own=False))
        figures["errors"][f"older ledgers (e-lond, pooled spread), {proposer}"] = rates
        show(f"pooled, {proposer}", rates)
    if not only:
        figures["misspecified"] = misspecify(source, streams)
    return figures


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m evidence.judge_streams", description=__doc__)
    parser.add_argument("what", choices=("train", "simulate"))
    parser.add_argument("--out", type=Path, default=Path("runs/judge"), help="where runs are kept meanwhile")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--seed", type=int, default=0, help="of the simulation")
    parser.add_argument("--only", default="", help="streams whose name starts so; the other figures stay")
    arguments = parser.parse_args()
    if arguments.what == "train":
        train_table(arguments.out)
        return
    start, file = time.process_time(), RESULTS / "judge_streams.json"
    figures = simulate(arguments.streams, arguments.seed, arguments.only)
    figures["seconds"] = round(time.process_time() - start)
    if arguments.only:
        before = json.loads(file.read_text(encoding="utf-8"))
        merged = {name: before[name] | figures[name] for name in ("errors", "quality", "power_in_streams")}
        figures = before | merged
    file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
