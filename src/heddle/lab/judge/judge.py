"""Judge proposals one after another: what `heddle judge` calls."""

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from heddle import progress
from heddle.data.corpus import prepare_corpus
from heddle.errors import CheckpointError, ConfigError, HeddleError, MachineError, pip_install
from heddle.lab.compare.plan import split_designs
from heddle.lab.compare.statistics import seed_half_width
from heddle.lab.judge import evidence
from heddle.lab.judge.decision import Judge, RunFailed, first_size, listed
from heddle.lab.judge.evidence import Noise
from heddle.lab.judge.ledger import (
    AGENTS_FILE,
    CALIBRATION,
    FINAL_SEED,
    Candidate,
    Ledger,
    append,
    check_settings,
    ledger_lines,
    windows_from,
    write_settings,
)
from heddle.lab.judge.proposal import Submission, absolute_sources, read_proposal
from heddle.lab.judge.settings import ACTIONS, ADOPTED, MATCHES, RULES, JudgeSettings
from heddle.lab.pages.judge import PAGE_FILE, judge_page
from heddle.lab.workers import default_workers
from heddle.model.load_config import load_config
from heddle.runtime import Runtime
from heddle.session import open_session
from heddle.settings import SessionSettings, settings_of
from heddle.storage import file_io
from heddle.storage.file_io import read_json_file, write_file
from heddle.storage.lock import RunLock
from heddle.storage.run_log import refuse_other_content, to_plain_json
from heddle.tokenization import DEFAULT_VOCAB_SIZE

# The end of a ledger: the sealed text is opened once, and each accepted change is removed alone.

FIRST, LAST = "first", "last"


def final(judge: Judge) -> dict[str, Any]:
    """Score the first incumbent, the last one, and the last one without each change, on the sealed text; once.

    From the first call on nothing more can be submitted; a later call returns its result, or finishes it.
    """
    ledger = judge.ledger
    if ledger.final is not None:
        return ledger.final
    if ledger.unfinished is not None:
        judge.decide(ledger.unfinished)
    if not ledger.is_open:
        ledger.record({"event": "open"})
    systems, kept = _systems(judge)
    losses = _losses(judge, systems)
    last, removed = losses[LAST], {}
    for entry in ledger.accepted:
        name = str(entry["number"])
        if name in losses:
            removed[name] = {"name": entry["name"], **_difference(losses[name], last)}
        else:
            removed[name] = {"name": entry["name"], "reason": kept.get(name, "it is the only change")}
    result = {
        "event": "final",
        "improvement": _difference(losses[FIRST], last) if LAST in systems else None,
        "removed": removed,
        "pairs": ledger.windows.pairs,
        "by_e_bh": _summary(judge),
    }
    result["sentence"] = _sentence(result)
    ledger.record(result)
    return dict(to_plain_json(result))


def _systems(judge: Judge) -> tuple[dict[str, tuple[Candidate, Any]], dict[str, str]]:
    """(candidate, size) by name: the first and last incumbents, and the last without a change; why others are not."""
    ledger, accepted = judge.ledger, judge.ledger.accepted
    first = Candidate.read(ledger.facts["candidate"])
    systems, reasons = {FIRST: (first, first_size(ledger.facts["sizes"]))}, dict[str, str]()
    systems[LAST] = (ledger.incumbent, first_size(accepted[-1]["sizes"] if accepted else ledger.facts["sizes"]))
    for entry in accepted if len(accepted) > 1 else []:
        number = str(entry["number"])
        rebuilt = _without(judge, first, entry["number"])
        if isinstance(rebuilt, str):
            reasons[number] = rebuilt
        else:
            systems[number] = rebuilt
    return systems, reasons


