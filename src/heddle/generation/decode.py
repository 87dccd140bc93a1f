"""Autoregressive decoding: prefill, the choice of a token, then one forward pass per new token of every row."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from heddle.distributed.ranks import is_sharded
from heddle.errors import ConfigError, MachineError
from heddle.model.copies import refusing_compiler_errors, remove_damaged_libraries
from heddle.model.decoder import LENGTH_DEPENDENT, Decoder
from heddle.model.state import State
from heddle.numerics.dispatch import DeviceSize, Kernel, Operation, device_type
from heddle.numerics.linear import PackedWeightCache, ProductTable, packed_weights
from heddle.numerics.random import RandomStream, uniform_double
from heddle.numerics.transfer import Constants, to_device
from heddle.parts.layout import EncoderOutput, Layout

# Choose the next token: greedy, or sampled after temperature, top-k and top-p (Holtzman et al. 2020).


LOGITS_NOT_FINITE = "generation: the model's logits are not finite; its weights or its state are damaged"
NOT_FINITE = -1  # stands for the token of a row whose logits are not finite


@dataclass(frozen=True)
class Sampler:
    """temperature 0 is greedy. top_k keeps the k most likely tokens, top_p the fewest whose probability reaches p.

    A row's random numbers depend only on the seed, its index in the batch and the step, not on other rows. first_row:
    the index of the first row, where the batch has only some of a caller's rows.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    first_row: int = 0
    _streams: dict[int, RandomStream] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature {self.temperature}: must be 0 (greedy) or a number above it")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k {self.top_k}: must be at least 1")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p {self.top_p}: must be above 0 and at most 1")
        if not 0 <= self.seed < 2**62:
            raise ConfigError(f"seed {self.seed}: must be at least 0 and below 2^62")

    @property
    def can_share(self) -> bool:
        """Whether one sampler can choose for rows of several requests: greedy ones draw no random numbers."""
        return self.temperature == 0.0

    def sample(self, logits: Tensor, step: int) -> Tensor:
        """logits [B, vocab] -> tokens int64 [B]. Greedy ties go to the lowest token.

        Raises MachineError if a row's highest logit is not a finite number; −inf excludes a token.
        """
        tokens = self.choose(logits, torch.full((), step, device=logits.device))
        check_chosen(tokens.tolist())
        return tokens

    def choose(self, logits: Tensor, position: Tensor) -> Tensor:
        """As `sample` for the token at `position` (int64 []) of the new text, but without waiting for the device.

        The token of a row whose highest logit is not a finite number is NOT_FINITE: see `check_chosen`.
        """
        highest = logits.amax(-1)
        if self.temperature == 0.0:
            tokens = _argmax(logits, highest)
        else:
            probabilities, order = self._filtered_probabilities(logits)
            rows = torch.arange(self.first_row, self.first_row + logits.shape[0], device=logits.device)
            uniforms = self.uniform(rows, position, site=0)[:, None]
            tokens = order.gather(-1, _inverse_cdf(probabilities, uniforms)).squeeze(-1)
        return torch.where(highest.isfinite(), tokens, NOT_FINITE)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution `sample` draws from: logits [..., vocab] -> float64 of that shape; one-hot if greedy.

        The distribution of a row whose highest logit is not finite is meaningless: see `all_finite`.
        """
        if self.temperature == 0.0:
            return functional.one_hot(_argmax(logits, logits.amax(-1)), logits.shape[-1]).double()
        probabilities, order = self._filtered_probabilities(logits.flatten(0, -2))
        return torch.zeros_like(probabilities).scatter(-1, order, probabilities).view(logits.shape)

    def uniform(self, rows: Tensor, positions: Tensor, site: int) -> Tensor:
        """Uniform float64 in [0, 1), 53 bits: a function of seed, row in the batch, position in the new text, site."""
        if site not in self._streams:  # a graph that is traced finds the stream of its first call
            self._streams[site] = RandomStream.of(self.seed, 0, site)
        return uniform_double(self._streams[site], rows * 2**32 + positions)

    def draw(self, weights: Tensor, rows: Tensor, positions: Tensor, site: int) -> Tensor:
        """Draw tokens int64 [B] in proportion to weights float64 [B, vocab]; random numbers as in `uniform`."""
        return _inverse_cdf(weights, self.uniform(rows, positions, site)[:, None]).squeeze(-1)

    def _filtered_probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities after top-k and top-p, highest first, zero where filtered out; and the tokens in that order."""
        sorted_logits, order = logits.double().sort(dim=-1, descending=True, stable=True)
        highest = sorted_logits[:, :1]
        # Dividing the difference from the highest logit stays finite at tiny temperatures.
        weights = ((sorted_logits - highest) / self.temperature).exp()
        if self.top_k is not None:
            weights[:, self.top_k :] = 0.0
        if self.top_p is not None:
            probabilities = weights / weights.sum(-1, keepdim=True)
            preceding = probabilities.cumsum(-1) - probabilities
            weights = weights.masked_fill(preceding >= self.top_p, 0.0)
        return weights / weights.sum(-1, keepdim=True), order


