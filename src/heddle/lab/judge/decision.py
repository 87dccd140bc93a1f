"""Decisions: the runs of a proposal and of the incumbent in pairs, the verdict, and the stream of proposals.

Every pair has one fresh seed, and held-out windows that no other pair reads. Each run is stored once it is complete,
and the verdict last. A killed submission, submitted again, continues and ends with the same verdict.
"""

import hashlib
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import numpy as np

from heddle import progress
from heddle.errors import CheckpointError, ConfigError, MachineError
from heddle.lab.compare.plan import all_candidates, parse_tuned_fields, tuned_settings
from heddle.lab.judge import evidence, foreign
from heddle.lab.judge.evidence import Decision, Noise
from heddle.lab.judge.ledger import CALIBRATION, FIRST_SEED, TOKENIZER_FILE, Candidate, Ledger, Spans
from heddle.lab.judge.proposal import Refused, Submission, screen, screen_apart
from heddle.lab.judge.settings import JudgeSettings
from heddle.lab.workers import Task, Workers, run_tasks
from heddle.model.decoder import build
from heddle.model.load_config import load_config, with_vocab_size
from heddle.model.size import flops_per_token
from heddle.runtime import Runtime
from heddle.storage.file_io import read_json_file, write_file, write_json_file
from heddle.storage.run_log import to_plain_json
from heddle.training.settings import Settings

CALIBRATION_SEEDS = 6
LOOK_SEED, REFERENCE_SEED, TUNING_SEED = 700_000, 800_000, 900_000
LOOK_SEEDS = 25_000  # between the seeds of one proposal's first runs
REFERENCE_RUNS = 4  # of a new incumbent, for later first looks
TUNING_TOKENS = 4  # a trial of tuning reads a fourth of a run's tokens
SECOND_PAIRS = 2  # at the second size
VERDICT_FILE, PROPOSAL_FILE, CHANGE_FILE = "verdict.json", "proposal.yaml", "change.json"
Verdict = dict[str, Any]


