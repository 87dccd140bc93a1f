"""The recall tasks of a comparison: which are worth training, and which distinguish the designs.

`auto` trains only tasks that may distinguish the designs. Before any training it leaves out

- a task for which the small copies of all designs are equal, but for windows that hide nothing in its sequences,
- all tasks, if every design's state keeps all tokens of a sequence: such designs recall equally well, and none of them
  tracks a state (Hahn 2020; Merrill & Sabharwal 2023),
- a task with which a design's tests would read more than `MAX_TOKEN_SHARE` times its own training tokens,
- S5, which no kind of mixer learns within the budget of a probe.

Equal copies are trained once. All copies read the same sequences in the same order. A run ends early once the task is
solved, or when it is hopeless: after `HOPELESS_STEPS` of the budget the accuracy is still at chance. A task that all
designs solve, or none, is reported in one line and not plotted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heddle.config import DesignError
from heddle.data.corpus import Corpus
from heddle.errors import ConfigError
from heddle.lab.compare.equal_size import with_mixers
from heddle.lab.compare.probes import AUTO, RECALL_PROBES, RecallProbe
from heddle.lab.compare.results import (
    ExtrapolationFacts,
    LeftOutProbe,
    LengthChange,
    LengthResult,
    ProbeResult,
    ProbeSummary,
    Report,
    Run,
    ScoredRun,
)
from heddle.lab.compare.statistics import TEXT_SPANS, finished_runs, loss_of, paired_difference
from heddle.lab.compare.tables import format_percent, join_names
from heddle.model.config import ModelConfig
from heddle.model.size import state_bytes
from heddle.parts.mixers import MixerConfig
from heddle.training.evaluation.length_extrapolation import ExtrapolationPlan, ExtrapolationResult
from heddle.training.evaluation.scores import ratio_of_sums

MAX_TOKEN_SHARE = 2.0
SKIPPED_PROBES = ("s5",)
MIN_DIFFERENCE_SHARE = 0.1  # of the way from guessing to a perfect score, between the best and the worst design
SOLVED_SHARE = 0.9  # of that way: from there on a task counts as learned


@dataclass(frozen=True)
class TaskChoice:
    """Whether a task is trained. reason: why it is not, or "".

    copies: by design, the design that provides the small copy: itself, or an earlier one with an equal copy.
    """

    probe: str
    copies: Mapping[str, str]
    reason: str = ""


def choose_tasks(designs: Mapping[str, ModelConfig], requested: Sequence[str], train_tokens: float) -> list[TaskChoice]:
    """Decide on each task before anything is trained.

    designs: configs by name, each with a vocabulary size. requested: "auto", or names of probes, which are all trained.
    train_tokens: tokens that a design reads in all of its training runs together.
    """
    choices = []
    for requested_name in requested:
        if requested_name != AUTO:
            choices.append(_choose_task(designs, requested_name))
            continue
        affordable = MAX_TOKEN_SHARE * train_tokens
        for name in RECALL_PROBES:
            choice = _choose_task(designs, name, affordable)
            affordable -= 0 if choice.reason else _tokens(RECALL_PROBES[name])
            choices.append(choice)
    return choices


def _tokens(probe: RecallProbe) -> int:
    """Training tokens of a copy that does not stop early."""
    return probe.steps * probe.batch_size * probe.task_stream.length


def _choose_task(designs: Mapping[str, ModelConfig], name: str, affordable: float | None = None) -> TaskChoice:
    """Decide on one task. affordable: tokens that a copy may still read; None: the task was requested by name."""
    probe = RECALL_PROBES[name]
    length, copies = probe.task_stream.length, {each: _copy_or_none(probe, config) for each, config in designs.items()}
    built = [copy for copy in copies.values() if copy is not None]
    seen = {design: copy and _without_long_windows(copy, length) for design, copy in copies.items()}
    first_equal = {
        design: design if copy is None else next(other for other, its_copy in seen.items() if its_copy == copy)
        for design, copy in seen.items()
    }
    if affordable is None:
        return TaskChoice(name, first_equal)
    reason = ""
    if len(set(first_equal.values())) == 1 and len(designs) > 1:
        reason = "the small copies of all designs are equal"
        if any(copy != built[0] for copy in built):
            reason += f": their windows hide none of its {length} tokens"
    elif built and all(keeps_every_token(copy, length) for copy in built):
        reason = "every design keeps all tokens of a sequence"
    elif name in SKIPPED_PROBES:
        reason = "no kind of mixer learns it within this budget"
    elif _tokens(probe) > affordable:
        reason = f"all tests together may read at most {MAX_TOKEN_SHARE:g} times a design's training tokens"
    return TaskChoice(name, first_equal, reason)


def _copy_or_none(probe: RecallProbe, config: ModelConfig) -> ModelConfig | None:
    """The small copy of a design; None if it cannot be built (its training reports why)."""
    try:
        return probe.small_copy(config)
    except DesignError:
        return None


def _without_long_windows(copy: ModelConfig, length: int) -> ModelConfig:
    """A copy as it acts on `length` tokens: without windows that hide none of them, each layer written out."""

    def widened(mixer: MixerConfig) -> MixerConfig:
        values = {name: getattr(mixer, name) for name in type(mixer).model_fields}
        changes: dict[str, Any] = {
            name: widened(each) for name, each in values.items() if isinstance(each, MixerConfig)
        }
        if (values.get("window") or 0) >= length:
            changes |= {name: value for name, value in {"window": None, "chunked": False}.items() if name in values}
        return mixer.replace(**changes)

    try:
        copy = copy if any(copy.looped_layers) else with_mixers(copy, widened)
        return copy.replace(layers=tuple(layer.replace(repeat=1) for _, layer in copy.expand()))
    except DesignError:  # a field needs its window
        return copy


def keeps_every_token(config: ModelConfig, length: int) -> bool:
    """Whether a design's state still grows at the last of `length` tokens, so that a layer keeps all."""
    try:
        return state_bytes(config, length) > state_bytes(config, length - 1)
    except ConfigError:  # beyond its learned positions
        return True


