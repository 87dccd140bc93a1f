"""The settings of `heddle serve` and `heddle chat`, among them limits per request and on concurrency."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

from heddle.errors import ConfigError
from heddle.settings import Argument, Kernel, Option, Precision, SessionSettings, VerbSettings, parse_port

ModelFolder = Annotated[Path, Argument("MODEL", "A run, a model folder, or a transformers folder.")]


@dataclass(frozen=True, kw_only=True)
class ServerLimits(VerbSettings):
    """The limits of a server; each is at least 1.

    max_body: checked while a body is read. max_seconds: from a request's arrival to its end, time in the queue
    included. slots: a single request may exceed it.
    """

    max_body: Annotated[int, Option("N", "Max bytes of a request.")] = 2**20
    max_stops: Annotated[int, Option("N", "Max stop strings of a request.")] = 4
    max_stop_length: Annotated[int, Option("N", "Max characters of a stop string.")] = 256
    max_prompt: Annotated[int, Option("N", "Max tokens of a prompt.")] = 8192
    max_new_tokens: Annotated[int, Option("N", "Max new tokens of a request.")] = 2048
    max_seconds: Annotated[int, Option("N", "Max seconds of a request, queue included.")] = 120
    streams: Annotated[int, Option("N", "Max requests decoded at once.")] = 32
    slots: Annotated[int, Option("N", "Max tokens in all states together.")] = 81_920
    queue: Annotated[int, Option("N", "Max waiting requests; others get 429.")] = 64
    connections: Annotated[int, Option("N", "Max open connections.")] = 512
    drain_seconds: Annotated[int, Option("N", "Seconds for requests to finish after SIGTERM.")] = 30

    def __post_init__(self) -> None:
        for field in fields(ServerLimits):
            if getattr(self, field.name) < 1:
                raise ConfigError(f"{field.name} {getattr(self, field.name)}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class ServeSettings(ServerLimits, SessionSettings):
    """Settings of `heddle serve`."""

    SHOWN: ClassVar = (
        "host", "port", "token_file", "name", "streams", "max_new_tokens", "max_seconds", "device", "precision",
    )  # fmt: skip

    model: ModelFolder
    host: Annotated[str, Option("NAME", "Address; beyond loopback, a token is required.")] = "127.0.0.1"
    port: Annotated[int, Option("N", "Port; 0 picks a free one.", parse_port)] = 8000
    token_file: Annotated[Path | None, Option("FILE", "File with the token that requests must send.")] = None
    name: Annotated[str | None, Option("NAME", "The model's name for clients. [its folder's]")] = None
    batch_invariant: Annotated[bool, Option("", "Compute each request alone, with the same bits at any load.")] = False
    precision: Precision = "fp32"
    kernel: Kernel = ()


@dataclass(frozen=True, kw_only=True)
class ChatSettings(SessionSettings):
    """Settings of `heddle chat`."""

    models: Annotated[tuple[Path, ...], Argument("RUN", "One or two runs, model folders or transformers folders.")]
    page: Annotated[bool, Option("", "Chat in the browser, not in the terminal.")] = False
    port: Annotated[int, Option("N", "Port of the page; 0 picks a free one.", parse_port)] = 0
    open: Annotated[bool, Option("", "Open the page in the browser.")] = False
    precision: Precision = "fp32"
    kernel: Kernel = ()
