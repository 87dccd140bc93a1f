"""Tokenizers of others carried along, read as their own library reads them; ours, as transformers reads its export."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine

import heddle
from heddle.cli.main import run_command
from heddle.data.corpus import check_tokenizer_fits
from heddle.errors import ConfigError, DataError
from heddle.exchange import tokenizer_files
from heddle.exchange.export import export
from heddle.exchange.imported_checkpoint import ImportedModel
from heddle.exchange.load import load
from heddle.generation.decode import GenerationRequest, ModelRunner, Sampler, decode
from heddle.generation.generate import beam_search
from heddle.serving.limits import ServerLimits
from heddle.serving.requests import RequestReader
from heddle.storage.model import load as load_checkpoint
from heddle.tokenization.backend import EOD_TOKEN
from heddle.tokenization.token_bytes import SPIECE_UNDERLINE
from heddle.tokenization.tokenizer import BoundaryTokens, Tokenizer
from tests.exchange.hf_models import their_tokenizer
from tests.exchange.tokenizer_cases import MEASURED, TEXTS, TOKENIZERS, tokenizer_json

TEXT = st.one_of(st.text(), st.lists(st.sampled_from(
    ["the", " the", "\n", "  ", "héddle", "日本", "😀", "e\u0301", " <0x41>", "İ", "\u0e01\u0e33", "़", "ﬁ", "\t"]
)).map("".join))  # fmt: skip
LLAMA: dict[str, Any] = {
    "vocab_size": 600, "width": 16, "norm": {"kind": "rms", "eps": 1e-6}, "head": {"tied": False},
    "layers": [{"mixer": {"kind": "attention", "heads": 2, "position": {"kind": "rope"}},
                "feedforward": {"kind": "gated", "hidden": 24}}],
}  # fmt: skip


def model(**changes: Any) -> heddle.Decoder:
    return heddle.build(heddle.load_config(LLAMA | changes), seed=1)


def folder_of(name: str, folder: Path) -> Path:
    """A Llama of random weights with somebody's tokenizer beside it."""
    export(model(), folder)
    (folder / "manifest.json").unlink()
    (folder / "tokenizer.json").write_text(tokenizer_json(name), encoding="utf-8")
    _, settings, eos, _ = TOKENIZERS[name]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages }}\r\n", newline="")
    if eos is not None:
        engine = Engine.from_str(tokenizer_json(name))
        ids = [engine.token_to_id(token) for token in ("<|end_of_text|>", "<|eot_id|>")] if eos == "both" else eos
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


@cache
def imported(name: str, root: str) -> ImportedModel:
    return load(folder_of(name, Path(root) / name))


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = str(tmp_path_factory.mktemp("tokenizers"))

    def find(name: str) -> Tokenizer:
        loaded = imported(name, root).tokenizer
        assert loaded is not None
        return loaded

    return find


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train(TEXTS, 400)


def streamed(tokenizer: Tokenizer, ids: list[int], before: list[int]) -> str:
    stream = tokenizer.decode_stream(before)
    return "".join(map(stream.push, ids)) + stream.finish()


