"""The tokenizer keys of a GGUF, both ways: byte-level BPE (`gpt2`), SentencePiece's BPE (`llama`), WordPiece (`bert`).

llama.cpp has a fixed list of named pre-tokenizers (rules that split a text into words) for byte-level BPE. A tokenizer
trained by heddle splits as GPT-2's does, except that it also cuts runs of more than 256 characters of the same kind.
SentencePiece's BPE has no merges: the neighbors with the highest score of their union are joined first, so that merges
and their order follow from the scores. Bytes outside of the vocabulary are tokens such as <0xE2>. WordPiece tokens that
begin a word start with ▁ there, and tokens that continue one have no ##; text is always lowercased.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

from heddle.data.chat import CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, chat_template_text, named_tokens, turn_end_ids
from heddle.errors import DataError, HeddleError, shorten_value
from heddle.progress import print_status, printable
from heddle.tokenization.backend import MAX_RUN_LENGTH, is_backend_error, read_backend
from heddle.tokenization.token_bytes import SPIECE_UNDERLINE
from heddle.tokenization.tokenizer import BoundaryTokens, Tokenizer

if TYPE_CHECKING:
    from heddle.exchange.gguf.config_from_keys import Keys

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
BYTE_LEVEL, SENTENCEPIECE, WORDPIECE = "gpt2", "llama", "bert"
CONTINUING = "##"
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
NAMED_TOKENS = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "mask_token": "mask",
    "sep_token": "seperator",  # as a GGUF spells it
}  # fmt: skip
# Texts of tokens that llama.cpp takes for control tokens whatever their type, and for ends of a text.
END_TEXTS = """
<|eot_id|> <|im_end|> <|end|> <end_of_turn> <turn|> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] [EOS] <eos> </s>
<｜end▁of▁sentence｜> <end_of_utterance> <|eom_id|> <|return|> <|call|> <|calls|> <|flush|>
""".split()  # noqa: SIM905
# The same of tokens around code to fill in, where no key names the token.
FILL_TEXTS = {
    "fim_pre": "<|fim_prefix|> <fim_prefix> <fim-prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim_suffix> <fim-suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim_middle> <fim-middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim_pad> <fim-pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <fim-repo> <|repo_name|> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
NO_SCORE = -1000.0  # of tokens that no merge makes, as in Gemma's files
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BPE_SPLIT = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = _CONTRACTIONS + _BPE_SPLIT % r"\p{N}{1,3}"
_QWEN2_SPLIT = _CONTRACTIONS + _BPE_SPLIT % r"\p{N}"
# llama.cpp's name of a pre-tokenizer -> the expressions that split a text, one after the other. Of several names for
# the same, the first is written.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat"), (_GPT2_SPLIT,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "kormo"), (_QWEN2_SPLIT,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"), (_LLAMA3_SPLIT,)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), (_LLAMA3_SPLIT,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", _GPT2_SPLIT)),
}
IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"}
BEGINS_BY_DEFAULT = IGNORE_MERGES  # files without `add_bos_token` begin texts with it, as SentencePiece's do


def tokenizer_keys(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The keys under `tokenizer.`. vocab_size: rows of the embedding; rows without a token are marked as unused.

    Raises DataError for a kind of tokenizer that llama.cpp does not know.
    """
    data = json.loads(tokenizer.to_json())
    model = data["model"]
    if model.get("type") not in ("BPE", "WordPiece"):
        raise DataError(f"tokenizer: is {model.get('type')}; a GGUF is written with BPE and WordPiece only")
    tokens: dict[int, str] = {index: token for token, index in model["vocab"].items()}
    token_types = dict.fromkeys(tokens, NORMAL)
    for added in data.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        token_types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    make_keys = _sentencepiece_keys if model.get("byte_fallback") else _byte_level_keys
    keys = (_wordpiece_keys if model["type"] == "WordPiece" else make_keys)(data, tokens, token_types) | {
        "tokens": [tokens.get(index, f"[PAD{index}]") for index in range(vocab_size)],
        "token_type": [token_types.get(index, UNUSED) for index in range(vocab_size)],
    }
    if "scores" in keys:
        keys["scores"] = [keys["scores"].get(index, NO_SCORE) for index in range(vocab_size)]
    keys = {f"tokenizer.ggml.{name}": value for name, value in (_special_token_keys(tokenizer) | keys).items()}
    template = chat_template_text(tokenizer.companion_files)
    return keys | ({} if template is None else {"tokenizer.chat_template": template})


