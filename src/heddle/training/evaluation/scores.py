"""Scores as pairs of sums: a numerator and a denominator for each evaluated window or row."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from heddle.data.samples import Batch
from heddle.distributed.ranks import Ranks
from heddle.model.decoder import Decoder
from heddle.numerics.cross_entropy import token_losses
from heddle.numerics.transfer import to_device
from heddle.parts.layout import Layout
from heddle.storage.run_log import read_log

# (bits, bytes) of each window of text, or (correct answers, scored targets) of each row of a task
Scores = list[tuple[float, int]]
# the same in JSON: None for a non-finite score
FiniteScores = list[tuple[float | None, int]]


def ratio_of_sums(scores: Scores) -> float:
    """Return the sum of the numerators over the sum of the denominators; nan if the denominators are 0."""
    numerator, denominator = sum(score for score, _ in scores), sum(size for _, size in scores)
    return numerator / denominator if denominator else math.nan


def finite_ratio(scores: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the ratio of sums; None if there are no scores, or if one is not finite."""
    pairs = list(scores)
    denominator = sum(size for _, size in pairs)
    if not denominator or any(score is None for score, _ in pairs):
        return None
    return sum(score for score, _ in pairs if score is not None) / denominator


def finite_scores(scores: Scores) -> FiniteScores:
    """Return the scores with None for non-finite numbers, which JSON cannot express."""
    return [(score if math.isfinite(score) else None, size) for score, size in scores]


def row_sums(values: np.ndarray, sizes: np.ndarray) -> Scores:
    """Return the score of each row of float64 and int64 [B, T]."""
    return list(zip(values.sum(1).tolist(), sizes.sum(1).tolist(), strict=True))


# Bits per byte: `Σ loss / ln 2 / Σ bytes` over the tokens of a text. End tokens add neither bits nor bytes.


class TokenScores(NamedTuple):
    """For every target of a batch: its loss in nats, float64 [B, T], and its bytes, int64 [B, T].

    Both are 0 where nothing is scored. An end token has no loss, and 0 or −1 bytes. correct: bool [B, T], whether the
    target is the most likely token of the whole vocabulary; None unless requested.
    """

    nats: Tensor
    sizes: Tensor
    correct: Tensor | None = None


# Called with each batch of an evaluation and the scores of its tokens.
TokenObserver = Callable[[Batch, TokenScores], None]


def bits_and_bytes(
    model: Decoder,
    batches: Iterable[Batch],
    byte_lengths: np.ndarray,
    autocast: torch.dtype | None = None,
    observer: TokenObserver | None = None,
) -> Scores:
    """Return (bits, bytes) of each row. Runs in eval mode and restores the model's mode.

    byte_lengths: int [vocab], the bytes of each token. Tokens of 0 or −1 bytes (end tokens) add no bits.
    """
    scores: Scores = []
    for batch, tokens in token_scores(model, batches, byte_lengths, autocast):
        sums = torch.stack((tokens.nats.sum(1) / math.log(2), tokens.sizes.sum(1).double()), dim=1)
        scores += [(row_bits, int(row_bytes)) for row_bits, row_bytes in sums.tolist()]
        if observer is not None:
            observer(batch, tokens)
    return scores


def token_scores(
    model: Decoder,
    batches: Iterable[Batch],
    byte_lengths: np.ndarray,
    autocast: torch.dtype | None = None,
    *,
    with_correct: bool = False,
) -> Iterator[tuple[Batch, TokenScores]]:
    """Yield each batch and the scores of its tokens, which `bits_and_bytes` adds up. with_correct: fill `correct`."""
    device = model.embed.weight.device
    token_bytes = to_device(torch.from_numpy(np.asarray(byte_lengths, dtype=np.int64)), device)
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            # Copies, since the arrays may be read-only. Scored targets are counted on the host, which has them.
            on_host = (batch.tokens, batch.targets, np.flatnonzero(np.asarray(batch.targets) >= 0))
            tokens, targets, scored = (to_device(torch.tensor(array, device="cpu"), device) for array in on_host)
            layout = Layout.packed(batch.doc_lengths, targets.shape[1], device)
            correct = torch.zeros_like(targets, dtype=torch.bool) if with_correct else None
            with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                hidden, _ = model(tokens[:, :-1], layout)
                hidden, target_tokens = hidden.flatten(0, 1)[scored], targets.flatten()[scored]
                nats = torch.zeros(targets.shape, dtype=torch.float64, device=device)
                nats.view(-1)[scored] = token_losses(hidden, model.head.output_head, target_tokens).double()
                if correct is not None:
                    correct.view(-1)[scored] = model.head(hidden).argmax(-1) == target_tokens
            sizes = token_bytes[targets.clamp(min=0)] * (targets >= 0)
            yield batch, TokenScores(nats * (sizes > 0), sizes, correct)
    finally:
        model.train(was_training)


def token_bits(scores: TokenScores) -> np.ndarray:
    """Return the loss of each token in bits, float64 [B, T]."""
    bits: np.ndarray = scores.nats.cpu().numpy() / math.log(2)
    return bits


# Task accuracy: the fraction of scored targets that are the model's most likely token of the whole vocabulary.


