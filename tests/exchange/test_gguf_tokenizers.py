"""The tokenizers of GGUF files, both ways: the ids are those of llama.cpp on texts of every kind."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from heddle.errors import DataError, HeddleError
from heddle.exchange.gguf import export_gguf, load_gguf
from heddle.exchange.gguf import read as gguf_read
from heddle.exchange.gguf import tokenizer as ours
from heddle.exchange.gguf.config_from_keys import Keys
from heddle.exchange.gguf.file import read_contents
from heddle.exchange.gguf.tokenizer import IGNORE_MERGES, SPLITS, read_tokenizer, tokenizer_keys
from heddle.tokenization.tokenizer import BoundaryTokens, Tokenizer
from tests.exchange.test_gguf import ROWS, TEXTS, model_pair
from tests.laws.planting import Plant, replaced, result
from tools.llama_cpp.runner import run

PIECES = [
    "a",
    "b",
    "the",
    " ",
    "  ",
    "\n",
    "▁",
    "é",
    "日",
    "1",
    "22",
    ".",
    "'s",
    "🙂",
    "\t",
    "<",
    "b>",
    "river",
    "in",
    "\u00a0",
]
WORDS = """
▁ ▁t he ▁the a e h t ▁a in ▁in i n ▁river r v er ▁r iv ri ver river 日 本 日本 é 1 2 22 ▁▁ ▁▁▁ . 's ' s
""".split()  # noqa: SIM905
TEMPLATE = "{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<end>{% endfor %}"


def texts() -> list[str]:
    """200 texts: those of the other tests, and random pieces, some of them spaces, half words and bytes."""
    draw = random.Random(0)
    return TEXTS + ["".join(draw.choice(PIECES) for _ in range(draw.randint(1, 40))) for _ in range(200 - len(TEXTS))]


Odd = list[tuple[str, int]]  # tokens with their types


def sentencepiece(file: Path, prefix: bool = True, begins: bool | None = None, odd: Odd | None = None) -> Path:
    """A tiny Llama with SentencePiece's tokenizer, as the package gguf writes it, and with odd tokens besides."""
    odd = odd or []
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "<turn>", "<end>", "   "]
    tokens += [token for token, _ in odd]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(WORDS), 4, 3, 4, *(kind for _, kind in odd)]
    scores = [0.0] * 259 + [-float(index) for index in range(len(WORDS))] + [-1000.0] * (3 + len(odd))
    width, hidden = 32, 48
    writer, draw = GGUFWriter(file, "llama"), np.random.default_rng(0)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(tokens.index("<end>"))
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(tokens.index("<turn>"))
    writer.add_chat_template(TEMPLATE)
    if not prefix:
        writer.add_add_space_prefix(False)
    if begins is not None:
        writer.add_add_bos_token(begins)
    shapes = {"token_embd": (len(tokens), width), "output": (len(tokens), width), "output_norm": (width,)}
    shapes |= {f"blk.0.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (hidden, width), "blk.0.ffn_up": (hidden, width), "blk.0.ffn_down": (width, hidden)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.normal(size=shape).astype(np.float32) * 0.05)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def read(file: Path) -> Tokenizer:
    contents = read_contents(file)
    found = read_tokenizer(Keys(contents.keys, str(file)), contents.tensors["token_embd.weight"].shape[0], str(file))
    assert found is not None
    return found


def assert_same_ids(file: Path, tokenizer: Tokenizer) -> None:
    answers = run(file, [{"text": text, "spell": True} for text in texts()])
    for text, answer in zip(texts(), answers, strict=True):
        assert answer["prompt"] == [*tokenizer.bos_ids, *tokenizer.encode_batch([text])[0]], repr(text[:40])


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("begins", [True, False, None])
def test_sentencepiece_is_cut_as_llama_cpp_cuts_it(prefix: bool, begins: bool | None, tmp_path: Path) -> None:
    file = sentencepiece(tmp_path / "theirs.gguf", prefix, begins)
    tokenizer = read(file)
    assert tokenizer.bos_ids == ([] if begins is False else [1])
    assert_same_ids(file, tokenizer)


ODD: dict[str, Odd] = {
    "an end of turn of any type": [("<|im_end|>", 1), ("<|im_start|>", 1)],
    "an end of turn of the user's": [("<|im_end|>", 4), ("<|im_start|>", 4), ("<think>", 4)],
    "several ends": [("<|eot_id|>", 1), ("<end_of_turn>", 1), ("<|end|>", 4), ("<|endoftext|>", 3), ("[EOS]", 1)],
    "code to fill in": [("<fim_prefix>", 1), ("<fim_suffix>", 4), ("<PAD>", 4), ("<|file_sep|>", 1)],
    "runs of spaces": [("▁▁▁▁", 4), ("\n\n", 4), ("\t\t", 4), (" x", 4)],
    "empty and unused": [("", 5), ("", 5), ("[PAD7]", 5), ("<unused0>", 3)],
    "words of the user": [("riv", 4), ("the ", 4), ("éé", 4), ("日本本", 4)],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_tokens_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """In a text, in one with the names of control tokens, and as ends of a text."""
    file = sentencepiece(tmp_path / "theirs.gguf", odd=ODD[name])
    tokenizer = read(file)
    marks = [token for token, _ in ODD[name] if token] + ["</s>", "<s>", "<unk>", "<turn>"]
    asked = texts()[::8] + [
        text for mark in marks for text in (mark, f"the{mark}", f"a {mark}\n the", f"{mark}{mark}x")
    ]
    count = tokenizer.vocab_size
    plain = run(file, [{"text": text, "spell": True, "ends": count} for text in asked])
    special = run(file, [{"text": text, "spell": True, "special": True} for text in asked])
    for text, first, second in zip(asked, plain, special, strict=True):
        assert first["prompt"] == [*tokenizer.bos_ids, *tokenizer.encode_batch([text])[0]], repr(text)
        assert second["prompt"] == [*tokenizer.bos_ids, *tokenizer.encode(text)], repr(text)
    fills = {token for token, text in tokenizer.special_tokens.items() if text in " ".join(ours.FILL_TEXTS.values())}
    assert {*tokenizer.eos_ids} - {*tokenizer.bos_ids} == {*plain[0]["ends"]} - fills


def test_odd_tokens_that_are_read_by_their_types_alone_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced(ours._as_llama_cpp_reads, lambda keys, kinds: kinds)(monkeypatch)
    with pytest.raises(AssertionError):
        test_odd_tokens_are_those_of_llama_cpp("an end of turn of any type", tmp_path)


def test_a_pad_that_is_the_end_is_not_written(tmp_path: Path) -> None:
    """A trainer that leaves padding out would leave out the end, too."""
    tokenizer = read(sentencepiece(tmp_path / "theirs.gguf"))
    for pad, is_written in (("<turn>", True), ("</s>", False)):
        tokenizer.companion_files = {"special_tokens_map.json": json.dumps({"pad_token": {"content": pad}})}
        assert ("tokenizer.ggml.padding_token_id" in tokenizer_keys(tokenizer, ROWS)) == is_written


@pytest.mark.parametrize("score", [0.0, float("nan")])
def test_scores_that_give_no_order_are_refused(score: float, tmp_path: Path) -> None:
    file = sentencepiece(tmp_path / "theirs.gguf")
    places = np.arange(len(WORDS), dtype=np.float32)
    file.write_bytes(file.read_bytes().replace((-places).tobytes(), np.full_like(places, score).tobytes()))
    with pytest.raises(DataError, match=r"theirs.gguf: token .* has no score of its own.*--tokenizer FILE"):
        read(file)


def test_ids_that_no_token_has_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = sentencepiece(tmp_path / "theirs.gguf")
    contents = read_contents(file)
    rows = len(contents.keys["tokenizer.ggml.tokens"])
    for number, is_said in ((rows, True), (2**32 - 1, False)):
        keys = Keys(contents.keys | {"tokenizer.ggml.eot_token_id": number}, str(file))
        tokenizer = read_tokenizer(keys, rows, str(file))
        assert tokenizer is not None
        assert tokenizer.eos_ids == [2, 1]
        assert (f"'tokenizer.ggml.eot_token_id' is {rows}" in capsys.readouterr().err) == is_said


def test_transformers_reads_the_same_ids(tmp_path: Path) -> None:
    """But for a space at the start of a text, where transformers adds none: llama.cpp does."""
    from transformers import AutoTokenizer

    file = sentencepiece(tmp_path / "theirs.gguf")
    theirs, tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name), read(file)
    compared = [text for text in texts() if text[:1] not in (" ", "▁") and "</s>" not in text and "   " not in text]
    assert len(compared) > 100
    for text in compared:
        assert theirs(text)["input_ids"] == [*tokenizer.bos_ids, *tokenizer.encode(text)], repr(text)


def test_it_is_written_as_it_was_read(tmp_path: Path) -> None:
    """Ids, boundaries, end of turn and template survive a way in, to a folder, and out again."""
    imported = load_gguf(sentencepiece(tmp_path / "theirs.gguf"))
    tokenizer = imported.tokenizer
    assert tokenizer is not None
    assert (tokenizer.bos_ids, tokenizer.eos_ids[:2]) == ([1], [2, tokenizer.vocab_size - 2])
    export_gguf(imported.model, tmp_path / "again.gguf", tokenizer, imported)
    assert_same_ids(tmp_path / "again.gguf", read(tmp_path / "again.gguf"))
    theirs, again = (read_contents(tmp_path / f"{name}.gguf").keys for name in ("theirs", "again"))
    names = (
        "bos_token_id",
        "eos_token_id",
        "eot_token_id",
        "unknown_token_id",
        "padding_token_id",
        "token_type",
        "tokens",
    )
    for name in names:
        assert again[f"tokenizer.ggml.{name}"] == theirs[f"tokenizer.ggml.{name}"], name
    assert again["tokenizer.chat_template"] == TEMPLATE


def trained(name: str | None) -> Tokenizer:
    """One that splits as llama.cpp's pre-tokenizer of this name; None: as `ByteLevel` does by itself."""
    engine = Engine(models.BPE(ignore_merges=name in IGNORE_MERGES))
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name is None)
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[name]] if name else []
    engine.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytewise])
    engine.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=ROWS, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    engine.train_from_iterator(["12 123 1234 \n\n x\n\n y's Y'S (a) !!!\n if  x:\n\n\n" * 50], trainer)
    return Tokenizer.from_json(engine.to_str())


