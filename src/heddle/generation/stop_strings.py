"""Stop strings: hold text back while it may be the start of a stop string; cut the text where a stop string begins."""

from collections.abc import Sequence

from heddle.errors import ConfigError


class StopStringBuffer:
    """The text of one row. `text` is what was released so far; `stopped` is set once a stop string is found."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if any(not stop for stop in stop_strings):
            raise ConfigError("stop: an empty stop string would end every text at once; leave it out")
        self.stop_strings = tuple(stop_strings)
        self.text = ""
        self.stopped = False
        self._pending = ""

    def push(self, piece: str) -> str:
        """Add text; returns the text that can be shown now."""
        if self.stopped:
            return ""
        self._pending += piece
        matches = [index for stop in self.stop_strings if (index := self._pending.find(stop)) >= 0]
        if matches:
            self.stopped = True
            return self._release(min(matches), discard_rest=True)
        longest = max((self._partial_match_length(stop) for stop in self.stop_strings), default=0)
        return self._release(len(self._pending) - longest)

    def finish(self) -> str:
        """The text still held back, once no more text will come."""
        return "" if self.stopped else self._release(len(self._pending))

    def _partial_match_length(self, stop: str) -> int:
        """How many of the last pending characters are the start of a stop string."""
        return next((length for length in range(len(stop) - 1, 0, -1) if self._pending.endswith(stop[:length])), 0)

    def _release(self, length: int, discard_rest: bool = False) -> str:
        released, self._pending = self._pending[:length], "" if discard_rest else self._pending[length:]
        self.text += released
        return released
