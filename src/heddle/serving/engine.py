"""One worker thread that decodes: requests join and leave between steps, and share a batch where that is faster.

A request's text equals the text of the request alone up to rounding; with `batch_invariant`, bit for bit.
"""

import contextvars
import itertools
import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from heddle.errors import HeddleError, MachineError, is_out_of_memory
from heddle.generation.decode import LOGITS_NOT_FINITE, NOT_FINITE, GenerationRequest, ModelRunner, Sampler, eval_mode
from heddle.generation.generate import StopStringBuffer
from heddle.generation.scheduler import BatchScheduler, NextToken, Scheduler, SeparateScheduler
from heddle.model.decoder import Decoder
from heddle.progress import print_warning, printable
from heddle.serving.limits import ServerLimits
from heddle.serving.requests import Grammar, RequestError, TextRequest
from heddle.tokenization.tokenizer import Tokenizer

SHUTTING_DOWN = "the server is shutting down; try again later"

# Metrics for /metrics, in Prometheus's text format.


BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds


def metric_lines(name: str, kind: str, meaning: str, samples: Mapping[str, float]) -> list[str]:
    """A metric in Prometheus's text format: what it means, its kind, and its samples.

    samples: by what follows the name, such as `_sum` or `{status="200"}`.
    """
    values = [f"heddle_{name}{suffix} {value}" for suffix, value in samples.items()]
    return [f"# HELP heddle_{name} {meaning}", f"# TYPE heddle_{name} {kind}", *values]


class Histogram:
    """A histogram of durations: how many were at most each bucket's seconds. Thread-safe."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._total = 0.0
        self._lock = threading.Lock()

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        with self._lock:
            self._counts[bisect_left(BUCKETS, seconds)] += 1
            self._total += seconds

    @property
    def mean(self) -> float:
        """The mean in seconds; 0 before the first duration."""
        with self._lock:
            return self._total / max(1, sum(self._counts))

    def samples(self) -> dict[str, float]:
        """Its samples for `metric_lines`, in seconds."""
        with self._lock:
            counts, total = list(itertools.accumulate(self._counts)), self._total
        bounds = [*map(str, BUCKETS), "+Inf"]
        buckets = {f'_bucket{{le="{bound}"}}': count for bound, count in zip(bounds, counts, strict=True)}
        return {**buckets, "_sum": total, "_count": counts[-1]}


COUNTERS = {
    "prompt_tokens": "Tokens of the prompts of all started requests.",
    "new_tokens": "Generated tokens, end tokens included.",
    "finished": "Requests that ended, also by an error.",
    "cancelled": "Requests whose client went away.",
}
HISTOGRAMS = {
    "queue_seconds": "From a request's arrival to its start.",
    "first_token_seconds": "From a request's arrival to its first token.",
    "token_seconds": "From one token of a request to the next.",
    "running_seconds": "From a request's start to its end.",
}


class EngineMetrics:
    """What the engine has counted since it started: `COUNTERS` and `HISTOGRAMS`."""

    def __init__(self) -> None:
        self.prompt_tokens = self.new_tokens = self.finished = self.cancelled = 0
        self.queue_seconds, self.first_token_seconds = Histogram(), Histogram()
        self.token_seconds, self.running_seconds = Histogram(), Histogram()

    def lines(self) -> list[str]:
        """All metrics in Prometheus's text format."""
        lines: list[str] = []
        for name, meaning in COUNTERS.items():
            lines += metric_lines(f"{name}_total", "counter", meaning, {"": getattr(self, name)})
        for name, meaning in HISTOGRAMS.items():
            lines += metric_lines(name, "histogram", meaning, getattr(self, name).samples())
        return lines


# Log probabilities of tokens, in the format of the OpenAI API.


class TokenScore(NamedTuple):
    """A token's natural log probability, and the most likely tokens with theirs, most likely first.

    The first token of a prompt, which nothing precedes, has nan and no alternatives.
    """

    token: int
    log_probability: float
    alternatives: list[tuple[int, float]]

    @property
    def is_first(self) -> bool:
        """Whether it is the first token of a prompt."""
        return math.isnan(self.log_probability)


LEAST_LOG_PROBABILITY = -9999.0  # OpenAI's, for a token of probability 0: JSON has no infinity


def score_token(logits: Tensor, token: int, alternatives: int) -> TokenScore:
    """The score of a token from the logits [vocab] that predict it."""
    log_probabilities = logits.double().log_softmax(-1).clamp(min=LEAST_LOG_PROBABILITY)
    best = log_probabilities.topk(min(alternatives, len(log_probabilities)))
    own = float(log_probabilities[token]) if token < len(log_probabilities) else LEAST_LOG_PROBABILITY
    return TokenScore(token, own, list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))