@pytest.mark.parametrize(
    ("file", "content", "template"),
    [
        ("chat_template.json", {"chat_template": "{{ messages }}"}, "{{ messages }}"),
        ("tokenizer_config.json", {"chat_template": {"default": "{{ messages }}", "rag": "x"}}, "{{ messages }}"),
        ("tokenizer_config.json", {"chat_template": [{"name": "tool_use", "template": "x"}]}, None),
        ("tokenizer_config.json", {"chat_template": None}, None),
    ],
)
def test_a_template_is_found_wherever_it_lies_and_no_other_takes_its_place(
    file: str, content: Any, template: str | None, tmp_path: Path
) -> None:
    folder = folder_of(next(iter(TOKENIZERS)), tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    (folder / file).write_text(json.dumps(content))
    tokenizer = load(folder).tokenizer
    assert tokenizer is not None
    found = RequestReader(tokenizer, "model", ServerLimits()).chat_format
    assert (None if found is None else found.template) == template


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "tiktoken.model"])
def test_a_tokenizer_that_is_not_read_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(next(iter(TOKENIZERS)), tmp_path / "model")
    (folder / "tokenizer.json").rename(folder / name)
    assert load(folder).tokenizer is None
    assert f"{folder / name}: is not read" in capsys.readouterr().err


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXT)
def test_texts_are_read_as_their_library_reads_them(carried: Any, name: str, text: str) -> None:
    engine, tokenizer = Engine.from_str(tokenizer_json(name)), carried(name)
    ids = tokenizer.encode(text)
    assert ids == engine.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == engine.decode(ids)
    if name in MEASURED and SPIECE_UNDERLINE not in text and not (name == "mistral" and text.startswith(" ")):
        same = Engine.from_str(tokenizer_json(name)).normalizer.normalize_str(text) if name == "qwen" else text
        assert tokenizer.decode(ids) == same
        documents = tokenizer.encode_batch([text])[0]
        stored = int(tokenizer.byte_lengths[[tokenizer.eod_id, *documents]].sum())
        assert stored == len(same.encode()) or (not text and stored == -MEASURED[name])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_any_ids_are_decoded_as_their_library_decodes_them_piece_by_piece(carried: Any, name: str, data: Any) -> None:
    engine, tokenizer = Engine.from_str(tokenizer_json(name)), carried(name)
    some = st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, min(300, tokenizer.vocab_size - 1))
    ids = data.draw(st.lists(some))
    assert tokenizer.decode(ids) == engine.decode(ids) == streamed(tokenizer, ids, [])
    whole = tokenizer.encode("the warp")
    assert "the warp" + streamed(tokenizer, whole, whole) in ("the warpthe warp", "the warp the warp")


def test_a_continuation_keeps_its_space(carried: Any) -> None:
    tokenizer = carried("llama2")
    the, warp = tokenizer.encode("the"), tokenizer.encode("warp")
    assert (streamed(tokenizer, warp, []), streamed(tokenizer, warp, [1, *the])) == ("warp", " warp")
    assert streamed(tokenizer, warp, [1]) == "warp"


def test_a_run_of_bytes_is_text_only_as_a_whole(carried: Any) -> None:
    tokenizer = carried("gemma")
    first = tokenizer.encode("日")
    assert len(first) == 3
    stream = tokenizer.decode_stream()
    assert [stream.push(i) for i in [*first, *tokenizer.encode("the")]] == ["", "", "", "日th", "e"]
    assert tokenizer.decode(first[:2]) == "\ufffd\ufffd"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_opens_and_ends_a_text(carried: Any, name: str) -> None:
    tokenizer, engine = carried(name), Engine.from_str(tokenizer_json(name))
    _, settings, eos, opening = TOKENIZERS[name]
    assert [engine.id_to_token(token) for token in tokenizer.bos_ids] == opening
    eos_token = settings.get("eos_token")
    expected = [eos_token["content"] if isinstance(eos_token, dict) else eos_token] if eos_token else []
    if eos == "both":
        expected = ["<|end_of_text|>", "<|eot_id|>"]
    assert [engine.id_to_token(token) for token in tokenizer.eos_ids] == [*expected, *opening]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_transformers_opens_texts_alike(carried: Any, name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path / name)
    settings = TOKENIZERS[name][1] | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer, other = carried(name), their_tokenizer(folder)
    for text in TEXTS:
        ids = [*tokenizer.bos_ids, *tokenizer.encode(text)]
        assert other(text).input_ids[: len(ids)] == ids
        assert other.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


