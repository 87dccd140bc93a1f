"""Weights as they lie on disks: names that wrappers and base classes changed, buffers, leftovers, what is no model."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heddle.errors import CheckpointError
from heddle.exchange import load as loading
from heddle.exchange.export import export
from heddle.exchange.family import families
from heddle.exchange.load import LazyCheckpoint, TensorNames, load
from tests.exchange.cases import CASES, Fields
from tests.exchange.hf_models import imported, saved
from tests.exchange.test_bad_input import copy, edit, index, refusal, rewrite, shard, theirs
from tests.exchange.test_older_files import Tensors, rewritten
from tests.laws.planting import Plant, result

Renaming = Callable[[str], str]
ENCODERS = {"bert": "BertModel", "roberta": "RobertaModel", "modernbert": "ModernBertModel"}
ENCODERS |= {
    "xlm-roberta": "XLMRobertaModel",
    "camembert": "CamembertModel",
    "electra": "ElectraModel",
    "mpnet": "MPNetModel",
    "distilbert": "DistilBertModel",
}


def base_name(family: str) -> Renaming:
    """What a base class calls a tensor of the whole model."""
    prefix = saved(family, next(iter(CASES[family].variants)))[0].base_model_prefix + "."
    return lambda name: name.removeprefix(prefix)


def inside(word: str) -> Renaming:
    """A word in the middle of a name, as wrappers of single layers put it."""
    return lambda name: name.replace(".0.", f".0.{word}.", 1)


RENAMINGS: dict[str, Callable[[str], Renaming]] = {
    "torch.compile": lambda family: lambda name: "_orig_mod." + name,
    "data parallel": lambda family: lambda name: "module._orig_mod." + name,
    "checkpointing": lambda family: inside("_checkpoint_wrapped_module"),
    "a trainer": lambda family: lambda name: "lightning.student." + name,
    "a base class": base_name,
    "a base class in a trainer": lambda family: lambda name: "net." + base_name(family)(name),
}


def each_renaming() -> Iterator[Any]:
    """Every family with every renaming: by day, each family with one and each renaming with many; else in the night."""
    for number, family in enumerate(name for name in families() if name in CASES):
        for place, kind in enumerate(RENAMINGS):
            is_day = number % len(RENAMINGS) == place
            yield pytest.param(family, kind, marks=() if is_day else pytest.mark.nightly)


@pytest.mark.parametrize(("family", "kind"), [*each_renaming()])
def test_names_that_others_changed_are_found(family: str, kind: str, tmp_path: Path) -> None:
    variant = next(iter(CASES[family].variants))
    rename = RENAMINGS[kind](family)

    def renamed(config: Fields, tensors: Tensors) -> Tensors:
        return {rename(name): tensor for name, tensor in tensors.items()}

    folder = rewritten(family, variant, tmp_path / "model", renamed)
    want, got = imported(family, variant).model.state_dict(), load(folder).model.state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    lazy = LazyCheckpoint(folder)
    assert all(torch.equal(want[name], lazy.tensor(name)) for name in lazy.specs)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "bloom", "qwen2"])
def test_a_tied_head_may_stand_for_the_embedding(family: str, tmp_path: Path) -> None:
    """Programs that write shared memory once may write it under this name; transformers reads it, too."""

    def head_alone(config: Fields, tensors: Tensors) -> Tensors:
        config["tie_word_embeddings"] = True
        embedding = tied_embedding(tensors)
        return {"lm_head.weight": tensors.pop(embedding)} | {
            name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"
        }

    def whole(config: Fields, tensors: Tensors) -> Tensors:
        config["tie_word_embeddings"] = True
        return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}

    variant = next(iter(CASES[family].variants))
    folder = rewritten(family, variant, tmp_path / "head", head_alone)
    want = load(rewritten(family, variant, tmp_path / "whole", whole)).model.state_dict()
    got, lazy = load(folder).model.state_dict(), LazyCheckpoint(folder)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert all(torch.equal(want[name], lazy.tensor(name)) for name in lazy.specs)


def tied_embedding(tensors: Tensors) -> str:
    return next(
        name for name in tensors if name.endswith((".embed_tokens.weight", ".wte.weight", ".word_embeddings.weight"))
    )


@pytest.mark.parametrize("name", ["model.fp16.safetensors", "pytorch_model.safetensors"])
def test_weights_of_another_name_are_named_with_the_right_one(name: str, tmp_path: Path) -> None:
    folder = rewritten("llama", "plain", tmp_path / "model", lambda config, tensors: tensors)
    (folder / "model.safetensors").rename(folder / name)
    assert f"rename {name} to model.safetensors" in refusal(folder)
    (folder / name).rename(folder / "model.safetensors")
    load(folder)


def test_weights_in_mistral_s_own_names_are_not_to_be_renamed(tmp_path: Path) -> None:
    folder = rewritten("llama", "plain", tmp_path / "model", lambda config, tensors: tensors)
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert "rename" not in refusal(folder)


def test_a_cache_of_a_hub_is_named_with_its_snapshot(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    rewritten("llama", "plain", snapshot, lambda config, tensors: tensors)
    assert str(snapshot) in refusal(tmp_path / "models--a--b")
    load(snapshot)
    (snapshot.parent / "0000").mkdir()
    (snapshot.parent / "0000" / "config.json").write_text("{}")
    (tmp_path / "models--a--b" / "refs").mkdir()
    (tmp_path / "models--a--b" / "refs" / "main").write_text("0123")
    assert str(snapshot) in refusal(tmp_path / "models--a--b")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_link_to_nothing_is_named(name: str, tmp_path: Path) -> None:
    folder = rewritten("llama", "plain", tmp_path / "model", lambda config, tensors: tensors)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../blobs/0123")
    assert f"{folder / name}: is a symbolic link to nothing" in refusal(folder)


def test_a_classifier_is_named_by_its_class(tmp_path: Path) -> None:
    def with_other_head(config: Fields, tensors: Tensors) -> Tensors:
        config["architectures"] = ["LlamaForSequenceClassification"]
        head = tensors.pop("lm_head.weight")
        return tensors | {"own_head.weight": head[:1].clone()}

    folder = rewritten("llama", "plain", tmp_path / "model", with_other_head)
    assert "its LlamaForSequenceClassification predicts no tokens: import the language model" in refusal(folder)


def test_modules_of_a_sentence_encoder_are_said_not_to_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = rewritten("bert", next(iter(CASES["bert"].variants)), tmp_path / "model", lambda config, tensors: tensors)
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    load(folder)
    assert f"{folder / 'modules.json'}: what follows the transformer" in capsys.readouterr().err


def test_two_models_in_one_file_are_named(tmp_path: Path) -> None:
    def doubled(config: Fields, tensors: Tensors) -> Tensors:
        return {f"{who}.{name}": tensor.clone() for who in ("student", "teacher") for name, tensor in tensors.items()}

    folder = rewritten("llama", "plain", tmp_path / "model", doubled)
    with pytest.raises(CheckpointError, match=r"student.*teacher"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        *("rotary_emb.inv_freq", "rotary_emb.cos_cached", "attn.masked_bias", "position_ids", "causal_mask"),
        *("attn_mask", "attn.tril", "cos_cached", "rotary_emb.original_inv_freq", "rotary_emb.sin_cached"),
        *("rotary_pos_emb.inv_freq", "inv_freq", "rotary_emb.sin", "freqs_cis", "_extra_state"),
    ],
)
def test_buffers_are_ignored(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy(theirs(), tmp_path / "model")
    rewrite(shard(folder), lambda tensors: tensors.update({f"model.layers.0.self_attn.{name}": torch.arange(4.0)}))
    load(folder)
    assert "ignored: tensors" in capsys.readouterr().err


def test_an_index_that_is_wrong_about_nothing_needed_is_no_reason_to_refuse(tmp_path: Path) -> None:
    folder = copy(theirs(), tmp_path / "model")
    index(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": shard(folder).name})
    name = next(iter(load_file(shard(folder, 1))))
    index(folder, **{name: shard(folder).name})  # it is in another one
    want, got = load(theirs()).model.state_dict(), load(folder).model.state_dict()
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_a_missing_shard_of_nothing_needed_is_no_reason_to_refuse(tmp_path: Path) -> None:
    folder = copy(theirs(), tmp_path / "model")
    missing, copied = "model-00009-of-00009.safetensors", next(iter(load_file(shard(folder, 1))))
    index(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": missing, "model.rotary_emb.inv_freq": missing})
    index(folder, **{copied: missing})  # it is in another one
    want, got = load(theirs()).model.state_dict(), load(folder).model.state_dict()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert LazyCheckpoint(folder).specs.keys() == want.keys()
    index(folder, **{"model.other.weight": missing})
    assert f"{folder / missing}: shard is missing" in refusal(folder)


def test_shards_without_their_index_are_read_if_all_are_there(tmp_path: Path) -> None:
    folder = copy(theirs(), tmp_path / "model")
    (folder / "model.safetensors.index.json").unlink()
    want, got = load(theirs()).model.state_dict(), load(folder).model.state_dict()
    assert all(torch.equal(want[name], got[name]) for name in want)
    shard(folder, 1).unlink()
    assert "shard is missing; download it again" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["self_attn.q_proj.lora_A.default.weight", "self_attn.q_proj.base_layer.weight", "mlp.modules_to_save.x"]
)
def test_an_adapter_inside_a_model_is_named(name: str, tmp_path: Path) -> None:
    folder = copy(theirs(), tmp_path / "model")
    rewrite(shard(folder), lambda tensors: tensors.update({f"model.layers.0.{name}": torch.ones(2, 2)}))
    assert re.search(rf"{name}.* is of an adapter inside the model; .*merge_and_unload", refusal(folder))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 123456\n"


@pytest.mark.parametrize("name", ["a shard", "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path) -> None:
    folder = copy(theirs(), tmp_path / "model")
    file = shard(folder) if name == "a shard" else folder / name
    file.write_bytes(POINTER)
    assert f"{file}: is a Git LFS pointer" in refusal(folder)


def test_an_adapter_is_named_with_its_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "meta/llama"}))
    save_file({"base_model.model.layers.0.q.lora_A.weight": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    text = refusal(tmp_path)
    assert "adapter of meta/llama" in text
    assert "merge_and_unload" in text


def test_an_adapter_beside_a_model_is_said_not_to_be_applied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy(theirs(), tmp_path / "model")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "meta/llama"}))
    load(folder)
    assert "the adapter of meta/llama is not applied" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "kv_scale",
        "wscale",
        "qzeros",
        "weight_scale",
        "weight_scale_2",
        "k_scale",
        "weight.quant_state.bitsandbytes__nf4",
    ],
)
def test_what_is_left_of_quantization_is_named(name: str, tmp_path: Path) -> None:
    folder = copy(theirs(), tmp_path / "model")
    rewrite(shard(folder), lambda t: t.update({f"model.layers.0.mlp.up_proj.{name}": torch.ones(1)}))
    assert "left over from quantized weights" in refusal(folder)


@pytest.mark.parametrize(
    ("fields", "is_unpacked"),
    [
        ({"quant_method": "gptq"}, True),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, True),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, False),
        ({"quant_method": "hqq"}, False),
        ({"quant_algo": "NVFP4"}, False),
    ],
)
def test_quantized_weights_are_refused_with_the_option_that_reads_them(
    fields: Fields, is_unpacked: bool, tmp_path: Path
) -> None:
    """Only where it does."""
    folder = copy(theirs(), tmp_path / "model")
    edit(folder / "config.json", quantization_config=fields)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"never read")
    assert ("--dequantize bf16" in refusal(folder)) == is_unpacked


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_narrow_weights_that_no_config_explains_are_named(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = copy(theirs(), tmp_path / "model")
    name = "model.layers.0.mlp.up_proj.weight"
    file = next(file for file in folder.glob("*.safetensors") if name in load_file(file))
    rewrite(file, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert re.search(rf"{name}.*{dtype}.*quantized.*save the weights dequantized", refusal(folder))


def test_a_missing_head_is_said_to_be_that_of_a_base_class(tmp_path: Path) -> None:
    def headless(config: Fields, tensors: Tensors) -> Tensors:
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}

    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*base classes.*tie_word_embeddings"):
        load(rewritten("llama", "plain", tmp_path / "model", headless))


@pytest.mark.parametrize("head", ["score.weight", "classifier.bias", "qa_outputs.weight"])
def test_a_classifier_is_named_with_the_model_to_import(head: str, tmp_path: Path) -> None:
    def classifying(config: Fields, tensors: Tensors) -> Tensors:
        others = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        return others | {head: torch.zeros(2)}

    with pytest.raises(CheckpointError, match=f"its {head} predicts no tokens: import the language model"):
        load(rewritten("llama", "plain", tmp_path / "model", classifying))


def headless_encoder(family: str, folder: Path, prefix: str = "") -> tuple[torch.nn.Module, Path]:
    """The base class of an encoder, without a head, in float64, and its folder with the buffer of positions."""
    from transformers import AutoModel

    model, _ = saved(family, next(iter(CASES[family].variants)))
    torch.manual_seed(5)
    base = AutoModel.from_config(model.config).eval()
    base.save_pretrained(folder)
    tensors = {prefix + name: tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors[prefix + "embeddings.position_ids"] = torch.arange(8)[None]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return base.double(), folder


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_without_a_head_has_their_hidden_states(family: str, tmp_path: Path) -> None:
    for prefix in ("", "encoder."):
        base, folder = headless_encoder(family, tmp_path / f"theirs-{prefix}", prefix)
        ours = load(folder)
        tokens = torch.randint(3, 90, (2, 17), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            want = base(tokens).last_hidden_state
            got = ours.model.double()(tokens)[0]
        assert float(want.std()) > 0.1
        # ModernBERT's rotation is in float32 whatever its dtype.
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 if family == "modernbert" else 1e-10)
    match = export(ours.model.float(), tmp_path / "ours", imported=ours)
    assert match.architecture == ENCODERS[family]
    again = load_file(tmp_path / "ours/model.safetensors")
    with torch.no_grad():
        base.float().load_state_dict(again, strict=False)  # the pooler is left out
        torch.testing.assert_close(base.double()(tokens).last_hidden_state, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("named", [True, False])
def test_a_missing_head_is_none_whatever_the_config_names(
    family: str, named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As sentence encoders lie: trained without the head of the model whose config they keep."""
    base, folder = headless_encoder(family, tmp_path / "theirs")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("architectures") == [ENCODERS[family]]
    named_class = {"architectures": [families()[family].architecture]} if named else {}
    (folder / "config.json").write_text(json.dumps(config | named_class))
    tokens = torch.randint(3, 90, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = base(tokens).last_hidden_state, load(folder).model.double()(tokens)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 if family == "modernbert" else 1e-10)
    assert f"has no language head, so it is read as {ENCODERS[family]}" in capsys.readouterr().err
    lazy = LazyCheckpoint(folder)
    assert {*lazy.specs} == {name for name, _ in load(folder).model.named_parameters()}


@pytest.mark.parametrize(
    "plant",
    [result(loading._without_wrappers, lambda name: name + "x"), result(TensorNames.__call__, lambda name: name[1:])],
    ids=["wrappers", "names"],
)
def test_a_planted_bug_is_caught(plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, CheckpointError)):
        test_names_that_others_changed_are_found("llama", "torch.compile", tmp_path)