def solved_accuracy(chance: float) -> float:
    """The accuracy at which a task counts as learned."""
    return chance + SOLVED_SHARE * (1 - chance)


def describe_results(accuracies: Mapping[str, float | None], chance: float) -> str:
    """Why a task does not distinguish the designs; "" if it does, or if only one design was measured.

    accuracies: by design; None if not measured. A task is plotted only if the best and the worst design are more than
    `MIN_DIFFERENCE_SHARE` of the way from chance to a perfect score apart.
    """
    measured = {name: accuracy for name, accuracy in accuracies.items() if accuracy is not None}
    if len(measured) < 2 or len(measured) < len(accuracies):
        return ""
    low, high = min(measured.values()), max(measured.values())
    if high - low > MIN_DIFFERENCE_SHARE * (1 - chance):
        return ""
    span = " to ".join(dict.fromkeys(map(format_percent, (low, high))))
    if low >= solved_accuracy(chance):
        return f"every design learned it ({span})"
    if high <= chance + MIN_DIFFERENCE_SHARE * (1 - chance):
        return f"no design learned it within the budget ({span}, guessing {format_percent(chance)})"
    return f"all designs score alike ({span}, guessing {format_percent(chance)})"


def summarize_abilities(
    choices: Sequence[TaskChoice], results: Mapping[str, Mapping[str, ProbeResult]], is_auto: bool
) -> tuple[dict[str, ProbeSummary], list[LeftOutProbe]]:
    """The recall probes that are plotted, and the ones left out.

    results: by design and probe, for every probe that was trained. is_auto: leave out probes that do not distinguish
    the designs.
    """
    drawn: dict[str, ProbeSummary] = {}
    left_out = []
    for choice in choices:
        summary = RECALL_PROBES[choice.probe].summary()
        of_probe = {name: of_design.get(choice.probe) for name, of_design in results.items()}
        accuracies = {name: None if result is None else result.accuracy for name, result in of_probe.items()}
        unfinished = any(result is None for result in of_probe.values())
        reason = choice.reason or (describe_results(accuracies, summary.chance) if is_auto else "")
        if choice.reason or (reason and not unfinished):
            trained = accuracies if any(result is not None for result in of_probe.values()) else {}
            left_out.append(LeftOutProbe(name=choice.probe, title=summary.title, reason=reason, accuracies=trained))
        else:
            drawn[choice.probe] = summary
    return drawn, left_out