def _without(judge: Judge, first: Candidate, number: int) -> tuple[Candidate, Any] | str:
    """The last incumbent without one of its changes, and its size; or why it cannot be made."""
    base, sizes = first, judge.ledger.facts["sizes"]
    for entry in judge.ledger.accepted:
        if entry["number"] == number:
            continue
        staged = read_json_file(judge.ledger.proposal_folder(entry["number"]) / "change.json")
        if "trainer" in staged["change"]:
            return "a foreign trainer cannot be split into changes"
        submission = Submission(entry["name"], b"", staged["change"], {})
        screened = judge.screened(base, submission, staged["files"], entry["number"], {})
        if "refused" in screened:
            return f"without it {entry['name']} is refused: {screened['refused'][1]}"
        base, sizes = Candidate.read(screened["candidate"]), screened["sizes"]
    where, size = judge.ledger.folder / "final", first_size(sizes)
    name = f"without{number}"
    return judge.tuned(base, size, name, where, judge.tokens_of(base, size, name, where)), size


def _losses(judge: Judge, systems: dict[str, tuple[Candidate, Any]]) -> dict[str, list[float]]:
    """The losses of each system; every pair has its own seed and its own part of the sealed text."""
    windows, where, tasks = judge.ledger.windows, judge.ledger.folder / "final", []
    for pair in range(windows.pairs):
        for name, (candidate, size) in systems.items():
            label = f"without{name}" if name.isdecimal() else name
            tokens = judge.tokens_of(candidate, size, label, where)
            span, seed = windows.of_final_pair(pair), FINAL_SEED + pair
            task = judge.task(candidate, size, f"{label}-pair{pair}", where, seed=seed, span=span, tokens=tokens)
            tasks.append(task)
    progress.print_status(f"{len(tasks)} runs on the sealed text")
    try:
        losses = judge.losses(tasks)
    except RunFailed as failed:
        raise MachineError(f"{failed}; the same command continues") from None
    return {name: losses[index :: len(systems)] for index, name in enumerate(systems)}


def _difference(worse: Sequence[float], better: Sequence[float]) -> dict[str, float | None]:
    """The mean of worse − better over the pairs, and its 95 % interval by Student's t; None for a diverged run."""
    differences = np.array(worse) - np.array(better)
    if not np.isfinite(differences).all():
        return {"mean": None, "low": None, "high": None}
    half = seed_half_width(differences.tolist())
    mean = float(differences.mean())
    return {"mean": mean, "low": mean - half, "high": mean + half}


def _summary(judge: Judge) -> list[int]:
    """The numbers of the proposals that online e-BH calls better, of all evidence; for this summary only."""
    roots = [entry for entry in judge.ledger.decided if entry["continues"] is None]
    values = []
    for root in roots:
        chain = [entry["verdict"] for entry in judge.ledger.decided if entry["root"] == root["number"]]
        last = chain[-1].get("evidence", 0.0)
        if last and Noise(*root["noise"]).own:
            last = evidence.lifted(max(verdict.get("peak", 0.0) for verdict in chain))
        values.append(last)
    found = evidence.summarize_by_e_bh(values, judge.settings.alpha, judge.ledger.windows.decisions)
    return [root["number"] for root, is_better in zip(roots, found, strict=True) if is_better]


def _sentence(result: dict[str, Any]) -> str:
    """The result on the sealed text, as a sentence."""
    total, removed = result["improvement"], result["removed"]
    if not removed:
        return "No proposal was accepted, so the first incumbent is the last one."
    words = f"On the sealed text the last incumbent is better than the first by {_interval(total)}."
    carries = {each["name"]: each for each in removed.values() if each.get("mean") is not None}
    for name, each in carries.items():
        verb = "still carries" if each["low"] > 0 else "no longer clearly carries"
        words += f" Without {name} it loses {_interval(each)}: it {verb} its weight."
    if len(carries) == len(removed) and total["mean"] is not None:
        apart = sum(each["mean"] for each in carries.values())
        relation = "more than they gain together, so they replace each other in part"
        if apart < total["mean"]:
            relation = "less than they gain together, so none is missed alone as much as it gave"
        spread = sum((each["high"] - each["low"]) / 2 for each in carries.values())
        if abs(apart - total["mean"]) < spread:
            relation = "as much as they gain together, within the intervals"
        words += f" Removed alone, the changes lose {apart:+.4f} in all: {relation}."
    return words


def _interval(each: dict[str, Any]) -> str:
    if each["mean"] is None:
        return "an unknown amount, since a run diverged"
    return f"{each['mean']:+.4f} bits per byte ({each['low']:+.4f} to {each['high']:+.4f})"


