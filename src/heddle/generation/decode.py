"""Autoregressive decoding: prefill, then one forward pass per new token of every row."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from heddle.generation.model_runner import GenerationRequest, ModelRunner, NewTokens, eval_mode, prefill
from heddle.generation.sampling import check_chosen
from heddle.model.copies import refusing_compiler_errors, remove_damaged_libraries
from heddle.model.decoder import Decoder
from heddle.model.state import State
from heddle.numerics.dispatch import DeviceSize, Kernel, Operation, device_type
from heddle.numerics.linear import ProductTable

# Steps between two reads of the tokens. On a GPU each read waits for all steps before it; steps past a row's end are
# discarded. On a CPU a read costs nothing, and text is shown token by token.
STEPS_PER_READ = DeviceSize(cpu=1, accelerator=16)
MIN_GRAPH_TOKENS = 4  # recording a graph takes about as long as a step


class DecodingFacts(NamedTuple):
    """What the way of decoding is chosen by. refusal: why no graph can be recorded, once that is known."""

    device: str
    tokens: int
    is_compiled: bool = False
    refusal: str | None = None


def decode(
    model: Decoder, request: GenerationRequest, finished: list[bool], runner: ModelRunner | None = None
) -> NewTokens:
    """Yield one new token per row at each step. The caller marks rows in `finished` when they need no more tokens.

    runner: the model's runner, to share its packed weights between calls. A sharded model always takes all
    `max_new_tokens` steps: each rank chooses the tokens itself, and all ranks must run equally many forward passes.
    """
    runner = runner or ModelRunner(model)
    with eval_mode(model):
        hidden, state = prefill(runner, request)
        block_size = STEPS_PER_READ.on(hidden)
        refusal = "the ranks gather the weights at each step" if runner.is_sharded else None
        facts = DecodingFacts(device_type(hidden), request.max_new_tokens, request.compile_decoding, refusal)
        steps = DECODING.choose(facts).run(runner, request, hidden, state)
        while block := list(islice(steps, block_size)):
            for tokens in torch.stack(block).tolist():
                check_chosen(tokens)
                yield list(enumerate(tokens))
                if all(finished) and not runner.is_sharded:
                    return


def _eager_steps(runner: ModelRunner, request: GenerationRequest, hidden: Tensor, state: State) -> Iterator[Tensor]:
    """Yield the next tokens of all rows, int64 [B], at each step; −1 where logits are not finite."""
    for step in range(request.max_new_tokens):
        position = torch.full((), step, device=hidden.device)
        tokens = request.sampler.choose(runner.logits(hidden, request), position)
        yield tokens
        if step + 1 < request.max_new_tokens:
            all_hidden, state = runner.forward(tokens.clamp(min=0)[:, None], None, state)
            hidden = all_hidden[:, -1]


# Record the kernels of a step once, and replay them all by one call: a CUDA graph.


Step = Callable[[], None]


def capture(step: Step) -> Step:
    """Record `step`, which reads and writes the same tensors at each call, without running it. Returns its replay.

    The step must have run once, so that its libraries are loaded. It must not wait for the device, copy from pageable
    memory, or have shapes that depend on values. Raises RuntimeError (torch's) for a step that does.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# A step as one compiled graph with packed weights, for a CPU.
#
# torch.compile traces a step without running it, so it finds no packed weight, and guards each of its tensors. Here one
# real step is recorded, with the kernels that it chooses, and the record is compiled without guards: the tensors that a
# pinned state reads and writes stay the same.


_Graph = Callable[..., tuple[()]]
_HOST_READS = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__")
}
_VALUE_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _NoHostReads(TorchFunctionMode):
    """Refuse to read a tensor's values: a recorded step would reuse them in every step."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _HOST_READS:
            raise RuntimeError(f"{function.__name__} of a tensor reads its values")
        return function(*args, **(kwargs or {}))


def record_step(step: Step, tensors: Sequence[Tensor]) -> Step:
    """Record `step`, which reads and writes `tensors` at each call, and return its compiled form.

    tensors: all that change from call to call, each once; they hold the same values afterwards. The step must have run
    once, so that its weights are packed. Raises RuntimeError for a step that reads values, or whose shapes depend on
    them. The compiler runs at the first call.
    """
    values, table = [tensor.clone() for tensor in tensors], ProductTable()
    try:
        with torch.no_grad(), table.recording():
            graph = _graph(step, tensors)
    finally:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    compiled_graph = torch.compile(graph, fullgraph=True, dynamic=False, options=options)
    return partial(_replay, compiled_graph, tensors, table)


def _graph(step: Step, tensors: Sequence[Tensor]) -> GraphModule:
    def recorded_step(*_: Tensor) -> tuple[()]:
        with _NoHostReads():
            step()
        return ()

    graph = make_fx(recorded_step)(*tensors)
    for node in graph.graph.nodes:
        if _VALUE_DEPENDENT & set(getattr(node.target, "tags", ())) and not _takes_indices(node):
            raise RuntimeError(f"the shape of {node.target} depends on values")
    return graph


def _takes_indices(node: Node) -> bool:
    """Whether the node is x[i, j] with integers: torch tags it for its other use, x[bool]."""
    if node.target is not torch.ops.aten.index.Tensor:
        return False
    indices = [index.meta["val"] for index in node.args[1] if index is not None]  # type: ignore[union-attr]
    return all(index.dtype in (torch.int32, torch.int64) for index in indices)


@torch.no_grad()
def _replay(graph: _Graph, tensors: Sequence[Tensor], table: ProductTable) -> None:
    """Run the graph. Its calls read their weights from the table, which lives as long as the caller's step."""
    graph(*tensors)


