"""Write one folder from many ranks: each rank writes a file with its own rows, and rank 0 writes the manifest, last.

A rank writes whole blocks of rows (docs/decisions/034-format-2.md), so that a tensor's hash does not depend on the
ranks. If ranks' rows are not aligned to blocks, as for small tensors, the tensor is gathered first. Rows that several
ranks hold are written by the rank with the least to write.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from heddle.distributed.ranks import Ranks, call_on_all, gather_texts, held_rows, local_part, whole
from heddle.errors import CheckpointError
from heddle.storage import file_io
from heddle.storage.folder import check_documents, finish_folder, staged_folder
from heddle.storage.manifest import (
    FileRecord,
    LogPosition,
    Manifest,
    parse_file_record,
    parse_json_object,
    row_layout,
    rows_per_block,
)
from heddle.storage.tensor_file import (
    DTYPE_NAMES,
    DTYPES,
    SUFFIX,
    RowSlice,
    check_tensors,
    find_tensor_sets,
    index_name,
    index_of,
    natural_order,
    shard_name,
    write_tensor_file,
)


class HeldTensor(NamedTuple):
    """A rank's rows of a tensor: `start` to `stop`. A scalar has one row."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorPlan(NamedTuple):
    """Which rank writes which rows of a tensor. is_gathered: the tensor is gathered on all ranks first."""

    shape: tuple[int, ...]
    is_gathered: bool
    rows: Mapping[int, range]


def write_rank_folder(
    folder: Path,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    documents: Mapping[str, str],
    kind: str,
    ranks: Ranks,
    log: LogPosition | None = None,
    lock: bool = True,
) -> None:
    """Write a folder as `write_folder` does, from all ranks together; they must share a file system.

    tensors: this rank's, sharded over the ranks by rows, or whole and equal on all ranks that have them. documents,
    kind, log: of rank 0. If one rank fails, all raise its error and the folder is unchanged.
    """
    documents_in_utf8 = check_documents(folder, tensors, documents, kind)
    call_on_all(ranks, lambda: _check(folder, tensors))
    pieces = {set_name: _own_pieces(folder, named, ranks) for set_name, named in tensors.items()}
    counts = gather_texts(ranks, json.dumps({set_name: len(own) for set_name, (own, _) in pieces.items()}))
    names = [_file_name(set_name, [json.loads(text) for text in counts], ranks.rank) for set_name in pieces]
    with ExitStack() as stack:

        def stage() -> str:
            return str(stack.enter_context(staged_folder(folder, lock))) if ranks.rank == 0 else ""

        staged = Path(call_on_all(ranks, stage)[0])

        def write() -> str:
            written = (
                (name, write_tensor_file(staged / name, own, slices=slices))
                for (own, slices), name in zip(pieces.values(), names, strict=True)
                if name is not None
            )
            return json.dumps({name: record.to_json() for name, record in written})

        texts = call_on_all(ranks, write)

        def finish() -> str:
            if ranks.rank == 0:
                records = _checked_records(staged, texts)
                for set_name, files in find_tensor_sets(folder, records).items():
                    if files != (set_name,):
                        index = index_of({file: records[file] for file in files})
                        documents_in_utf8[index_name(set_name)] = index.encode("ascii")
                finish_folder(staged, documents_in_utf8, Manifest(kind, records, log))
                stack.close()
            return ""

        call_on_all(ranks, finish)


def _check(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> str:
    for set_name, named in tensors.items():
        check_tensors(folder / set_name, {name: local_part(tensor) for name, tensor in named.items()})
    return ""


def _own_pieces(
    folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks
) -> tuple[dict[str, Tensor], dict[str, RowSlice]]:
    """Return the tensors and slices of tensors that this rank writes, and the slices' positions."""
    own_rows = {name: _describe(tensor) for name, tensor in tensors.items()}
    texts = gather_texts(ranks, json.dumps(own_rows))
    tables = [{name: HeldTensor(d, tuple(s), a, b) for name, (d, s, a, b) in json.loads(t).items()} for t in texts]
    own: dict[str, Tensor] = {}
    slices: dict[str, RowSlice] = {}
    for name, plan in plan_rows(folder, tables).items():
        gathered = whole(tensors[name].detach()) if plan.is_gathered else None
        rows = plan.rows.get(ranks.rank)
        if rows is None:
            continue
        values, start = local_part(tensors[name].detach()), own_rows[name].start
        if gathered is not None:
            values, start = gathered[rows.start : rows.stop].cpu().clone(), rows.start
        if plan.shape:
            values = values[rows.start - start : rows.stop - start]
        own[name] = values
        if plan.shape and len(rows) < plan.shape[0]:
            slices[name] = RowSlice(rows.start, plan.shape[0])
    return own, slices


def _describe(tensor: Tensor) -> HeldTensor:
    rows = held_rows(tensor) if tensor.dim() else slice(0, 1)
    return HeldTensor(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), rows.start, rows.stop)