class Judge:
    """A ledger that is open for work, and where its runs take place."""

    def __init__(self, ledger: Ledger, runtime: Runtime, workers: Workers) -> None:
        self.ledger, self.runtime, self.workers = ledger, runtime, workers
        self.settings: JudgeSettings = ledger.settings

    @property
    def defaults(self) -> dict[str, Any]:
        """The training settings that a proposal may change."""
        settings = self.settings
        return {
            "batch_size": settings.batch_size,
            "sequence_length": settings.sequence_length,
            "learning_rate": settings.lr,
            "optimizer": settings.optimizer,
            "schedule": settings.schedule,
            "warmup": settings.warmup,
            "precision": settings.precision,
        }

    # Runs.

    def task(
        self,
        candidate: Candidate,
        size: Mapping[str, Any],
        name: str,
        where: Path,
        *,
        seed: int,
        span: Spans,
        tokens: int,
        kind: str = "loss",
        keeps_windows: bool = False,
    ) -> Task:
        """One run: trained on `tokens` tokens from a seed, and scored on spans of the held-out tokens."""
        settings, folder = self.settings, self.ledger.folder.resolve()
        file = where.resolve() / "runs" / f"{name}.json"
        fields = self.defaults | candidate.training
        steps = max(1, tokens // (fields["batch_size"] * fields["sequence_length"]))
        own_code = bool(candidate.parts)
        request = {
            "task": kind,
            "out": str(file.with_suffix("")),
            "design": size.get("design"),
            "trainer": candidate.trainer,
            "data": list(candidate.data or settings.data),
            "held_out_data": list(settings.data) if candidate.data else None,
            "held_out": span,
            "hides_windows": not keeps_windows,
            "tokenizer": str(folder / TOKENIZER_FILE),
            "vocab_size": None,
            "max_train_tokens": settings.tokens,
            "settings": asdict(Settings(steps=steps, seed=seed, **fields)),
            "threads": self.workers.threads,
            "choices": self.runtime.choices_of_worker(self.workers.threads),
            "part_files": candidate.part_files(folder),
            "limits": [str(where.resolve() / "own"), settings.seconds, settings.memory] if own_code else None,
            "command": f"heddle judge submit --out {folder}",
        }
        return Task(f"{where.name}, {name}", file, request, is_optional=True)

    def run(self, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """The results of tasks, in order; complete ones are not repeated."""
        own = [task for task in tasks if not task.request["trainer"]]
        limited = [task for task in own if task.request["limits"]]
        until = time.monotonic() + self.settings.seconds * len(own) + 60 if limited else math.inf
        results = dict(zip(own, run_tasks(own, self.workers, _forget_checkpoints, until=until), strict=False))
        for task in tasks:
            if task.request["trainer"]:
                results[task] = task.saved_result() or foreign.run(task, self.ledger)
        late = "exceeded the time limit"
        return [results.get(task) or {"status": "failed", "message": f"{task.label}: {late}"} for task in tasks]

    def losses(self, tasks: Sequence[Task], required: bool = False) -> list[float]:
        """Bits per byte of tasks; infinite for a run that diverged. Raises RunFailed for a run that did not finish."""
        losses = []
        for result in self.run(tasks):
            if result["status"] == "failed" and required:
                raise MachineError(f"{result['message']}; the same command tries it again")
            if result["status"] == "failed":
                raise RunFailed(result["message"])
            loss = result.get("bits_per_byte") if result["status"] == "done" else None
            losses.append(math.inf if loss is None or not math.isfinite(loss) else float(loss))
        return losses

    def tokens_of(self, candidate: Candidate, size: Mapping[str, Any], name: str, where: Path) -> int:
        """The training tokens that the budget allows; timed where it is in seconds."""
        if size.get("tokens") is not None:
            return int(size["tokens"])
        _, value, tokens = self.ledger.facts["budget"]
        if candidate.trainer is not None:
            return int(tokens)
        task = self.task(candidate, size, f"{name}-time", where, seed=0, span=[[0, 2]], tokens=1, kind="calibrate")
        [result] = self.run([task])
        if result["status"] != "done":
            raise RunFailed(result["message"])
        per_step: int = task.request["settings"]["batch_size"] * self.settings.sequence_length
        return max(1, int(value / result["seconds_per_step"])) * per_step

    def tuned(self, candidate: Candidate, size: Mapping[str, Any], name: str, where: Path, tokens: int) -> Candidate:
        """The candidate with the best values of `--tune`, from short runs on the tuning part of the held-out text."""
        fields = [
            field
            for field in parse_tuned_fields(self.settings.tune)
            if candidate.trainer is None and not self._is_proposed(candidate, field.name)
        ]
        if not fields:
            return candidate
        trials = []
        for values in all_candidates(fields):
            found = tuned_settings(fields, values, ())
            trials.append(replace(candidate, training=candidate.training | found))
        tasks = [
            self.task(
                trial, size, f"{name}-trial{index}", where, seed=TUNING_SEED, span=self.ledger.windows.tuning,
                tokens=tokens // TUNING_TOKENS,
            )
            for index, trial in enumerate(trials)
        ]  # fmt: skip
        losses = self.losses(tasks)
        return trials[losses.index(min(losses))]

    def _is_proposed(self, candidate: Candidate, field: str) -> bool:
        """Whether the newest change sets a tuned field itself."""
        number = candidate.changed[-1] if candidate.changed else 0
        if not number:
            return False
        change = read_json_file(self.ledger.proposal_folder(number) / CHANGE_FILE)["change"]
        return ("learning_rate" if field == "lr" else field) in change.get("training", {})

    def budget(self, first: Candidate) -> list[Any]:
        """[kind, amount, tokens of the first incumbent]: how much every run may use."""
        settings, tokens = self.settings, self.settings.tokens
        if settings.match in ("tokens", "parameters") or first.trainer is not None:
            return ["tokens", tokens, tokens]
        config = with_vocab_size(load_config(first.design or {}), self.ledger.facts["vocab_size"])
        if settings.match == "flops":
            model = build(config, device="meta")
            return ["flops", 3 * flops_per_token(model, settings.sequence_length, training=True) * tokens, tokens]
        where = self.ledger.folder / CALIBRATION
        size = {"design": config.dump()}
        task = self.task(first, size, "time", where, seed=0, span=[[0, 2]], tokens=1, kind="calibrate")
        [result] = self.run([task])
        if result["status"] != "done":
            raise MachineError(result["message"])
        steps = max(1, tokens // (settings.batch_size * settings.sequence_length))
        return ["seconds", steps * result["seconds_per_step"], tokens]

    def calibrate(self, first: Candidate, size: Mapping[str, Any]) -> tuple[Candidate, list[float], float]:
        """Tune the first incumbent and train it from a few seeds; all read the tuning part of the held-out text.

        Returns the candidate, its losses, and the variance between windows of the difference of two seeds.
        """
        where, span = self.ledger.folder / CALIBRATION, self.ledger.windows.tuning
        tokens = self.tokens_of(first, size, "incumbent", where)
        first = self.tuned(first, size, "incumbent", where, tokens)
        tasks = [
            self.task(first, size, f"seed{seed}", where, seed=seed, span=span, tokens=tokens, keeps_windows=True)
            for seed in range(CALIBRATION_SEEDS)
        ]
        losses = self.losses(tasks, required=True)
        if not all(map(math.isfinite, losses)):
            raise ConfigError(f"{first.name}: a run diverged; try a lower --lr")
        rates = np.array([[bits / max(1, size) for bits, size in result["windows"]] for result in self.run(tasks)])
        variance = float((rates[:-1] - rates[1:]).var(axis=1, ddof=1).mean()) if rates.shape[1] > 1 else 0.0
        return first, losses, variance

    # Decisions.

    def decide(self, entry: dict[str, Any]) -> Verdict:
        """Reach the verdict of a fixed proposal, write it, and record it."""
        folder = self.ledger.proposal_folder(entry["number"])
        try:
            verdict = self._refused(entry, *entry["refused"]) if entry["refused"] else self._judged(entry, folder)
        except RunFailed as failed:
            verdict = self._refused(entry, "failed", str(failed))
        except Refused as refused:
            verdict = self._refused(entry, refused.rule, refused.case)
        verdict = dict(to_plain_json(verdict))
        write_json_file(folder / VERDICT_FILE, verdict)
        self.ledger.record({"event": "verdict", "number": entry["number"], "verdict": verdict})
        return verdict

    def _judged(self, entry: dict[str, Any], folder: Path) -> Verdict:
        ledger, level, noise = self.ledger, entry["level"], Noise(*entry["noise"])
        sides = {"incumbent": Candidate.read(entry["incumbent"]), "proposal": Candidate.read(entry["candidate"])}
        sizes = {"incumbent": entry["incumbent_sizes"], "proposal": entry["sizes"]}
        tokens = {name: self.tokens_of(side, first_size(sizes[name]), name, folder) for name, side in sides.items()}
        tuned = self.tuned(sides["proposal"], first_size(sizes["proposal"]), "proposal", folder, tokens["proposal"])
        sides["proposal"] = tuned
        differences, found, peak, gain = list(entry["earlier"]), None, 0.0, math.nan
        looks: list[float] = []
        if entry.get("reference") and entry["continues"] is None:
            found = self._look(entry, tuned, noise, folder, tokens, looks)
            gain = float(np.mean(entry["reference"])) - float(np.mean(looks))
        planned, at_once = ledger.windows.pairs, max(1, self.workers.count // 2)
        for pair in range(planned if found is None else 0):
            if pair % at_once == 0:
                pairs = range(pair, min(pair + at_once, planned))
                ahead = [loss for each in pairs for loss in self._pair(entry, sides, sizes, tokens, each, folder)]
            incumbent, proposal = ahead[2 * (pair % at_once) : 2 * (pair % at_once) + 2]
            if math.isfinite(incumbent):
                differences.append(incumbent - proposal)
            peak = max(peak, evidence.e_value(differences, noise, level, planned))
            found = evidence.verdict(differences, noise, level, planned, more=len(entry["earlier"]))
            if found is not None:
                break
        facts = self._facts(entry, differences, noise, level, gain)
        facts |= {"peak": peak, "training": tuned.training}
        if found == "better" and second_size(sizes["proposal"]) is not None:
            facts["sizes"].append(self._at_second_size(entry, sides, sizes, tokens, folder))
            if not facts["sizes"][1]["improvement"] > 0:
                found, facts["evidence"] = "no clear difference", 0.0
        if looks and self.settings.adopt == "leading" and found not in ("better", "worse") and facts["evidence"]:
            lead = evidence.lead(looks, entry["reference"], differences, noise)
            facts |= {"lead": lead * noise.deviation / math.sqrt(2)} if lead >= evidence.LEAD else {}
        if (found == "better" or "lead" in facts) and entry.get("reference") and not ledger.has_adopted(entry):
            seeds = [REFERENCE_SEED + entry["block"] * REFERENCE_RUNS + run for run in range(REFERENCE_RUNS)]
            losses = self._on_tuning_text(tuned, sizes["proposal"], "reference", folder, seeds, tokens)
            facts["reference"] = [loss for loss in losses if math.isfinite(loss)]
        shutil.rmtree(folder / "own", ignore_errors=True)
        return self._sentenced(entry, found or "no clear difference", facts, tokens)

    def _look(
        self,
        entry: Mapping[str, Any],
        proposal: Candidate,
        noise: Noise,
        folder: Path,
        tokens: Mapping[str, int],
        looks: list[float],
    ) -> str | None:
        """What the first runs say; their losses are added to `looks`."""
        while True:
            number = len(looks)
            seed = LOOK_SEED + number * LOOK_SEEDS + entry["block"]
            looks += self._on_tuning_text(proposal, entry["sizes"], "look", folder, [seed], tokens, number)
            if self.settings.adopt == "better":
                return evidence.first_look(looks[0], entry["reference"], noise)
            found = evidence.leading_look(looks, entry["reference"], noise)
            if found != "another run":
                return found

    def _pair(
        self,
        entry: Mapping[str, Any],
        sides: Mapping[str, Candidate],
        sizes: Mapping[str, Sequence[Mapping[str, Any]]],
        tokens: Mapping[str, int],
        pair: int,
        folder: Path,
        is_second: bool = False,
    ) -> list[float]:
        """The losses of incumbent and proposal with the pair's seed on the pair's windows."""
        block, windows = entry["block"], self.ledger.windows
        tasks = [
            self.task(
                side,
                (second_size(sizes[name]) if is_second else None) or first_size(sizes[name]),
                f"{name}-{'second' if is_second else 'pair'}{pair}",
                folder,
                seed=FIRST_SEED + block * windows.pairs + pair,
                span=windows.of_pair(block, pair),
                tokens=tokens[name],
            )
            for name, side in sides.items()
        ]
        return self.losses(tasks)

    def _on_tuning_text(
        self,
        proposal: Candidate,
        sizes: Sequence[Mapping[str, Any]],
        name: str,
        folder: Path,
        seeds: Sequence[int],
        tokens: Mapping[str, int],
        first: int = 0,
    ) -> list[float]:
        """The losses of a proposal's preliminary runs, on the text of calibration; they do not enter the verdict."""
        span = self.ledger.windows.tuning
        return self.losses([
            self.task(
                proposal, first_size(sizes), f"proposal-{name}{run}", folder, seed=seed, span=span,
                tokens=tokens["proposal"],
            )
            for run, seed in enumerate(seeds, first)
        ])  # fmt: skip

    def _at_second_size(self, entry: Any, sides: Any, sizes: Any, tokens: Any, folder: Path) -> dict[str, Any]:
        """The improvement at the second size, from two pairs."""
        pairs = [self._pair(entry, sides, sizes, tokens, pair, folder, is_second=True) for pair in range(SECOND_PAIRS)]
        second = second_size(sizes["proposal"])
        assert second is not None
        improvement = float(np.mean([incumbent - proposal for incumbent, proposal in pairs]))
        return {"parameters": second["parameters"], "tokens": tokens["proposal"], "improvement": improvement}

    def _facts(
        self, entry: Mapping[str, Any], differences: list[float], noise: Noise, level: float, gain: float
    ) -> dict[str, Any]:
        """The numbers of a verdict. gain: of the first look."""
        ends = min(0.05, level) * (2 if noise.own else 1)  # with 2 the lower end is above 0 where the verdict is better
        low, high = evidence.improvement_bounds(differences, noise, ends, self.ledger.windows.pairs)
        mean = float(np.mean(differences)) if differences else gain
        numbers = {"mean": mean, "low": low, "high": high}
        return {
            "improvement": {name: value if math.isfinite(value) else None for name, value in numbers.items()},
            "deviation": noise.deviation,
            "evidence": min(evidence.e_value(differences, noise, level, self.ledger.windows.pairs), 1e12),
            "needed": 1 / level if level > 0 else None,
            "pairs": len(differences),
            "differences": [value if math.isfinite(value) else None for value in differences],
            "settle": evidence.pairs_to_settle(mean, noise, level) if mean > 0 else None,
            "sizes": [
                {
                    "parameters": size["parameters"],
                    "tokens": size["tokens"],
                    "improvement": mean if math.isfinite(mean) else None,
                }
                for size in entry["sizes"][:1]
            ],
        }

    def _refused(self, entry: Mapping[str, Any], rule: str, case: str) -> Verdict:
        sentence = f"{entry['name']} is refused by {rule}: {case.rstrip('.')}."
        return {**_head(self.ledger, entry), "verdict": "refused", "sentence": sentence, "rule": rule, "case": case,
                "incumbent": False}  # fmt: skip

    def _sentenced(
        self, entry: Mapping[str, Any], found: str, facts: dict[str, Any], tokens: Mapping[str, int]
    ) -> Verdict:
        """The verdict with its sentence."""
        name, improvement = entry["name"], facts["improvement"]
        for size in facts["sizes"]:
            size["tokens"] = tokens["proposal"]
        against = f"incumbent {entry['against']}"
        if improvement["mean"] is None:
            amount = "its run diverged"
        else:
            ends = (improvement["low"], improvement["high"])
            bound = "no bound yet" if None in ends else f"{ends[0]:+.4f} to {ends[1]:+.4f}"
            pairs = f"{facts['pairs']} pair{'s' if facts['pairs'] > 1 else ''}" if facts["pairs"] else "a first run"
            amount = f"by {improvement['mean']:+.4f} bits per byte ({bound}), from {pairs}"
        second = facts["sizes"][1] if len(facts["sizes"]) > 1 else None
        where = "".join(
            f"; at {each['parameters']:,} parameters by {each['improvement']:+.4f}" for each in facts["sizes"][1:]
        )
        if found == "better":
            becomes = "is the incumbent already" if self.ledger.has_adopted(entry) else "becomes the incumbent"
            sentence = f"{name} is better than {against} {amount}{where}. It {becomes}."
        elif found == "worse":
            sentence = f"{name} is worse than {against}: {amount}."
        elif second is not None:
            sentence = f"{name}: no clear difference: it wins {amount}, but not at the second size{where}."
        else:
            settle = f"; such a difference is settled by {facts['settle']} pairs" if facts["settle"] else ""
            early = "; more pairs would hardly make it better" if facts["pairs"] < self.settings.pairs else ""
            sentence = f"{name}: no clear difference to {against}: {amount}{settle or early}."
            if "lead" in facts:
                sentence += f" It leads by {facts['lead']:+.4f} and becomes the incumbent, without a claim."
        head = _head(self.ledger, entry)
        is_adopted = (found == "better" or "lead" in facts) and not self.ledger.has_adopted(entry)
        return {**head, "verdict": found, "sentence": sentence, **facts, "incumbent": is_adopted}

    # The stream.

    def level(self) -> tuple[float, int]:
        """The level of the next proposal, and how many proposals were called better."""
        past = []
        for entry in self.ledger.decided:
            if entry["continues"] is not None:
                continue
            chain = [each["verdict"] for each in self.ledger.decided if each["root"] == entry["number"]]
            better = any(verdict["verdict"] == "better" for verdict in chain)
            peak = max((verdict.get("peak", 0.0) for verdict in chain), default=0.0)
            past.append(Decision(entry["level"], entry["found"], peak, better))
        horizon = self.ledger.windows.decisions
        level = evidence.next_level(past, self.settings.alpha, self.settings.rule, horizon)
        return level, sum(decision.better for decision in past)

    def noise(self) -> Noise:
        """The spread of a pair, from calibration and all finished decisions."""
        noise = Noise(*self.ledger.facts["noise"])
        for entry in self.ledger.decided:
            values = entry["verdict"].get("differences", [])[len(entry["earlier"]) :]
            noise = noise.with_pairs([value for value in values if value is not None])
        return noise

    def submit(self, submission: Submission, more: bool = False) -> Verdict:
        """The verdict of a proposal. An unfinished proposal is finished first."""
        ledger = self.ledger
        if ledger.is_open:
            raise CheckpointError(
                f"{ledger.folder}: final has opened its sealed text, so nothing more is judged; make another"
            )
        unfinished = ledger.unfinished
        if unfinished is not None:
            if unfinished["content"] != submission.content:
                progress.print_status(f"proposal {unfinished['number']} was not finished; it is judged first")
            verdict = self.decide(unfinished)
            if unfinished["content"] == submission.content:
                return verdict
        same = [
            entry
            for entry in ledger.entries
            if entry["content"] == submission.content
            and (entry["against"] == ledger.incumbent_number or ledger.has_adopted(entry))
        ]
        if same and not (more and same[-1]["verdict"]["verdict"] == "no clear difference"):
            return dict(same[-1]["verdict"])
        return self.decide(self._fixed(submission, same[-1] if same else None))

    def _fixed(self, submission: Submission, earlier: dict[str, Any] | None) -> dict[str, Any]:
        """Stage and screen a proposal, and record it with its level, seeds and windows."""
        ledger, number = self.ledger, len(self.ledger.entries) + 1
        folder = ledger.proposal_folder(number)
        shutil.rmtree(folder, ignore_errors=True)  # of a submission that was killed before it was fixed
        write_file(folder / PROPOSAL_FILE, submission.text)
        for name, content in submission.files.items():
            write_file(folder / name, content)
        files = listed(folder, submission, ledger.folder)
        write_json_file(folder / CHANGE_FILE, {"change": submission.change, "files": files})
        entry: dict[str, Any] = {
            "event": "proposal", "number": number, "name": submission.name, "content": submission.content,
            "against": ledger.incumbent_number, "refused": None, "block": None, "continues": None, "root": number,
            "earlier": [], "level": None, "found": None,
        }  # fmt: skip
        if earlier is not None:
            entry |= {name: earlier[name] for name in ("candidate", "identity", "sizes", "level", "noise", "found")}
            entry["reference"] = earlier.get("reference")
            differences = earlier["verdict"]["differences"]
            is_over = None in differences or earlier["verdict"]["evidence"] == 0
            entry |= {"continues": earlier["number"], "root": earlier["root"], "earlier": differences}
            if is_over:
                entry["refused"] = ["evidence", f"proposal {earlier['number']} has evidence 0, which no pair can raise"]
        elif submission.refused is not None:
            entry["refused"] = list(submission.refused)
        else:
            screened = self.screened(ledger.incumbent, submission, files, number, self._known())
            entry |= {"refused": None, **screened}
        if entry["refused"] is None and ledger.decisions_left < 1:
            entry["refused"] = ["windows", "no fresh held-out windows are left, so nothing more can be called better"]
        if entry["refused"] is None:
            entry |= {"block": len(ledger.decided)}
            if earlier is not None:  # it may be the incumbent itself by now
                entry |= {name: earlier[name] for name in ("against", "incumbent", "incumbent_sizes")}
            else:
                entry |= {"incumbent": ledger.incumbent.dump(), "incumbent_sizes": self._incumbent_sizes()}
            if earlier is None:
                level, found = self.level()
                entry |= {"level": level, "found": found, "noise": list(astuple(self.noise()))}
                entry["reference"] = ledger.reference
        ledger.record(entry)
        return ledger.entries[-1]

    def _incumbent_sizes(self) -> list[dict[str, Any]]:
        accepted = self.ledger.accepted
        sizes: list[dict[str, Any]] = accepted[-1]["sizes"] if accepted else self.ledger.facts["sizes"]
        return sizes

    def _known(self) -> dict[str, str]:
        """What a proposal must differ from, by identity: the first incumbent, and every earlier proposal.

        An incumbent that a mere lead replaced may be proposed once more.
        """
        incumbent = self.ledger.facts["identity"]
        known = {incumbent: "the first incumbent"}
        for entry in self.ledger.entries:
            if entry.get("identity"):
                known.setdefault(entry["identity"], f"proposal {entry['number']}, {entry['name']}")
            verdict = entry.get("verdict", {})
            if verdict.get("incumbent"):
                if verdict["verdict"] != "better":
                    known.pop(incumbent, None)
                incumbent = entry["identity"]
        return known

    def screened(
        self, base: Candidate, submission: Submission, files: list[list[str]], number: int, known: Mapping[str, str]
    ) -> dict[str, Any]:
        """What `heddle.lab.judge.proposal.screen` says of a change of `base`. files: (file, SHA-256)."""
        settings, facts, root = self.settings, self.ledger.facts, self.ledger.folder.resolve()
        where = self.ledger.proposal_folder(number).resolve()
        request = {
            "folder": str(root),
            "base": base.dump(),
            "name": submission.name,
            "change": submission.change,
            "files": files,
            "number": number,
            "known": known,
            "equal_to": base.design if number and settings.match == "parameters" else None,
            "vocab_size": facts["vocab_size"],
            "budget": facts["budget"],
            "data": list(settings.data),
            "training": self.defaults,
            "sequence_length": settings.sequence_length,
            "second": settings.second,
            "limits": [str(where / "own"), settings.seconds, settings.memory],
        }
        base.part_files(root)  # a file that was changed stops the ledger, not the proposal
        if base.parts or any("/parts/" in file for file, _ in files):
            found = screen_apart(request, where)
            shutil.rmtree(where / "own", ignore_errors=True)
            return found
        with progress.quiet():
            return screen(request)


class RunFailed(Exception):
    """A run of a proposal that ended without a loss: its own code failed, or passed a limit."""


def first_size(sizes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first size; a foreign trainer has none."""
    return sizes[0] if sizes else {"parameters": None, "tokens": None}


def second_size(sizes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return sizes[1] if len(sizes) > 1 else None


def _head(ledger: Ledger, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "number": entry["number"], "name": entry["name"], "against": entry["against"],
        "continues": entry["continues"], "match": ledger.settings.match, "decisions_left": ledger.decisions_left,
    }  # fmt: skip


def _forget_checkpoints(task: Task, result: Mapping[str, Any]) -> None:
    """Remove the folder of a finished run, so that its model cannot be scored on other text."""
    if result["status"] != "failed":
        shutil.rmtree(task.result_file.with_suffix(""), ignore_errors=True)


def listed(folder: Path, submission: Submission, root: Path) -> list[list[str]]:
    """(file below the ledger, SHA-256) of a submission's files."""
    return [
        [(folder / name).relative_to(root).as_posix(), hashlib.sha256(content).hexdigest()]
        for name, content in submission.files.items()
    ]
