"""Multi-token modules of families: transformers' own in float64, files back and forth, and what is left out."""

import importlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, modeling_layers, modeling_rope_utils
from transformers.modeling_layers import MtpLayer, MtpModel

import heddle
from heddle.errors import ConfigError
from heddle.exchange.export import export
from heddle.exchange.family import families
from heddle.exchange.family_match import chosen_match
from heddle.exchange.load import LazyCheckpoint, load
from heddle.exchange.safetensors_folder import to_json
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.model.multi_token import MultiTokenModule
from tests.exchange.hf_models import PLAIN, VOCABULARY, config_of, drawn, our_logits, read_json, tensors_of, write

LINEAR, FULL = "linear_attention", "full_attention"
MIXED = [LINEAR, LINEAR, LINEAR, FULL]  # of the model; the module's layer follows
QWEN = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "post_norm"}
DEEPSEEK = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "post_norm"}


class Case(NamedTuple):
    """A variant of `tests/exchange/cases.py` with a model of `depth` layers and so many modules; other fields of it."""

    variant: str
    depth: int
    modules: int
    names: dict[str, str]
    module: str  # what the family calls it
    changes: dict[str, Any]


CASES = {
    "deepseek_v3": Case("plain", 3, 2, DEEPSEEK, "deepseek_v3", {}),
    "deepseek_v32": Case("plain", 3, 1, DEEPSEEK, "deepseek_v32", {}),
    "glm4_moe": Case("plain", 3, 2, DEEPSEEK, "glm4_moe", {}),
    "glm4_moe_lite": Case("plain", 3, 1, DEEPSEEK, "glm4_moe_lite", {}),
    "bailing_hybrid": Case(
        "plain", 4, 1, DEEPSEEK, "bailing_hybrid", {"layer_types": [LINEAR, LINEAR, FULL, FULL, FULL]}
    ),
    "qwen3_next": Case("plain", 4, 1, QWEN, "qwen3_next", {"layer_types": [*MIXED, FULL]}),
    "qwen3_5_text": Case("plain", 4, 1, QWEN, "qwen3_5", {"layer_types": [*MIXED, FULL]}),
    "qwen3_5_moe_text": Case("plain", 4, 1, QWEN, "qwen3_5_moe", {"layer_types": [*MIXED, FULL]}),
}
ERROR = 1e-9
TOLD = 1e-3  # how far a wrong module is at least
TOKENS = torch.randint(1, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(4))


class Exact:
    """torch with float64 in place of float32, which transformers names where it wants more than the model's dtype."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_float64(module: str) -> Iterator[None]:
    """Whatever a modeling file of transformers computes in float32 is computed in float64."""
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for each in (modeling, modeling_layers, modeling_rope_utils):
            patch.setattr(each, "torch", Exact())
        yield


class Saved(NamedTuple):
    """A folder as it is published, and what transformers computes: logits of the model, and of each module."""

    folder: Path
    logits: Tensor
    ahead: list[Tensor]


@cache
@torch.no_grad()
def saved(family: str) -> Saved:
    case = CASES[family]
    with in_float64(case.module):
        theirs = drawn(config_of(family, case.variant, **case.changes, num_hidden_layers=case.depth + case.modules))
        folder, config = write(theirs, max_shard_size="1GB"), theirs.config
        modules = [_module(theirs, case.depth + index) for index in range(case.modules)]
        _publish(family, folder, theirs, modules)
        theirs.model.layers, config.num_hidden_layers = theirs.model.layers[: case.depth], case.depth
        hidden = theirs.model(TOKENS, use_cache=False).last_hidden_state
        logits, ahead = theirs.lm_head(hidden), []
        for depth, module in enumerate(modules, start=1):
            embedding = theirs.model.embed_tokens(TOKENS[:, depth:])
            positions = torch.arange(depth, TOKENS.shape[1])[None]
            length = positions.shape[1]
            mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
            turns = theirs.model.rotary_emb(embedding, position_ids=positions)
            hidden = module(embedding, hidden[:, :length], turns, mask.expand(2, -1, -1, -1), positions, None)
            ahead.append(theirs.lm_head(hidden))
        return Saved(folder, logits, ahead)


def _module(theirs: Any, index: int) -> Any:
    """transformers' own module around a further layer, its gains far from their start."""
    layer = theirs.model.layers[index]
    module = MtpLayer(theirs.config, type(layer), type(layer.input_layernorm), index).double()
    module.mtp_block = layer
    torch.nn.init.normal_(module.eh_proj.weight, std=0.15)
    for norm in (module.enorm, module.hnorm, module.post_norm):
        norm.weight.add_(torch.randn_like(norm.weight) * 0.2)
    return module


