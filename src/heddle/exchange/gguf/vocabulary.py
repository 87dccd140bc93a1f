"""A tokenizer as a GGUF tells it: tokens, their types, merges, and the name of the rule that splits texts into words.

llama.cpp has the rules of well-known tokenizers under names, and no way to be told another. A tokenizer trained by
heddle splits as GPT-2's does, but for runs of more than 256 characters of a kind, which it also cuts.
"""

import json
from typing import Any

from heddle.errors import DataError
from heddle.tokenization.tokenizer import LONGEST_RUN, Tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LATER = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# What splits a text -> llama.cpp's name of it.
SPLITS = {
    _GPT2: "gpt-2",
    _ENDINGS + _LATER % r"\p{N}": "qwen2",
    _ENDINGS + _LATER % r"\p{N}{1,3}": "llama-bpe",
}
IGNORES_MERGES = {"llama-bpe"}  # a word that is a token is that token, whatever the merges say


def vocabulary(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """The keys below `tokenizer.ggml.`, for an embedding of `rows` rows; rows without a token are marked as unused.

    Raises DataError, naming it, for a kind of tokenizer that llama.cpp does not know.
    """
    data = json.loads(tokenizer.to_json())
    model = data["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "BPE that falls back to bytes" if model.get("byte_fallback") else model.get("type")
        raise DataError(f"tokenizer: is {kind}; a GGUF is written with byte-level BPE only")
    normalizer = (data.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise DataError(f"tokenizer: its normalizer {normalizer} is none that llama.cpp applies; take one without")
    names = {index: token for token, index in model["vocab"].items()}
    types = dict.fromkeys(names, NORMAL)
    for added in data.get("added_tokens", []):
        names[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    told: dict[str, Any] = {
        "model": "gpt2",
        "pre": _split(data),
        "tokens": [names.get(index, f"[PAD{index}]") for index in range(rows)],
        "token_type": [types.get(index, UNUSED) for index in range(rows)],
        "merges": merges,
    }
    return told | _ends(tokenizer)


def _split(data: dict[str, Any]) -> str:
    """llama.cpp's name of the rule that splits."""
    steps = data.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    bytewise = next((step for step in steps if step.get("type") == "ByteLevel"), None)
    patterns = [step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"]
    if bytewise is not None and bytewise.get("use_regex", True):
        patterns.append(_GPT2)
    plain = [pattern.replace(f"{{1,{LONGEST_RUN}}}", "+") for pattern in patterns]
    name = SPLITS.get(plain[0]) if len(plain) == 1 else None
    if name is None or bytewise is None or bytewise.get("add_prefix_space"):
        raise DataError(
            "tokenizer: splits texts in a way that llama.cpp has no name for; take one that splits as GPT-2"
        )
    if bool(data["model"].get("ignore_merges")) != (name in IGNORES_MERGES):
        raise DataError(f"tokenizer: splits as {name}, but its ignore_merges is not that of {name}; take another")
    return name


def _ends(tokenizer: Tokenizer) -> dict[str, Any]:
    """What opens and ends a text."""
    ends = [token for token in tokenizer.ends if token not in tokenizer.opening] or tokenizer.ends
    told: dict[str, Any] = {"add_bos_token": bool(tokenizer.opening), "add_eos_token": False}
    if tokenizer.opening:
        told["bos_token_id"] = tokenizer.opening[0]
    if ends:
        told["eos_token_id"] = ends[0]
    return told
