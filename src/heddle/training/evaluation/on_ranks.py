"""An evaluation whose batches are divided among ranks. Each batch is computed whole on one, with one process's bits."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch.nn import functional

from heddle.data.samples import Batch
from heddle.distributed.ranks import Ranks
from heddle.model.decoder import Decoder
from heddle.training.evaluation.bits_per_byte import EvaluationBatch, TokenObserver, TokenScores
from heddle.training.evaluation.scores import Scores

Evaluate = Callable[[Sequence[Batch], TokenObserver | None], Scores]


def scores_on_ranks(
    model: Decoder, batches: Iterable[Batch], evaluate: Evaluate, ranks: Ranks, observer: TokenObserver | None = None
) -> Scores:
    """Return the scores of all batches in their order, on each rank. `evaluate`: of batches, by a sharded model.

    Its layers are gathered by all ranks at once: where batches are fewer than ranks, some compute the last one again.
    Layers that were compiled in place run uncompiled, as on one process. observer: gets all batches on each rank.
    """
    from heddle.distributed.sharding import reshard

    scores: Scores = []
    with torch.compiler.set_stance("force_eager"):
        for group in _groups(batches, ranks.count):
            seen: list[TokenScores] = []

            def observe(_: EvaluationBatch, tokens: TokenScores, seen: list[TokenScores] = seen) -> None:
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
    table = torch.stack((own.nats.cpu(), own.sizes.double().cpu()))  # float64 has every size
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
