"""Continuous batching (Yu et al. 2022, Orca): many requests at once, each with its own row of the state.

Requests join and leave between steps. A long prompt is prefilled in chunks: running requests wait for at most one chunk
between two steps, and a third of the time overall. Short prompts overtake long ones, which take turns. Random numbers
depend on a request's own seed and row: other requests change no draw.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from heddle.errors import ConfigError, MachineError
from heddle.generation.decode import (
    LOGITS_NOT_FINITE,
    NOT_FINITE,
    GenerationRequest,
    ModelRunner,
    NewTokens,
    decode,
    eval_mode,
)
from heddle.model.state import State
from heddle.numerics.transfer import to_device

PREFILL_TOKENS = 128  # of short prompts, and of a long one, that are read between two steps
READING_SHARE = 0.5  # seconds of reading long prompts per second of decoding, while requests run
SLOT_STEP = 64  # the slots that attention reads in a batch are multiples of it


class NextToken(NamedTuple):
    """The result of a step for one request: its next token, or the error that ended it."""

    key: int
    token: int
    error: Exception | None = None


class Scheduler(Protocol):
    """Runs requests of one prompt each that share tokenizer and model. A request leaves by itself at its last token.

    join: start a request under this key. leave: drop a request and free its state, if it still runs. step: generate at
    most one token of each request. len(): the number of running requests. The model must be in eval mode.
    """

    def join(self, key: int, request: GenerationRequest) -> None: ...

    def leave(self, key: int) -> None: ...

    def step(self) -> list[NextToken]: ...

    def __len__(self) -> int: ...


class SeparateScheduler:
    """Steps each request by itself, so that no bit of its text depends on other requests."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._requests: dict[int, tuple[NewTokens, int]] = {}  # by key: the steps, and how many are left

    def __len__(self) -> int:
        return len(self._requests)

    def join(self, key: int, request: GenerationRequest) -> None:
        """As in `Scheduler`."""
        self._requests[key] = (decode(self._runner.model, request, [False], self._runner), request.max_new_tokens)

    def leave(self, key: int) -> None:
        """As in `Scheduler`."""
        self._requests.pop(key, None)

    def step(self) -> list[NextToken]:
        """As in `Scheduler`."""
        results = []
        for key, (steps, left) in list(self._requests.items()):
            try:
                ((_, token),) = next(steps)
                results.append(NextToken(key, token))
                self._requests[key] = (steps, left - 1)
            except Exception as error:
                results.append(NextToken(key, NOT_FINITE, error))
            if left == 1 or results[-1].error is not None:
                del self._requests[key]
        return results


@dataclass(eq=False)
class _Row:
    """A request in the batch, or about to join it: until then it has its own `state`."""

    key: int
    request: GenerationRequest
    state: State | None
    read: int  # tokens of the prompt
    tokens: int = 0  # generated so far
    newest: int = 0
    has_left: bool = False

    @property
    def unread(self) -> int:
        """How many tokens of the prompt are still to be read."""
        return len(self.request.prompt_ids[0]) - self.read


