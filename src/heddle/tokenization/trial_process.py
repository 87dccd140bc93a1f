"""The trial process of `heddle.tokenization.backend`: read steps and units from standard input, encode, print ok."""

import json
import resource
import signal
import sys
from pathlib import Path

from tokenizers import Tokenizer

_LENGTH = 30_000  # characters of a run
_SECONDS = 1.0  # of CPU time
_MEMORY_BYTES = 64 * 2**20
_STATUS_FILE = Path("/proc/self/statm")


def _limit() -> None:
    """Limit CPU time and memory: the system ends this process when it takes too much."""
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    if _STATUS_FILE.exists():  # Linux; elsewhere only time is limited
        used = int(_STATUS_FILE.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))


def main() -> None:
    """Encode long runs of each unit, and of all in turn, each followed by an unexpected character and all units."""
    request = json.load(sys.stdin)
    steps, units = request["steps"], request["units"]
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    _limit()
    tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model} | steps))
    turns = "".join(units)
    for run in ("", "a", *(unit * (_LENGTH // len(unit)) for unit in (*units, turns))):
        tokenizer.encode(f"{run}\x01{turns}", add_special_tokens=False)
        if tokenizer.decoder is not None:
            tokenizer.decoder.decode([run, run])
    print("ok", end="", flush=True)


if __name__ == "__main__":
    main()