def check_chosen(tokens: list[int]) -> None:
    """Raise MachineError if a token from `Sampler.choose` is NOT_FINITE."""
    if NOT_FINITE in tokens:
        raise MachineError(LOGITS_NOT_FINITE)


def all_finite(logits: Tensor) -> Tensor:
    """Whether the highest logit of each row is a finite number, bool []."""
    return logits.amax(-1).isfinite().all()


def _argmax(logits: Tensor, highest: Tensor) -> Tensor:
    """The lowest index of the highest of logits [..., vocab]."""
    # torch.argmax may return any of several equal entries; on this 0/1 mask it returns the first.
    return (logits == highest[..., None]).to(torch.uint8).argmax(-1)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first index [B, 1] where the running sum of weights [B, N] exceeds `uniforms` [B, 1] times their total."""
    cumulative = weights.cumsum(-1)
    index = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    # Rounding may lead past the last index with a nonzero weight.
    indices = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, indices, 0).amax(-1, keepdim=True)
    return torch.minimum(index, last)


# Run a model for generation: forward passes without gradients, and logits over the tokens it may generate.


READ_TOKENS = 16  # of a prompt whose logits are in memory at a time: a vocabulary may be large
NewTokens = Iterator[list[tuple[int, int]]]  # at each step the new tokens, as (row, token)


@dataclass(frozen=True)
class GenerationRequest:
    """A batch of prompts and how to continue them.

    prompt_ids: the tokens of each prompt, the prefix included. max_new_tokens: the limit of each row. vocab_limit:
    generate only tokens below it (None: all), since a vocabulary may be larger than its tokenizer's. unused_token_ids:
    tokens below the limit that are never generated. eos_ids: any of these ends a row. encoder_output: what
    cross-attention reads, one row per prompt. compile_decoding: compile the decode step. read_prompt: called with the
    logits [n, vocab] after each token of a single prompt without a prefix, a few tokens at a time.
    """

    prompt_ids: Sequence[Sequence[int]]
    max_new_tokens: int
    sampler: Sampler
    vocab_limit: int | None = None
    eos_ids: tuple[int, ...] = ()
    unused_token_ids: tuple[int, ...] = ()
    prefix: "Prefix | None" = None
    encoder_output: EncoderOutput | None = None
    compile_decoding: bool = False
    read_prompt: Callable[[Tensor], None] | None = None


class ModelRunner:
    """Runs a model without gradients, with packed weights that are reused between calls.

    is_sharded: each forward pass is a collective of all ranks and gathers the weights again, so none are packed.
    """

    def __init__(self, model: Decoder) -> None:
        self.model, self.is_sharded = model, is_sharded(model)
        self.packed_weights: PackedWeightCache = {}
        self.constants = Constants()

    def forward(self, tokens: Tensor, layout: Layout | None, state: State) -> tuple[Tensor, State]:
        """tokens int64 [B, T] -> hidden [B, T, width] and the new state."""
        # Entered at each call: a generator that yields inside these blocks would leave them active in its caller.
        with torch.no_grad(), self._packing():
            hidden, new_state = self.model(tokens, layout, state)
        assert new_state is not None
        return hidden, new_state

    def draft(self, hidden: Tensor, tokens: Tensor, layout: Layout, state: State) -> tuple[Tensor, State]:
        """hidden [B, T, width] and the tokens after each, int64 [B, T] -> the first multi-token module's output.

        layout: of the tokens of `hidden`. state: of `init_draft_state`; also returns the new one.
        """
        with torch.no_grad(), self._packing():
            embedding = self.model.embed(tokens, _one_later(layout))
            predicted, new_state = self.model.multi_token[0](hidden, embedding, layout, state)
        return predicted, new_state

    def logits(self, hidden: Tensor, request: GenerationRequest) -> Tensor:
        """hidden [..., width] -> logits [..., vocab] below the request's vocab_limit; -inf for unused tokens."""
        with torch.no_grad(), self._packing():
            logits: Tensor = self.model.head(hidden)
        logits = logits[..., : request.vocab_limit]
        if request.unused_token_ids:
            unused = self.constants.tensor(request.unused_token_ids, torch.int64, logits.device)
            logits = logits.index_fill(-1, unused, -torch.inf)
        return logits

    def read_prompt(self, hidden: Tensor, request: GenerationRequest) -> None:
        """Pass the logits of prompt tokens that were just read to the request. hidden: [1, T, width]."""
        if request.read_prompt is not None:
            for piece in hidden[0].split(READ_TOKENS):
                request.read_prompt(self.logits(piece, request))

    def _packing(self) -> AbstractContextManager[None]:
        """A compiled graph cannot set the context, and holds no packed weight."""
        return nullcontext() if self.is_sharded or is_compiling() else packed_weights(self.packed_weights)


