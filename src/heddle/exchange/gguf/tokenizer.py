"""The tokenizer keys of a GGUF: tokens, their types, merges, and the name of the pre-tokenizer.

llama.cpp has a fixed list of named pre-tokenizers (rules that split a text into words). A tokenizer trained by heddle
splits as GPT-2's does, except that it also cuts runs of more than 256 characters of the same kind.
"""

import json
from typing import Any

from heddle.errors import DataError
from heddle.tokenization.tokenizer import MAX_RUN_LENGTH, Tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BPE_SPLIT = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Regular expression that splits a text -> llama.cpp's name of the pre-tokenizer.
PRE_TOKENIZERS = {
    _GPT2_SPLIT: "gpt-2",
    _CONTRACTIONS + _BPE_SPLIT % r"\p{N}": "qwen2",
    _CONTRACTIONS + _BPE_SPLIT % r"\p{N}{1,3}": "llama-bpe",
}
IGNORE_MERGES = {"llama-bpe"}  # a word that is a token becomes that token, without merges


def tokenizer_keys(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The keys under `tokenizer.ggml.`. vocab_size: rows of the embedding; rows without a token are marked as unused.

    Raises DataError for a kind of tokenizer that llama.cpp does not know.
    """
    data = json.loads(tokenizer.to_json())
    model = data["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "BPE that falls back to bytes" if model.get("byte_fallback") else model.get("type")
        raise DataError(f"tokenizer: is {kind}; a GGUF is written with byte-level BPE only")
    normalizer = (data.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise DataError(f"tokenizer: its normalizer {normalizer} is none that llama.cpp applies; take one without")
    tokens = {index: token for token, index in model["vocab"].items()}
    token_types = dict.fromkeys(tokens, NORMAL)
    for added in data.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        token_types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": _pre_tokenizer_name(data),
        "tokens": [tokens.get(index, f"[PAD{index}]") for index in range(vocab_size)],
        "token_type": [token_types.get(index, UNUSED) for index in range(vocab_size)],
        "merges": merges,
    }
    return keys | _special_token_keys(tokenizer)


def _pre_tokenizer_name(data: dict[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer."""
    steps = data.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    bytewise = next((step for step in steps if step.get("type") == "ByteLevel"), None)
    patterns = [step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"]
    if bytewise is not None and bytewise.get("use_regex", True):
        patterns.append(_GPT2_SPLIT)
    plain = [pattern.replace(f"{{1,{MAX_RUN_LENGTH}}}", "+") for pattern in patterns]
    name = PRE_TOKENIZERS.get(plain[0]) if len(plain) == 1 else None
    if name is None or bytewise is None or bytewise.get("add_prefix_space"):
        raise DataError(
            "tokenizer: splits texts in a way that llama.cpp has no name for; take one that splits as GPT-2"
        )
    if bool(data["model"].get("ignore_merges")) != (name in IGNORE_MERGES):
        raise DataError(f"tokenizer: splits as {name}, but its ignore_merges is not that of {name}; take another")
    return name


def _special_token_keys(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokens that begin and end a text."""
    eos_ids = [token for token in tokenizer.eos_ids if token not in tokenizer.bos_ids] or tokenizer.eos_ids
    keys: dict[str, Any] = {"add_bos_token": bool(tokenizer.bos_ids), "add_eos_token": False}
    if tokenizer.bos_ids:
        keys["bos_token_id"] = tokenizer.bos_ids[0]
    if eos_ids:
        keys["eos_token_id"] = eos_ids[0]
    return keys
