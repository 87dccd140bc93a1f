"""How much faster do 50 clients at once get their texts than one after another, 128 tokens in and 128 out?

Both sides are the server's engine, without HTTP: requests wait in its queue, and their text comes as events. `at_once`
has all 50 in the queue and decodes 32 in a batch; `in_turn` computes each alone, and submits it when the last one has
ended.
"""

import threading
from functools import partial
from typing import Any

from benchmarks import peers
from benchmarks.harness import Case, Measured, main, timed
from heddle.serving.engine import Engine, Event
from heddle.serving.limits import ServerLimits
from heddle.serving.requests import TextRequest
from heddle.tokenization.tokenizer import Tokenizer

TOKENS_IN, TOKENS_OUT = 128, 128


class Clients:
    """Submit requests to an engine and wait for all their texts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def ask(self, requests: list[TextRequest]) -> None:
        """All at once."""
        ended = threading.Semaphore(0)

        def deliver(event: Event) -> None:
            if event.is_last:
                assert event.error is None, event.error
                ended.release()

        for request in requests:
            self.engine.submit(request, deliver)
        for _ in requests:
            ended.acquire()


def side(at_once: bool, arguments: dict[str, Any]) -> Measured:
    """Seconds per new token of all clients together."""
    tokenizer = Tokenizer.train([__doc__ or ""], 300)
    model = peers.ours(arguments["design"], peers.DTYPES[arguments["precision"]]).eval()
    limits = ServerLimits(max_seconds=3600, queue=64)
    engine = Engine(model, tokenizer, limits, batch_invariant=not at_once).__enter__()  # until the worker ends
    clients, count = Clients(engine), arguments["clients"] if at_once else arguments["in_turn"]
    prompts = peers.tokens(count, TOKENS_IN).remainder(tokenizer.vocab_size).tolist()
    requests = [TextRequest(prompt, TOKENS_OUT, 0.0, None, 0) for prompt in prompts]

    def ask_all() -> None:
        for group in [requests] if at_once else [[request] for request in requests]:
            clients.ask(group)

    def seconds() -> float:
        before = engine.metrics.new_tokens
        spent = timed(ask_all)
        return spent / (engine.metrics.new_tokens - before)

    return Measured(seconds, list)


CASES = [
    Case(
        f"small {precision}",
        {"design": "preset:gqa-small", "precision": precision, "clients": 50, "in_turn": 4},
        4.0 if precision == "fp32" else None,
        pairs=5,
        figure="many requests" if precision == "fp32" else "",
    )
    for precision in ("fp32", "bf16")
]

if __name__ == "__main__":
    main(
        "benchmarks.serving",
        (__doc__ or "").splitlines()[0],
        {
            "at_once": partial(side, True),
            "in_turn": partial(side, False),
        },
        CASES,
    )
