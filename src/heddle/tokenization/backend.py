"""The `tokenizers` library underneath: reading tokenizer.json, how a text is divided, its end-of-document token."""

import base64
import json
from typing import Any

from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from heddle.errors import DataError
from heddle.tokenization.trial import check_steps

EOD_TOKEN = "<|end|>"
# BPE splits longer runs, since its time grows faster than the length of a run, and one letter may fill 100 MB.
MAX_RUN_LENGTH = 256
# GPT-2's pattern; runs longer than MAX_RUN_LENGTH are split.
_PATTERN = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}{1,N}| ?\p{N}{1,N}| ?[^\s\p{L}\p{N}]{1,N}|\s{1,N}(?!\S)|\s{1,N}").replace(
    "{1,N}", f"{{1,{MAX_RUN_LENGTH}}}"
)
_STEPS = ("normalizer", "pre_tokenizer", "decoder")
MAX_STEP_VALUES = 2000  # each step walks over the whole text
MAX_GROWTH = 1000  # characters that replacements, one after the other, may make of one
_EOD_TOKEN_NAMES = (
    EOD_TOKEN, "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>",
    "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>",
)  # fmt: skip


def byte_level_pre_tokenizer() -> pre_tokenizers.Sequence:
    """How heddle's tokenizers divide a text: GPT-2's words, as bytes."""
    split = pre_tokenizers.Split(Regex(_PATTERN), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def read_backend(json_text: str, name: str) -> BackendTokenizer:
    """Read a tokenizer.json into a backend tokenizer. Raises DataError, naming the tokenizer, where it is malformed.

    Its sizes are counted and its expressions are tried in another process before the library reads it here.
    """
    try:
        data = json.loads(json_text, object_pairs_hook=_distinct)
        steps = {key: data.get(key) for key in _STEPS}
        if _count_values(list(steps.values())) > MAX_STEP_VALUES:
            raise DataError(f"tokenizer {name} splits a text in more than {MAX_STEP_VALUES} steps: give another one.")
        if any(_growth(step) > MAX_GROWTH for step in steps.values()):
            raise DataError(f"tokenizer {name} may make more than {MAX_GROWTH} characters of one: give another one.")
        check_steps(steps, frozenset({_PATTERN}), name)
        return BackendTokenizer.from_str(json_text)
    except DataError:
        raise
    except BaseException as error:
        if not is_backend_error(error):
            raise
        raise DataError(f"tokenizer {name} is not a valid tokenizer.json: save it again with `tokenizers`.") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. A key that stands twice would be counted once and read twice."""
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key stands twice")
    return content


def _growth(step: Any) -> int:
    """The most characters that the replacements of a normalizer or decoder make of one, one after the other."""
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
    """The longest text that a map of sentencepiece puts for a character: a trie's size, it, then texts ended by 0."""
    content = base64.b64decode(characters)
    texts = content[4 + int.from_bytes(content[:4], "little") :].decode("utf-8")
    return max(1, *map(len, texts.split("\0")))


def is_backend_error(error: BaseException) -> bool:
    """Whether `tokenizers` failed: it raises bare Exception, and panics that are no Exception. A signal is neither."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _count_values(data: Any) -> int:
    """How many values there are in plain data, counted without recursion."""
    level, count = [data], 0
    while level:
        count += len(level)
        nested = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = [child for children in nested for child in children]
    return count


def find_eod_id(backend: BackendTokenizer) -> int:
    """The id of the end-of-document token: the first usual name among its special tokens, else a new special token."""
    special_tokens = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    for name in _EOD_TOKEN_NAMES:
        if name in special_tokens:
            return special_tokens[name]
    backend.add_special_tokens([AddedToken(EOD_TOKEN, special=True, normalized=False)])
    eod_id = backend.token_to_id(EOD_TOKEN)
    assert eod_id is not None
    return eod_id


def canonical_json(text: str) -> bytes:
    """The JSON with sorted keys and without nulls: formatting and new optional fields do not change the hash."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items() if inner is not None}
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(clean(json.loads(text)), sort_keys=True).encode()
