"""A server of a small model on a free port, run in a thread of the test."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import httpx2 as httpx

from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.serving.app import Access, Application
from heddle.serving.engine import Engine
from heddle.serving.limits import ServerLimits
from heddle.serving.requests import RequestReader
from heddle.serving.server import DrainingServer, host_names, listen
from heddle.tokenization.tokenizer import Tokenizer
from tests import small

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}{{ 'assistant: ' }}"
NAME = "small"


@cache
def small_model() -> tuple[Decoder, Tokenizer]:
    tokenizer = Tokenizer.train([small.text(4000)], small.VOCABULARY)
    tokenizer.companion_files = {"chat_template.jinja": TEMPLATE}
    config = load_config(small.design(), [f"vocab_size={tokenizer.vocab_size}"])
    return build(config).eval(), tokenizer


class Served(Protocol):
    """A server that can be asked."""

    client: httpx.Client

    def complete(self, **fields: Any) -> httpx.Response: ...


@dataclass
class Running:
    server: DrainingServer
    engine: Engine
    address: str
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.address, timeout=60.0)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": NAME, "prompt": "The weaver"} | fields)

    def wait_until_free(self) -> None:
        deadline = time.monotonic() + 20
        while self.engine.states or self.engine.queue_length:
            assert time.monotonic() < deadline, "a state was not freed"
            time.sleep(0.01)


@contextmanager
def running_server(token: str | None = None, template: bool = True, **limits: int) -> Iterator[Running]:
    model, tokenizer = small_model()
    tokenizer.companion_files = {"chat_template.jinja": TEMPLATE} if template else {}
    all_limits = ServerLimits(**limits)
    with listen("127.0.0.1", 0) as listener, Engine(model, tokenizer, all_limits) as engine:
        port = listener.getsockname()[1]
        access = Access(host_names("127.0.0.1", port), token)
        server = DrainingServer(Application(engine, RequestReader(tokenizer, NAME, all_limits), access))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        running = Running(server, engine, f"http://127.0.0.1:{port}")
        try:
            yield running
        finally:
            running.client.close()
            server.should_exit = True
            thread.join()
