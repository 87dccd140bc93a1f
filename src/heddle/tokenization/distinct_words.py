"""The distinct words of texts, which decide how much memory it takes to train a tokenizer."""

import re
from collections.abc import Iterable

from heddle.tokenization.backend import MAX_RUN_LENGTH

_WORD = re.compile(rf"\w{{1,{MAX_RUN_LENGTH}}}|[^\w\s]{{1,{MAX_RUN_LENGTH}}}")
_MAX_RUNS_SIZE = 4 * 1024 * 1024  # characters that are remembered


def distinct_word_bytes(texts: Iterable[str], limit: int) -> int:
    """Count the UTF-8 bytes of the distinct words of the texts; stop once the count passes `limit`.

    BPE training holds every distinct word and needs about 100 bytes of memory for each of these bytes. Scripts
    without spaces have many distinct words, source code has few.
    """
    words: set[str] = set()
    runs: set[str] = set()  # what stands between white space: most of it repeats, and is searched once
    total = runs_size = 0
    for text in texts:
        new_runs = set(text.split()) - runs
        new_words = set(_WORD.findall(" ".join(new_runs))) - words
        words |= new_words
        total += sum(len(word.encode("utf-8")) for word in new_words)
        runs_size += sum(map(len, new_runs))
        runs |= new_runs
        if runs_size > _MAX_RUNS_SIZE:
            runs, runs_size = set(), 0
        if total > limit:
            break
    return total