def _merge_pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(first, second) for first, second in pairs]


def _byte_level_keys(data: dict[str, Any], tokens: dict[int, str], token_types: dict[int, int]) -> dict[str, Any]:
    normalizer = (data.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise DataError(f"tokenizer: llama.cpp does not apply its normalizer {normalizer}; use a tokenizer without one")
    merges = [" ".join(pair) for pair in _merge_pairs(data["model"])]
    return {"model": BYTE_LEVEL, "pre": _pre_tokenizer_name(data), "merges": merges}


def _sentencepiece_keys(data: dict[str, Any], tokens: dict[int, str], token_types: dict[int, int]) -> dict[str, Any]:
    """Scores in place of merges. `tokens` and `token_types` are changed in place to llama.cpp's spelling."""
    prefix = _adds_space_prefix(data)
    vocabulary = data["model"]["vocab"]
    if not vocabulary.keys() >= set(BYTE_TOKENS):
        raise DataError("tokenizer: falls back to bytes, but lacks tokens for some bytes; use another")
    unknown = data["model"].get("unk_token")
    for token, index in vocabulary.items():
        if token in BYTE_TOKENS:
            token_types[index] = BYTE
        elif token == unknown:
            token_types[index] = UNKNOWN
    for index, kind in token_types.items():
        if kind == USER_DEFINED:
            tokens[index] = tokens[index].replace(SPIECE_UNDERLINE, " ")
    normal = {token: index for token, index in vocabulary.items() if token_types[index] == NORMAL}
    merges = [
        pair for pair in _merge_pairs(data["model"]) if "".join(pair) in normal
    ]  # added tokens are split off first
    ranks: dict[str, int] = {}
    for pair in merges:
        ranks.setdefault("".join(pair), len(ranks))
    scores = {token: -float(ranks.get(token, len(ranks))) for token in normal}
    # llama.cpp joins any two tokens whose union is one, by the score of the union alone.
    in_order = [ranks["".join(pair)] for pair in merges]
    if in_order != sorted(in_order) or sorted(_merges_of_scores(scores, vocabulary)) != sorted(merges):
        raise DataError("tokenizer: its merges do not follow from token scores, as SentencePiece's do; use another")
    keys: dict[str, Any] = {
        "model": SENTENCEPIECE,
        "pre": "default",
        "scores": {normal[token]: score for token, score in scores.items()},
        "add_space_prefix": prefix,
    }
    return keys | ({"unknown_token_id": vocabulary[unknown]} if unknown in vocabulary else {})


# What llama.cpp does with a text before WordPiece.
BERT_NORMALIZER = {"clean_text": True, "handle_chinese_chars": True, "lowercase": True}


def _wordpiece_keys(data: dict[str, Any], tokens: dict[int, str], token_types: dict[int, int]) -> dict[str, Any]:
    """The keys of WordPiece. `tokens` is changed in place to llama.cpp's spelling."""
    normalizer, model = dict(data.get("normalizer") or {}), data["model"]
    steps = (normalizer.get("type"), (data.get("pre_tokenizer") or {}).get("type"))
    if steps != ("BertNormalizer", "BertPreTokenizer"):
        raise DataError("tokenizer: is WordPiece, but does not split text as BERT does, as llama.cpp requires")
    expected = BERT_NORMALIZER | ({"strip_accents": True} if normalizer.get("strip_accents") is False else {})
    for name, value in expected.items():
        if normalizer.get(name) != value:
            raise DataError(f"tokenizer: is WordPiece with {name} {normalizer.get(name)}; llama.cpp requires {value}")
    prefix = model.get("continuing_subword_prefix", CONTINUING)
    for index, kind in token_types.items():
        if kind != CONTROL:
            is_inner = tokens[index].startswith(prefix) and tokens[index] != prefix
            tokens[index] = tokens[index].removeprefix(prefix) if is_inner else SPIECE_UNDERLINE + tokens[index]
    ids = {"unknown": model.get("unk_token"), "padding": "[PAD]", "mask": "[MASK]"}
    ids |= {"bos": "[CLS]", "eos": "[SEP]", "seperator": "[SEP]"}
    vocabulary = model["vocab"]
    if not {"[CLS]", "[SEP]"} <= vocabulary.keys():
        raise DataError("tokenizer: is WordPiece without [CLS] and [SEP], which llama.cpp puts around a text")
    named = {f"{name}_token_id": vocabulary[token] for name, token in ids.items() if token in vocabulary}
    return {"model": WORDPIECE, **named}


def _adds_space_prefix(data: dict[str, Any]) -> bool:
    """Whether a text is read with a space before it. Raises DataError for steps that llama.cpp does not apply."""
    step = data.get("normalizer") or {}
    steps = step["normalizers"] if step.get("type") == "Sequence" else [step] * bool(step)
    splits = data.get("pre_tokenizer") or {}
    splits = splits["pretokenizers"] if splits.get("type") == "Sequence" else [splits] * bool(splits)
    prefix, spaces = False, False
    for step in steps:
        is_replacement = step["type"] == "Replace" and step["pattern"] == {"String": " "}
        spaces |= is_replacement and step["content"] == SPIECE_UNDERLINE
        prefix |= step["type"] == "Prepend" and step["prepend"] == SPIECE_UNDERLINE
    for split in splits:
        if split["type"] == "Metaspace" and not split.get("split", True):
            spaces, prefix = True, split["prepend_scheme"] != "never"
    splits = [split for split in splits if not (spaces and split.get("pattern") == {"String": " "})]  # finds none
    kinds = {step["type"] for step in (*steps, *splits)} - {"Prepend", "Replace", "Metaspace"}
    if kinds or not spaces:
        steps_text = ", ".join(sorted(kinds)) or "none"
        raise DataError(f"tokenizer: llama.cpp does not apply its steps before BPE ({steps_text}); use another")
    return prefix


def _merges_of_scores(scores: Mapping[str, float], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens whose union is a token, the highest score of the union first."""

    def pairs() -> Iterator[tuple[float, int, str, str]]:
        for token, score in scores.items():
            for middle in range(1, len(token)):
                first, second = token[:middle], token[middle:]
                if first in vocabulary and second in vocabulary:
                    yield -score, -middle, first, second

    return [(first, second) for _, _, first, second in sorted(pairs())]


def _pre_tokenizer_name(data: dict[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer."""
    steps = data.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    bytewise = next((step for step in steps if step.get("type") == "ByteLevel"), None)
    patterns = [step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"]
    patterns += [r"\p{N}"] * sum(step.get("type") == "Digits" and step["individual_digits"] for step in steps)
    if bytewise is not None and bytewise.get("use_regex", True):
        patterns.append(_GPT2_SPLIT)
    splits = tuple(pattern.replace(f"{{1,{MAX_RUN_LENGTH}}}", "+") for pattern in patterns)
    names = [name for name, known in SPLITS.items() if known == splits]
    if not names or bytewise is None or bytewise.get("add_prefix_space"):
        raise DataError(
            "tokenizer: splits text in a way that llama.cpp does not support; use one that splits as GPT-2 does"
        )
    ignore_merges = bool(data["model"].get("ignore_merges"))
    name = next((name for name in names if (name in IGNORE_MERGES) == ignore_merges), None)
    if name is None:
        raise DataError(f"tokenizer: splits as {names[0]}, but its ignore_merges is not {names[0]}'s; use another")
    return name


def _special_token_keys(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokens that begin and end a text."""
    eos_ids = [token for token in tokenizer.eos_ids if token not in tokenizer.bos_ids] or tokenizer.eos_ids
    keys: dict[str, Any] = {"add_bos_token": bool(tokenizer.bos_ids), "add_eos_token": False}
    if tokenizer.bos_ids:
        keys["bos_token_id"] = tokenizer.bos_ids[0]
    if eos_ids:
        keys["eos_token_id"] = eos_ids[0]
    added = tokenizer.special_tokens | tokenizer.other_added_tokens
    vocabulary = {text: token for token, text in added.items()}
    for name, text in named_tokens(tokenizer.companion_files).items():
        token = vocabulary.get(text)
        if name in ("pad_token", "mask_token", "sep_token") and token is not None and token not in eos_ids:
            keys[f"{NAMED_TOKENS[name]}_token_id"] = token
    turn_ends = [token for token in (*turn_end_ids(tokenizer), *eos_ids[1:]) if token not in eos_ids[:1]]
    if turn_ends:  # llama.cpp has one place more
        keys["eot_token_id"] = turn_ends[0]
    return keys


def read_tokenizer(keys: "Keys", rows: int, source: str) -> Tokenizer | None:
    """The tokenizer of a GGUF; None, with a printed warning, for a kind that is not supported.

    rows: of the embedding. Raises DataError for damaged keys.
    """
    kind, pre = (keys.get(f"tokenizer.ggml.{name}", "none") for name in ("model", "pre"))
    is_read = kind in (SENTENCEPIECE, WORDPIECE) or (kind == BYTE_LEVEL and pre in SPLITS)
    if not is_read:
        if kind != "none":
            remedy = "give one with `--tokenizer FILE`, the model's tokenizer.json"
            print_status(f"warning: {source}: its tokenizer ({kind}, {pre}) is not supported; {remedy}")
        return None
    names = ("tokens", "token_type", "merges", "scores")
    tokens, types, merges, scores = (keys.get(f"tokenizer.ggml.{name}", list[Any]()) for name in names)
    if len(tokens) > rows:
        raise DataError(f"{source}: has {len(tokens)} tokens, but the embedding only {rows} rows; download it again")
    try:
        kinds = _as_llama_cpp_reads(keys, list(zip(tokens, types or [NORMAL] * len(tokens), strict=True)))
        _check_unique(kinds, source)
        if kind == SENTENCEPIECE:
            prefix = keys.get("tokenizer.ggml.add_space_prefix", True)
            unknown = keys.get("tokenizer.ggml.unknown_token_id", -1)
            _check_scores(kinds, scores, source)
            text = _sentencepiece_json(kinds, scores, prefix, tokens[unknown] if unknown >= 0 else None)
        elif kind == WORDPIECE:
            text = _wordpiece_json(kinds, *(_token_id(keys, name, token) for name, token in WORDPIECE_IDS.items()))
        else:
            text = _bpe_json(kinds, merges, SPLITS[pre], pre in IGNORE_MERGES)
        boundaries = _boundary_tokens(keys, kind, pre)
        if kind != WORDPIECE:
            text = _with_begin_token(text, [(token, tokens[token]) for token in boundaries.bos_ids])
        return Tokenizer(read_backend(text, source), source, text, boundaries)
    except BaseException as error:
        if isinstance(error, HeddleError) or not is_backend_error(error):
            raise
        reason = printable(str(error).partition("\n")[0])[:120]
        raise DataError(f"{source}: its tokenizer is damaged ({reason}); download it again") from error


def _as_llama_cpp_reads(keys: "Keys", kinds: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The tokens with their types; some texts make a control token whatever the file says."""
    unnamed = [texts for name, texts in FILL_TEXTS.items() if keys.get(f"tokenizer.ggml.{name}_token_id", -1) < 0]
    controls = {*END_TEXTS, *" ".join(unnamed).split()}
    return [(token, CONTROL if kind in (NORMAL, USER_DEFINED) and token in controls else kind) for token, kind in kinds]


def _check_scores(kinds: list[tuple[str, int]], scores: list[float], source: str) -> None:
    """Raise DataError for scores that give no order: llama.cpp then joins tokens by their place in a text."""
    vocabulary = {token for token, kind in kinds if kind != UNUSED}
    by_score: dict[float, list[str]] = {}
    for (token, kind), score in zip(kinds, scores, strict=True):
        if kind == NORMAL:
            by_score.setdefault(score, []).append(token)
    for score, tokens in by_score.items():
        if len(tokens) > 1 or math.isnan(score):
            parts = ((token[:end], token[end:], token) for token in tokens for end in range(1, len(token)))
            joined = {token for first, second, token in parts if first in vocabulary and second in vocabulary}
            if len(joined) > 1 or (joined and math.isnan(score)):
                what = f"token {shorten_value(min(joined))} has no score of its own ({score})"
                remedy = "give the model's tokenizer.json with `--tokenizer FILE`"
                raise DataError(f"{source}: {what}, so the order of merges is not known; {remedy}")


def _check_unique(kinds: list[tuple[str, int]], source: str) -> None:
    """Raise DataError where two ids have one text: a text would be cut into the second one alone."""
    ids: dict[str, int] = {}
    for index, (token, kind) in enumerate(kinds):
        if token and kind != UNUSED and ids.setdefault(token, index) != index:
            remedy = "download it again, or give the model's tokenizer.json with `--tokenizer FILE`"
            raise DataError(f"{source}: its tokens {ids[token]} and {index} are both {shorten_value(token)}; {remedy}")


def _known_id(keys: "Keys", name: str, count: int) -> int:
    """The id of a key; −1 without one, or, with a printed warning, where it is not below the count of tokens."""
    token = keys.get(key := f"tokenizer.ggml.{name}_token_id", -1)
    if not count <= token:
        return token
    if token < 2**31:  # above: no token, as llama.cpp writes it
        print_status(f"warning: {keys.source}: key '{key}' is {token}, but it has only {count} tokens; it is left out")
    return -1


def _boundary_tokens(keys: "Keys", kind: str, pre: str) -> BoundaryTokens:
    """The tokens that begin and end a text, and the chat template. Without a key for BOS, llama.cpp's default."""
    tokens = keys.get("tokenizer.ggml.tokens", list[str]())
    bos, *ends = (_known_id(keys, name, len(tokens)) for name in ("bos", "eos", "eot", "eom"))
    types = keys.get("tokenizer.ggml.token_type", list[int]()) or [NORMAL] * len(tokens)
    controls = _as_llama_cpp_reads(keys, list(zip(tokens, types, strict=True)))
    places = {token: index for index, (token, kind) in enumerate(controls) if kind == CONTROL}
    is_markup = {token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED and token == "</s>"}
    ends += [places[text] for text in END_TEXTS if text in places.keys() - is_markup]
    begins = keys.get("tokenizer.ggml.add_bos_token", kind == SENTENCEPIECE or pre in BEGINS_BY_DEFAULT) and bos >= 0
    if kind == WORDPIECE:
        begins, bos = True, _token_id(keys, "bos", WORDPIECE_IDS["bos"])
        ends = [bos]  # each text begins with it, and no other token ends one
    template = keys.get("tokenizer.chat_template", "")
    ids = {name: keys.get(f"tokenizer.ggml.{key}_token_id", -1) for name, key in NAMED_TOKENS.items()}
    named: dict[str, Any] = {name: tokens[token] for name, token in ids.items() if 0 <= token < len(tokens)}
    if kind == WORDPIECE:  # BERT's names: a text has a class token and separators, and no token that ends it
        named |= {"cls_token": named.pop("bos_token", tokens[bos])}
        named.pop("eos_token", None)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | named
    files = {TOKENIZER_CONFIG_FILE: json.dumps(settings, indent=2, ensure_ascii=False) + "\n"}
    files |= {CHAT_TEMPLATE_FILE: template} if template else {}
    ends = list(dict.fromkeys(end for end in ends if end >= 0))
    return BoundaryTokens((bos,) if begins else (), tuple(ends), files)


def _bpe_json(kinds: list[tuple[str, int]], merges: list[str], splits: tuple[str, ...], ignore_merges: bool) -> str:
    """The tokenizer.json of a byte-level BPE. kinds: (token, its type) of each id."""
    engine = Engine(
        models.BPE(
            {token: index for index, (token, kind) in enumerate(kinds) if kind != UNUSED},
            [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)],
            ignore_merges=ignore_merges,
        )
    )
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    engine.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytewise])
    engine.decoder = decoders.ByteLevel()
    return _with_added_tokens(engine, kinds)


def _sentencepiece_json(kinds: list[tuple[str, int]], scores: list[float], prefix: bool, unknown: str | None) -> str:
    """The tokenizer.json of SentencePiece's BPE. prefix: whether a space is added before each text."""
    vocabulary = {token: index for index, (token, kind) in enumerate(kinds) if kind != UNUSED}
    joined = (NORMAL, USER_DEFINED)
    scored = {token: score for (token, kind), score in zip(kinds, scores, strict=True) if kind in joined}
    merges = _merges_of_scores(scored, vocabulary)
    falls_back = vocabulary.keys() >= set(BYTE_TOKENS)
    engine = Engine(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=falls_back))
    spaces = normalizers.Replace(" ", SPIECE_UNDERLINE)
    engine.normalizer = normalizers.Sequence([*[normalizers.Prepend(SPIECE_UNDERLINE)] * prefix, spaces])
    steps = [decoders.Replace(SPIECE_UNDERLINE, " "), decoders.ByteFallback(), decoders.Fuse()]
    engine.decoder = decoders.Sequence([*steps, *[decoders.Strip(" ", 1, 0)] * prefix])
    return _with_added_tokens(engine, kinds)


