"""Compare designs as `heddle compare` does, from settings: `heddle.compare`."""

import json
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle.errors import ConfigError
from heddle.lab.compare.devices import choose_devices, parse_process_share
from heddle.lab.compare.equal_size import equalize_sizes
from heddle.lab.compare.plan import (
    ComparisonPlan,
    DesignEntry,
    TuningPlan,
    choose_baseline,
    load_entries,
    parse_tuned_fields,
    parse_tuning_budget,
    parse_varied_fields,
    shared_vocab_size,
    split_designs,
    tuned_paths,
)
from heddle.lab.compare.probes import select_probes
from heddle.lab.compare.results import Report, finite, parse, plain
from heddle.lab.compare.run import compare as run_comparison
from heddle.lab.compare.settings import DEFAULT_TUNING_BUDGET, CompareSettings
from heddle.lab.compare.tasks import choose_workers
from heddle.lab.compare.terminal import print_report
from heddle.lab.compare.tuning import check_tuning
from heddle.lab.live import open_live_page
from heddle.notebook import html_table
from heddle.progress import print_text, terminal_safe
from heddle.runtime import Runtime, kind_of_device
from heddle.session import dtype_of, open_session
from heddle.settings import shared
from heddle.tokenization import DEFAULT_VOCAB_SIZE
from heddle.tokenization.tokenizer import Tokenizer
from heddle.training.run import parse_scales, trackers_of, transfer_width_of
from heddle.training.settings import Settings

DEFAULT_TOKENS = 100_000
SPEED_CONTEXTS = (512, 2048, 8192)
SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class ComparedDesigns:
    """A finished comparison. folder: its own, with report.html. report: what report.json holds."""

    folder: Path
    report: dict[str, Any]

    def _repr_html_(self) -> str:
        header = ("design", "parameters", "bits per byte")
        rows = [
            (design["name"], design["parameters"], design["bits_per_byte"]["mean"]) for design in self.report["designs"]
        ]
        return html_table(header, rows, " ".join(self.report["verdict"]))


def compare(*designs: CompareSettings | str | Path, **options: Any) -> ComparedDesigns:
    """Compare designs as `heddle compare` does, with its options, defaults and output.

    designs: files, preset:NAME or folders, of which the first is the baseline, and overrides such as "width=64", which
    apply to all; or the settings of the whole comparison. options: those of the command line, such as `tokens=100_000`
    or `seeds=3`. Raises ConfigError for an option that does not exist or cannot be, and what the command reports.
    """
    if not designs:
        raise ConfigError("designs: are missing; give at least one file, preset:NAME or folder")
    if isinstance(designs[0], CompareSettings):
        return _compare(designs[0])
    return _compare(CompareSettings.read({"designs": designs, **options}))


def _compare(settings: CompareSettings) -> ComparedDesigns:
    with ExitStack() as stack:
        devices = choose_devices(settings.devices, settings.device, settings.workers, settings.nproc)
        share = parse_process_share(settings.share, os.environ)
        device = devices[0] if devices else settings.device
        runtime = open_session(stack, settings, device=device, tf32=settings.tf32, deterministic=settings.deterministic)
        plan = comparison_plan(settings, runtime)
        workers = choose_workers(
            plan, runtime, count=settings.workers, devices=devices, share=share, ranks=settings.nproc
        )
        is_served = settings.open or settings.port is not None or not (settings.quiet or share)
        live = open_live_page(stack, settings.port, settings.open, "the report") if is_served else None
        command = settings.command_line("compare")
        report = run_comparison(plan, settings.out, runtime, command, workers=workers, live=live)
    if settings.json:
        print_text(json.dumps(plain(finite(report)), indent=2))
    else:
        print_report(_terminal_safe(report))
        print_text(f"report: {settings.out / 'report.html'}")
    return ComparedDesigns(settings.out, plain(report))


def comparison_plan(settings: CompareSettings, runtime: Runtime) -> ComparisonPlan:
    """The plan of a comparison. Raises ConfigError for what cannot be, before anything is trained."""
    budget_kind, budget_value = _budget(settings)
    if not 1 <= settings.seeds <= 100:
        raise ConfigError(f"--seeds {settings.seeds}: must be from 1 to 100")
    half_width, time_budget = _stopping(settings)
    probes = select_probes(settings.recall)
    if settings.tokenizer is not None:
        Tokenizer.load(settings.tokenizer)  # one that cannot be read must not become part of a comparison
    scales = parse_scales(settings.lr_scale)
    tuning = _tuning(settings)
    paths = (*scales, *(tuned_paths(tuning.fields) if tuning is not None else ()))
    sources, overrides = split_designs(settings.designs)
    entries = load_entries(sources, overrides, varied_fields=parse_varied_fields(settings.vary), scales=paths)
    baseline = choose_baseline(entries, settings.baseline)
    vocabulary = settings.tokenizer or shared_vocab_size(entries, settings.vocab_size, DEFAULT_VOCAB_SIZE)
    equal = settings.equal
    if equal is not None:
        equal = f"{equal}@{settings.sequence_length}" if equal == "state" else equal
        entries = _equalize(settings, entries, baseline, equal, vocabulary)
    plan = ComparisonPlan(
        **shared(settings, ComparisonPlan)
        | {
            "entries": entries,
            "baseline": baseline,
            "equal_size": equal,
            "data": settings.data or ("stdlib",),
            "budget_kind": budget_kind,
            "budget_value": budget_value,
            "seeds": tuple(range(settings.seeds)),
            "learning_rate": settings.lr,
            "lr_scale": scales,
            "vocab_size": vocabulary if isinstance(vocabulary, int) else None,
            "tokenizer": None if settings.tokenizer is None else os.path.realpath(settings.tokenizer),
            "device": kind_of_device(runtime.device),
            "part_files": tuple(os.path.realpath(file) for file in settings.part),
            "speed_contexts": tuple(sorted(set(settings.speed_context_length or SPEED_CONTEXTS))),
            "recall_probes": probes,
            "max_length_multiple": settings.extrapolate,
            "tuning": tuning,
            "until_resolved": half_width,
            "time_budget": time_budget,
            "transfer_width": transfer_width_of(settings.transfer),
            "trackers": trackers_of(settings.track),
        }
    )
    _check(plan)
    return plan


