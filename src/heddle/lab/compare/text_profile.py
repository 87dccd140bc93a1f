"""A comparison's text, and losses behind the mean: by position, token frequency and length, and recall in the text.

Every number of a design is compared with the baseline's by `paired_difference`: the same seeds, the same text.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from heddle.data.corpus import Corpus
from heddle.lab.compare.results import (
    DataFacts,
    ExtrapolationFacts,
    FrequencyGroup,
    LengthChange,
    LengthResult,
    ProfileGroups,
    ProfileRow,
    RecallGain,
    Run,
    ScoredRun,
    TextRecallFacts,
    TextRecallRow,
)
from heddle.lab.compare.statistics import TEXT_SPANS, TextSampling, finished_runs, loss_of, paired_difference
from heddle.model.decoder import Decoder
from heddle.training.evaluation.length_extrapolation import ExtrapolationPlan, ExtrapolationResult
from heddle.training.evaluation.loss_profile import LossProfile, frequency_groups, position_edges, token_frequencies
from heddle.training.evaluation.scores import FiniteScores, finite_ratio, ratio_of_sums
from heddle.training.evaluation.text_recall import NEEDLE_TOKENS, TextRecall, TextRecallScores, score_text_recall
from heddle.training.settings import Settings

TEXT_BLOCKS = TextSampling("a bootstrap over blocks of validation windows", 1)  # merged neighbors need no longer blocks
RECALL_DEPTHS = (0.1, 0.5, 0.9)
# Rows of recall together read at most this share of the tokens that a run trains on: about 4 % of its time.
MAX_RECALL_SHARE = 1 / 8
MIN_RECALL_ROWS, MAX_RECALL_ROWS = 4, 32
MAX_EXAMPLES = 4

Scored = Callable[[Run], FiniteScores | None]


def data_facts(names: Sequence[str], corpus: Corpus | None, final_tokens: int) -> DataFacts:
    """The text of a comparison; None for its numbers while it is prepared."""
    if corpus is None:
        return DataFacts(name=", ".join(names))
    return DataFacts(
        name=corpus.name,
        hash=corpus.hash,
        train_bytes=sum(source["train"]["bytes"] for source in corpus.report["sources"]),
        train_tokens=sum(len(file) for file in corpus.train),
        validation_bytes=corpus.report["validation"]["bytes"],
        final_tokens=min(final_tokens, len(corpus.validation)),
        vocab_size=corpus.tokenizer.vocab_size,
        report=corpus.report,
    )


def count_recall_rows(sequence_length: int, train_tokens: int) -> int:
    """How many needles every trained model reads: as many as `MAX_RECALL_SHARE` allows, at least four."""
    affordable = int(MAX_RECALL_SHARE * train_tokens) // (sequence_length * (len(RECALL_DEPTHS) + 3))
    return min(MAX_RECALL_ROWS, max(MIN_RECALL_ROWS, affordable))


def text_recall_rows(corpus: Corpus, sequence_length: int, needles: int) -> TextRecall:
    """The rows that every trained model reads: needles, and twice as many repeated spans."""
    return TextRecall(corpus, sequence_length, spans=2 * needles, needles=needles, depths=RECALL_DEPTHS)


def describe_text_recall(corpus: Corpus, sequence_length: int, needles: int) -> TextRecallFacts:
    """What is read."""
    rows = text_recall_rows(corpus, sequence_length, needles)
    return TextRecallFacts(
        row_length=rows.row_length,
        spans=rows.spans,
        needles=rows.needles,
        depths=list(rows.depths),
        span_length=rows.span_length,
        query_tokens=NEEDLE_TOKENS // 2,
        note=rows.note,
    )


def measure_text_recall(
    model: Decoder, corpus: Corpus, settings: Settings, needles: int, autocast: torch.dtype | None
) -> TextRecallScores | None:
    """The scores of a trained model; None if no needles were requested."""
    if not needles:
        return None
    return score_text_recall(model, text_recall_rows(corpus, settings.sequence_length, needles), autocast)


def start_profile(corpus: Corpus, sequence_length: int) -> LossProfile:
    """The empty loss profile of a run."""
    return LossProfile(position_edges(sequence_length), frequency_groups(token_frequencies(corpus)))


def describe_profile(corpus: Corpus, sequence_length: int) -> ProfileGroups:
    """The groups of the profile."""
    frequencies = token_frequencies(corpus)
    groups = frequency_groups(frequencies)
    edges = position_edges(sequence_length)
    rows = []
    for group in range(int(groups.max()) + 1):
        members = np.flatnonzero(groups == group)
        members = members[np.argsort(-frequencies[members], kind="stable")]
        rows.append(
            FrequencyGroup(
                share=float(frequencies[members].sum()),
                tokens=len(members),
                examples=[_token_text(corpus, int(token)) for token in members[:MAX_EXAMPLES]],
            )
        )
    return ProfileGroups(positions=list(pairwise(edges)), frequencies=rows)


def _token_text(corpus: Corpus, token: int) -> str:
    text = corpus.tokenizer.token_bytes(token).decode("utf-8", errors="replace")
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣")


def profile_rows(runs: Sequence[Run], baseline_runs: Sequence[Run], name: str) -> list[ProfileRow]:
    """A design in each group of the profile: bits_per_byte (mean of the seeds), and the difference to the baseline.

    name: "positions" or "frequencies".
    """
    profiled = [run for run in finished_runs(runs) if run.loss_profile]
    count = len((profiled[0].loss_profile or {})[name]) if profiled else 0

    def scored(group: int) -> Scored:
        return lambda run: run.loss_profile[name][group] if run.loss_profile else None

    return [
        ProfileRow(
            bits_per_byte=_mean_ratio(runs, score),
            difference=paired_difference(_as_runs(runs, score), _as_runs(baseline_runs, score), TEXT_BLOCKS),
        )
        for score in (scored(group) for group in range(count))
    ]


def recall_in_text(runs: Sequence[Run], baseline_runs: Sequence[Run]) -> TextRecallRow | None:
    """A design's recall in held-out text; None where no run measured it."""
    if not any(run.text_recall and run.text_recall.needles for run in finished_runs(runs)):
        return None
    needles: dict[str, tuple[Scored, Scored]] = {
        name: (partial(_over_depths, name=kind, hidden=True), partial(_over_depths, name=kind, hidden=False))
        for name, kind in (("needle", "correct"), ("needle_loss", "losses"))
    }
    pairs = needles | {"span": (_recalled("repeated_spans"), _recalled("first_spans"))}
    rows: dict[str, RecallGain] = {}
    for name, (scores, control) in pairs.items():
        gain = _gain(scores, control)
        rows[name] = RecallGain(
            value=_mean_ratio(runs, scores),
            control=_mean_ratio(runs, control),
            gain=paired_difference(_as_runs(runs, scores), _as_runs(runs, control), TEXT_SPANS),
            difference=paired_difference(_as_runs(runs, gain), _as_runs(baseline_runs, gain), TEXT_SPANS),
        )
    return TextRecallRow(**rows)