VERDICTS = ("better", "no clear difference", "worse", "refused")


def judge(settings: JudgeSettings | str, *words: str | Path, **options: Any) -> Any:
    """Judge proposals as `heddle judge` does, with its options, defaults and output.

    settings: the settings, or an action: `judge("init", "preset:gqa-tiny", out=…)` returns the ledger's first line,
    `judge("submit", "proposal.yaml", out=…)` a verdict. Raises ConfigError for an
    invalid option, and the errors that the command reports.
    """
    if isinstance(settings, str):
        settings = JudgeSettings.read({"action": settings, "words": words, **options})
    if settings.action not in ACTIONS:
        raise ConfigError(f"ACTION {settings.action}: unknown; choices: {', '.join(ACTIONS)}")
    if settings.words and settings.action in ("show", "final", "mcp"):
        raise ConfigError(f"{settings.action}: takes no {settings.words[0]}; leave it out")
    if settings.action == "show":
        return summary(Ledger.open(settings.out))
    if settings.action == "mcp":
        return server(settings).run()
    if settings.action != "init":
        _refuse_options_of_init(settings, Ledger.open(settings.out).settings)  # before a lock makes a folder
    with ExitStack() as stack:
        runtime = open_session(stack, settings)
        stack.enter_context(RunLock(settings.out))
        if settings.action == "init":
            return init(settings, runtime)
        judge = Judge(
            Ledger.open(settings.out), runtime, default_workers(runtime.device, runtime.threads, settings.workers)
        )
        if settings.action == "final":
            result = final(judge)
        elif len(settings.words) != 1:
            raise ConfigError("submit: takes one proposal; give a YAML file")
        else:
            result = judge.submit(read_proposal(Path(settings.words[0])), settings.more)
        write_file(settings.out / PAGE_FILE, judge_page(summary(judge.ledger)))
        return result


def _refuse_options_of_init(settings: JudgeSettings, fixed: JudgeSettings) -> None:
    """Raise ConfigError for an option that `init` has fixed to another value."""
    settings = replace(settings, data=tuple(absolute_sources(settings.data)) if settings.data else ())
    default, free = JudgeSettings(action=settings.action), {each.name for each in fields(SessionSettings)}
    for field in fields(JudgeSettings):
        as_before = getattr(settings, field.name) in (getattr(default, field.name), getattr(fixed, field.name))
        if not as_before and field.name not in free | {"action", "words", "out", "more", "workers", "json"}:
            option = settings_of(JudgeSettings)[field.name].flag
            raise ConfigError(f"{option}: was fixed by `init`; leave it out, or make another ledger")


def server(settings: JudgeSettings) -> Any:
    """The ledger `settings.out` as an `MCPServer`: an agent proposes through tools, without access to the files.

    Its `run()` speaks on stdin and stdout until they are closed. Source: https://modelcontextprotocol.io. Raises
    ConfigError if the library is missing, and CheckpointError if there is no ledger.
    """
    try:
        from mcp.server import MCPServer
    except ImportError:
        raise ConfigError(f"mcp: its library is not installed; {pip_install('mcp')}") from None
    Ledger.open(settings.out)
    protocol: Any = MCPServer("heddle judge", instructions=(settings.out / AGENTS_FILE).read_text(encoding="utf-8"))

    def submit(proposal: str, files: dict[str, str] | None = None, more: bool = False) -> dict[str, Any]:
        """Submit a proposal in YAML and get its verdict. files: the text of each file that it names; more: more pairs.

        A call takes as long as the runs: minutes or more. Repeat an interrupted call to continue it.
        """
        with tempfile.TemporaryDirectory() as folder:
            for name, text in {**(files or {}), "proposal.yaml": proposal}.items():
                if Path(name).name != name or name in ("", ".."):
                    return {"error": f"files: {name!r}: must be a name without folders"}
                Path(folder, name).write_text(text, encoding="utf-8")
            words = (str(Path(folder, "proposal.yaml")),)
            try:
                return dict(judge(replace(settings, action="submit", words=words, more=more, quiet=True)))
            except HeddleError as error:
                return {"error": str(error)}

    def show() -> dict[str, Any]:
        """Every verdict so far, the decisions that are left, and the incumbent: its design in YAML, its files."""
        ledger = Ledger.open(settings.out)
        incumbent = ledger.incumbent
        pairs = [*incumbent.parts, *(incumbent.trainer or {"files": ()})["files"]]
        files = {Path(file).name: settings.out / file for file, _ in pairs}
        return summary(ledger) | {
            "design": None if incumbent.design is None else yaml.safe_dump(incumbent.design, sort_keys=False),
            "training": incumbent.training,
            "files": {name: path.read_text(encoding="utf-8") for name, path in files.items()},
        }

    for tool in (submit, show):
        protocol.tool()(tool)
    return protocol


