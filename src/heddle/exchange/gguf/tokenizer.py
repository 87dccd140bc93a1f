"""The tokenizer keys of a GGUF: tokens, their types, merges, and the name of the pre-tokenizer.

llama.cpp has a fixed list of named pre-tokenizers (rules that split a text into words). A tokenizer trained by heddle
splits as GPT-2's does, except that it also cuts runs of more than 256 characters of the same kind.
"""

import json
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Engine

from heddle.errors import DataError
from heddle.progress import print_status
from heddle.tokenization.backend import MAX_RUN_LENGTH, read_backend
from heddle.tokenization.tokenizer import BoundaryTokens, Tokenizer

if TYPE_CHECKING:
    from heddle.exchange.gguf.read import Keys

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


def read_tokenizer(keys: "Keys", rows: int, source: str) -> Tokenizer | None:
    """The byte-level BPE of a GGUF; None, and a sentence that says so, for another kind.

    rows: of the embedding. Raises DataError for damaged keys.
    """
    kind, pre = (keys.get(f"tokenizer.ggml.{name}", "none") for name in ("model", "pre"))
    patterns = {name: pattern for pattern, name in PRE_TOKENIZERS.items()}
    if kind != "gpt2" or pre not in patterns:
        if kind != "none":
            remedy = "give the model a tokenizer.json of its own"
            print_status(f"warning: {source}: its tokenizer ({kind}, {pre}) is not read; {remedy}")
        return None
    lists = {name: keys.get(f"tokenizer.ggml.{name}", list[Any]()) for name in ("tokens", "token_type", "merges")}
    tokens = lists["tokens"]
    if len(tokens) > rows:
        raise DataError(f"{source}: has {len(tokens)} tokens, but the embedding only {rows} rows; download it again")
    try:
        text = _bpe_json(tokens, lists["token_type"], lists["merges"], patterns[pre], pre in IGNORE_MERGES)
        ids = {name: keys.get(f"tokenizer.ggml.{name}_token_id", -1) for name in ("bos", "eos")}
        begins = keys.get("tokenizer.ggml.add_bos_token", False) and ids["bos"] >= 0
        ends = (ids["eos"],) if ids["eos"] >= 0 else ()
        boundaries = BoundaryTokens((ids["bos"],) if begins else (), ends)
        return Tokenizer(read_backend(text, source), source, text, boundaries)
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise DataError(f"{source}: its tokenizer is damaged ({error}); download it again") from error


def _bpe_json(tokens: list[str], types: list[int], merges: list[str], pattern: str, ignore_merges: bool) -> str:
    """The tokenizer.json of a byte-level BPE."""
    types = types or [NORMAL] * len(tokens)
    kinds = list(zip(tokens, types, strict=True))
    engine = Engine(
        models.BPE(
            {token: index for index, (token, kind) in enumerate(kinds) if kind in (NORMAL, CONTROL, USER_DEFINED)},
            [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)],
            ignore_merges=ignore_merges,
        )
    )
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytewise])
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == CONTROL])
    engine.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == USER_DEFINED])
    text: str = engine.to_str()
    return text
