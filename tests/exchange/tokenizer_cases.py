"""Small tokenizers of the same kinds as those of Llama 2, Gemma, Mistral, Llama 3, Qwen, GPT-2, T5 and BERT."""

import json
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "def weave(threads):\n    return [lift(thread) for thread in threads]\n" * 9,
    "It's the heddle that lifts the warp; don't let it drop. 1234567\r\n" * 9,
    "Das Weberschiffchen läuft über die Kettfäden. Ça va, naïve café.\n" * 9,
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _template(begin: str, engine: Tokenizer) -> Any:
    return processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B:1", special_tokens=[(begin, engine.token_to_id(begin))]
    )


def _pieces(normalizer: Any, pre: Any, decoder: Any) -> Tokenizer:
    """BPE over characters with a token for each byte, as SentencePiece trains it."""
    engine = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    engine.normalizer, engine.pre_tokenizer = normalizer, pre_tokenizers.Split("\u2581", "merged_with_next")
    if normalizer is None:
        engine.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False)
    engine.train_from_iterator(TEXTS, trainer)
    data = json.loads(engine.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] not in BYTES]
    engine = Tokenizer.from_str(json.dumps(data))
    engine.normalizer, engine.pre_tokenizer, engine.decoder = normalizer, pre, decoder
    engine.post_processor = _template("<s>", engine)
    return engine


def _bytes(normalizer: Any = None, special: tuple[str, ...] = ("<|endoftext|>",)) -> Tokenizer:
    """Byte-level BPE."""
    engine = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(r"\p{L}+| ?[^\s\p{L}]+|\s+"), "isolated")
    engine.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    engine.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    engine.add_special_tokens(list(special))
    if normalizer is not None:
        engine.normalizer = normalizer
    return engine


def _replaced(*more: Any) -> Any:
    return decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *more])


def _llama2() -> Tokenizer:
    normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return _pieces(normalizer, None, _replaced(decoders.Strip(" ", 1, 0)))


def _gemma() -> Tokenizer:
    pre = pre_tokenizers.Split(" ", "merged_with_previous")
    engine = _pieces(normalizers.Replace(" ", "\u2581"), pre, _replaced())
    engine.add_tokens(["<table>", "<unused0>"])
    return engine


def _mistral() -> Tokenizer:
    pre = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _pieces(None, pre, _replaced(decoders.Strip(" ", 1, 0)))


def _llama3() -> Tokenizer:
    engine = _bytes(special=("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"))
    engine.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), _template("<|begin_of_text|>", engine)]
    )
    return engine


def _qwen() -> Tokenizer:
    return _bytes(normalizers.NFC(), ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))


def _unigram(byte_fallback: bool) -> Tokenizer:
    words = sorted({"\u2581" + word for text in TEXTS for word in text.split()})
    letters = sorted({letter for word in words for letter in word} | {"\u2581"})
    bytes_ = BYTES if byte_fallback else []
    scores = [(token, 0.0) for token in ("<unk>", "</s>", *bytes_)]
    scores += [(token, -5.0 - len(token)) for token in words] + [(token, -9.0) for token in letters]
    engine = Tokenizer(models.Unigram(list(dict(scores).items()), unk_id=0, byte_fallback=byte_fallback))
    engine.add_special_tokens(["<unk>", "</s>"])
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return engine


def _t5() -> Tokenizer:
    engine = _unigram(False)
    engine.normalizer, engine.decoder = normalizers.NFKC(), decoders.Metaspace(prepend_scheme="always")
    engine.post_processor = processors.TemplateProcessing(single="$A </s>", pair=None, special_tokens=[("</s>", 1)])
    return engine


def _unigram_bytes() -> Tokenizer:
    engine = _unigram(True)
    engine.decoder = _replaced(decoders.Strip(" ", 1, 0))
    return engine


def _bert() -> Tokenizer:
    engine = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    engine.normalizer, engine.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    engine.decoder = decoders.WordPiece()
    engine.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    )
    return engine


EOS = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "rstrip": False}
EOS |= {"single_word": False}
# name -> engine, tokenizer_config.json, eos_token_id of generation_config.json, what opens a text
TOKENIZERS: dict[str, tuple[Any, dict[str, Any], Any, list[str]]] = {
    "llama2": (_llama2, {"add_bos_token": True, "bos_token": "<s>", "eos_token": EOS}, None, ["<s>"]),
    "gemma": (_gemma, {"bos_token": "<s>", "eos_token": "</s>"}, None, ["<s>"]),
    "mistral": (_mistral, {"add_bos_token": False, "bos_token": "<s>", "eos_token": "</s>"}, 2, ["<s>"]),
    "llama3": (_llama3, {"eos_token": "<|eot_id|>"}, "both", ["<|begin_of_text|>"]),
    "qwen": (_qwen, {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>"}, None, []),
    "gpt2": (_bytes, {"eos_token": "<|endoftext|>"}, None, []),
    "unigram": (_unigram_bytes, {"eos_token": "</s>"}, None, []),
    "t5": (_t5, {"eos_token": "</s>"}, None, []),
    "bert": (_bert, {}, None, []),
}
MEASURED = {"llama2": 1, "gemma": 0, "mistral": 1, "llama3": 0, "qwen": 0, "gpt2": 0}  # bytes before each text


@cache
def tokenizer_json(name: str) -> str:
    """The text of a tokenizer.json, in nobody's usual layout."""
    return json.dumps(json.loads(TOKENIZERS[name][0]().to_str()), indent=3, ensure_ascii=False)