def _one_later(layout: Layout) -> Layout:
    """The layout of the tokens one later than `layout`'s, for their embeddings."""
    positions = torch.where(layout.positions < 0, -1, layout.positions + 1)
    start = None if layout.start is None else layout.start + 1
    newest = None if layout.max_position is None else layout.max_position + 1
    return replace(layout, positions=positions, start=start, max_position=newest, cache={})


@contextmanager
def eval_mode(*models: Decoder) -> Iterator[None]:
    """Put models in eval mode within the block, and restore their mode after it."""
    training_flags = [model.training for model in models]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model, training in zip(models, training_flags, strict=True):
            model.train(training)


# Prefill: read prompts of any lengths in one call. A common beginning of all prompts is read only once.


LENGTH_STEP = DeviceSize(cpu=1, accelerator=64)  # the lengths that uneven prompts are padded to are multiples of it
MIN_SHARED_TOKENS = 16  # reading a shorter common beginning once saves less than the extra call costs


@dataclass(frozen=True, eq=False)
class Prefix:
    """Tokens that prompts begin with, and the state after all of them but the last.

    The last token is read with each prompt, so that an empty prompt after the prefix has a token to continue from.
    """

    model: Decoder
    tokens: tuple[int, ...]
    state: State


def final_lengths(request: GenerationRequest) -> list[int]:
    """How many tokens of each row a model reads: the last new one is never read."""
    return [len(prompt) + request.max_new_tokens - 1 for prompt in request.prompt_ids]


ReadPrompts = Callable[[Tensor, Layout | None, Tensor], None]  # (tokens [B, T], layout, hidden [B, T, width])


