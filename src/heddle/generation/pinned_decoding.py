"""Decoding by one graph: every token takes the same kernels over the same tensors.

The state is pinned (`State.pinned`): its facts hold for all next tokens until a row has `limit` of them, and attention
reads `limit` slots. The limit doubles when it is reached. The first token of each limit runs without a graph: it grows
the caches and loads the kernels. On a GPU the others replay what was captured after it. The host waits for none of
them: tokens are chosen on the device, and read in blocks. `compile_decoding` compiles the step, on any device: fewer
kernels in the graph. On a CPU it is recorded before, with packed weights, and no Python runs between its kernels.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.generation.capture import Step, capture
from heddle.generation.model_runner import GenerationRequest, ModelRunner
from heddle.generation.recorded_step import record_step
from heddle.model.state import State

MIN_LIMIT = 256  # slots that attention reads at least
MIN_COMPILED_LIMIT = 1024  # where each limit is compiled: reading these takes less than compiling once more


class PinnedDecoder:
    """The tensors of a decoding that every step reads and writes in place.

    tokens: int64 [B], the newest of each row. position: int64 [], their index in the new text. state: of all earlier
    tokens.
    """

    def __init__(self, runner: ModelRunner, request: GenerationRequest, tokens: Tensor, state: State) -> None:
        self.runner, self.request = runner, request
        self.tokens, self.state = tokens.clone(), state
        self.position = torch.zeros((), dtype=torch.int64, device=tokens.device)

    def grow(self, limit: int) -> None:
        """Choose a token like `step`, in a state that from now on has room for `limit` tokens of a row."""
        self.state = self._read_tokens(self.state.pinned(limit)).pinned(limit)

    def step(self) -> None:
        """Read the newest tokens and choose the next ones, in place."""
        self.state.advance(self._read_tokens)

    def compiled_step(self) -> Step:
        """The step as one graph. It holds for the present limit; a call raises ConfigError if a compiler refuses it."""
        if self.tokens.device.type == "cpu":
            try:
                return _refusing(record_step(self.step, self.tensors()))
            except RuntimeError:  # it reads a value; torch.compile's tracer chooses kernels that read none
                pass
        return _refusing(torch.compile(self.step, fullgraph=True, dynamic=False))

    def tensors(self) -> list[Tensor]:
        """All tensors that a step changes, each once."""
        tensors = [self.tokens, self.position, *self.state.tensors().values()]
        return list({id(tensor): tensor for tensor in tensors}.values())

    def _read_tokens(self, state: State) -> State:
        hidden, new_state = self.runner.forward(self.tokens.clamp(min=0)[:, None], None, state)
        self.position.add_(1)
        logits = self.runner.logits(hidden[:, -1], self.request)
        self.tokens.copy_(self.request.sampler.choose(logits, self.position))
        return new_state


def _refusing(compiled_step: Step) -> Step:
    """The step, whose calls raise ConfigError if the compiler refuses it."""

    def run() -> None:
        try:
            compiled_step()
        except RuntimeError as error:
            from torch._dynamo.exc import TorchDynamoException

            if not isinstance(error, TorchDynamoException):
                raise
            reason = " ".join(str(error).split("\n\n")[0].split())
            raise ConfigError(
                f"compile_decoding: torch.compile refuses a step of this design ({reason}); leave it out"
            ) from error

    return run


def next_limit(tokens: int, capacity: int, is_compiled: bool = False) -> int:
    """The slots that attention reads once rows have `tokens`: a power of two above it, at most the capacity.

    is_compiled: each limit takes the compiler's time, so there are fewer: the powers are those of four.
    """
    if not is_compiled:
        return min(capacity, max(MIN_LIMIT, 1 << tokens.bit_length()))
    return min(capacity, max(MIN_COMPILED_LIMIT, 1 << (tokens.bit_length() + 1) // 2 * 2))


def pinned_steps(
    runner: ModelRunner,
    request: GenerationRequest,
    hidden: Tensor,
    state: State,
    on_refusal: Callable[[str], None] | None = None,
) -> Iterator[Tensor]:
    """Yield the next tokens of all rows, int64 [B], at each step; −1 where logits are not finite.

    on_refusal gets the reason, once, if no graph can be recorded; then every step runs as the first one. None: no graph
    is tried.
    """
    tokens = request.sampler.choose(
        runner.logits(hidden, request), torch.zeros((), dtype=torch.int64, device=hidden.device)
    )
    yield tokens
    count = limit = state.table.max_tokens
    capacity = count + request.max_new_tokens - 1
    decoder = PinnedDecoder(runner, request, tokens, state)
    step, is_compiled = decoder.step, request.compile_decoding
    replay: Step | None = None
    for _ in range(request.max_new_tokens - 1):
        if count == limit:
            limit, replay = next_limit(count, capacity, is_compiled), None
            decoder.grow(limit)
            if is_compiled and count + 1 < capacity:
                step = decoder.compiled_step()
            is_loaded = not is_compiled  # its kernels
        else:
            if replay is None and on_refusal is not None and is_loaded:
                try:
                    replay = capture(step)
                except RuntimeError as error:
                    on_refusal(str(error).strip().split("\n")[0])
                    on_refusal = None
            (replay or step)()
            is_loaded = True
        count += 1
        yield decoder.tokens.clone()