def plan_rows(folder: Path, tables: Sequence[Mapping[str, HeldTensor]]) -> dict[str, TensorPlan]:
    """Return which rank writes which rows of each tensor. tables: each rank's tensors. All ranks plan the same.

    Raises CheckpointError for a tensor with different dtypes or shapes on ranks, or with missing rows.
    """
    load = [0] * len(tables)
    names = sorted({name for table in tables for name in table}, key=natural_order)
    holders = {name: {rank: table[name] for rank, table in enumerate(tables) if name in table} for name in names}
    whole_bytes = sum(map(_bytes_of, (next(iter(each.values())) for each in holders.values())))
    plans = {}
    for name in names:
        intervals = _intervals(folder, name, holders[name])
        dtype, shape, _, _ = next(iter(holders[name].values()))
        row_count, row_bytes = row_layout(shape, DTYPES[dtype].itemsize)
        row_block = rows_per_block(shape, DTYPES[dtype].itemsize)
        is_gathered = any(rows.start % row_block for rows in intervals)
        if is_gathered and len(holders[name]) < len(tables):
            raise _rows_error(folder, name)
        if is_gathered:
            intervals = {range(row_count): list(range(len(tables)))}
        assigned: dict[int, range] = {}
        for rows, ranks in intervals.items():
            blocks, share = -(-len(rows) // row_block), max(1, whole_bytes // len(tables))
            count = max(1, min(len(ranks), blocks, -(-len(rows) * row_bytes // share)))
            writers = sorted(sorted(ranks, key=lambda rank: (load[rank], rank))[:count])
            for number, rank in enumerate(writers):
                start, stop = (rows.start + blocks * i // count * row_block for i in (number, number + 1))
                assigned[rank] = range(start, min(stop, rows.stop))
                load[rank] += len(assigned[rank]) * row_bytes
        plans[name] = TensorPlan(shape, is_gathered, assigned)
    return plans


def _bytes_of(tensor: HeldTensor) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize


def _intervals(folder: Path, name: str, holders: Mapping[int, HeldTensor]) -> dict[range, list[int]]:
    """Return the ranks with each interval of rows, in the order of rows. Ranks without rows are left out."""
    first = next(iter(holders.values()))
    row_count = row_layout(first.shape, 1)[0]
    intervals: dict[range, list[int]] = {}
    for rank, tensor in holders.items():
        if tensor[:2] != first[:2]:
            raise CheckpointError(
                f"{folder}: ranks {next(iter(holders))} and {rank} hold tensor {name!r} with different types or shapes;"
                " build the same model on all ranks"
            )
        if tensor.start < tensor.stop:
            intervals.setdefault(range(tensor.start, tensor.stop), []).append(rank)
    if not row_count:
        return {range(0): list(holders)}
    ordered = sorted(intervals.items(), key=lambda item: item[0].start)
    ends = [0, *(rows.stop for rows, _ in ordered)]
    if ends != [*(rows.start for rows, _ in ordered), row_count]:
        raise _rows_error(folder, name)
    return dict(ordered)


def _rows_error(folder: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: the ranks do not hold each row of tensor {name!r} once; shard it in the same way on all ranks"
    )


def _file_name(set_name: str, counts: Sequence[Mapping[str, int]], rank: int) -> str | None:
    """Return the name of a rank's file, if it writes one. counts: how many tensors each rank writes to each set."""
    writers = [each for each, own in enumerate(counts) if own[set_name]] or [0]
    if rank not in writers:
        return None
    if len(writers) == 1:
        return set_name
    return shard_name(set_name.removesuffix(SUFFIX), writers.index(rank) + 1, len(writers))


def _checked_records(staged: Path, texts: Sequence[str]) -> dict[str, FileRecord]:
    """Return the entries of the files that all ranks wrote. Raises CheckpointError if rank 0 cannot see one."""
    records = {}
    for rank, text in enumerate(texts):
        for name, fields in parse_json_object(text.encode()).items():
            records[name] = parse_file_record(name, fields)
            try:
                with file_io.open_regular_file(staged / name) as (_, size):
                    is_whole = size == records[name].size
            except CheckpointError:
                is_whole = False
            if not is_whole:
                raise CheckpointError(
                    f"{staged / name}: was written by rank {rank}, but rank 0 does not find all of it; use a folder"
                    " that all ranks share"
                )
    return records
