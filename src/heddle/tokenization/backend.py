"""The `tokenizers` library underneath: reading tokenizer.json, pre-tokenization, the end-of-document token."""

import base64
import functools
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from heddle.errors import DataError

EOD_TOKEN = "<|end|>"
# Longer runs are split before BPE, whose time grows faster than a run's length: one letter may fill 100 MB.
MAX_RUN_LENGTH = 256
# GPT-2's pattern; runs longer than MAX_RUN_LENGTH are split.
_PATTERN = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}{1,N}| ?\p{N}{1,N}| ?[^\s\p{L}\p{N}]{1,N}|\s{1,N}(?!\S)|\s{1,N}").replace(
    "{1,N}", f"{{1,{MAX_RUN_LENGTH}}}"
)
_STEPS = ("normalizer", "pre_tokenizer", "decoder")
MAX_STEP_VALUES = 2000  # each step reads the whole text
MAX_GROWTH = 1000  # how many characters all replacements together may make from one
_EOD_TOKEN_NAMES = (
    EOD_TOKEN, "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>",
    "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>",
)  # fmt: skip


def byte_level_pre_tokenizer() -> pre_tokenizers.Sequence:
    """Return the pre-tokenizer of heddle's tokenizers: GPT-2's words, as bytes."""
    split = pre_tokenizers.Split(Regex(_PATTERN), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def read_backend(json_text: str, name: str) -> BackendTokenizer:
    """Read a tokenizer.json into a backend tokenizer. Raises DataError, naming the tokenizer, if it is malformed.

    Its sizes are checked and its expressions are tried in another process before the library reads it here.
    """
    try:
        data = json.loads(json_text, object_pairs_hook=_distinct)
        steps = {key: data.get(key) for key in _STEPS}
        if _count_values(list(steps.values())) > MAX_STEP_VALUES:
            raise DataError(f"tokenizer {name} splits a text in more than {MAX_STEP_VALUES} steps: give another one.")
        if any(_growth(step) > MAX_GROWTH for step in steps.values()):
            raise DataError(f"tokenizer {name} may turn one character into more than {MAX_GROWTH}: give another one.")
        check_steps(steps, frozenset({_PATTERN}), name)
        return BackendTokenizer.from_str(json_text)
    except DataError:
        raise
    except BaseException as error:
        if not is_backend_error(error):
            raise
        raise DataError(f"tokenizer {name} is not a valid tokenizer.json: save it again with `tokenizers`.") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. Refuses a duplicate key, which would be checked once and read twice."""
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("duplicate key in JSON")
    return content


def _growth(step: Any) -> int:
    """Return the most characters that all replacements of a normalizer or decoder together make from one."""
    if not isinstance(step, dict):
        return 1
    growth = 1
    for nested in (*(step.get("normalizers") or ()), *(step.get("decoders") or ())):
        growth = min(growth * _growth(nested), MAX_GROWTH + 1)
    kind = step.get("type")
    if kind == "Prepend":
        return 1 + len(step["prepend"])
    if kind == "Precompiled":
        return _longest_replacement(step.get("precompiled_charsmap") or "")
    if kind != "Replace":
        return growth
    pattern = step["pattern"].get("String")
    content = len(step["content"])
    return max(1, -(-content // len(pattern)) if pattern else content + 1)  # a pattern may match an empty text


def _longest_replacement(characters: str) -> int:
    """Return the longest replacement's length in a sentencepiece map: a trie's size, the trie, then 0-ended texts."""
    content = base64.b64decode(characters)
    texts = content[4 + int.from_bytes(content[:4], "little") :].decode("utf-8")
    return max(1, *map(len, texts.split("\0")))


def without_added_space(backend: BackendTokenizer) -> tuple[Any, Any]:
    """Return the normalizer and the pre-tokenizer of a text that goes on: without steps that put a space before it."""
    steps = [backend.normalizer, backend.pre_tokenizer]
    settings = [None if step is None else _without_added_space(json.loads(step.__getstate__())) for step in steps]
    model = {"type": "BPE", "vocab": {}, "merges": []}
    bare: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    changed = BackendTokenizer.from_str(json.dumps(bare | dict(zip(_STEPS, settings, strict=False))))
    return changed.normalizer, changed.pre_tokenizer


def _without_added_space(step: dict[str, Any]) -> dict[str, Any]:
    inner = {
        name: [_without_added_space(each) for each in step[name] if each.get("type") != "Prepend"]
        for name in ("normalizers", "pretokenizers")
        if name in step
    }
    if step.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    metaspace = {"prepend_scheme": "never"} if step.get("type") == "Metaspace" else {}
    spaces = {"add_prefix_space": False} if "add_prefix_space" in step else {}
    return step | inner | metaspace | spaces


def is_backend_error(error: BaseException) -> bool:
    """Whether `tokenizers` failed: it raises bare Exception, and panics are not Exceptions. A signal is neither."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _count_values(data: Any) -> int:
    """Return the number of values in plain data, counted without recursion."""
    level, count = [data], 0
    while level:
        count += len(level)
        nested = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = [child for children in nested for child in children]
    return count


def find_eod_id(backend: BackendTokenizer) -> int:
    """Return the id of the end-of-document token: the first known name among special tokens, else a new token."""
    special_tokens = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    for name in _EOD_TOKEN_NAMES:
        if name in special_tokens:
            return special_tokens[name]
    backend.add_special_tokens([AddedToken(EOD_TOKEN, special=True, normalized=False)])
    eod_id = backend.token_to_id(EOD_TOKEN)
    assert eod_id is not None
    return eod_id


def canonical_json(text: str) -> bytes:
    """Return the JSON with sorted keys, without nulls, so that formatting and new optional fields keep the hash."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items() if inner is not None}
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(clean(json.loads(text)), sort_keys=True).encode()


# A foreign tokenizer is tried in a separate process before its expressions are compiled in this one.
#
# The process ends after a second of CPU time, or when it takes more than 64 MiB. The library's output, such as a panic
# message, does not reach the terminal.

_PROCESS_FILE = Path(__file__).with_name("trial_process.py")
_MAX_UNITS = 64  # characters and pairs to repeat
_CHARACTERS = ("a", "A", "0", " ", "\n", "\t", "!", "_", "'", "é", "中", "\u0301")


def check_steps(steps: dict[str, Any], texts: frozenset[str], name: str) -> None:
    """Raise DataError for a tokenizer with expressions that take too much time or memory, or break the library.

    steps: normalizer, pre-tokenizer and decoder of a tokenizer.json. texts: known expressions. Steps without other
    expressions and without a search for empty text take linear time and memory, and are not tried.
    """
    patterns = set(_patterns(steps))
    if patterns <= texts:
        return
    literals = "".join(re.sub(r"\\.|\W", "", pattern) for pattern in sorted(patterns))
    units = dict.fromkeys([*_CHARACTERS, *literals, *map("".join, itertools.pairwise(literals))])
    reason = _failure(json.dumps({"steps": steps, "units": list(units)[:_MAX_UNITS]}))
    if reason is not None:
        raise DataError(
            f"tokenizer {name} cannot encode every text: {reason}; use another one, such as a byte-level one."
        )


def _patterns(step: Any) -> Iterator[str]:
    """Yield every expression, and "" for a replacement of the empty text; the JSON parser limits nesting."""
    if isinstance(step, list):
        for nested in step:
            yield from _patterns(nested)
    if not isinstance(step, dict):
        return
    pattern = step.get("pattern")
    if isinstance(pattern, dict):
        if "Regex" in pattern:
            yield str(pattern["Regex"])
        elif not pattern.get("String"):
            yield ""
    for nested in step.values():
        yield from _patterns(nested)


@functools.lru_cache(maxsize=64)
def _failure(request: str) -> str | None:
    """Return why the trial failed, or None."""
    try:
        result = subprocess.run(
            # a panic's backtrace may wait forever for memory that is refused
            ["env", "RUST_BACKTRACE=0", sys.executable, "-P", str(_PROCESS_FILE)],
            input=request.encode(),
            capture_output=True,
            timeout=20,  # for a busy machine; the CPU time is limited
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "its trial did not finish"
    if result.returncode == 0 and result.stdout == b"ok":
        return None
    if result.returncode == -signal.SIGPROF:
        return "its expressions take more than a second for runs of 30,000 characters"
    if result.returncode == -signal.SIGABRT:
        return "its expressions take more than 64 MiB"
    return "it breaks the library that reads it"
