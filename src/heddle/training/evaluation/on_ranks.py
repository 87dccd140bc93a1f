"""An evaluation whose batches are divided among ranks. Each batch is computed whole on one, with one process's bits."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import torch

from heddle.data.samples import Batch
from heddle.distributed.ranks import Ranks
from heddle.model.decoder import Decoder
from heddle.training.evaluation.scores import Scores


def scores_on_ranks(
    model: Decoder, batches: Iterable[Batch], evaluate: Callable[[Sequence[Batch]], Scores], ranks: Ranks
) -> Scores:
    """Return the scores of all batches in their order, on each rank. `evaluate`: of batches, by a sharded model.

    Its layers are gathered by all ranks at once: where batches are fewer than ranks, some compute the last one again.
    Layers that were compiled in place run uncompiled, as on one process.
    """
    from heddle.distributed.sharding import reshard

    scores: Scores = []
    with torch.compiler.set_stance("force_eager"):
        for group in _groups(batches, ranks.count):
            own = evaluate([group[min(ranks.rank, len(group) - 1)]])
            table = torch.zeros(max(len(batch.tokens) for batch in group), 2, dtype=torch.float64)
            table[: len(own)] = torch.tensor(own, dtype=torch.float64)
            for batch, rows in zip(group, ranks.gather(table).tolist(), strict=False):
                scores += [(score, int(size)) for score, size in rows[: len(batch.tokens)]]
    reshard(model)
    return scores


def _groups(batches: Iterable[Batch], count: int) -> Iterator[list[Batch]]:
    iterator = iter(batches)
    while group := list(islice(iterator, count)):
        yield group
