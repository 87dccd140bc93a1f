"""BERT's encoders in GGUF files, both ways: llama.cpp pools what transformers computes, and cuts texts into its ids."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

import heddle
from heddle.errors import ConfigError, DataError
from heddle.exchange.gguf import export_gguf, load_gguf
from heddle.exchange.gguf import tokenizer as ours
from heddle.exchange.gguf.match import match_architecture
from heddle.exchange.gguf.tokenizer import BERT_NORMALIZER, tokenizer_keys
from heddle.exchange.imported_checkpoint import ImportedModel
from heddle.exchange.load import load
from heddle.tokenization.tokenizer import BoundaryTokens, Tokenizer
from tests.exchange.hf_models import AutoConfig, drawn, write
from tests.exchange.test_gguf import CLOSE_WITH_GELU
from tests.exchange.test_gguf_tokenizers import texts
from tests.source import ROOT
from tools.llama_cpp.runner import run

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROWS = 400
FIELDS: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 64, "type_vocab_size": 2, "initializer_range": 0.15, "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip


@cache
def engine() -> Engine:
    """A WordPiece tokenizer as BERT's without case."""
    engine = Engine(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    engine.normalizer = normalizers.BertNormalizer(**BERT_NORMALIZER)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=ROWS - 10, special_tokens=SPECIAL, show_progress=False)
    engine.train_from_iterator([(ROOT / "docs/tour.md").read_text(encoding="utf-8"), "é日本 river 🙂"], trainer)
    engine.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return engine


def tokenizer(text: str | None = None) -> Tokenizer:
    return Tokenizer.from_json(text or engine().to_str(), boundary_tokens=BoundaryTokens((2,), (2,)))


@cache
def encoder() -> tuple[Any, ImportedModel]:
    """A BERT of transformers without a language head, with random weights, and the same read by us."""
    theirs = drawn(AutoConfig.for_model("bert", **FIELDS)).bert
    return theirs, load(write(theirs))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "encoder.gguf"
    assert export_gguf(encoder()[1].model, path, tokenizer())[1] == "bert"
    return path


@torch.no_grad()
def pooled(theirs: Any, tokens: list[int]) -> Tensor:
    hidden: Tensor = theirs(torch.tensor([tokens])).last_hidden_state[0]
    return hidden.mean(0)


def test_llama_cpp_pools_what_transformers_computes(file: Path) -> None:
    theirs = encoder()[0]
    for text in ("a weaver at the loom", "Hello world, how are you? 日本"):
        tokens = engine().encode(text).ids
        [answer] = run(file, [{"text": text, "embed": True}])
        want = pooled(theirs, tokens)
        assert float(want.std()) > 0.1
        assert float((torch.tensor(answer["embedding"]) - want).abs().max()) <= CLOSE_WITH_GELU
        assert float((torch.tensor(answer["embedding"]) - pooled(theirs, tokens[1:])).abs().max()) > 0.05


def test_an_encoder_comes_back_as_it_was(file: Path) -> None:
    model, back = encoder()[1].model, load_gguf(file)
    assert back.model.config == model.config.replace(initialization=back.model.config.initialization)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in back.model.state_dict().items())
    assert back.tokenizer is not None
    assert back.tokenizer.bos_ids == [2]
    config = json.loads(back.text_files["tokenizer_config.json"])
    assert (config["cls_token"], config["sep_token"], config["mask_token"]) == ("[CLS]", "[SEP]", "[MASK]")
    assert "eos_token" not in config
    again, first = Engine.from_str(back.tokenizer.to_json()), engine()
    for text in texts():
        assert again.encode(text).ids == first.encode(text).ids
    for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        assert getattr(again, name).__getstate__() == getattr(first, name).__getstate__()