class BatchScheduler:
    """Steps all requests in one call. Each text equals the text of its request alone, up to rounding."""

    def __init__(self, runner: ModelRunner, prefill_tokens: int = PREFILL_TOKENS) -> None:
        self._runner, self._prefill_tokens = runner, prefill_tokens
        self._reading: deque[_Row] = deque()
        self._joining: list[_Row] = []
        self._rows: list[_Row] = []  # as in the state
        self._state: State | None = None
        self._debt = 0.0  # seconds that long prompts were read beyond their share

    def __len__(self) -> int:
        return sum(not row.has_left for row in self._all_rows())

    def _all_rows(self) -> list[_Row]:
        return [*self._reading, *self._joining, *self._rows]

    def join(self, key: int, request: GenerationRequest) -> None:
        """As in `Scheduler`. Raises ConfigError for a request with an encoder output, which cannot join row by row."""
        model = self._runner.model
        if request.encoder_output is not None or model.encoder_width is not None:
            raise ConfigError("encoder_output: requests that join a batch have none; give all prompts in one call")
        ((*prompt,),) = request.prompt_ids
        if request.prefix is not None:
            state, read = request.prefix.state.select([0]), len(request.prefix.tokens) - 1
        else:
            lengths = [len(prompt) + request.max_new_tokens - 1] if model.length_dependent else None
            state, read = model.init_state(1, text_lengths=lengths), 0
        self._reading.append(_Row(key, request, state, read))

    def leave(self, key: int) -> None:
        """As in `Scheduler`. Rows of the batch are freed before the next step, or at once if none is left."""
        for row in self._all_rows():
            row.has_left = row.has_left or row.key == key
        self._reading = deque(row for row in self._reading if not row.has_left)
        self._joining = [row for row in self._joining if not row.has_left]
        self._forget_empty_batch()

    def step(self) -> list[NextToken]:
        """As in `Scheduler`."""
        started = time.perf_counter()
        results = self._decode()
        decoded = READING_SHARE * (time.perf_counter() - started)
        self._debt = max(0.0, self._debt - decoded) if self._is_decoding() else 0.0
        results += self._read_prompts()
        self._forget_empty_batch()
        return results

    def _is_decoding(self) -> bool:
        return any(not row.has_left for row in (*self._rows, *self._joining))

    def _forget_empty_batch(self) -> None:
        if all(row.has_left for row in self._rows):
            self._rows, self._state = [], None

    def _read_prompts(self) -> list[NextToken]:
        """Read short prompts whole, in order of arrival, and a chunk of the next long one."""
        results, left = [], self._prefill_tokens
        long = [row for row in self._reading if row.unread > self._prefill_tokens]
        for row in [row for row in self._reading if row.unread <= self._prefill_tokens]:
            if row.unread > left:
                break
            left -= row.unread
            results += self._read(row, row.unread)
        if long and self._debt == 0.0:
            started = time.perf_counter()
            results += self._read(long[0], self._prefill_tokens)
            self._debt = time.perf_counter() - started
        return results

    def _read(self, row: _Row, count: int) -> list[NextToken]:
        """Read a prompt's next tokens; it then goes to the back of the queue, or joins the batch with a first token."""
        self._reading.remove(row)
        piece = row.request.prompt_ids[0][row.read : row.read + count]
        row.read += count
        try:
            hidden, row.state = self._forward([piece], row.state)
            self._runner.read_prompt(hidden, row.request)
            if row.unread:
                self._reading.append(row)
                return []
            results = self._choose(hidden[:, -1], [row])
        except Exception as error:
            row.has_left = True
            return [NextToken(row.key, NOT_FINITE, error)]
        self._joining += [] if row.has_left else [row]
        return results

    def _decode(self) -> list[NextToken]:
        """One step of the batch, after removing rows that left and adding rows whose prompts were read."""
        ended = self._end_at_limit()
        running = [row for row in (*self._rows, *self._joining) if not row.has_left]
        if not running:
            self._joining = []
            return ended
        try:
            state = self._rearrange()
            if not state.table.contiguous:  # equal shapes for many steps, and no copy of the cache to clear its slots
                longest = max(row.read + row.tokens for row in self._rows)
                state = state.pinned(longest + SLOT_STEP - longest % SLOT_STEP)
            hidden, self._state = self._forward([[row.newest] for row in self._rows], state)
            return ended + self._choose(hidden[:, -1], self._rows)
        except Exception as error:  # all rows share one state, so all of them end
            self._rows, self._joining, self._state = [], [], None
            return ended + [NextToken(row.key, NOT_FINITE, error) for row in running]

    def _end_at_limit(self) -> list[NextToken]:
        """End rows whose next token has no position, so that the other rows of the step continue."""
        limit, results = self._runner.model.config.position_limit, []
        for row in (*self._rows, *self._joining):
            if limit is not None and not row.has_left and len(row.request.prompt_ids[0]) + row.tokens > limit:
                row.has_left = True
                sentence = f"the text has reached the model's limit of {limit:,} positions; ask for fewer tokens"
                results.append(NextToken(row.key, NOT_FINITE, ConfigError(sentence)))
        return results

    def _rearrange(self) -> State:
        """Remove the rows that left and add those whose prompts were read; returns the joint state."""
        staying = [index for index, row in enumerate(self._rows) if not row.has_left]
        joining, self._joining = self._joining, []
        states = [row.state for row in joining if row.state is not None]
        if self._state is not None and len(staying) < len(self._rows):
            self._state = self._state.select(staying)
        self._rows = [self._rows[index] for index in staying] + joining
        if states:
            self._state = State.join([*([] if self._state is None else [self._state]), *states])
        for row in joining:
            row.state = None
        assert self._state is not None
        return self._state

    def _forward(self, tokens: Sequence[Sequence[int]], state: State | None) -> tuple[Tensor, State]:
        """Tokens [B, T] -> hidden [B, T, width], and the new state."""
        assert state is not None
        device = self._runner.model.embed.weight.device
        rows = to_device(torch.tensor([list(row) for row in tokens], device="cpu"), device)
        return self._runner.forward(rows, None, state)

    def _choose(self, hidden: Tensor, rows: Sequence[_Row]) -> list[NextToken]:
        """Choose the next token of each row; a row whose logits are not finite ends alone."""
        logits = self._runner.logits(hidden, rows[0].request)
        shared = [index for index, row in enumerate(rows) if row.request.sampler.can_share]
        tokens: dict[int, int] = {}
        if shared:
            greedy = logits if len(shared) == len(rows) else logits[shared]
            chosen = rows[shared[0]].request.sampler.choose(greedy, torch.zeros((), dtype=torch.int64)).tolist()
            tokens = dict(zip(shared, chosen, strict=True))
        results = []
        for index, row in enumerate(rows):
            if index not in tokens:
                position = torch.full((), row.tokens, device=logits.device)
                tokens[index] = int(row.request.sampler.choose(logits[index : index + 1], position))
            row.newest, row.tokens = tokens[index], row.tokens + 1
            is_damaged = row.newest == NOT_FINITE
            row.has_left = is_damaged or row.tokens == row.request.max_new_tokens
            results.append(NextToken(row.key, row.newest, MachineError(LOGITS_NOT_FINITE) if is_damaged else None))
        return results


def decode_streams(
    scheduler: Scheduler, runner: ModelRunner, request: GenerationRequest, finished: list[bool], streams: int
) -> NewTokens:
    """As `decode`, but at most `streams` prompts run at once: when one leaves, the next one joins."""
    rows: Iterator[int] = iter(range(len(request.prompt_ids)))
    with eval_mode(runner.model):
        row = next(rows, None)
        while row is not None or len(scheduler):
            while row is not None and len(scheduler) < streams:
                sampler = replace(request.sampler, first_row=row)
                scheduler.join(row, replace(request, prompt_ids=[request.prompt_ids[row]], sampler=sampler))
                row = next(rows, None)
            results = scheduler.step()
            for error in (result.error for result in results if result.error is not None):
                raise error
            yield [(result.key, result.token) for result in results]
            for result in results:
                if finished[result.key]:
                    scheduler.leave(result.key)
