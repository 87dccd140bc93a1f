"""How much memory learning a tokenizer takes: that of the distinct words of the texts."""

import re
from collections.abc import Iterable

from heddle.tokenization.tokenizer import LONGEST_RUN

_WORD = re.compile(rf"\w{{1,{LONGEST_RUN}}}|[^\w\s]{{1,{LONGEST_RUN}}}")


def distinct_bytes(texts: Iterable[str], bound: int) -> int:
    """UTF-8 bytes of the distinct words of the texts, counted until they pass `bound`.

    Learning holds every distinct word, at about 100 bytes a byte: scripts without spaces have many, source code few.
    """
    seen: set[str] = set()
    total = 0
    for text in texts:
        new = set(_WORD.findall(text)) - seen
        seen |= new
        total += sum(len(word.encode("utf-8")) for word in new)
        if total > bound:
            break
    return total