# Decoding by one graph: every token runs the same kernels over the same tensors.
#
# The state is pinned (`State.pinned`): shapes stay fixed until a row has `limit` tokens, and attention reads `limit`
# slots. The limit doubles when it is reached. The first token of each limit runs without a graph: it grows the caches
# and loads the kernels. On a GPU the others replay the graph captured after it. The host waits for none of them: tokens
# are chosen on the device and read in blocks. `compile_decoding` compiles the step, on any device, for fewer kernels in
# the graph. On a CPU it is recorded first, with packed weights, and no Python runs between its kernels.


MIN_LIMIT = 256  # attention reads at least this many slots
MIN_COMPILED_LIMIT = 1024  # with compiled steps: reading so many slots costs less than compiling again


class PinnedDecoder:
    """The tensors that every decode step reads and writes in place.

    tokens: int64 [B], the newest token of each row. position: int64 [], their index among the new tokens. state: of all
    earlier tokens.
    """

    def __init__(self, runner: ModelRunner, request: GenerationRequest, tokens: Tensor, state: State) -> None:
        self.runner, self.request = runner, request
        self.tokens, self.state = tokens.clone(), state
        self.position = torch.zeros((), dtype=torch.int64, device=tokens.device)

    def grow(self, limit: int) -> None:
        """Choose a token as `step` does, and from now on pin the state to `limit` tokens per row."""
        self.state = self._read_tokens(self.state.pinned(limit)).pinned(limit)

    def step(self) -> None:
        """Read the newest tokens and choose the next ones, in place."""
        self.state.advance(self._read_tokens)

    def compiled_step(self) -> Step:
        """The step as one compiled graph, for the current limit. A call raises ConfigError if it cannot be compiled."""
        if self.tokens.device.type == "cpu":
            remove_damaged_libraries()
            try:
                return _refusing(record_step(self.step, self.tensors()))
            except RuntimeError:  # the step reads a value; torch.compile's tracer chooses kernels that read none
                pass
        return _refusing(torch.compile(self.step, fullgraph=True, dynamic=False))

    def tensors(self) -> list[Tensor]:
        """All tensors that a step changes, without duplicates."""
        tensors = [self.tokens, self.position, *self.state.tensors().values()]
        return list({id(tensor): tensor for tensor in tensors}.values())

    def _read_tokens(self, state: State) -> State:
        hidden, new_state = self.runner.forward(self.tokens.clamp(min=0)[:, None], None, state)
        self.position.add_(1)
        logits = self.runner.logits(hidden[:, -1], self.request)
        self.tokens.copy_(self.request.sampler.choose(logits, self.position))
        return new_state


def _refusing(compiled_step: Step) -> Step:
    """A step that raises ConfigError if the compiler fails on it."""

    def run() -> None:
        with refusing_compiler_errors("compile_decoding: torch.compile cannot compile a step of this design"):
            compiled_step()

    return run


def next_limit(tokens: int, capacity: int, is_compiled: bool = False) -> int:
    """How many slots attention reads once rows have `tokens`: the next power of two above, at most `capacity`.

    is_compiled: the next power of four, since compiling for each limit takes long.
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

    on_refusal: called once with the reason if no graph can be recorded; every step then runs as the first one did.
    None: no graph is tried.
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


def _graph_steps(runner: ModelRunner, request: GenerationRequest, hidden: Tensor, state: State) -> Iterator[Tensor]:
    """`_eager_steps` by replays of a graph."""

    def on_refusal(reason: str) -> None:  # records the kernel that decodes instead
        facts = DecodingFacts(device_type(hidden), request.max_new_tokens, request.compile_decoding, reason)
        DECODING.choose(facts)

    yield from pinned_steps(runner, request, hidden, state, on_refusal)


def _graph_unsupported(facts: DecodingFacts) -> str | None:
    if facts.device != "cuda":
        return "graphs need CUDA"
    if facts.tokens < MIN_GRAPH_TOKENS:
        return f"recording a graph does not pay off for fewer than {MIN_GRAPH_TOKENS} tokens"
    return facts.refusal


def _pinned_unsupported(facts: DecodingFacts) -> str | None:
    if facts.device == "cuda" or facts.is_compiled:
        return None
    return "it is for CUDA and compiled steps: elsewhere it would only read unused slots"


DECODING = Operation(
    "decoding",
    (
        Kernel("graph", _graph_steps, _graph_unsupported),
        Kernel("pinned", pinned_steps, _pinned_unsupported),
        Kernel("eager", _eager_steps, lambda facts: "its steps are not compiled" if facts.is_compiled else None),
    ),
)
