"""States as values: copied, cut into rows and taken back, they answer as if each text had been read alone."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.laws.subject import (
    MEMORY,
    POISON,
    Broken,
    advance,
    answer,
    equal,
    fresh,
    identical,
    in_chunks,
    keeps_state,
    refuses,
    subject,
    text,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.size import size
from heddle.parts.context.layout import Layout
from heddle.parts.mixers import Mixer

SLACK = 3  # tokens that rings can take back
ROWS = 3


class Read(NamedTuple):
    """One token that a row has read, and where it stood."""

    token: int
    position: int
    document: int


class Twin:
    """A state and the plain texts of its rows beside it, from which every answer is computed anew."""

    def __init__(self, model: Decoder, rows: int, capacity: int | None = None, rewind: int = 0) -> None:
        self.model = model
        self.state = fresh(model, rows, capacity, rewind)
        self.rows: list[list[Read]] = [[] for _ in range(rows)]

    def feed(self, tokens: Tensor, what: str, layout: Layout | None = None, tolerance: float = 1e-10) -> None:
        """Read tokens [B, T] and hold each answer against that of the whole texts without a state."""
        try:
            hidden, self.state = advance(self.model, self.state, tokens, layout)
        except ConfigError as error:
            raise Broken(f"{what}: refused: {error}") from None
        real: list[list[tuple[int, int]]] = []  # of each row: (token of the call, token of the text)
        for row, read in enumerate(self.rows):
            places = self._places(row, tokens.shape[1], layout)
            kept = [index for index, (position, _) in enumerate(places) if position >= 0]
            real.append([(index, len(read) + number) for number, index in enumerate(kept)])
            read += [Read(int(tokens[row, index]), *places[index]) for index in kept]
        whole = self.recomputed()
        for row, pairs in enumerate(real):
            if pairs:
                here, there = (list(column) for column in zip(*pairs, strict=True))
                equal(hidden[row : row + 1, here], whole[row : row + 1, there], f"{what}, row {row}", tolerance)

    def recomputed(self) -> Tensor:
        """Hidden states of all texts, in one call without a state, padded on the right."""
        longest = max(1, *map(len, self.rows))
        filled = [[*row, *[Read(POISON, -1, 0)] * (longest - len(row))] for row in self.rows]
        columns = [torch.tensor([[read[field] for read in row] for row in filled]) for field in range(3)]
        return answer(self.model, columns[0], Layout(columns[1], columns[2]))

    def back(self, tokens: int | Sequence[int]) -> None:
        """Take the last tokens of each row back."""
        counts = [tokens] * len(self.rows) if isinstance(tokens, int) else tokens
        self.state = self.state.rewind(tokens)
        self.rows = [row[: len(row) - count] for row, count in zip(self.rows, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> "Twin":
        """Another twin, of copies of these rows."""
        made = Twin.__new__(Twin)
        made.model, made.state, made.rows = self.model, self.state.select(rows), [list(self.rows[row]) for row in rows]
        return made

    def _places(self, row: int, length: int, layout: Layout | None) -> list[tuple[int, int]]:
        """Position and document of each token of a call; without a layout a row goes on after its last token."""
        if layout is None:
            last = self.rows[row][-1] if self.rows[row] else Read(0, -1, 0)
            return [(last.position + ahead, last.document) for ahead in range(1, length + 1)]
        positions = layout.positions[row].tolist()
        documents = [0] * length if layout.documents is None else layout.documents[row].tolist()
        return list(zip(positions, documents, strict=True))


def _rings(model: Decoder) -> list[int]:
    """What rings hold of a row: each window; where no layer looks back, the table's one position."""
    own = [part for mixer in model.mixers() if mixer is not None for part in mixer.modules()]  # a pair holds two
    looks = {part.looks_back for part in own if isinstance(part, Mixer)}
    return sorted(look for look in looks if look) or ([] if None in looks else [1])


def fork_apart(config: ModelConfig) -> None:
    """A fork and its original do not touch each other: each goes on, to the bit, as if there were no other."""
    model = subject(config)
    if not keeps_state(model):
        return
    tokens, other = text(config, 2, 9), text(config, 2, 4, seed=1)
    for capacity in (None, 14):
        _, untouched = in_chunks(model, tokens, [9], capacity)
        _, state = in_chunks(model, tokens, [9], capacity)
        forked = state.fork()
        before = {name: tensor.clone() for name, tensor in state.tensors().items()}
        there, forked = advance(model, forked, other)
        for name, tensor in state.tensors().items():
            if not torch.equal(tensor, before[name]):
                raise Broken(f"{name} of the original changed when its fork was used, capacity {capacity}")
        want, _ = advance(model, untouched, tokens[:, :4])
        got, state = advance(model, state, tokens[:, :4])
        identical(got, want, f"the original after its fork was used, capacity {capacity}")
        after, _ = advance(model, forked, other[:, :1])
        again = in_chunks(model, torch.cat((tokens, other, other[:, :1]), 1), [9, 4, 1], capacity)[0]
        identical(torch.cat((there, after), 1), again[:, 9:], f"the fork beside its original, capacity {capacity}")


