"""The settings of `heddle serve`; among them what one request may ask, and how many are served at once."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

from heddle.errors import ConfigError
from heddle.settings import Argument, Kernel, Option, Precision, SessionSettings, VerbSettings

ModelFolder = Annotated[Path, Argument("MODEL", "A run, a model's folder, or one of transformers.")]


@dataclass(frozen=True, kw_only=True)
class ServerLimits(VerbSettings):
    """The limits of a server; each is at least 1.

    max_body: checked while a body is read. max_seconds: from a request's arrival to its end, waiting included. slots: a
    request alone may have more.
    """

    max_body: Annotated[int, Option("N", "Bytes of a request.")] = 2**20
    max_stops: Annotated[int, Option("N", "Stop strings of a request.")] = 4
    max_stop_length: Annotated[int, Option("N", "Characters of each.")] = 256
    max_prompt: Annotated[int, Option("N", "Tokens of a prompt.")] = 8192
    max_new_tokens: Annotated[int, Option("N", "Most new tokens of a request.")] = 2048
    max_seconds: Annotated[int, Option("N", "Seconds of a request.")] = 120
    streams: Annotated[int, Option("N", "Requests decoded at once.")] = 32
    slots: Annotated[int, Option("N", "Tokens that all states have room for.")] = 81_920
    queue: Annotated[int, Option("N", "Requests that wait; others get 429.")] = 64
    connections: Annotated[int, Option("N", "Open connections.")] = 512
    drain_seconds: Annotated[int, Option("N", "Seconds that requests have after SIGTERM.")] = 30

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
    host: Annotated[str, Option("NAME", "Address; beyond loopback, a token is needed.")] = "127.0.0.1"
    port: Annotated[int, Option("N", "Port; 0 is any free one.")] = 8000
    token_file: Annotated[Path | None, Option("FILE", "File with the token that requests need.")] = None
    name: Annotated[str | None, Option("NAME", "The model's name for clients. [its folder's]")] = None
    batch_invariant: Annotated[bool, Option("", "Compute each request alone, so that it has the same bits.")] = False
    precision: Precision = "fp32"
    kernel: Kernel = ()


@dataclass(frozen=True, kw_only=True)
class ChatSettings(SessionSettings):
    """Settings of `heddle chat`."""

    models: Annotated[tuple[Path, ...], Argument("RUN", "One or two: runs, models' folders, or those of transformers.")]
    page: Annotated[bool, Option("", "On a page in the browser, instead of the terminal.")] = False
    port: Annotated[int, Option("N", "Port of the page; 0 is any free one.")] = 0
    open: Annotated[bool, Option("", "Open the page in the browser.")] = False
    precision: Precision = "fp32"
    kernel: Kernel = ()