def prefill(
    runner: ModelRunner, request: GenerationRequest, rollback: int = 0, on_read: ReadPrompts | None = None
) -> tuple[Tensor, State]:
    """Read all prompts; returns the hidden state of each prompt's last token [B, width], and the model's state.

    rollback: how many tokens the state must be able to roll back at a time. on_read: called with all tokens of the
    prompts, which have no prefix and are then read in one call.
    """
    prompts, model, batch, lengths = request.prompt_ids, runner.model, len(request.prompt_ids), final_lengths(request)
    cache_length, text_lengths = max(lengths), lengths if model.length_dependent else None
    is_alone = batch == 1 or request.encoder_output is not None or (text_lengths and len(set(text_lengths)) > 1)
    common = 0 if is_alone or on_read is not None else _common_prefix_length(prompts)
    if request.prefix is not None:
        shared, state = len(request.prefix.tokens) - 1, request.prefix.state.select([0] * batch)
    elif common >= MIN_SHARED_TOKENS:
        shared_lengths = None if text_lengths is None else text_lengths[:1]
        shared, shared_state = common, model.init_state(1, cache_length, None, rollback, shared_lengths)
        _, shared_state = runner.forward(_token_tensor([prompts[0][:common]], model), None, shared_state)
        state = shared_state.select([0] * batch)
    else:
        shared, state = 0, model.init_state(batch, cache_length, request.encoder_output, rollback, text_lengths)
    remaining = [list(prompt[shared:]) for prompt in prompts]
    lengths = [len(row) for row in remaining]
    longest = max(lengths)
    layout = None
    if min(lengths) < longest:  # exact lengths would hardly ever recur
        longest = padded_length(longest, LENGTH_STEP.on(model.embed.weight))
        layout = Layout.padded(lengths, longest, side="left", device=model.embed.weight.device, start=shared)
    tokens = _token_tensor([[0] * (longest - len(row)) + row for row in remaining], model)
    hidden, state = runner.forward(tokens, layout, state)
    runner.read_prompt(hidden, request)
    if on_read is not None:
        on_read(tokens, layout, hidden)
    return hidden[:, -1], state


def prefill_prefix(model: Decoder, tokens: Sequence[int]) -> Prefix:
    """Prefill tokens that the prompts of many calls begin with. The state has no cache_length: it grows."""
    if model.length_dependent:
        raise ConfigError(
            f"prefix: {LENGTH_DEPENDENT}, which is not known before the prompts; put its tokens before each prompt"
        )
    runner = ModelRunner(model)
    with eval_mode(model):
        state = model.init_state(1)
        if len(tokens) > 1:
            _, state = runner.forward(_token_tensor([tokens[:-1]], model), None, state)
    return Prefix(model, tuple(tokens), state)


def padded_length(longest: int, step: int) -> int:
    """The length that uneven prompts are padded to: a multiple of `step`, at most a quarter more for long ones.

    With few distinct lengths, a GPU's kernels, which are set up per shape, are reused.
    """
    if step == 1:
        return longest
    multiple = max(step, 1 << max(0, longest.bit_length() - 3))
    return -(-longest // multiple) * multiple


def validate_prompt(tokens: list[int], model: Decoder) -> list[int]:
    """Return the tokens of a prompt. Raises ConfigError if it is empty or a token is outside the vocabulary."""
    vocab_size = model.embed.weight.shape[0]
    if not tokens or min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ConfigError(f"prompts: each needs at least one token, all from 0 to {vocab_size - 1}")
    return tokens


def _common_prefix_length(prompts: Sequence[Sequence[int]]) -> int:
    """How many leading tokens all prompts share, leaving each at least one token of its own to continue from."""
    limit = min(map(len, prompts)) - 1
    return next((index for index in range(limit) if len({prompt[index] for prompt in prompts}) > 1), limit)


def _token_tensor(rows: Sequence[Sequence[int]], model: Decoder) -> Tensor:
    return to_device(torch.tensor([list(row) for row in rows], device="cpu"), model.embed.weight.device)


# Decode: one forward pass per new token of every row.


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
