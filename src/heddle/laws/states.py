"""States as values: forked, reordered and rolled back, they continue as if each sequence had been read separately."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.laws.harness import (
    ENCODER_LENGTH,
    MAX_TEXT_LENGTH,
    PADDING_TOKEN,
    LawViolation,
    assert_bitwise_equal,
    assert_close,
    assert_refused,
    encoder_output_for,
    fork,
    forward_in_chunks,
    forward_no_grad,
    forward_with_state,
    model_under_test,
    new_state,
    random_tokens,
    require_state,
    windows,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.size import size
from heddle.model.state import State
from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer
from heddle.parts.position_table import INITIAL_SLOTS

ROLLBACK = 3  # tokens that ring buffers can roll back
# Tokens rolled back in each row, and read after that. In the end all rows are equally long again.
ROLLBACKS = (([0, 1, 2], 4), ([3, 0, 1], 3), ([3, 3, 3], 2), ([2, 2, 0], 2), ([0, 2, 2], 2))
ROWS = 3


class TokenRead(NamedTuple):
    """One token that a row has read, with its position and document."""

    token: int
    position: int
    document: int


class ReferenceState:
    """A state with the sequences that it has read. Every output is compared with a call on these sequences."""

    def __init__(self, model: Decoder, rows: int, cache_length: int | None = None, rollback: int = 0) -> None:
        self.model = model
        self.state = new_state(model, rows, cache_length, rollback)
        self.rows: list[list[TokenRead]] = [[] for _ in range(rows)]

    def feed(self, tokens: Tensor, what: str, layout: Layout | None = None) -> None:
        """Read tokens [B, T] and compare each output with a call on the full sequences without a state."""
        try:
            hidden, self.state = forward_with_state(self.model, self.state, tokens, layout)
        except ConfigError as error:
            raise LawViolation(f"{what}: refused: {error}") from None
        real: list[list[tuple[int, int]]] = []  # of each row: (token of the call, token of the text)
        for row, read in enumerate(self.rows):
            coordinates = self._positions(row, tokens.shape[1], layout)
            token_indices = [index for index, (position, _) in enumerate(coordinates) if position >= 0]
            real.append([(index, len(read) + number) for number, index in enumerate(token_indices)])
            read += [TokenRead(int(tokens[row, index]), *coordinates[index]) for index in token_indices]
        recomputed = self.recomputed()
        for row, pairs in enumerate(real):
            if pairs:
                here, there = (list(column) for column in zip(*pairs, strict=True))
                assert_close(hidden[row : row + 1, here], recomputed[row : row + 1, there], f"{what}, row {row}", 1e-10)

    def recomputed(self) -> Tensor:
        """Hidden states of all sequences, in one call without a state, padded on the right."""
        longest = max(1, *map(len, self.rows))
        filled = [[*row, *[TokenRead(PADDING_TOKEN, -1, 0)] * (longest - len(row))] for row in self.rows]
        columns = [torch.tensor([[read[field] for read in row] for row in filled]) for field in range(3)]
        return forward_no_grad(self.model, columns[0], Layout(columns[1], columns[2]))

    def rollback(self, tokens: int | Sequence[int]) -> None:
        """Roll back the last tokens of each row."""
        counts = [tokens] * len(self.rows) if isinstance(tokens, int) else tokens
        self.state = self.state.rollback(tokens)
        self.rows = [row[: len(row) - count] for row, count in zip(self.rows, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> "ReferenceState":
        """A copy with these rows."""
        selection = ReferenceState.__new__(ReferenceState)
        selection.model, selection.state, selection.rows = (
            self.model,
            self.state.select(rows),
            [list(self.rows[row]) for row in rows],
        )
        return selection

    @staticmethod
    def join(parts: "Sequence[ReferenceState]") -> "ReferenceState":
        """A copy with the rows of all."""
        joined = ReferenceState.__new__(ReferenceState)
        joined.model, joined.state = parts[0].model, State.join([part.state for part in parts])
        joined.rows = [list(row) for part in parts for row in part.rows]
        return joined

    def _positions(self, row: int, length: int, layout: Layout | None) -> list[tuple[int, int]]:
        """Position and document of each token of a call. Without a layout a row continues after its last token."""
        if layout is None:
            last = self.rows[row][-1] if self.rows[row] else TokenRead(0, -1, 0)
            return [(last.position + ahead, last.document) for ahead in range(1, length + 1)]
        positions = layout.positions[row].tolist()
        documents = [0] * length if layout.segment_ids is None else layout.segment_ids[row].tolist()
        return list(zip(positions, documents, strict=True))


def _ring_sizes(model: Decoder) -> list[int]:
    """The sizes of the ring buffers: each window, or 1 (the position table's) if no layer looks back."""
    own = [part for mixer in model.mixers() if mixer is not None for part in mixer.modules()]  # a pair holds two
    looks = {size for part in own if isinstance(part, Mixer) for size in part.rings}
    return sorted(look for look in looks if look) or ([] if None in looks else [1])


def fork_isolation(config: ModelConfig) -> None:
    """A forked state and its original continue independently, bit-equal to states that were never forked."""
    model = model_under_test(config)
    require_state(model)
    tokens, other = random_tokens(config, 2, 9), random_tokens(config, 2, 4, seed=1)
    for cache_length in (None, 14):
        _, untouched = forward_in_chunks(model, tokens, [9], cache_length)
        _, state = forward_in_chunks(model, tokens, [9], cache_length)
        forked = state.fork()
        before = {name: tensor.clone() for name, tensor in state.tensors().items()}
        there, forked = forward_with_state(model, forked, other)
        for name, tensor in state.tensors().items():
            if not torch.equal(tensor, before[name]):
                raise LawViolation(
                    f"{name} of the original changed when its fork was used, cache_length {cache_length}"
                )
        want, _ = forward_with_state(model, untouched, tokens[:, :4])
        got, state = forward_with_state(model, state, tokens[:, :4])
        assert_bitwise_equal(got, want, f"the original after its fork was used, cache_length {cache_length}")
        after, _ = forward_with_state(model, forked, other[:, :1])
        again = forward_in_chunks(model, torch.cat((tokens, other, other[:, :1]), 1), [9, 4, 1], cache_length)[0]
        assert_bitwise_equal(
            torch.cat((there, after), 1), again[:, 9:], f"the fork next to its original, cache_length {cache_length}"
        )


def state_row_selection(config: ModelConfig) -> None:
    """Rows of a state that are selected, repeated or reordered continue as each sequence would alone."""
    model = model_under_test(config)
    require_state(model)
    layouts = {
        "even": None,
        "padded": Layout.padded([4, 8, 2], side="left"),
        "packed": Layout.packed([[3, 5], [8], [1, 1, 6]]),
    }
    tokens = random_tokens(config, ROWS, 8)
    for name, layout in layouts.items():
        twin = ReferenceState(model, ROWS, cache_length=11)
        twin.feed(tokens, f"{name} rows", layout)
        for rows in ([2, 0, 1], [1, 1, 0, 1], [0]):
            chosen = twin.select(rows)
            for step, count in enumerate((1, 2)):
                chosen.feed(random_tokens(config, len(rows), count, seed=step), f"rows {rows} of {name} rows")
        if layout is not None and layout.has_padding:  # a short row can be filled up to its cache_length
            twin.select([0, 2]).feed(
                random_tokens(config, 2, 7), "short rows selected from a batch, filled up to their cache_length"
            )
        twin.feed(tokens[:, :3], f"{name} rows after some were copied")


def changing_batch(config: ModelConfig) -> None:
    """Sequences that join a batch and leave it between steps continue as each would alone."""
    model = model_under_test(config)
    require_state(model)
    alone = [ReferenceState(model, 1) for _ in range(4)]
    for number, (text, lengths) in enumerate(zip(alone, ((3, 4), (2,), (66,), (5, 1)), strict=True)):
        for length in lengths:
            text.feed(random_tokens(config, 1, length, seed=number), f"text {number} before it joined")
    batch = ReferenceState.join(alone[:2])
    batch.feed(random_tokens(config, 2, 1), "after two texts joined")
    batch = ReferenceState.join([batch.select([1]), *alone[2:]])  # the long one has grown its state
    batch.feed(random_tokens(config, 3, 1, seed=1), "after one text left and two joined")
    batch = batch.select([2, 0])
    for step, length in enumerate((1, 2)):
        batch.feed(random_tokens(config, 2, length, seed=step), "after the long text left")
    other = new_state(model, 1, MAX_TEXT_LENGTH - 1)
    assert_refused(lambda: State.join([batch.state, other]), "join", "states of different lengths were joined")


def state_rollback(config: ModelConfig) -> None:
    """Rolled-back tokens leave no trace: any number, or up to `rollback` once a ring buffer has wrapped around."""
    model = model_under_test(config)
    require_state(model, rollback=True)
    turn = max(_ring_sizes(model), default=4) + ROLLBACK
    starts: dict[str, Layout | None] = {
        "even": None,
        "padded on the left": Layout.padded([turn + 1, 2, turn - 1], turn + 2, side="left"),
        "padded on the right": Layout.padded([3, turn + 2, turn], turn + 2, side="right"),
        "packed": Layout.packed([[turn - 1, 3], [turn + 2], [1, turn, 1]]),
    }
    for name, layout in starts.items():
        twin = ReferenceState(model, ROWS, None if layout is None else turn + 20, rollback=ROLLBACK)
        twin.feed(random_tokens(config, ROWS, turn + 2), f"{name} rows", layout)
        for number, (back, count) in enumerate(ROLLBACKS):
            twin.rollback(back)  # the first time right after a ring buffer wrapped around
            twin.feed(random_tokens(config, ROWS, count, seed=number), f"{name} rows after {back} were rolled back")
    _rollback_before_wraparound(model, config, turn)


def _rollback_before_wraparound(model: Decoder, config: ModelConfig, turn: int) -> None:
    """Roll everything back before a ring buffer wraps around, then roll back across the wraparound."""
    smallest = min(_ring_sizes(model), default=turn) + ROLLBACK
    twin = ReferenceState(model, 2, rollback=ROLLBACK)
    twin.feed(random_tokens(config, 2, smallest), "rows that fill a ring buffer")
    twin.rollback([smallest, smallest - 1])
    for step in range(smallest + 2):
        twin.feed(random_tokens(config, 2, 1, seed=step), f"token {step} after all were rolled back")
    for back in (ROLLBACK, 1, 2):
        twin.rollback(back)
        twin.feed(random_tokens(config, 2, 1, seed=back), f"a token after {back} were rolled back")
        twin.feed(random_tokens(config, 2, turn, seed=back), f"a chunk after {back} were rolled back")


def rollback_errors(config: ModelConfig) -> None:
    """An impossible rollback is refused and leaves the state valid; one that is performed consumes the handle."""
    model = model_under_test(config)
    require_state(model)
    forgets = not new_state(model, 1).can_roll_back(1)
    slack = 0 if forgets else 1
    if forgets:
        assert_refused(lambda: new_state(model, 2, rollback=1), "fork", "a recurrence accepted a rollback")
    length = max(_ring_sizes(model), default=4) + slack + 1
    twin = ReferenceState(model, 2, rollback=slack)
    twin.feed(random_tokens(config, 2, length), "rows")
    for wrong in (torch.tensor(length + 1), torch.tensor([0, length + 1]), torch.tensor(-1), torch.tensor([1, 1, 1])):
        take = lambda wrong=wrong: twin.state.rollback(wrong)  # noqa: E731
        assert_refused(take, "rollback", f"{wrong.tolist()} of {length} tokens were rolled back")
    if forgets or _ring_sizes(model):
        beyond = [slack + 1, 0]
        if twin.state.can_roll_back(slack + 1):
            raise LawViolation(f"a state that can roll back {slack} tokens claims to roll back {slack + 1}")
        assert_refused(lambda: twin.state.rollback(beyond), "fork", f"{beyond} tokens were rolled back")
    if slack:
        old = twin.state
        twin.rollback(1)
        assert_refused(lambda: old.rollback(0), "consumed", "a state was rolled back twice")
        assert_refused(
            lambda: forward_with_state(model, old, random_tokens(config, 2, 1)),
            "consumed",
            "a state was used after it was rolled back",
        )
        if _ring_sizes(model):
            assert_refused(
                lambda: twin.state.rollback(1), "fork", "a ring buffer rolled back further than allowed, in two steps"
            )
    twin.feed(random_tokens(config, 2, 2), "rows after refused rollbacks")


def rollback_size(config: ModelConfig) -> None:
    """The bytes that `size` reports for a rollback are the allocated ones, and the state can roll back that far."""
    model = model_under_test(config, torch.float32)
    require_state(model, rollback=True)
    context = max(_ring_sizes(model), default=4) + ROLLBACK + 2
    reported = size(
        config, context_length=context, batch=2, encoder_length=ENCODER_LENGTH, rollback=ROLLBACK
    ).state_bytes
    _, state = forward_with_state(model, new_state(model, 2, context, ROLLBACK), random_tokens(config, 2, context))
    if state.rollback(2).bytes != reported:
        raise LawViolation(
            f"{reported} bytes are reported for a state with rollback {ROLLBACK}, {state.bytes} are allocated"
        )


# Chunking: a sequence read in chunks, with a state carried from call to call, gives the hidden states of one call.


def chunked_decoding(config: ModelConfig) -> None:
    """Reading a sequence in chunks with a state equals reading it in one call, for lengths around every window."""
    model = model_under_test(config)
    require_state(model)
    for length in _lengths(model):
        tokens = random_tokens(config, 2, length)
        full = forward_no_grad(model, tokens)
        for number, sizes in enumerate(_chunkings(length)):
            for cache_length in (None, length) if number == 0 else (length if number % 2 else None,):
                hidden, _ = forward_in_chunks(model, tokens, sizes, cache_length)
                assert_close(hidden, full, f"text of {length} in {_brief(sizes)}, cache_length {cache_length}")


def _lengths(model: Decoder) -> list[int]:
    around = {length for w in windows(model) for length in (w - 1, w, w + 1, 2 * w + 3)}
    return sorted(length for length in around | {11} if length > 0)


def _chunkings(length: int) -> list[list[int]]:
    """Token by token, all at once, a prefill and single steps, and uneven chunks."""
    chunkings = [[1] * length, [length]]
    for pattern in ([length // 2, 1, 1], [3, 1, 1, 4], [1, 5], [length - 1]):
        sizes, remaining = [], length
        for chunk in pattern * length:
            if 0 < chunk <= remaining:
                sizes.append(chunk)
                remaining -= chunk
        sizes += [remaining] if remaining else []
        if sizes not in chunkings:
            chunkings.append(sizes)
    return chunkings


def _brief(sizes: list[int]) -> str:
    if len(sizes) > 8 and len(set(sizes)) == 1:
        return f"{len(sizes)} chunks of {sizes[0]}"
    return f"chunks {sizes}"


def all_chunkings(config: ModelConfig, length: int = 6) -> None:
    """All 2^(T−1) ways to split a short sequence into chunks give the hidden states of one call."""
    model = model_under_test(config)
    require_state(model)
    tokens = random_tokens(config, 2, length)
    full = forward_no_grad(model, tokens)

    def follow(state: State, chunks: list[int]) -> None:
        """Try every next chunk from this state. Chunkings with the same beginning share its calls."""
        start = sum(chunks)
        for chunk in range(1, length - start + 1):
            stop = start + chunk
            hidden, after = forward_with_state(model, fork(state), tokens[:, start:stop])
            assert_close(hidden, full[:, start:stop], f"after {chunks} a chunk of {chunk} (tokens counted from it)")
            follow(after, [*chunks, chunk])

    follow(new_state(model, 2, length), [])


def chunked_ragged_batch(config: ModelConfig) -> None:
    """Reading padded rows and packed documents in chunks equals reading them in one call."""
    model = model_under_test(config)
    require_state(model)
    holes = torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 0, 1, 1, 1]])
    layouts = {
        "padded on the left": Layout.padded([5, 9, 1], side="left"),
        "padded on the right": Layout.padded([5, 9, 1], side="right"),
        "padded between": Layout(torch.where(holes > 0, holes.cumsum(1) - 1, -1)),
        "of packed documents": Layout.packed([[4, 5], [1, 8], [3, 3, 3]]),
    }
    few, many = (([9], 9), ([6, 3], None)), (([1] * 9, None), ([1, 3, 1, 4], 9))
    positions = torch.cat([layout.positions for layout in layouts.values()])
    together = Layout(positions, torch.cat([layout.dense_segment_ids for layout in layouts.values()]))
    runs = [*((*item, few) for item in layouts.items()), ("of all these kinds", together, many)]
    for name, layout, chunkings in runs:
        tokens, is_token = random_tokens(config, layout.positions.shape[0], 9), (layout.positions >= 0)[..., None]
        full = forward_no_grad(model, tokens, layout) * is_token
        for sizes, cache_length in chunkings:
            hidden, _ = forward_in_chunks(model, tokens, sizes, cache_length, layout)
            assert_close(
                torch.where(is_token, hidden, 0.0), full, f"rows {name} in chunks {sizes}, cache_length {cache_length}"
            )