def left_out_sentences(report: Report) -> list[str]:
    """A sentence for each reason why tasks are left out: "Not tested: MQAR, Copying: every design keeps …"."""
    titles: dict[tuple[str, str], list[str]] = {}
    for row in report.recall_left_out:
        finished = {name: value for name, value in row.accuracies.items() if value is not None}
        state = "tested, not plotted" if finished else "not tested"
        if 0 < len(finished) < len(row.accuracies):
            scores = (f"{name}, {format_percent(value)} correct" for name, value in finished.items())
            state = f"finished only for {join_names(scores, 8)}"
        titles.setdefault((row.reason, state), []).append(row.title)
    return [f"{join_names(names, 8)}: {state}, because {reason}." for (reason, state), names in titles.items()]


def window_sentences(report: Report) -> list[str]:
    """Caveats on designs whose windows are too long for a task to show them."""
    sentences = []
    for design in report.designs:
        titles: dict[int, list[str]] = {}
        for probe in report.recall.values():
            if design.windows and min(design.windows) >= probe.sequence_length:
                titles.setdefault(probe.sequence_length, []).append(probe.title)
        sentences += [
            f"{design.name}: its window of {min(design.windows)} hides none of the {length} tokens of "
            f"{join_names(names, 8)}, which therefore says nothing about the window."
            for length, names in titles.items()
        ]
    return sentences


# Length extrapolation: a design's mean loss at each multiple of the trained length, and its paired change.


def length_result(result: ExtrapolationResult) -> LengthResult:
    """The result at one multiple, as stored in a run."""
    return LengthResult(
        multiple=result.multiple,
        status="done" if result.refusal is None else "refused",
        message=result.refusal,
        bits_per_byte=ratio_of_sums(result.scores) if result.scores else None,
        windows=result.scores,
    )


def extrapolation_facts(plan: ExtrapolationPlan, corpus: Corpus | None) -> ExtrapolationFacts:
    """What was read at multiples of the trained length.

    corpus: None until it is prepared. `multiples` is empty if nothing was read; `note` says why less was read than
    requested.
    """
    size = 0
    if corpus is not None:
        targets = [corpus.validation.read(start + 1, start + plan.span_length + 1) for start in plan.starts]
        size = sum(int(corpus.tokenizer.byte_lengths[tokens].sum()) for tokens in targets)
    return ExtrapolationFacts(
        sequence_length=plan.sequence_length,
        multiples=list(plan.multiples),
        spans=len(plan.starts),
        documents=plan.document_count,
        tokens=len(plan.starts) * plan.span_length,
        bytes=size,
        note=plan.note,
    )


def length_changes(runs: Sequence[Run], multiples: Sequence[int]) -> list[LengthChange]:
    """A design's mean bits per byte at each multiple, and the change from the trained length, paired by seed."""
    finished = finished_runs(runs)
    trained_length = _runs_at(finished, 1)
    rows = []
    for multiple in multiples:
        at_multiple = _runs_at(finished, multiple)
        values = [loss_of(run) for run in finished_runs(at_multiple)]
        refusals = [run.message for run in at_multiple if run.status == "refused"]
        rows.append(
            LengthChange(
                multiple=multiple,
                bits_per_byte=sum(values) / len(values) if values else None,
                change=paired_difference(at_multiple, trained_length, TEXT_SPANS) if multiple > 1 else None,
                not_finite=len(at_multiple) - len(values) - len(refusals),
                refusal=refusals[0] if refusals else None,
            )
        )
    return rows


def _runs_at(runs: Sequence[Run], multiple: int) -> list[ScoredRun]:
    """The results at one multiple in the form of runs."""
    results = [(run.seed, result) for run in runs for result in run.extrapolation if result.multiple == multiple]
    return [
        ScoredRun(
            seed=seed,
            status=result.status,
            message=result.message,
            bits_per_byte=result.bits_per_byte,
            windows=result.windows,
        )
        for seed, result in results
    ]