def test_settings_may_ask_for_an_opening_that_the_file_does_not_set(tmp_path: Path) -> None:
    folder = folder_of("gpt2", tmp_path / "gpt2")
    settings = {"add_bos_token": True, "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load(folder).tokenizer
    assert loaded is not None
    assert loaded.bos_ids == [Engine.from_str(tokenizer_json("gpt2")).token_to_id("<|endoftext|>")] == loaded.eos_ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_can_be_measured(carried: Any, name: str) -> None:
    tokenizer = carried(name)
    if name in MEASURED:
        assert tokenizer.byte_lengths[tokenizer.eod_id] == -MEASURED[name]
        check_tokenizer_fits(tokenizer, None)
        return
    with pytest.raises(DataError, match="bits per byte"):
        check_tokenizer_fits(tokenizer, None)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_everything_is_written_again_byte_for_byte_also_by_way_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path / "theirs")
    imported_model = load(folder)
    export(imported_model.model, tmp_path / "again", imported_model.tokenizer, imported_model)
    heddle.save(imported_model.model, tmp_path / "ours", imported_model.tokenizer)
    loaded_model, tokenizer = load_checkpoint(tmp_path / "ours")
    export(loaded_model, tmp_path / "later", tokenizer)
    assert tokenizer is not None
    assert imported_model.tokenizer is not None
    assert (tokenizer.bos_ids, tokenizer.eos_ids) == (
        imported_model.tokenizer.bos_ids,
        imported_model.tokenizer.eos_ids,
    )
    assert tokenizer.hash == imported_model.tokenizer.hash
    for out in ("again", "later"):
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            if (folder / file).is_file():
                assert (tmp_path / out / file).read_bytes() == (folder / file).read_bytes(), (out, file)
    again = load(tmp_path / "later").tokenizer
    assert again is not None
    assert (again.bos_ids, again.eos_ids) == (tokenizer.bos_ids, tokenizer.eos_ids)


def test_generation_opens_and_ends_as_the_folder_says_and_writes_no_token_that_is_not_there(carried: Any) -> None:
    writer = model()
    for name in TOKENIZERS:
        prompts = ["the warp", "" if carried(name).eos_ids else "weft"]
        texts = heddle.generate(writer, prompts, carried(name), max_new_tokens=30, temperature=2.0)
        assert len(texts) == 2
    data = json.loads(tokenizer_json("gpt2"))
    data["model"]["vocab"]["far"] = 420
    tokenizer = Tokenizer.from_json(json.dumps(data), boundary_tokens=BoundaryTokens(eos_ids=(1,)))
    assert tokenizer.vocab_size == 421
    assert {*range(421)} - {*tokenizer.unused_token_ids} == {*Engine.from_str(json.dumps(data)).get_vocab().values()}
    assert len(tokenizer.unused_token_ids) > 50
    request = GenerationRequest([[1]], 3, Sampler(), tokenizer.vocab_size, (), tokenizer.unused_token_ids)
    logits = ModelRunner(writer).logits(torch.zeros(1, 16), request)
    assert (logits == -torch.inf).nonzero()[:, 1].tolist() == list(tokenizer.unused_token_ids)
    assert logits.shape == (1, 421)
    for steps in (decode(writer, request, [False]), beam_search(writer, request, 2)):
        assert not {token for new in steps for _, token in new} & {*tokenizer.unused_token_ids}