# BERT's ids for a file that does not give them, as in llama.cpp.
WORDPIECE_IDS = {"unknown": 100, "bos": 101, "seperator": 102}


def _token_id(keys: "Keys", name: str, default: int) -> int:
    return keys.get(f"tokenizer.ggml.{name}_token_id", default)


def _wordpiece_json(kinds: list[tuple[str, int]], unknown: int, begin: int, end: int) -> str:
    """The tokenizer.json of lowercase WordPiece; text is wrapped in the tokens `begin` and `end`."""

    def spelled(token: str, index: int, kind: int) -> str:
        if kind != NORMAL or index in (unknown, begin, end):
            return token
        is_first = token.startswith(SPIECE_UNDERLINE)
        return token.removeprefix(SPIECE_UNDERLINE) if is_first else CONTINUING + token

    spellings = [spelled(token, index, kind) for index, (token, kind) in enumerate(kinds)]
    vocabulary = {token: index for index, token in enumerate(spellings) if kinds[index][1] != UNUSED}
    engine = Engine(models.WordPiece(vocabulary, unk_token=spellings[unknown], max_input_chars_per_word=100))
    engine.normalizer = normalizers.BertNormalizer(**BERT_NORMALIZER, strip_accents=None)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece(CONTINUING)
    first, last = spellings[begin], spellings[end]
    engine.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, "$B:1", f"{last}:1"],
        special_tokens=[(first, begin), (last, end)],
    )
    special = {unknown, begin, end} | {index for index, (_, kind) in enumerate(kinds) if kind == CONTROL}
    engine.add_special_tokens([AddedToken(spellings[index], normalized=False) for index in sorted(special)])
    text: str = engine.to_str()
    return text


def _with_begin_token(text: str, begin: list[tuple[int, str]]) -> str:
    """The tokenizer.json that begins each text with these tokens in transformers, too. begin: (id, token) of each."""
    if not begin:
        return text
    engine = Engine.from_str(text)
    [(index, token)] = begin
    engine.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", f"{token}:1", "$B:1"], special_tokens=[(token, index)]
    )
    result: str = engine.to_str()
    return result


def _with_added_tokens(engine: Engine, kinds: list[tuple[str, int]]) -> str:
    special = [AddedToken(token, normalized=False) for token, kind in kinds if kind in (CONTROL, UNKNOWN)]
    engine.add_special_tokens(special)
    engine.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == USER_DEFINED])
    text: str = engine.to_str()
    return text