def cache_growth(config: ModelConfig) -> None:
    """A cache without a cache_length grows past its initial size and keeps its contents."""
    model = model_under_test(config)
    require_state(model)
    length = INITIAL_SLOTS + 6
    tokens = random_tokens(config, 1, length)
    hidden, _ = forward_in_chunks(model, tokens, [INITIAL_SLOTS - 2, 1, 1, 1, 3, 2])
    assert_close(hidden, forward_no_grad(model, tokens), f"a growing state, {length} tokens")


def state_errors(config: ModelConfig) -> None:
    """A state that is full, consumed, of another batch or design, of unknown length or under gradients is refused."""
    model = model_under_test(config)
    require_state(model)
    tokens = random_tokens(config, 2, 6)
    _, state = forward_in_chunks(model, tokens, [6], cache_length=6)
    assert_refused(
        lambda: forward_with_state(model, fork(state), tokens[:, :1]),
        "cache_length 6",
        "a full state took another token",
    )
    first = new_state(model, 2, 6)
    forward_with_state(model, first, tokens)
    assert_refused(lambda: forward_with_state(model, first, tokens), "consumed", "a consumed state was used again")
    assert_refused(lambda: forward_with_state(model, new_state(model, 3), tokens), "3 rows", "a state of 3 rows took 2")
    other_model = model_under_test(
        config.replace(initialization=config.initialization.replace(std=config.initialization.std * 2))
    )
    assert_refused(
        lambda: forward_with_state(model, new_state(other_model, 2), tokens),
        "another design",
        "a state of another design was used",
    )
    with torch.enable_grad():
        assert_refused(lambda: model(tokens, None, new_state(model, 2)), "gradient", "a state was used under gradients")
    for batch, cache_length in ((0, 4), (1, 0)):
        make = lambda batch=batch, cache_length=cache_length: new_state(model, batch, cache_length)  # noqa: E731
        assert_refused(make, "at least 1", f"a state of {batch} rows and cache_length {cache_length} was made")
    if model.length_dependent:
        assert_refused(
            lambda: model.init_state(2, None, encoder_output_for(model, 2)),
            "cache_length",
            "a state without a cache_length was made",
        )
    if state.bytes != new_state(model, 2, 6).bytes:
        raise LawViolation(
            f"a state with a cache_length changed from {new_state(model, 2, 6).bytes} to {state.bytes} bytes"
        )