def _mean_ratio(runs: Sequence[Run], scored: Scored) -> float | None:
    values = [run.bits_per_byte for run in _as_runs(runs, scored) if run.bits_per_byte is not None]
    return float(np.mean(values)) if values else None


def _as_runs(runs: Sequence[Run], scored: Scored) -> list[ScoredRun]:
    """Scores of the finished runs in the form of runs, for the statistics; pieces without a token are left out."""
    rows = []
    for run in finished_runs(runs):
        scores = [(score, size) for score, size in scored(run) or () if size]
        rows.append(ScoredRun(seed=run.seed, status="done", bits_per_byte=finite_ratio(scores), windows=scores))
    return rows


def _recalled(name: str) -> Scored:
    return lambda run: getattr(run.text_recall, name) if run.text_recall else None


def _over_depths(run: Run, *, name: str, hidden: bool) -> FiniteScores | None:
    """The scores of the rows with needles, averaged over the depths, or of the rows without."""
    if not run.text_recall:
        return None
    chosen = [getattr(needle, name) for needle in run.text_recall.needles if (needle.depth is not None) == hidden]
    rows: FiniteScores = []
    for row in zip(*chosen, strict=True):
        scores = [score for score, _ in row if score is not None]
        rows.append((sum(scores) / len(scores) if len(scores) == len(row) else None, row[0][1]))
    return rows


def _gain(scores: Scored, control: Scored) -> Scored:
    """The scores minus the control's, row by row."""

    def gain(run: Run) -> FiniteScores | None:
        rows, reference = scores(run), control(run)
        if rows is None or reference is None:
            return None
        return [
            (None if score is None or other is None else score - other, size)
            for (score, size), (other, _) in zip(rows, reference, strict=True)
        ]

    return gain


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