def correct_predictions(model: Decoder, batches: Iterable[Batch], autocast: torch.dtype | None = None) -> Scores:
    """Return (correct answers, scored targets) of each row. Runs in eval mode and restores the model's mode."""
    device = model.embed.weight.device
    was_training = model.training
    model.eval()
    scores: Scores = []
    try:
        for batch in batches:
            on_host = (batch.tokens, batch.targets, np.flatnonzero(np.asarray(batch.targets) >= 0))
            tokens, targets, scored = (to_device(torch.tensor(array, device="cpu"), device) for array in on_host)
            layout = Layout.packed(batch.doc_lengths, device=device)
            if batch.coordinates is not None:
                layout = layout.with_coordinates(to_device(torch.tensor(batch.coordinates, device="cpu"), device))
            with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                hidden, _ = model(tokens[:, :-1], layout)
                correct = torch.zeros_like(targets, dtype=torch.bool)
                predictions = model.head(hidden.flatten(0, 1)[scored]).argmax(-1)
                correct.view(-1)[scored] = predictions == targets.flatten()[scored]
            sums = torch.stack((correct.sum(1), (targets >= 0).sum(1)), dim=1)
            scores += [(float(num_correct), num_scored) for num_correct, num_scored in sums.tolist()]
    finally:
        model.train(was_training)
    return scores


# Evaluation with its batches divided among ranks. One rank computes a whole batch, bit-equal to one process.


Evaluate = Callable[[Sequence[Batch], TokenObserver | None], Scores]


def scores_on_ranks(
    model: Decoder, batches: Iterable[Batch], evaluate: Evaluate, ranks: Ranks, observer: TokenObserver | None = None
) -> Scores:
    """Return the scores of all batches in their order, on each rank. evaluate: scores batches with the sharded model.

    All ranks gather its layers together: if there are fewer batches than ranks, some compute the last batch again.
    Layers that were compiled in place run uncompiled, as on one process. observer: gets all batches on each rank.
    """
    from heddle.distributed.sharding import reshard

    scores: Scores = []
    with torch.compiler.set_stance("force_eager"):
        for group in _groups(batches, ranks.count):
            seen: list[TokenScores] = []

            def observe(_: Batch, tokens: TokenScores, seen: list[TokenScores] = seen) -> None:
                seen.append(tokens)

            own = evaluate([group[min(ranks.rank, len(group) - 1)]], None if observer is None else observe)
            table = torch.zeros(max(len(batch.tokens) for batch in group), 2, dtype=torch.float64)
            table[: len(own)] = torch.tensor(own, dtype=torch.float64)
            for batch, rows in zip(group, ranks.gather(table).tolist(), strict=False):
                scores += [(score, int(size)) for score, size in rows[: len(batch.tokens)]]
            if observer is not None:
                for batch, tokens in zip(group, _gather_tokens(group, seen[0], ranks), strict=False):
                    observer(batch, tokens)
    reshard(model)
    return scores


def _gather_tokens(group: Sequence[Batch], own: TokenScores, ranks: Ranks) -> list[TokenScores]:
    """The token scores of a group's batches, without `correct`, on each rank."""
    rows, columns = (max(batch.targets.shape[dim] for batch in group) for dim in (0, 1))
    table = torch.stack((own.nats.cpu(), own.sizes.double().cpu()))  # float64 holds every size exactly
    table = functional.pad(table, (0, columns - table.shape[2], 0, rows - table.shape[1]))
    gathered = []
    for batch, (nats, sizes) in zip(group, ranks.gather(table), strict=False):
        rows, columns = batch.targets.shape
        gathered.append(TokenScores(nats[:rows, :columns], sizes[:rows, :columns].long()))
    return gathered


def _groups(batches: Iterable[Batch], count: int) -> Iterator[list[Batch]]:
    iterator = iter(batches)
    while group := list(islice(iterator, count)):
        yield group


# How much text evaluations during training read, and when training ends early because a task is solved or hopeless.


SOLVED_EVALUATIONS = 2  # in a row: a single one may be chance


@dataclass(frozen=True)
class EvaluationBudget:
    """Not part of a run's identity, because evaluations change no weights; `solved_accuracy` only ends it early.

    interim_tokens: held-out tokens per evaluation during training; final_tokens: of the final evaluation; None: the
    loop's defaults. solved_accuracy: training on a task ends once two evaluations in a row reach it.
    hopeless_accuracy: training on a task ends if an evaluation from `hopeless_steps` on does not exceed it.
    """

    interim_tokens: int | None = None
    final_tokens: int | None = None
    solved_accuracy: float | None = None
    hopeless_accuracy: float | None = None
    hopeless_steps: int = 0


class EarlyStop:
    """Decides after each evaluation whether training on a task may end because it is solved or hopeless."""

    def __init__(self, budget: EvaluationBudget) -> None:
        self.budget = budget
        self.solved_count = 0  # evaluations in a row
        self.is_hopeless = False

    @classmethod
    def of_run(cls, budget: EvaluationBudget, run: Path) -> "EarlyStop":
        """Restore the state from a run's log: a resumed run stops where an uninterrupted one would."""
        stop = cls(budget)
        for line in read_log(run) if stop._is_active else []:
            stop.add(line)
        return stop

    def add(self, line: Mapping[str, Any]) -> None:
        """Count the evaluation in a line of the log, if it has one."""
        if not self._is_active or self.is_over or "validation_accuracy" not in line:
            return
        accuracy, budget = line["validation_accuracy"] or 0.0, self.budget
        is_solved = budget.solved_accuracy is not None and accuracy >= budget.solved_accuracy
        self.solved_count = self.solved_count + 1 if is_solved else 0
        if budget.hopeless_accuracy is not None and line["step"] >= budget.hopeless_steps:
            self.is_hopeless = accuracy <= budget.hopeless_accuracy

    @property
    def is_over(self) -> bool:
        """Return whether training may end."""
        return self.is_hopeless or self.solved_count >= SOLVED_EVALUATIONS

    @property
    def _is_active(self) -> bool:
        return self.budget.solved_accuracy is not None or self.budget.hopeless_accuracy is not None