def test_the_command_line_writes_on_with_an_imported_tokenizer(
    carried: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("llama2", "qwen", "bert"):
        heddle.save(model(), tmp_path / name, carried(name))
        assert run_command(["generate", str(tmp_path / name), "--prompt", "the warp", "--max-new-tokens", "9"]) == 0
        streamed_text = capsys.readouterr().out
        assert (
            streamed_text.removesuffix("\n")
            == heddle.generate(model(), ["the warp"], carried(name), max_new_tokens=9)[0]
        )


def test_a_prompt_reads_names_of_special_tokens_and_a_document_does_not(carried: Any) -> None:
    tokenizer = carried("llama3")
    ids = tokenizer.encode("<|eot_id|>the")
    assert ids[0] == Engine.from_str(tokenizer_json("llama3")).token_to_id("<|eot_id|>")
    assert ids[0] not in tokenizer.encode_batch(["<|eot_id|>the"])[0]


@pytest.fixture(scope="module")
def theirs(trained: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What transformers makes of our export."""
    folder = tmp_path_factory.mktemp("exported") / "out"
    export(model(), folder, trained)
    return their_tokenizer(folder)


@given(text=TEXT)
def test_transformers_reads_our_export_as_we_train(trained: Tokenizer, theirs: Any, text: str) -> None:
    assert theirs(text).input_ids == [trained.eod_id, *trained.encode(text)]
    assert theirs.decode(trained.encode(text)) == text
    assert (theirs.bos_token, theirs.eos_token, theirs.eos_token_id) == (EOD_TOKEN, EOD_TOKEN, trained.eod_id)


def test_our_export_comes_back_as_it_was(trained: Tokenizer, tmp_path: Path) -> None:
    for name, own in {"ours": trained, "theirs": Tokenizer.from_json(tokenizer_json("llama3"))}.items():
        export(model(), tmp_path / name, own)
        loaded = load(tmp_path / name)
        assert loaded.tokenizer is not None
        assert (loaded.tokenizer.is_native, loaded.tokenizer.hash) == (True, own.hash)
        assert loaded.tokenizer.to_json() == own.to_json()
        export(loaded.model, tmp_path / "again", loaded.tokenizer, loaded)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
            assert (tmp_path / "again" / file).read_bytes() == (tmp_path / name / file).read_bytes(), file
        heddle.save(loaded.model, tmp_path / "saved", loaded.tokenizer)
        export(*load_checkpoint(tmp_path / "saved")[:1], tmp_path / "again", load_checkpoint(tmp_path / "saved")[1])
        assert (tmp_path / "again/tokenizer.json").read_bytes() == (tmp_path / name / "tokenizer.json").read_bytes()


def test_one_of_ours_that_somebody_changed_is_taken_as_changed(trained: Tokenizer, tmp_path: Path) -> None:
    export(model(), tmp_path / "out", trained)
    (tmp_path / "out/manifest.json").unlink()
    file = tmp_path / "out/tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"post_processor": None}))
    loaded = load(tmp_path / "out").tokenizer
    assert loaded is not None
    assert (loaded.is_native, loaded.bos_ids, loaded.eos_ids) == (False, [], [trained.eod_id])


def test_one_of_ours_that_transformers_saved_again_still_opens_texts(trained: Tokenizer, tmp_path: Path) -> None:
    export(model(), tmp_path / "out", trained)
    their_tokenizer(tmp_path / "out").save_pretrained(tmp_path / "out")
    (tmp_path / "out/manifest.json").unlink()
    loaded = load(tmp_path / "out").tokenizer
    assert loaded is not None
    assert (loaded.bos_ids, loaded.eos_ids) == ([trained.eod_id], [trained.eod_id])
    assert loaded.encode("the warp") == trained.encode("the warp")


def test_a_tokenizer_of_another_size_than_the_embedding(trained: Tokenizer, tmp_path: Path) -> None:
    export(model(vocab_size=trained.vocab_size - 1), tmp_path / "narrow", trained)
    with pytest.raises(ConfigError, match=rf"tokenizer\.json:.*{trained.vocab_size} tokens"):
        load(tmp_path / "narrow")


@pytest.mark.parametrize("kind", ["BPE", "WordPiece", "Unigram"])
def test_more_words_than_rows_are_refused_before_the_library_reads_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"w{number}" for number in range(1000)]
    vocabulary = [[word, 0.0] for word in words] if kind == "Unigram" else {word: i for i, word in enumerate(words)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": kind, "vocab": vocabulary}}))
    monkeypatch.setattr(tokenizer_files, "read_backend", lambda *_: pytest.fail("the library read it"))
    with pytest.raises(ConfigError, match="has 1000 tokens, but the embedding only 999 rows"):
        tokenizer_files.read_tokenizer_files(tmp_path, 999)


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"vocab": 3}}', '{"model": null}', "[" * 100_000])
def test_a_damaged_tokenizer_is_refused_where_it_is_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError):
        tokenizer_files.read_tokenizer_files(tmp_path, 999)