@dataclass
class PromptScores:
    """Adds the score of each token of a prompt to `scores`, as the model reads them."""

    tokens: list[int]
    alternatives: int
    scores: list[TokenScore]
    read: int = 0  # tokens whose logits were seen

    def __call__(self, logits: Tensor) -> None:
        """Take the logits [n, vocab] after the next n tokens of the prompt."""
        if not self.read:
            self.scores.append(TokenScore(self.tokens[0], math.nan, []))
        following = self.tokens[self.read + 1 : self.read + 1 + len(logits)]
        for row, token in zip(logits, following, strict=False):
            score = score_token(row, token, self.alternatives)
            if math.isnan(score.log_probability):
                raise MachineError(LOGITS_NOT_FINITE)
            self.scores.append(score)
        self.read += len(logits)


@dataclass(frozen=True)
class RowSampler(Sampler):
    """A sampler of one row that follows a grammar, and records the score of each token it chooses.

    alternatives: how many other tokens to score, all by the model's probabilities before grammar, temperature, top-k
    and top-p; None: score nothing. Only for steps that run one by one: a recorded graph calls no sampler.
    """

    alternatives: int | None = None
    scores: list[TokenScore] = field(default_factory=list, repr=False, compare=False)
    grammar: Grammar | None = field(default=None, repr=False, compare=False)

    @property
    def can_share(self) -> bool:
        """Never: each row has its own scores and grammar."""
        return False

    def choose(self, logits: Tensor, position: Tensor) -> Tensor:
        """As in `Sampler`."""
        tokens = super().choose(logits if self.grammar is None else self.grammar.masked(logits), position)
        token = int(tokens[0])
        if self.grammar is not None and token != NOT_FINITE:
            self.grammar.take(token)
        if self.alternatives is None:
            return tokens
        if token != NOT_FINITE:
            self.scores.append(score_token(logits[0], token, self.alternatives))
        return tokens