def _publish(family: str, folder: Path, theirs: Any, modules: list[Any]) -> None:
    """Change a folder of transformers, where modules are layers, to the names and fields of published files."""
    case, config = CASES[family], read_json(folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    for index, module in enumerate(modules):
        layer = f"model.layers.{case.depth + index}"
        prefix = "mtp" if case.names is QWEN else layer
        for hf, name in case.names.items():
            tensors[f"{prefix}.{hf}.weight"] = module.get_parameter(f"{name}.weight").contiguous()
        if case.names is QWEN:
            tensors = {name.replace(f"{layer}.", "mtp.layers.0."): tensor for name, tensor in tensors.items()}
        else:
            embedding = next(
                name for name in tensors if name.endswith(("embed_tokens.weight", "word_embeddings.weight"))
            )
            tensors[f"{layer}.embed_tokens.weight"] = tensors[embedding].clone()
            tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    config.pop("num_mtp_layers", None)
    config |= {name: config[name][: case.depth] for name in ("layer_types", "mlp_layer_types") if config.get(name)}
    config["num_hidden_layers"] = case.depth
    if family != "qwen3_next":  # whose published files do not say it
        config[families()[family].multi_token.count_field] = case.modules  # type: ignore[union-attr]
    (folder / "config.json").write_text(to_json(config))


def logits_ahead(model: Decoder) -> list[Tensor]:
    with torch.no_grad():
        hidden, _ = model(TOKENS)
        return [model.head(entry.hidden) for entry in model.predict_ahead(hidden, TOKENS)]


def error(model: Decoder, family: str) -> float:
    """The largest difference of logits from those of transformers' modules."""
    pairs = zip(logits_ahead(model), saved(family).ahead, strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def altered(family: str, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """A copy with other tensors."""
    copy = Path(shutil.copytree(saved(family).folder, folder))
    [file] = copy.glob("*.safetensors")
    tensors = {name: tensor.clone() for name, tensor in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return copy


def without_modules(family: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    case = CASES[family]
    prefixes = tuple(f"model.layers.{case.depth + index}." for index in range(case.modules))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(("mtp.", *prefixes))}


@pytest.mark.parametrize("family", CASES)
def test_they_are_transformers_own(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, model = CASES[family], load(saved(family).folder).model
    assert model.config.multi_token is not None
    assert model.config.multi_token.depth == len(model.multi_token) == case.modules
    assert "ignored" not in capsys.readouterr().err
    assert float(saved(family).ahead[0].std()) > 0.5, "logits this even would agree whatever a module does"
    assert error(model, family) <= ERROR
    logits = our_logits(model, TOKENS)
    assert float((logits - saved(family).logits).abs().max()) <= ERROR
    bare = load(altered(family, tmp_path / "bare", lambda tensors: without_modules(family, tensors))).model
    assert bare.config == model.config.replace(multi_token=None)
    assert torch.equal(our_logits(bare, TOKENS), logits)


def swapped(module: MultiTokenModule) -> None:
    weight = module.projection.weight
    weight.data = torch.cat(weight.data.chunk(2, dim=1)[::-1], dim=1)


def left_out(norm: str) -> Callable[[MultiTokenModule], None]:
    return lambda module: setattr(module, norm, nn.Identity())


FAULTS: dict[str, Callable[[MultiTokenModule], None]] = {
    "the states before the embedding": swapped,
    "no norm of the embedding": left_out("embedding_norm"),
    "no norm of the states": left_out("hidden_norm"),
    "no last norm": left_out("final_norm"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_another_module_is_told_apart(family: str, fault: str) -> None:
    model = load(saved(family).folder).model
    FAULTS[fault](model.multi_token[0])  # type: ignore[arg-type]
    assert error(model, family) > TOLD


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_states_before_the_models_last_norm_are_told_apart(family: str) -> None:
    model = load(saved(family).folder).model
    normed = model.final_norm
    model.final_norm = nn.Identity()
    hidden = model(TOKENS)[0].detach()
    model.final_norm = normed
    [first, *_] = model.predict_ahead(hidden, TOKENS)
    assert float((model.head(first.hidden) - saved(family).ahead[0]).detach().abs().max()) > TOLD


@pytest.mark.parametrize("family", CASES)
def test_an_export_writes_them_again(family: str, tmp_path: Path) -> None:
    source = load(saved(family).folder)
    match = export(source.model, tmp_path / "out", imported=source)
    assert match.family.model_type == family
    mine, theirs = tensors_of(tmp_path / "out"), tensors_of(saved(family).folder)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    names = families()[family].multi_token
    assert names is not None
    assert read_json(tmp_path / "out")[names.count_field] == CASES[family].modules
    again = load(tmp_path / "out").model
    assert again.config == source.model.config
    assert error(again, family) <= ERROR
    lazy = LazyCheckpoint(tmp_path / "out")
    assert lazy.design == again.config
    for name, parameter in again.named_parameters():
        assert torch.equal(lazy.tensor(name), parameter), name


def test_the_weight_of_their_loss_comes_back(tmp_path: Path) -> None:
    model = load(saved("deepseek_v3").folder).model
    config = load_config(model.config.dump(), ["multi_token.loss_weight=0.1"])
    other = heddle.build(config)
    match = export(other, tmp_path / "out", family="deepseek_v3")
    assert not match.mismatches
    assert load(tmp_path / "out").model.config == config


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_transformers_drafts_with_an_export(family: str, tmp_path: Path) -> None:
    """It finds them by the numbers of published layers, which are not those of a small model."""
    source = load(saved(family).folder)
    export(source.model, tmp_path / "out", imported=source)
    with in_float64(CASES[family].module):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64, **PLAIN).eval()
        patterns = [rf"model\.layers\.{CASES[family].depth + index}\." for index in range(CASES[family].modules)]
        theirs._keys_to_ignore_on_load_unexpected = patterns
        modules = MtpModel.from_pretrained(theirs)
        names = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj"}
        for module, own in zip(modules.layers, source.model.multi_token, strict=True):
            for ours, name in names.items():
                assert torch.equal(module.get_parameter(f"{name}.weight"), own.get_parameter(f"{ours}.weight"))
        text = theirs.generate(TOKENS[:1], max_new_tokens=12, do_sample=False)
        drafted = theirs.generate(TOKENS[:1], max_new_tokens=12, do_sample=False, use_mtp=True)
    assert torch.equal(text, drafted)
    assert heddle.generate(source.model, TOKENS[:1].tolist(), max_new_tokens=12) == text[:, TOKENS.shape[1] :].tolist()


def test_our_drafts_write_the_plain_text() -> None:
    model = load(saved("qwen3_5_text").folder).model
    plain = heddle.generate(model, TOKENS.tolist(), max_new_tokens=12)
    assert heddle.generate(model, TOKENS.tolist(), max_new_tokens=12, multi_token_draft=True) == plain


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
LEFT_OUT: dict[str, tuple[str, Change, str]] = {
    "another embedding": (
        "deepseek_v3",
        lambda tensors: tensors | {"model.layers.3.embed_tokens.weight": tensors["model.embed_tokens.weight"] + 1},
        "tensor 'model.layers.3.embed_tokens.weight' differs from the model's 'model.embed_tokens.weight'",
    ),
    "another head": (
        "glm4_moe",
        lambda tensors: tensors | {"model.layers.3.shared_head.head.weight": tensors["lm_head.weight"] * 2},
        "tensor 'model.layers.3.shared_head.head.weight' differs from the model's 'lm_head.weight'",
    ),
    "an embedding of its own": (
        "qwen3_5_text",
        lambda tensors: tensors | {"mtp.embed_tokens.weight": tensors["model.embed_tokens.weight"]},
        "tensor 'mtp.embed_tokens.weight' has no counterpart in heddle's",
    ),
    "two layers": (
        "qwen3_next",
        lambda tensors: tensors | {"mtp.layers.1.input_layernorm.weight": tensors["mtp.norm.weight"]},
        "tensor 'mtp.layers.1.input_layernorm.weight' has no counterpart in heddle's",
    ),
    "a norm is missing": (
        "qwen3_next",
        lambda tensors: {name: tensors[name] for name in tensors if name != "mtp.norm.weight"},
        "tensor 'mtp.norm.weight' is missing",
    ),
    "without experts": (
        "deepseek_v32",
        lambda tensors: {name: tensors[name] for name in tensors if not name.startswith("model.layers.3.mlp.experts.")},
        "tensor 'model.layers.3.mlp.experts.0.down_proj.weight' is missing",
    ),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_others_are_left_out_and_why_is_told(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, change, reason = LEFT_OUT[what]
    if CASES[family].modules > 1:  # a second one would be a layer that nothing knows
        change = _of_one(change)
    model = load(altered(family, tmp_path / "altered", change)).model
    assert model.config.multi_token is None
    told = capsys.readouterr().err
    assert f"ignored: the multi-token modules of {tmp_path / 'altered'}: {reason}" in told
    assert "ignored: tensors " in told
    assert torch.equal(our_logits(model, TOKENS), our_logits(load(saved(family).folder).model, TOKENS))


def _of_one(change: Change) -> Change:
    return lambda tensors: {name: value for name, value in change(tensors).items() if "layers.4." not in name}


def test_a_module_of_another_kind_of_layer_is_left_out_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Published modules have softmax attention; in this model the delta rule comes last."""
    data = load(saved("qwen3_next").folder).model.config.dump()
    data["layers"] = data["layers"][::-1]
    design = load_config(data)
    with pytest.raises(ConfigError, match=r"family 'qwen3_next': cannot express this design .multi_token is"):
        chosen_match(design, "qwen3_next")
    with pytest.raises(ConfigError, match=r"cannot express this design .multi_token is"):
        chosen_match(load_config(saved_config("qwen3_next") | {"multi_token": {"depth": 2}}), "qwen3_next")
    data = saved_config("deepseek_v3")
    data["layers"] = data["layers"][:1]  # dense
    with pytest.raises(ConfigError, match=r"cannot express this design .multi_token is"):
        chosen_match(load_config(data), "deepseek_v3")

    export(heddle.build(design.replace(multi_token=None)), tmp_path / "linear", family="qwen3_next")
    names = {name: tensor for name, tensor in tensors_of(saved("qwen3_next").folder).items() if name.startswith("mtp.")}
    save_file(tensors_of(tmp_path / "linear") | names, tmp_path / "linear" / "model.safetensors")
    (tmp_path / "linear" / "manifest.json").unlink()
    assert load(tmp_path / "linear").model.config.multi_token is None
    assert "their layer is of another kind than the last one of the model" in capsys.readouterr().err


def saved_config(family: str) -> dict[str, Any]:
    return load(saved(family).folder).model.config.dump()


def test_names_of_a_trainer_and_stacked_experts(tmp_path: Path) -> None:
    family = "qwen3_5_moe_text"

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        experts = "mtp.layers.0.mlp.experts."
        rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(experts)}
        count = config_of(family, "plain").num_experts
        gate, up, down = (
            torch.stack([tensors[f"{experts}{index}.{name}_proj.weight"] for index in range(count)])
            for name in ("gate", "up", "down")
        )
        rest |= {f"{experts}gate_up_proj": torch.cat((gate, up), dim=1), f"{experts}down_proj": down}
        return {f"_orig_mod.{name}": tensor for name, tensor in rest.items()}

    assert error(load(altered(family, tmp_path / "altered", change)).model, family) <= ERROR
    student = altered(
        "glm4_moe", tmp_path / "student", lambda tensors: {f"student.{name}": tensors[name] for name in tensors}
    )
    assert error(load(student).model, "glm4_moe") <= ERROR

    def another(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = _of_one(lambda own: own | {"model.layers.3.embed_tokens.weight": own["lm_head.weight"]})(tensors)
        return {f"student.{name}": tensor for name, tensor in changed.items()}

    assert load(altered("glm4_moe", tmp_path / "another", another)).model.config.multi_token is None


def test_what_transformers_saves_again_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = load(saved("deepseek_v3").folder)
    export(source.model, tmp_path / "out", imported=source)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64, **PLAIN)
    theirs.save_pretrained(tmp_path / "again")
    model = load(tmp_path / "again").model
    assert model.config == source.model.config.replace(multi_token=None)
    assert "holds no multi-token modules, which the exported design has" in capsys.readouterr().err
    assert torch.equal(our_logits(model, TOKENS), our_logits(source.model, TOKENS))


def test_beside_images_and_in_eight_bits(tmp_path: Path) -> None:
    family = "qwen3_5_text"
    sees = altered(
        family,
        tmp_path / "sees",
        lambda tensors: {re.sub(r"^model\.", "model.language_model.", name): tensors[name] for name in tensors},
    )
    config = {"model_type": "qwen3_5", "text_config": read_json(sees), "vision_config": {}}
    (sees / "config.json").write_text(to_json(config))
    assert error(load(sees).model, family) <= ERROR

    name = "model.layers.3.self_attn.o_proj.weight"
    whole = tensors_of(saved("deepseek_v3").folder)[name]
    packed = {name: (whole / 2).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.full((1, 1), 2.0)}
    eight = altered("deepseek_v3", tmp_path / "eight", lambda tensors: tensors | packed)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (eight / "config.json").write_text(to_json(read_json(eight) | {"quantization_config": quantization}))
    model = load(eight, dequantize=torch.float64).model
    assert torch.equal(model.get_parameter("multi_token.0.layer.mixer.out.weight"), packed[name].double() * 2)