def selected_rows(config: ModelConfig) -> None:
    """Rows of a state, chosen, repeated or in another order, go on as each text alone."""
    model = subject(config)
    if not keeps_state(model):
        return
    layouts = {
        "even": None,
        "padded": Layout.padded([4, 8, 2], side="left"),
        "packed": Layout.packed([[3, 5], [8], [1, 1, 6]]),
    }
    tokens = text(config, ROWS, 8)
    for name, layout in layouts.items():
        twin = Twin(model, ROWS, capacity=11)
        twin.feed(tokens, f"{name} rows", layout)
        for rows in ([2, 0, 1], [1, 1, 0, 1], [0]):
            chosen = twin.select(rows)
            for step, count in enumerate((1, 2)):
                chosen.feed(text(config, len(rows), count, seed=step), f"rows {rows} of {name} rows")
        if layout is not None and layout.has_padding:  # a short row has room for as many as its capacity says
            twin.select([0, 2]).feed(text(config, 2, 7), "short rows chosen from a batch, up to their capacity")
        twin.feed(tokens[:, :3], f"{name} rows after some were copied")


def rewound(config: ModelConfig) -> None:
    """Tokens taken back were never read: any number, or, once a ring has turned, as many as its slack."""
    model = subject(config)
    if not keeps_state(model) or not fresh(model, 1).can_roll_back(1):
        return
    turn = max(_rings(model), default=4) + SLACK
    starts: dict[str, Layout | None] = {
        "even": None,
        "padded on the left": Layout.padded([turn + 1, 2, turn - 1], turn + 2, side="left"),
        "padded on the right": Layout.padded([3, turn + 2, turn], turn + 2, side="right"),
        "packed": Layout.packed([[turn - 1, 3], [turn + 2], [1, turn, 1]]),
    }
    for name, layout in starts.items():
        twin = Twin(model, ROWS, None if layout is None else turn + 20, rewind=SLACK)
        twin.feed(text(config, ROWS, turn + 2), f"{name} rows", layout)
        for number, (back, count) in enumerate((([0, 1, 2], 4), ([3, 0, 1], 3), ([3, 3, 3], 2), ([2, 2, 0], 1))):
            twin.back(back)  # the first time, right after a ring has turned
            twin.feed(text(config, ROWS, count, seed=number), f"{name} rows after {back} were taken back")
    _rewound_before_the_turn(model, config, turn)


def _rewound_before_the_turn(model: Decoder, config: ModelConfig, turn: int) -> None:
    """Before any ring turns everything can be taken back; then, token by token, across the turn and over again."""
    smallest = min(_rings(model), default=turn) + SLACK
    twin = Twin(model, 2, rewind=SLACK)
    twin.feed(text(config, 2, smallest), "rows that fill a ring")
    twin.back([smallest, smallest - 1])
    for step in range(smallest + 2):
        twin.feed(text(config, 2, 1, seed=step), f"token {step} after all were taken back")
    for back in (SLACK, 1, 2):
        twin.back(back)
        twin.feed(text(config, 2, 1, seed=back), f"a token after {back} were taken back")
        twin.feed(text(config, 2, turn, seed=back), f"a chunk after {back} were taken back")


def rewind_refusals(config: ModelConfig) -> None:
    """What cannot be taken back is refused and the handle stays good; a handle that was taken back is consumed."""
    model = subject(config)
    if not keeps_state(model):
        return
    forgets = not fresh(model, 1).can_roll_back(1)
    slack = 0 if forgets else 1
    if forgets:
        refuses(lambda: fresh(model, 2, rewind=1), "fork", "a recurrence promised to go back")
    length = max(_rings(model), default=4) + slack + 1
    twin = Twin(model, 2, rewind=slack)
    twin.feed(text(config, 2, length), "rows")
    for wrong in (torch.tensor(length + 1), torch.tensor([0, length + 1]), torch.tensor(-1), torch.tensor([1, 1, 1])):
        take = lambda wrong=wrong: twin.state.rewind(wrong)  # noqa: E731
        refuses(take, "rewind", f"{wrong.tolist()} of {length} tokens were taken back")
    if forgets or _rings(model):
        beyond = [slack + 1, 0]
        if twin.state.can_roll_back(slack + 1):
            raise Broken(f"a state that can go back {slack} says that it goes back {slack + 1}")
        refuses(lambda: twin.state.rewind(beyond), "fork", f"{beyond} tokens were taken back")
    if slack:
        old = twin.state
        twin.back(1)
        refuses(lambda: old.rewind(0), "consumed", "a state was taken back twice")
        refuses(lambda: advance(model, old, text(config, 2, 1)), "consumed", "a state was used after it was taken back")
        if _rings(model):
            refuses(lambda: twin.state.rewind(1), "fork", "a ring went back further than its slack, in two steps")
    twin.feed(text(config, 2, 2), "rows after what was refused")


def slack_told(config: ModelConfig) -> None:
    """A state that can go back takes the bytes that are told, also when it has been used."""
    model = subject(config, torch.float32)
    if not keeps_state(model) or not fresh(model, 1).can_roll_back(1):
        return
    context = max(_rings(model), default=4) + SLACK + 2
    told = size(config, context=context, batch=2, memory=MEMORY, rewind=SLACK).state_bytes
    _, state = advance(model, fresh(model, 2, context, SLACK), text(config, 2, context))
    if state.rewind(2).bytes != told:
        raise Broken(f"{told} bytes of a state that goes back {SLACK} tokens are told, {state.bytes} are allocated")