def summary(ledger: Ledger) -> dict[str, Any]:
    """The stream so far, in plain values."""
    verdicts = [entry["verdict"] for entry in ledger.entries if "verdict" in entry]
    spent = sum(entry["level"] / (1 + entry["found"]) for entry in ledger.decided if entry["continues"] is None)
    return {
        "first": ledger.facts["candidate"]["name"], "incumbent": ledger.incumbent.name,
        "incumbent_number": ledger.incumbent_number, "decisions_left": ledger.decisions_left,
        "alpha": ledger.settings.alpha, "alpha_spent": spent, "rule": ledger.settings.rule,
        "counts": {name: sum(verdict["verdict"] == name for verdict in verdicts) for name in VERDICTS},
        "proposals": verdicts, "final": ledger.final,
    }  # fmt: skip


def describe(result: Mapping[str, Any]) -> list[str]:
    """What `judge` returned, as sentences."""
    if "removed" in result:
        return [result["sentence"]]
    if "sentence" in result:
        return [result["sentence"], f"{result['decisions_left']} decisions left."]
    if "windows" in result:
        windows = result["windows"]
        return [
            f"The incumbent is {result['candidate']['name']}; a pair's difference spreads by {result['noise'][0]:.4f} "
            f"bits per byte. Each of at most {windows['pairs']} pairs reads {windows['each']} fresh windows of "
            f"{windows['length']} tokens.",
            f"{result['decisions_left']} decisions left.",
        ]
    counts = ", ".join(f"{count} {name}" for name, count in result["counts"].items() if count) or "no proposal yet"
    lines = [f"{verdict['number']:>4}  {verdict['sentence']}" for verdict in result["proposals"]]
    return [
        *lines,
        f"The incumbent is {result['incumbent']} ({result['incumbent_number']}). {counts}; {result['alpha_spent']:.4f} "
        f"of alpha {result['alpha']:g} spent; {result['decisions_left']} decisions left.",
    ]