def check_ids(path: Path) -> None:
    """Of texts without ▁, words of more than 100 characters, and vowels that llama.cpp takes for accents."""
    odd = ("▁", "한", "a" * 100)
    cut = [text for text in texts() if not any(piece in text for piece in odd)]
    assert len(cut) > 60
    answers = run(path, [{"text": text, "n": 0, "spell": True} for text in cut])
    for text, answer in zip(cut, answers, strict=True):
        ids = [token for token in answer["prompt"] if token not in (2, 3)]
        assert ids == engine().encode(text, add_special_tokens=False).ids, text


def test_wordpiece_is_cut_as_llama_cpp_cuts_it(file: Path) -> None:
    check_ids(file)


def without_marks(data: dict[str, Any], tokens: dict[int, str], token_types: dict[int, int]) -> dict[str, Any]:
    return {"model": "bert", "unknown_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "seperator_token_id": 3}


def test_other_spellings_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(ours, "_wordpiece_keys", without_marks)
        export_gguf(encoder()[1].model, path, tokenizer())
    with pytest.raises(AssertionError):
        check_ids(path)


def test_the_file_says_what_llama_cpp_asks(file: Path) -> None:
    fields = GGUFReader(file).fields
    asked = {
        "bert.attention.causal": False, "bert.pooling_type": 1, "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.unknown_token_id": 1, "tokenizer.ggml.seperator_token_id": 3, "tokenizer.ggml.bos_token_id": 2,
    }  # fmt: skip
    assert {name: fields[name].contents() for name in asked} == asked
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokens[:5] == SPECIAL
    vocabulary = engine().get_vocab()
    inner = next(token for token in vocabulary if token.startswith("##"))
    assert tokens[vocabulary[inner]] == inner[2:]
    assert tokens[vocabulary["the"]] == "▁the"


def test_a_language_head_is_refused_with_a_change_that_helps(tmp_path: Path) -> None:
    design = encoder()[1].model.config
    masked = heddle.load_config(design.dump(), ["head.transform=gelu", "head.bias=true"])
    with pytest.raises(ConfigError, match=r"head\.transform is gelu") as caught:
        export_gguf(heddle.build(masked, device="meta"), tmp_path / "model.gguf")
    changes = str(caught.value).rpartition(" with ")[2].split(" ")
    assert match_architecture(heddle.load_config(masked.dump(), changes))[1].name == "bert"


@pytest.mark.parametrize(
    ("part", "fields", "named"),
    [
        ("normalizer", {"lowercase": False}, "lowercase False"),
        ("normalizer", {"strip_accents": False}, "strip_accents False"),
        ("normalizer", {"type": "Lowercase"}, "does not split text as BERT"),
        ("pre_tokenizer", {"type": "Whitespace"}, "does not split text as BERT"),
    ],
)
def test_other_wordpieces_are_refused(part: str, fields: dict[str, Any], named: str) -> None:
    data = json.loads(engine().to_str())
    data[part] = fields if "type" in fields else data[part] | fields
    with pytest.raises(DataError, match=named):
        tokenizer_keys(tokenizer(json.dumps(data)), ROWS)


def test_a_quantized_encoder_holds_the_numbers_of_the_package_gguf(tmp_path: Path) -> None:
    """Of matrices whose rows are multiples of 32; the others are float16, and what is float32 stays so."""
    config = AutoConfig.for_model("bert", **FIELDS | {"hidden_size": 64, "num_attention_heads": 4})
    model, path = load(write(drawn(config).bert)).model, tmp_path / "q8.gguf"
    export_gguf(model, path, tokenizer(), q8_0=True)
    back, kinds = load_gguf(path, torch.float32).model.state_dict(), set()
    for name, tensor in model.state_dict().items():
        numbers = tensor.numpy()
        if numbers.ndim == 2 and name not in ("embed.position.weight", "embed.token_types.weight"):
            kind = gguf.GGMLQuantizationType.F16 if numbers.shape[-1] % 32 else gguf.GGMLQuantizationType.Q8_0
            numbers = gguf.quants.dequantize(gguf.quants.quantize(numbers, kind), kind)
            kinds.add(kind.name)
        assert np.array_equal(back[name].numpy(), numbers), name
    assert kinds == {"F16", "Q8_0"}