@pytest.mark.parametrize("name", [None, *SPLITS])
def test_splits_that_llama_cpp_has_a_name_for(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, file = trained(name), tmp_path / "model.gguf"
    written = tokenizer_keys(tokenizer, ROWS)["tokenizer.ggml.pre"]
    if name is not None:
        assert (SPLITS[written], written in IGNORE_MERGES) == (SPLITS[name], name in IGNORE_MERGES)
        monkeypatch.setattr(ours, "_pre_tokenizer_name", lambda data: name)
    export_gguf(model_pair("llama", "plain")[1].model, file, tokenizer)
    assert_same_ids(file, tokenizer)
    assert_same_ids(file, read(file))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data["model"]["merges"].pop(), "scores"),
        (lambda data: data["model"]["merges"].sort(key=lambda pair: pair != ["▁", "▁▁"]), "scores"),
        (lambda data: data.update(normalizer={"type": "NFKC"}), "NFKC"),
        (lambda data: data["model"].update(type="WordLevel"), "WordLevel"),
    ],
)
def test_what_no_scores_express_is_refused(
    change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = read(sentencepiece(tmp_path / "theirs.gguf"))
    data = json.loads(tokenizer.to_json())
    change(data)
    monkeypatch.setattr(tokenizer, "_json", json.dumps(data))
    with pytest.raises(DataError, match=words):
        tokenizer_keys(tokenizer, 400)


def test_a_token_that_stands_twice_is_refused_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sentencepiece(tmp_path / "theirs.gguf")
    file.write_bytes(file.read_bytes().replace("▁a".encode(), "▁t".encode()))
    monkeypatch.setattr(gguf_read, "load_weights", lambda *arguments: pytest.fail("the weights were read"))
    first, second = (3 + 256 + WORDS.index(word) for word in ("▁t", "▁a"))
    with pytest.raises(DataError, match=rf"theirs.gguf: its tokens {first} and {second} .*'▁t'.*--tokenizer"):
        load_gguf(file)


def test_a_tokenizer_json_may_take_the_place_of_that_in_the_file(tmp_path: Path) -> None:
    file = sentencepiece(tmp_path / "theirs.gguf")
    other = trained(None)
    (tmp_path / "tokenizer.json").write_text(other.to_json(), encoding="utf-8")
    got = load_gguf(file, tokenizer_file=tmp_path / "tokenizer.json").tokenizer
    assert got is not None
    assert got.encode("12 y's") == other.encode("12 y's")
    for name in ("none/tokenizer.json", "vocab.txt"):
        with pytest.raises(HeddleError, match=name):
            load_gguf(file, tokenizer_file=tmp_path / name)


@pytest.mark.parametrize(
    "plant",
    [
        result(ours._merges_of_scores, lambda merges: merges[:-3]),
        result(ours._boundary_tokens, lambda tokens: BoundaryTokens((), tokens.eos_ids)),
    ],
    ids=["fewer merges", "no begin token"],
)
def test_a_planted_bug_is_caught(plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, HeddleError)):
        test_sentencepiece_is_cut_as_llama_cpp_cuts_it(True, None, tmp_path)


def test_q8_0_holds_the_bytes_of_the_package_gguf(tmp_path: Path) -> None:
    _, small = model_pair("qwen2", "plain")
    for name, q8_0 in (("plain", False), ("packed", True)):
        export_gguf(small.model, tmp_path / f"{name}.gguf", q8_0=q8_0)
    plain, packed = ({t.name: t for t in GGUFReader(tmp_path / f"{name}.gguf").tensors} for name in ("plain", "packed"))
    assert packed.keys() == plain.keys()
    kinds = {tensor.tensor_type.name for tensor in packed.values()}
    assert kinds <= {"F32", "F16", "Q8_0"}
    for name, tensor in packed.items():
        if tensor.tensor_type.name == "Q8_0":
            want = gguf.quants.quantize(np.array(plain[name].data), gguf.GGMLQuantizationType.Q8_0)
            assert np.array_equal(tensor.data, want), name
        elif tensor.tensor_type.name == "F32":
            assert np.array_equal(tensor.data, plain[name].data), name
    assert torch.isfinite(load_gguf(tmp_path / "packed.gguf", torch.float32).model.embed.weight).all()
