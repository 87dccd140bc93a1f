"""One worker thread that decodes: requests join and leave between steps, and each has a state of its own.

A round takes one step of every running request in turn. No request is computed in a batch with another one, so its text
has the bits that it has alone.
"""

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from heddle.errors import HeddleError, MachineError, is_out_of_memory
from heddle.generation.decode import decode
from heddle.generation.model_runner import GenerationRequest, ModelRunner
from heddle.generation.sampling import Sampler
from heddle.generation.stop_strings import StopStringBuffer
from heddle.model.decoder import Decoder
from heddle.progress import print_warning
from heddle.serving.limits import ServerLimits
from heddle.serving.requests import RequestError, TextRequest
from heddle.serving.scores import ScoringSampler, TokenScore
from heddle.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Event:
    """What comes of a request: more text, or its end. new_tokens: how many were generated so far."""

    text: str = ""
    scores: tuple[TokenScore, ...] = ()
    new_tokens: int = 0
    finish_reason: str | None = None
    error: RequestError | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing comes after it."""
        return self.finish_reason is not None or self.error is not None


@dataclass(eq=False)
class Job:
    """A request, where its events go, and when it must have ended, in time.monotonic() seconds."""

    request: TextRequest
    deliver: Callable[[Event], None]
    deadline: float
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass
class Counts:
    """What /metrics tells of the engine since it began."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    finished: int = 0
    cancelled: int = 0


class Engine:
    """`with Engine(…) as engine: engine.submit(request, deliver)`; `deliver` is called on the worker's thread."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, limits: ServerLimits) -> None:
        self.model, self.tokenizer, self.limits, self.counts = model, tokenizer, limits, Counts()
        self.gives_scores = model.embed.weight.device.type == "cpu"  # a recorded graph calls no sampler
        self._runner = ModelRunner(model)
        self._waiting: deque[Job] = deque()
        self._running: dict[Job, Iterator[Event]] = {}
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
        """How many requests wait."""
        return len(self._waiting)

    @property
    def states(self) -> int:
        """How many requests are decoded now; each has one state."""
        return len(self._running)

    def submit(self, request: TextRequest, deliver: Callable[[Event], None]) -> Job:
        """Queue a request. Raises RequestError when the queue is full."""
        if request.alternatives is not None and not self.gives_scores:
            raise RequestError("logprobs: this server decodes by recorded steps, which give none", "logprobs")
        job = Job(request, deliver, time.monotonic() + self.limits.seconds)
        with self._changed:
            is_busy = len(self._running) + len(self._waiting) >= self.limits.streams
            if is_busy and len(self._waiting) >= self.limits.queue:
                raise RequestError("the queue is full; try again after a second", status=429)
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def cancel(self, job: Job) -> None:
        """Give up a request that nobody reads: its state is freed before the next step. Ended ones stay ended."""
        job.cancelled.set()
        with self._changed:
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._running or self._closed)
                self._admit()
                if self._closed:
                    break
            for job in list(self._running):
                self._step(job)
        for job in [*self._waiting, *self._running]:
            job.deliver(Event(error=RequestError("the server ends; try again later", status=503)))
        self._waiting.clear()
        self._running.clear()

    def _admit(self) -> None:
        """Drop requests that were cancelled or waited too long, and start as many others as may run."""
        now = time.monotonic()
        for job in list(self._waiting):
            if job.cancelled.is_set():
                self._waiting.remove(job)
                self.counts.cancelled += 1
            elif now > job.deadline:
                self._waiting.remove(job)
                job.deliver(Event(error=RequestError("waited too long in the queue; try again later", status=429)))
        while self._waiting and len(self._running) < self.limits.streams:
            job = self._waiting.popleft()
            self._running[job] = self._events(job.request, job.deadline)

    def _step(self, job: Job) -> None:
        if job.cancelled.is_set():
            del self._running[job]
            self.counts.cancelled += 1
            return
        try:
            event = next(self._running[job])
        except Exception as error:
            event = Event(error=_as_request_error(error))
        if event.is_last:
            del self._running[job]  # before the end is told: who reads it finds the state freed
            self.counts.finished += 1
        if event.text or event.scores or event.is_last:
            job.deliver(event)

    def _events(self, request: TextRequest, deadline: float) -> Iterator[Event]:
        """One event per step; the last one has a finish_reason."""
        scores: list[TokenScore] = []
        sampler = _sampler(request, scores)
        tokenizer, finished = self.tokenizer, [False]
        generation = GenerationRequest(
            prompt_ids=[request.prompt_ids],
            max_new_tokens=request.new_tokens,
            sampler=sampler,
            vocab_limit=tokenizer.vocab_size,
            eos_ids=tuple(tokenizer.eos_ids),
            unused_token_ids=tokenizer.unused_token_ids,
        )
        stream, buffer = tokenizer.decode_stream(request.prompt_ids), StopStringBuffer(request.stop)
        reason, count = "length", 0
        self.counts.prompt_tokens += len(request.prompt_ids)
        for ((_, token),) in decode(self.model, generation, finished, self._runner):
            count += 1
            self.counts.new_tokens += 1
            is_end = token in tokenizer.eos_ids
            text = "" if is_end else buffer.push(stream.push(token))
            if is_end or buffer.stopped:
                finished[0], reason = True, "stop"
            elif time.monotonic() > deadline:
                finished[0] = True
            new_scores = tuple(scores)
            scores.clear()
            yield Event(text, new_scores, count)
            if finished[0]:  # on a GPU, steps come in blocks
                break
        rest = "" if buffer.stopped else buffer.push(stream.finish())
        yield Event(rest + buffer.finish(), (), count, reason)


def _sampler(request: TextRequest, scores: list[TokenScore]) -> Sampler:
    if request.alternatives is None:
        return Sampler(request.temperature, None, request.top_p, request.seed)
    return ScoringSampler(request.temperature, None, request.top_p, request.seed, request.alternatives, scores)


def _as_request_error(error: Exception) -> RequestError:
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