def _tuning(settings: CompareSettings) -> TuningPlan | None:
    """What is tuned, or None."""
    if not settings.tune:
        if settings.tune_budget is not None:
            raise ConfigError(f"--tune-budget {settings.tune_budget}: nothing is tuned; name a field with --tune")
        return None
    budget = parse_tuning_budget(settings.tune_budget or DEFAULT_TUNING_BUDGET)
    return TuningPlan(parse_tuned_fields(settings.tune), *budget)


def parse_duration(text: str, option: str) -> float:
    """Seconds of a time such as 90s, 30m or 1.5h. Raises ConfigError naming the option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    seconds = float(match[1]) * SECONDS_PER_UNIT[match[2]] if match else 0.0
    if not seconds:
        raise ConfigError(f"{option} {text}: must be a time above 0, such as 90s, 30m or 2h")
    return seconds


def _stopping(settings: CompareSettings) -> tuple[float | None, float | None]:
    """(the half-width at which a comparison stops, its budget in seconds); None where it has a number of seeds."""
    until_resolved, budget = settings.until_resolved, settings.budget
    if until_resolved is None:
        if budget is not None:
            raise ConfigError(f"--budget {budget}: limits --until-resolved; give both, or neither")
        return None, None
    if not 0 < until_resolved < float("inf"):
        raise ConfigError(f"--until-resolved {until_resolved:g}: must be a number of bits per byte above 0")
    if settings.seeds < 2:
        raise ConfigError(f"--seeds {settings.seeds}: must be at least 2 with --until-resolved, which starts with them")
    return until_resolved, None if budget is None else parse_duration(budget, "--budget")


def _budget(settings: CompareSettings) -> tuple[str, float]:
    """The unit of the training budget ("tokens", "seconds" or "flops") and its amount, for each run."""
    options = {"tokens": settings.tokens, "seconds": settings.seconds, "flops": settings.flops}
    budgets: dict[str, float] = {kind: value for kind, value in options.items() if value is not None}
    if len(budgets) > 1:
        flags = " and ".join(f"--{kind}" for kind in budgets)
        raise ConfigError(f"{flags}: all set the length of the training; give one of them")
    kind, value = next(iter(budgets.items()), ("tokens", float(DEFAULT_TOKENS)))
    if not 0 < value < float("inf"):
        raise ConfigError(f"--{kind} {value:g}: must be a number above 0")
    return kind, value


def _terminal_safe(report: Report) -> Report:
    """The same report with every text safe to print."""
    return parse(Report, _safe(plain(report)))


def _safe(data: Any) -> Any:
    if isinstance(data, dict):
        return {_safe(key): _safe(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_safe(value) for value in data]
    return terminal_safe(data) if isinstance(data, str) else data


def _equalize(
    settings: CompareSettings,
    entries: tuple[DesignEntry, ...],
    baseline: str,
    kind: str,
    vocabulary: Path | int,
) -> tuple[DesignEntry, ...]:
    """The entries with new widths, or with new fields of mixers, such that all designs have the same size."""
    length = settings.sequence_length
    if length < 1:  # sizes are measured at this length, before the plan is checked
        raise ConfigError(f"--sequence-length {length}: must be at least 1")
    vocab_size = Tokenizer.load(vocabulary).vocab_size if isinstance(vocabulary, Path) else vocabulary
    return equalize_sizes(entries, baseline, kind, vocab_size, length, dtype_of(settings.precision))


def _check(plan: ComparisonPlan) -> None:
    """Raise ConfigError for a setting that training would refuse, before any training starts."""
    Settings(steps=1, **shared(plan, Settings))
    multiple = plan.max_length_multiple
    if multiple < 1 or multiple & (multiple - 1):
        raise ConfigError(f"--extrapolate {multiple}: must be a power of two; 1 turns the test off")
    if min(plan.speed_contexts) < 1:
        raise ConfigError("--speed-context-length: must be at least 1")
    check_tuning(plan)
