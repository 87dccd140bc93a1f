"""What one request may ask of the server, and how many are served at once."""

from dataclasses import dataclass, fields

from heddle.errors import ConfigError


@dataclass(frozen=True)
class ServerLimits:
    """The limits of a server; each is at least 1.

    body_bytes: of a request's body, checked while it is read. stop_strings, stop_characters: how many, and of each.
    prompt_tokens, new_tokens: of one request. seconds: from its arrival to its end, waiting included. streams: requests
    that are decoded at once. slots: tokens that the states of all of them may have room for; a request alone may have
    more. queue: requests that wait. drain_seconds: how long running requests may go on after SIGTERM.
    connections: how many may be open.
    """

    body_bytes: int = 2**20
    stop_strings: int = 4
    stop_characters: int = 256
    prompt_tokens: int = 8192
    new_tokens: int = 2048
    seconds: int = 120
    streams: int = 32
    slots: int = 81_920
    queue: int = 64
    drain_seconds: int = 30
    connections: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(f"{field.name} {getattr(self, field.name)}: must be at least 1")