def token_text(token: int, tokenizer: Tokenizer) -> str:
    """A token by itself: a special token's name; bytes that are not whole characters as `bytes:\\xe2\\x80`."""
    if token in tokenizer.special_tokens:
        return tokenizer.special_tokens[token]
    data = tokenizer.token_bytes(token)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_scores(scores: list[TokenScore], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of /v1/chat/completions; besides OpenAI's fields, each token has its `id`."""

    def entry(token: int, log_probability: float) -> dict[str, Any]:
        data = list(tokenizer.token_bytes(token))
        return {"token": token_text(token, tokenizer), "logprob": log_probability, "bytes": data, "id": token}

    content = [
        entry(score.token, score.log_probability) | {"top_logprobs": [entry(*pair) for pair in score.alternatives]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def completion_scores(
    scores: list[TokenScore], tokenizer: Tokenizer, before: bytes = b"", echo: str = ""
) -> tuple[dict[str, Any], bytes]:
    """`logprobs` of /v1/completions, and token_ids; and the bytes of the text after these tokens.

    before: the bytes of the text so far. text_offset: whole characters of the text before each token. echo: the prompt;
    it may name special tokens, and lacks the spaces that a tokenizer adds.
    """
    offsets, data, prompt = [], before, echo.encode("utf-8")
    for score in scores:
        offsets.append(len(data.decode("utf-8", "ignore")))
        piece, rest = tokenizer.token_bytes(score.token), prompt[len(data) :]
        name = tokenizer.special_tokens.get(score.token, "").encode("utf-8")
        if name and rest.startswith(name):
            piece = name
        elif rest and not rest.startswith(b" "):
            piece = piece.removeprefix(b" ")
        data += piece
    shown = {
        "tokens": [token_text(score.token, tokenizer) for score in scores],
        "token_ids": [score.token for score in scores],
        "token_logprobs": [None if score.is_first else score.log_probability for score in scores],
        "top_logprobs": [
            None if score.is_first else {token_text(token, tokenizer): value for token, value in score.alternatives}
            for score in scores
        ],
        "text_offset": offsets,
    }
    return shown, data


@dataclass(frozen=True)
class Event:
    """An event of a request: more text, or its end. new_tokens: how many tokens were generated so far."""

    text: str = ""
    scores: tuple[TokenScore, ...] = ()
    new_tokens: int = 0
    finish_reason: str | None = None
    error: RequestError | None = None

    @property
    def is_last(self) -> bool:
        """Whether no event follows."""
        return self.finish_reason is not None or self.error is not None


class TokenReader:
    """Turns the tokens of a request into events."""

    def __init__(self, request: TextRequest, tokenizer: Tokenizer, deadline: float) -> None:
        self._deadline, self._new_tokens = deadline, request.new_tokens
        self._stream, self._buffer = tokenizer.decode_stream(request.prompt_ids), StopStringBuffer(request.stop)
        self._count, self._scores = 0, list[TokenScore]()
        self._end_ids = tuple(dict.fromkeys([*tokenizer.eos_ids, *request.stop_ids]))
        self._grammar = None if request.grammar is None else request.grammar()
        sampling = (request.temperature, request.top_k, request.top_p, request.seed)
        self.generation = GenerationRequest(
            prompt_ids=[request.prompt_ids],
            max_new_tokens=max(1, request.new_tokens),
            sampler=Sampler(*sampling)
            if request.alternatives is None and self._grammar is None
            else RowSampler(*sampling, alternatives=request.alternatives, scores=self._scores, grammar=self._grammar),
            vocab_limit=tokenizer.vocab_size,
            eos_ids=self._end_ids,
            unused_token_ids=tokenizer.unused_token_ids,
            read_prompt=PromptScores(request.prompt_ids, request.alternatives, self._scores)
            if request.echo is not None and request.alternatives is not None
            else None,
        )

    def read(self, token: int) -> Event:
        """The event of the next token; the last one has a finish_reason. Raises RequestError if the grammar failed."""
        if self._grammar is not None and self._grammar.error:
            reason = printable(self._grammar.error.partition("\n")[0])[:200]  # its state follows
            raise RequestError(f"response_format: the schema cannot be followed further ({reason})", "response_format")
        if not self._new_tokens:  # the token shows that the prompt was read
            return Event("", tuple(self._scores[:-1]), 0, "length")
        self._count += 1
        is_end = token in self._end_ids
        text = "" if is_end else self._buffer.push(self._stream.push(token))
        is_stopped = is_end or self._buffer.stopped
        scores = tuple(self._scores)
        self._scores.clear()
        if not is_stopped and self._count < self._new_tokens and time.monotonic() <= self._deadline:
            return Event(text, scores, self._count)
        rest = "" if self._buffer.stopped else self._buffer.push(self._stream.finish())
        return Event(text + rest + self._buffer.finish(), scores, self._count, "stop" if is_stopped else "length")


@dataclass(eq=False)
class Job:
    """A request, the callback for its events, and its arrival and deadline in time.monotonic() seconds."""

    request: TextRequest
    deliver: Callable[[Event], None]
    arrival: float
    deadline: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    reader: TokenReader | None = None
    start: float = 0.0
    newest: float = 0.0  # when the newest token arrived

    @property
    def slots(self) -> int:
        """The most tokens that its state can have."""
        return len(self.request.prompt_ids) + self.request.new_tokens


class Engine:
    """`with Engine(…) as engine: engine.submit(request, deliver)`; `deliver` is called on the worker thread."""

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, limits: ServerLimits, batch_invariant: bool = False
    ) -> None:
        self.model, self.tokenizer, self.limits, self.metrics = model, tokenizer, limits, EngineMetrics()
        self.gives_scores = model.embed.weight.device.type == "cpu"  # a recorded graph calls no sampler
        is_separate = batch_invariant or not self.gives_scores  # on a GPU: recorded graphs, of one row
        self._new_scheduler: type[SeparateScheduler | BatchScheduler]
        self._new_scheduler = SeparateScheduler if is_separate else BatchScheduler
        self._scheduler: Scheduler = self._new_scheduler(ModelRunner(model))
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._entering: set[object] = set()
        self._keys = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        context = contextvars.copy_context()  # holds the kernels that were forced
        self._thread = threading.Thread(target=context.run, args=(self._work,), daemon=True)

    def __enter__(self) -> "Engine":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def queue_length(self) -> int:
        """How many requests are waiting."""
        return len(self._waiting)

    @property
    def states(self) -> int:
        """How many requests are being decoded; each has one state."""
        return len(self._running)

    @property
    def retry_seconds(self) -> int:
        """Seconds until a request that is refused now may find room: until as many have ended as wait before it."""
        turns = (1 + len(self._waiting)) / self.limits.streams
        return min(self.limits.max_seconds, max(1, math.ceil(turns * self.metrics.running_seconds.mean)))

    @contextmanager
    def entry(self) -> Iterator[object]:
        """Reserve a place in the queue for a request before it is parsed, to pass to `submit`.

        Raises RequestError if the queue is full, before anything is computed for the request.
        """
        entry = object()
        with self._changed:
            coming = len(self._running) + len(self._waiting) + len(self._entering)
            if coming >= self.limits.streams + self.limits.queue:
                seconds = self.retry_seconds
                raise RequestError(f"the queue is full; try again after {seconds} s", None, 429, seconds)
            self._entering.add(entry)
        try:
            yield entry
        finally:
            with self._changed:
                self._entering.discard(entry)

    def submit(self, request: TextRequest, deliver: Callable[[Event], None], entry: object | None = None) -> Job:
        """Queue a request. Raises RequestError if it has no entry and the queue is full."""
        if entry is None:
            with self.entry() as own:
                return self.submit(request, deliver, own)
        if request.alternatives is not None and not self.gives_scores:
            raise RequestError("logprobs: this server decodes with recorded graphs, which return none", "logprobs")
        if request.grammar is not None and not self.gives_scores:
            sentence = "response_format: this server decodes with recorded graphs, which follow no schema"
            raise RequestError(sentence, "response_format")
        now = time.monotonic()
        job = Job(request, deliver, now, now + self.limits.max_seconds)
        with self._changed:
            if self._closed:
                raise RequestError(SHUTTING_DOWN, status=503)
            self._entering.discard(entry)
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def cancel(self, job: Job) -> None:
        """Cancel a request; its state is freed before the next step. Does nothing for one that has ended."""
        job.cancelled.set()
        with self._changed:
            self._changed.notify_all()

    def _work(self) -> None:
        with eval_mode(self.model):
            while self._admit():
                try:
                    for result in self._scheduler.step():
                        self._deliver(result)
                except Exception as error:  # not of one request: all running ones end, and the server continues
                    self._end_all(_as_request_error(error))
        for job in [*self._waiting, *self._running.values()]:
            job.deliver(Event(error=RequestError(SHUTTING_DOWN, status=503)))
        self._waiting.clear()
        self._running.clear()

    def _end_all(self, error: RequestError) -> None:
        """End every running request, and drop their states."""
        jobs, self._running = list(self._running.values()), {}
        self._scheduler = self._new_scheduler(ModelRunner(self.model))
        for job in jobs:
            self.metrics.finished += 1
            job.deliver(Event(error=error))

    def _admit(self) -> bool:
        """Wait for requests; drop cancelled and expired ones, start others. Returns False once the engine is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._running or self._closed)
            now = time.monotonic()
            for job in list(self._waiting):
                if job.cancelled.is_set():
                    self._waiting.remove(job)
                    self.metrics.cancelled += 1
                elif now > job.deadline:
                    self._waiting.remove(job)
                    self.metrics.finished += 1
                    sentence = "waited too long in the queue; try again later"
                    job.deliver(Event(error=RequestError(sentence, None, 429, self.retry_seconds)))
            for key, job in list(self._running.items()):
                if job.cancelled.is_set():
                    self._leave(key)
                    self.metrics.cancelled += 1
            while self._waiting and self._has_room(self._waiting[0]):
                self._start(self._waiting.popleft(), now)
            return not self._closed

    def _has_room(self, job: Job) -> bool:
        """Whether a job fits beside the running ones: every row of a batch has as many slots as the longest."""
        if not self._running:
            return True
        longest = max(other.slots for other in (job, *self._running.values()))
        rows = len(self._running) + 1
        return rows <= self.limits.streams and rows * longest <= self.limits.slots

    def _start(self, job: Job, now: float) -> None:
        key = next(self._keys)
        job.reader = TokenReader(job.request, self.tokenizer, job.deadline)
        job.start = job.newest = now
        self.metrics.queue_seconds.observe(now - job.arrival)
        self.metrics.prompt_tokens += len(job.request.prompt_ids)
        try:
            self._scheduler.join(key, job.reader.generation)
            self._running[key] = job
        except Exception as error:
            job.deliver(Event(error=_as_request_error(error)))

    def _leave(self, key: int) -> Job:
        self._scheduler.leave(key)
        return self._running.pop(key)

    def _deliver(self, result: NextToken) -> None:
        job, now = self._running[result.key], time.monotonic()
        assert job.reader is not None
        try:
            if result.error is not None:
                raise result.error
            event = job.reader.read(result.token)
            self.metrics.new_tokens += min(1, event.new_tokens)
            is_first = event.new_tokens <= 1
            (self.metrics.first_token_seconds if is_first else self.metrics.token_seconds).observe(
                now - (job.arrival if is_first else job.newest)
            )
            job.newest = now
        except Exception as error:
            event = Event(error=_as_request_error(error))
        if event.is_last:
            self._leave(result.key)  # before the last event: whoever reads it finds the state freed
            self.metrics.finished += 1
            self.metrics.running_seconds.observe(now - job.start)
        if event.text or event.scores or event.is_last:
            job.deliver(event)


def _as_request_error(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, HeddleError) and not isinstance(error, MachineError):
        return RequestError(str(error))
    if is_out_of_memory(error):
        sentence = "out of memory; ask for fewer tokens, or start the server with fewer streams"
    elif isinstance(error, MachineError):
        sentence = str(error)
    else:
        sentence = "the request failed inside the server"
    print_warning(f"serve: {sentence} ({type(error).__name__})")
    return RequestError(sentence, status=500)
