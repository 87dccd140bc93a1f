"""Families with experts, beside what is held for all: precisions, losses, tensors left out, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import heddle
from heddle.config import parse_config
from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.export import export
from heddle.exchange.family import families
from heddle.exchange.family_match import HEDDLE, best_match, chosen_match, design_from_config, match_family
from heddle.exchange.load import LazyCheckpoint, load, original_design
from heddle.model.config import ModelConfig
from heddle.numerics.experts.mixture import route
from heddle.parts.feedforwards.moe import MoE
from heddle.parts.mixers.attention import Attention
from heddle.parts.mixers.kda import KDA
from heddle.parts.mixers.latent_attention import LatentAttention
from heddle.parts.modules.indexer import Indexer
from heddle.parts.modules.router_statistics import record_router_statistics
from heddle.parts.norms.layer import LayerNorm
from heddle.parts.positions.sinusoidal import Sinusoidal
from heddle.parts.residuals.sandwich import Sandwich
from tests.exchange.hf_models import (
    batch,
    config_of,
    drawn,
    imported,
    our_logits,
    read_json,
    saved,
    tensors_of,
    their_logits,
    write,
)
from tests.laws.planting import assigned, calls, condition, reads


def without_bias(linear: Any) -> Any:
    return lambda x: torch.nn.functional.linear(x, linear.weight)


BUGS = {
    "weights of LayerNorm without their 1": (
        "nemotron",
        "plain",
        calls(LayerNorm.forward, "with_offset", lambda _, weight, *rest: weight),
    ),
    "a sigmoid in place of softplus": ("laguna", "plain", condition(Attention.forward, "is_sigmoid", True)),
    "router logits without their cap": (
        "laguna",
        "channels-all-sparse-capped-tied",
        condition(MoE.forward, "cap", True),
    ),
    "a balancing bias of scores": ("kolibri1", "plain", assigned(route, "chosen_by", lambda _, *, scores: scores)),
    "branches without their multiplier": ("hyperclovax", "plain", condition(Sandwich._process, "multiplier", True)),
    "positions without their offset": ("xglm", "plain", reads(Sinusoidal.forward, "offset", lambda offset: 0)),
    "no bias of attention's output": ("gpt_neo", "plain", reads(Attention.forward, "out", without_bias)),
    "a mixture without its norm": ("axk1", "plain", condition(MoE.forward, "output_norm", True)),
    "heads without their gates": ("bailing_hybrid", "plain", condition(LatentAttention.forward, "gates", False)),
    "the decay by the matrix of the gate": (
        "bailing_hybrid",
        "plain",
        assigned(KDA.forward, "decay_and_gate", lambda pair: pair[::-1]),
    ),
    "index queries without their norm": ("minimax_m3_vl_text", "plain", condition(Indexer.forward, "q_norm", True)),
    "gates over more experts": ("phimoe", "plain", reads(route, "tolerance", lambda tolerance: 4 * tolerance)),
    "experts of the best scores, whatever the table says": (
        "deepseek_v4",
        "plain",
        reads(MoE._routed_experts, "chosen", lambda _: None, 0),
    ),
    "unclipped queries and keys": ("dbrx", "plain", condition(Attention.forward, "qkv_clip", False)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, variant, plant = BUGS[bug]
    plant(monkeypatch)
    (tokens, mask, layout), theirs = batch(), saved(family, variant)[0]
    apart = our_logits(imported(family, variant).model, tokens, layout) - their_logits(theirs, tokens, mask)
    assert float(apart[mask.bool()].abs().max()) > 1e-3


def copy(family: str, variant: str, folder: Path) -> Path:
    return Path(shutil.copytree(saved(family, variant)[1], folder / "theirs"))


def add(folder: Path, name: str) -> None:
    """A tensor more, in a file that holds others."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = sorted(set(index["weight_map"].values()))[0]
    tensors = load_file(folder / file) | {name: torch.ones(3, 2)}
    save_file(tensors, folder / file, metadata={"format": "pt"})
    index["weight_map"][name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("family", "name", "prefix"),
    [
        ("deepseek_v3", "model.layers.3.eh_proj.weight", "model.layers.3."),
        ("qwen3_next", "mtp.fc.weight", "mtp."),
        ("qwen3_5_text", "mtp.fc.weight", "mtp."),
        ("qwen3_5_moe_text", "mtp.fc.weight", "mtp."),
        ("glm4_moe", "model.layers.3.eh_proj.weight", "model.layers.3."),
        ("minimax_m2", "model.layers.3.eh_proj.weight", "model.layers.3."),
        ("minimax", "model.layers.1.self_attn.slope_rate", "model.layers.*.self_attn.slope_rate"),
        ("minimax", "model.layers.1.self_attn.key_decay", "model.layers.*.self_attn.*_decay"),
        ("nemotron_h", "mtp.layers.0.norm.weight", "mtp."),
        ("deepseek_v4", "mtp.0.norm.weight", "mtp."),
    ],
)
def test_what_predicts_further_tokens_is_left_out_and_told(
    family: str, name: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy(family, "plain", tmp_path)
    add(folder, name)
    tokens, _, layout = batch()
    actual = our_logits(load(folder).model, tokens, layout)
    assert f"ignored: tensors {prefix}…" in capsys.readouterr().err
    assert torch.equal(actual, our_logits(load(saved(family, "plain")[1]).model, tokens, layout))


@pytest.mark.parametrize("name", ["model.layers.4.mlp.up_proj.weight", "mtp.fc.weight"])
def test_other_tensors_are_refused(name: str, tmp_path: Path) -> None:
    folder = copy("deepseek_v3", "plain", tmp_path)
    add(folder, name)
    with pytest.raises(CheckpointError, match=name):
        load(folder)


def test_the_balancing_bias_stays_in_float32(tmp_path: Path) -> None:
    model = drawn(config_of("deepseek_v3", "plain")).to(torch.bfloat16)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias = layer.mlp.gate.e_score_correction_bias.float()
    folder = write(model)
    imported = load(folder)
    dtypes = {name: parameter.dtype for name, parameter in imported.model.named_parameters()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {f"layers.{index}.feedforward.router.expert_bias" for index in (1, 2)}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    export(imported.model, tmp_path / "out", imported=imported)
    files = [load_file(file) for file in (*folder.glob("*.safetensors"), *(tmp_path / "out").glob("*.safetensors"))]
    mine, theirs = files.pop(), {name: tensor for tensors in files for name, tensor in tensors.items()}
    assert all(mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    tokens, _, layout = batch()
    exact = load(folder, torch.float32).model
    distance = (our_logits(imported.model, tokens, layout) - our_logits(exact, tokens, layout)).abs()
    assert 0.0 < float(distance[layout.positions >= 0].median()) < 0.05
    lowered = load(saved("deepseek_v3", "plain")[1], torch.bfloat16).model
    assert lowered.get_parameter("layers.1.feedforward.router.expert_bias").dtype == torch.float32
    assert lowered.embed.weight.dtype == torch.bfloat16


def test_a_table_of_ids_is_of_whole_numbers_in_files(tmp_path: Path) -> None:
    """Read whole or lazily it is float32, also in a narrow model; written it is int64, by its published name."""
    folder, name = copy("deepseek_v4", "plain", tmp_path), "layers.0.feedforward.table.experts"
    model, lazy = load(folder, torch.bfloat16).model, LazyCheckpoint(folder)
    assert lazy.specs[name] == (torch.float32, (97, 2))
    assert model.get_parameter(name).dtype == torch.float32
    assert torch.equal(lazy.tensor(name), model.get_parameter(name))
    export(model, tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    table = load_file(file)["layers.0.ffn.gate.tid2eid"]
    assert table.dtype == torch.int64
    assert torch.equal(table.float(), lazy.tensor(name))
    again = load(tmp_path / "out").model
    assert all(torch.equal(value, again.get_parameter(each)) for each, value in model.named_parameters())
    shards = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shard = folder / shards[theirs := "model.layers.0.ffn.gate.tid2eid"]
    save_file(load_file(shard) | {theirs: table.float()}, shard, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tid2eid' is of type torch.float32; it holds ids"):
        load(folder)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_their_balancing_loss_is_ours_of_one_layer_and_row(family: str) -> None:
    changes = {"num_hidden_layers": 1, "output_router_logits": True, "router_aux_loss_coef": 0.03}
    model = drawn(config_of(family, "plain" if family == "mixtral" else "dense-between", **changes))
    ours = load(write(model)).model.train()
    tokens = batch()[0][:1]
    with torch.no_grad(), record_router_statistics() as recorder:
        ours(tokens)
        want = 0.03 * model(tokens).aux_loss
    (entry,) = recorder.entries
    assert entry.aux_loss is not None
    torch.testing.assert_close(entry.aux_loss / tokens.numel(), want)


@pytest.mark.parametrize("coefficient", [0.001, 0.02, 1 / 3])
@pytest.mark.parametrize(("layers", "top_k"), [(1, 2), (3, 5), (48, 7)])
def test_the_coefficient_of_a_loss_comes_back(coefficient: float, layers: int, top_k: int) -> None:
    changes = {"num_hidden_layers": layers, "num_experts_per_tok": top_k, "num_experts": 8}
    coefficient = float(f"{coefficient:.12g}")
    config = config_of("mixtral", "plain", **changes, output_router_logits=True, router_aux_loss_coef=coefficient)
    design = design_from_config(json.loads(config.to_json_string()), families()["mixtral"])
    loss = design.dump()["layers"][0]["feedforward"]["aux_loss"]
    assert loss == pytest.approx(coefficient * top_k / layers)
    assert families()["mixtral"].write_config(design.resolved())["router_aux_loss_coef"] == coefficient


def altered(family: str, variant: str, **feedforward: Any) -> ModelConfig:
    """A design of the family with other fields of its experts."""
    data = load(saved(family, variant)[1]).model.config.dump()
    for layer in data["layers"]:
        if layer["feedforward"]["kind"] == "moe":
            layer["feedforward"] = {**layer["feedforward"], **feedforward}
    return parse_config(ModelConfig, data)


SAME = [
    ("deepseek_v3", {"groups": None, "top_groups": None}),
    ("deepseek_v3", {"groups": 1, "top_groups": 1}),
    ("deepseek_v3", {"shared": 1, "shared_hidden": 60}),
    ("deepseek_v3", {"bias_update": 0.001, "aux_loss": 0.0001, "z_loss": 0.1, "capacity_factor": 2.0}),
    ("qwen3_next", {"shared": 3, "shared_hidden": None}),
]


@pytest.mark.parametrize(("family", "fields"), SAME)
def test_other_words_for_what_a_family_has_fit_it(family: str, fields: dict[str, Any]) -> None:
    assert best_match(altered(family, "plain", **fields)).family.model_type == family


OTHER = [
    ("deepseek_v3", {"bias_update": None}, "bias_update=0.0"),
    ("deepseek_v3", {"shared": 1, "shared_hidden": 50}, "shared_hidden=40"),
    ("deepseek_v2", {"renormalize": True}, "renormalize=false"),
    ("qwen3_next", {"shared_gate": False}, "shared_gate=true"),
    ("qwen3_moe", {"scale": 2.0}, "scale=1.0"),
    ("mixtral", {"renormalize": False}, "renormalize=true"),
    ("mixtral", {"routing": "topk_softmax"}, "routing=softmax_topk"),
]


@pytest.mark.parametrize(("family", "fields", "change"), OTHER)
def test_what_a_family_has_not_is_told_as_the_change_that_is_needed(
    family: str, fields: dict[str, Any], change: str
) -> None:
    variant = {"deepseek_v2": "greedy", "qwen3_moe": "dense-between"}.get(family, "plain")
    actual = match_family(altered(family, variant, **fields), families()[family])
    assert {str(mismatch).partition("feedforward.")[2] for mismatch in actual.mismatches} == {change}


DELTA_OPTIONS = [
    ("qwen3_next", "gated_delta", {"negative_eigenvalues": True}),
    ("qwen3_5_text", "gated_delta", {"negative_eigenvalues": True}),
    ("qwen3_next", "gated_delta", {"steps": 2}),
    ("qwen3_5_text", "gated_delta", {"steps": 2}),
    ("kimi_linear", "kda", {"negative_eigenvalues": True}),
    ("kimi_linear", "kda", {"decay_bound": 5.0}),
    ("kimi_linear", "kda", {"channel_gates": True}),
    ("kimi_linear", "kda", {"preconditioned": True}),
    ("qwen3_next", "gated_delta", {"preconditioned": True}),
]


@pytest.mark.parametrize(("family", "kind", "option"), DELTA_OPTIONS)
def test_an_option_of_the_delta_rule_that_a_family_has_not_is_refused_by_name(
    family: str, kind: str, option: dict[str, Any]
) -> None:
    data = load(saved(family, "plain")[1]).model.config.dump()
    for layer in data["layers"]:
        layer["mixer"] |= option if layer["mixer"]["kind"] == kind else {}
    design, (name,) = parse_config(ModelConfig, data), option
    with pytest.raises(ConfigError, match=rf"family '{family}': cannot express this design \(.*mixer\.{name} .*is"):
        chosen_match(design, family)
    assert best_match(design).family.model_type == HEDDLE


def test_kimi_linear_as_it_is_published() -> None:
    """Layers numbered from 1 and other names of fields ask the same design; what a later model adds is refused."""
    config = read_json(saved("kimi_linear", "five-heads-two-groups")[1])
    design = original_design(config, families()["kimi_linear"], "config.json")
    plain = {name: value for name, value in config.items() if "linear_" not in name and not name.endswith("_types")}
    table = {"num_heads": 5, "head_dim": 7, "short_conv_kernel_size": 3}
    numbers = {"kda_layers": [1, 3], "full_attn_layers": [2]}
    named = plain | {"first_k_dense_replace": 1, "linear_attn_config": table | numbers}
    assert original_design(named, families()["kimi_linear"], "config.json") == design
    for wrong, sentence in (
        (table | numbers | {"gate_lower_bound": -5.0}, "'gate_lower_bound':"),
        (
            table | numbers | {"kda_layers": [1]},
            r"'kda_layers'.*\[1\].*full_attn_layers",
        ),
    ):
        with pytest.raises(ConfigError, match=f"config.json: linear_attn_config.*{sentence}"):
            original_design(named | {"linear_attn_config": wrong}, families()["kimi_linear"], "config.json")
    with pytest.raises(ConfigError, match=r"config\.json: 'routed_expert_hidden_size'"):
        original_design(named | {"routed_expert_hidden_size": 9}, families()["kimi_linear"], "config.json")


@pytest.mark.parametrize("change", [{"mscale": None}, {"attention_factor": 1.5}])
def test_scores_that_a_scaling_multiplies_by_half_a_pair_are_refused(change: dict[str, Any]) -> None:
    config = read_json(saved("deepseek_v3", "yarn-bias-tied")[1])
    config["rope_parameters"] = config["rope_parameters"] | change
    with pytest.raises(ConfigError, match="mscale_all_dim"):
        original_design(config, families()["deepseek_v3"], "config.json")


def test_experts_of_a_shared_bias_have_none() -> None:
    model = heddle.build(load(saved("deepseek_v2", "no-query-rank-biases-tied")[1]).model.config)
    named = {name.partition("feedforward.")[2] for name, _ in model.named_parameters() if name.endswith("bias")}
    assert named - {""} == {f"{prefix}{role}.bias" for prefix in ("", "shared.") for role in ("gate", "up", "down")}
    assert "layers.1.feedforward.up.bias" not in dict(model.named_parameters())


def published_m3(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor of MiniMax M3 by the names of published files, which hold its text model below `language_model`."""
    name = name.replace(".self_attn.indexer.", ".self_attn.index_")
    for part in ("gate.", "experts.", "shared_experts."):
        name = name.replace(f".mlp.{part}", f".block_sparse_moe.{part}")
    name = "language_model." + name.replace(".gate.e_score_correction_bias", ".e_score_correction_bias")
    if name.endswith("experts.gate_up_proj"):
        halves = zip(("w1", "w3"), tensor.chunk(2, dim=1), strict=True)
        pieces = {f"{index}.{role}": row for role, half in halves for index, row in enumerate(half)}
    elif name.endswith("experts.down_proj"):
        pieces = {f"{index}.w2": row for index, row in enumerate(tensor)}
    elif name.endswith(".gate_up_proj.weight"):
        return {name.replace("gate_up", role): half for role, half in zip(("gate", "up"), tensor.chunk(2), strict=True)}
    else:
        return {name: tensor}
    return {f"{name.rpartition('.')[0]}.{piece}.weight": row for piece, row in pieces.items()}


def test_minimax_m3_is_read_by_the_names_of_published_files(tmp_path: Path) -> None:
    folder, tensors = saved("minimax_m3_vl_text", "plain")[1], dict[str, torch.Tensor]()
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            tensors |= {new: each.contiguous() for new, each in published_m3(name, tensor).items()}
    tensors["vision_tower.patch.weight"] = torch.ones(2, 3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    inner = read_json(folder)
    config = {"model_type": "minimax_m3_vl", "text_config": inner, "image_token_index": 9, "projector_hidden_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": inner["tie_word_embeddings"]}))
    published, plain = load(tmp_path).model, imported("minimax_m3_vl_text", "plain").model
    assert published.config == plain.config
    assert all(torch.equal(value, published.get_parameter(name)) for name, value in plain.named_parameters())


def test_axk1_without_balancing_biases_has_zeros(tmp_path: Path) -> None:
    folder = copy("axk1", "plain", tmp_path)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("e_score_correction_bias")}
        save_file(kept, file, metadata={"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {
        name: file for name, file in index["weight_map"].items() if not name.endswith("e_score_correction_bias")
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    add(folder, "model.layers.0.post_mlp_layernorm.weight")
    model = load(folder).model
    biases = [value for name, value in model.named_parameters() if name.endswith("expert_bias")]
    assert len(biases) == 2
    assert not any(bool(bias.any()) for bias in biases)
    lazy = LazyCheckpoint(folder)
    assert all(torch.equal(lazy.tensor(name), parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("parts", [2, 5, 7])
def test_a_table_in_parts_is_one(parts: int, tmp_path: Path) -> None:
    """Qwen4's table of vectors, cut as `split_ngram_parts` says, is read whole; a part that is missing is named."""
    model = drawn(config_of("qwen4_exp_text", "plain", split_ngram_parts=parts))
    model.save_pretrained(tmp_path)
    files = tensors_of(tmp_path)
    name = "model.layers.0.ple.ple_embedding.ngram_embedding.shard_{}.weight"
    assert name.format(parts - 1) in files
    table = load(tmp_path).model.get_parameter("layers.0.feedforward.tables.weight")
    assert torch.equal(table, torch.cat([files[name.format(part)] for part in range(parts)]))
    [file] = tmp_path.glob("*.safetensors")
    save_file({key: value for key, value in files.items() if key != name.format(1)}, file)
    with pytest.raises(CheckpointError, match="shard_0"):
        load(tmp_path)


def test_hashes_of_another_seed_are_refused(tmp_path: Path) -> None:
    drawn(config_of("qwen4_exp_text", "plain")).save_pretrained(tmp_path)
    config = read_json(tmp_path) | {"seed": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="layer_multipliers"):
        load(tmp_path)
