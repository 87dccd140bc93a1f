"""The distinct words of texts, which decide how much memory it takes to train a tokenizer."""

import re
from collections.abc import Iterable

from heddle.tokenization.tokenizer import MAX_RUN_LENGTH

_WORD = re.compile(rf"\w{{1,{MAX_RUN_LENGTH}}}|[^\w\s]{{1,{MAX_RUN_LENGTH}}}")


def distinct_word_bytes(texts: Iterable[str], limit: int) -> int:
    """Count the UTF-8 bytes of the distinct words of the texts; stop once the count passes `limit`.

    BPE training holds every distinct word and needs about 100 bytes of memory for each of these bytes. Scripts
    without spaces have many distinct words, source code has few.
    """
    words: set[str] = set()
    total = 0
    for text in texts:
        new = set(_WORD.findall(text)) - words
        words |= new
        total += sum(len(word.encode("utf-8")) for word in new)
        if total > limit:
            break
    return total
