"""Stop strings: text is held back while it may be the start of one, and cut where one begins."""

from collections.abc import Sequence

from heddle.errors import ConfigError


class Tail:
    """The text of one row. `text` is all that was let through, `stopped` whether a stop string was met."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ConfigError("stop: an empty stop string would end every text at once; leave it out")
        self.stops = tuple(stops)
        self.text = ""
        self.stopped = False
        self._held = ""

    def push(self, piece: str) -> str:
        """Add text; returns what may be shown now."""
        if self.stopped:
            return ""
        self._held += piece
        found = [index for stop in self.stops if (index := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._let(min(found), drop=True)
        longest = max((self._overlap(stop) for stop in self.stops), default=0)
        return self._let(len(self._held) - longest)

    def finish(self) -> str:
        """The text held back, once nothing more comes."""
        return "" if self.stopped else self._let(len(self._held))

    def _overlap(self, stop: str) -> int:
        """How many last characters held are the start of a stop string."""
        return next((size for size in range(len(stop) - 1, 0, -1) if self._held.endswith(stop[:size])), 0)

    def _let(self, size: int, drop: bool = False) -> str:
        shown, self._held = self._held[:size], "" if drop else self._held[size:]
        self.text += shown
        return shown