def init(settings: JudgeSettings, runtime: Runtime) -> dict[str, Any]:
    """Make a ledger: calibrate the first incumbent, divide the held-out text, and fix both."""
    folder = settings.out
    check_settings(settings, {"match": MATCHES, "rule": RULES, "adopt": ADOPTED})
    if settings.part:
        raise ConfigError(f"--part {settings.part[0]}: `init` starts from parts of the package; submit the part")
    if ledger_lines(folder):
        raise CheckpointError(f"{folder}: holds a ledger already; submit to it, or name another folder with --out")
    if not (folder / CALIBRATION).is_dir():  # of an interrupted call
        refuse_other_content(folder)
    file_io.make_folder(folder / CALIBRATION)
    first, files = _first_incumbent(settings)
    settings = replace(settings, data=tuple(absolute_sources(settings.data)), words=(), more=False)
    vocab_size = settings.vocab_size
    if first.design is not None and vocab_size is None:
        vocab_size = first.design.get("vocab_size", DEFAULT_VOCAB_SIZE)
    corpus = prepare_corpus(
        settings.data, vocab_size=vocab_size, max_train_tokens=settings.tokens, tokenizer=settings.tokenizer
    )
    for name, content in corpus.tokenizer.to_files().items():
        write_file(folder / name, content)
    count = (len(corpus.validation) - 1) // settings.sequence_length
    facts: dict[str, Any] = {
        "event": "init", "settings": settings.dump() | {"action": "init"}, "text": corpus.hash,
        "vocab_size": corpus.tokenizer.vocab_size, "budget": ["tokens", settings.tokens, settings.tokens],
        "windows": asdict(windows_from(replace(settings, windows=settings.windows or 1), count, 1.0, 0.0)),
    }  # fmt: skip
    workers = default_workers(runtime.device, runtime.threads, settings.workers)
    judge = Judge(Ledger(folder, settings, facts, []), runtime, workers)
    facts["budget"] = judge.budget(first)
    change = {"trainer": first.trainer} if first.trainer else {"design": first.design}
    submission = Submission(first.name, b"", change, {})
    screened = judge.screened(replace(first, trainer=None), submission, files, 0, {})
    if "refused" in screened:
        raise ConfigError(f"{first.name}: is refused by {': '.join(screened['refused'])}; start from another design")
    first, sizes = replace(Candidate.read(screened["candidate"]), changed=()), screened["sizes"]
    first, losses, window_variance = judge.calibrate(first, first_size(sizes))
    noise = evidence.pooled_noise([losses])
    windows = windows_from(settings, count, noise.deviation**2, window_variance)
    deviation = math.sqrt(noise.deviation**2 + window_variance / windows.each)
    facts |= {
        "candidate": first.dump(), "identity": screened["identity"], "sizes": sizes, "windows": asdict(windows),
        "noise": [deviation, noise.degrees, True], "reference": losses,
        "settings_sha256": write_settings(folder, settings),
    }  # fmt: skip
    write_file(folder / AGENTS_FILE, AGENTS.format(out=folder, pairs=settings.pairs, alpha=settings.alpha))
    append(folder, to_plain_json(facts))
    shutil.rmtree(folder / CALIBRATION, ignore_errors=True)
    return dict(to_plain_json(facts)) | {"decisions_left": windows.decisions}


def _first_incumbent(settings: JudgeSettings) -> tuple[Candidate, list[list[str]]]:
    """The incumbent that `init` names, a design or a trainer's YAML file, and the trainer's files."""
    sources, overrides = split_designs(settings.words)
    if len(sources) != 1:
        raise ConfigError("init: takes one design; give a file, preset:NAME or a folder")
    path = Path(sources[0])
    if path.suffix in (".yaml", ".yml") and path.is_file() and "\ntrainer:" in f"\n{path.read_text('utf-8')}":
        submission = read_proposal(path)
        if submission.refused is not None:
            raise ConfigError(f"{path}: is refused by {': '.join(submission.refused)}; give another trainer")
        for name, content in submission.files.items():
            write_file(settings.out / name, content)
        files = listed(settings.out, submission, settings.out)
        return Candidate(submission.name, trainer=submission.change["trainer"]), files
    name = sources[0].removeprefix("preset:") if sources[0].startswith("preset:") else path.stem
    return Candidate(name, design=load_config(sources[0], overrides).dump()), []


AGENTS = """# How to propose a change

A judge decides whether a change makes the incumbent better. You propose; it trains, tests and answers.

1. Write a proposal, a YAML file, with some of these fields:

       name: wider-feedforward
       overrides: [layers.*.feedforward.hidden=320]   # changes of the incumbent's design
       design: mine.yaml                              # or a whole design
       part: my_part.py                               # a part of your own in one file
       training: {{lr: 0.004, optimizer: muon}}         # also schedule, warmup, weight_decay, batch_size, lr_scale
       data: [mine.txt@2, stdlib]                     # sources of training text, with weights

2. Submit it: `heddle judge submit proposal.yaml --out {out} --json`. The answer is one line of JSON. `verdict` is
   refused (`rule` and `case` say why), worse, no clear difference, or better. Where `incumbent` is true it is the
   incumbent from then on, and later overrides apply to it.
3. Exit codes: 0 better, 3 no clear difference, 4 worse, 5 refused, 2 a file or option that cannot be read, 1 a failure
   of the machine. After a kill, submit the same file again: it continues.

A decision takes at most {pairs} pairs of runs, on seeds and held-out windows that nothing has read. `decisions_left`
says how many remain; a refused proposal costs none. What differs from an incumbent or an earlier proposal in names or
seeds only is refused. Of all that is called better, at most a share of {alpha:g} is expected to be false, whatever you
propose. Do not read the held-out text.
"""
