"""The text model of a model that also sees: read from transformers' own folder, and its images left out by name."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.export import export
from heddle.exchange.load import LazyCheckpoint, load
from tests.exchange.cases import CASES
from tests.exchange.hf_models import PLAIN, AutoConfig, AutoModelForCausalLM, batch, config_of, our_logits, read_json

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers import AutoModelForImageTextToText

Fields = dict[str, Any]
QWEN_VISION: Fields = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 20, "patch_size": 4, "temporal_patch_size": 1,
    "spatial_merge_size": 1, "num_position_embeddings": 16,
}  # fmt: skip
PIXTRAL: Fields = {
    "model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 20, "image_size": 8, "patch_size": 4, "head_dim": 8,
}  # fmt: skip
GEMMA: Fields = {
    "model_type": "gemma4_vision", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 20, "patch_size": 4, "position_embedding_size": 16,
}  # fmt: skip
GOT: Fields = {
    "hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "mlp_dim": 20, "window_size": 2, "global_attn_indexes": [0],
}  # fmt: skip
M3: Fields = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20, "image_size": 16,
    "patch_size": 4, "temporal_patch_size": 1,
}  # fmt: skip
KIMI: Fields = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20, "patch_size": 4,
    "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2,
}  # fmt: skip
HEARS = "moss_transcribe_diarize"  # with an encoder of audio
MOSS: Fields = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20, "num_mel_bins": 8,
    "max_source_positions": 16,
}  # fmt: skip
EMU3: Fields = {
    "codebook_size": 8, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1, 1],
    "num_res_blocks": 1, "attn_resolutions": [2], "hidden_size": 32,
}  # fmt: skip
SEEING = [
    ("qwen3_5", "qwen3_5_text", QWEN_VISION),
    ("qwen3_5_moe", "qwen3_5_moe_text", QWEN_VISION),
    ("qwen4_exp", "qwen4_exp_text", QWEN_VISION),
    ("mistral3", "ministral3", PIXTRAL),
    ("gemma4", "gemma4_text", GEMMA),
    ("got_ocr2", "qwen2", GOT),
    ("fuyu", "persimmon", {}),
    ("minimax_m3_vl", "minimax_m3_vl_text", M3),
    (HEARS, "qwen3", MOSS),
    ("emu3", "emu3_text_model", EMU3),
    ("kimi_k25", "deepseek_v3", KIMI),
    ("glm5_next", "glm5_next_text", {name: value for name, value in QWEN_VISION.items() if "num_pos" not in name}),
]


def seeing(model_type: str, family: str, vision: Fields, folder: Path) -> Any:
    """A model of transformers that also sees, with random weights, and the folder that it was saved in."""
    text = json.loads(config_of(family, next(iter(CASES[family].variants)), tie_word_embeddings=False).to_json_string())
    vision = vision | ({} if "patch_size" not in vision or model_type == "mistral3" else {"out_hidden_size": 42})
    encoder = {HEARS: "audio_config", "emu3": "vq_config"}.get(model_type, "vision_config")
    tables: Fields = {"text_config": text, encoder: vision}
    if model_type == "emu3":
        tables["vocabulary_map"] = {"<image>": 5, "<|extra_200|>": 6}
    config = AutoConfig.for_model(model_type, **tables, tie_word_embeddings=False)
    torch.manual_seed(4)
    kind = AutoModelForCausalLM if model_type == HEARS else AutoModelForImageTextToText
    model = kind.from_config(config, **PLAIN).float().eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("model_type", "family", "vision"), SEEING)
def test_it_computes_what_the_whole_model_computes_for_a_text(
    model_type: str, family: str, vision: Fields, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = seeing(model_type, family, vision, tmp_path / "theirs")
    ours = load(tmp_path / "theirs").model
    assert "which heddle does not build" in capsys.readouterr().err
    tokens, _, _ = batch()
    with torch.no_grad():
        expected = theirs(input_ids=tokens[:1], use_cache=False).logits
    torch.testing.assert_close(our_logits(ours, tokens[:1]), expected, rtol=0, atol=2e-5)
    lazy = LazyCheckpoint(tmp_path / "theirs")
    for name, parameter in ours.named_parameters():
        assert torch.equal(lazy.tensor(name), parameter), name
    assert export(ours, tmp_path / "out").family.model_type == family
    assert read_json(tmp_path / "out")["model_type"] == family
    again = load(tmp_path / "out").model
    assert again.config == ours.config
    assert all(torch.equal(value, again.get_parameter(name)) for name, value in ours.named_parameters())


def test_published_names_of_kimi_are_read_as_those_of_transformers(tmp_path: Path) -> None:
    seeing("kimi_k25", "deepseek_v3", KIMI, tmp_path)
    ours, file = load(tmp_path).model, tmp_path / "model.safetensors"
    tensors = {name.replace("model.blocks.", "model.layers."): tensor for name, tensor in load_file(file).items()}
    assert tensors.keys() != load_file(file).keys()
    save_file(tensors, file)
    config = read_json(tmp_path)
    config["text_config"]["model_type"] = "kimi_k2"
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = load(tmp_path).model
    assert again.config == ours.config
    assert all(torch.equal(value, again.get_parameter(name)) for name, value in ours.named_parameters())


def test_stacked_experts_are_read_as_those_of_one_tensor_each(tmp_path: Path) -> None:
    seeing(*SEEING[1], tmp_path / "single")
    (tmp_path / "stacked").mkdir()
    tensors = load_file(tmp_path / "single/model.safetensors")
    layers = [name.removesuffix("gate_up_proj") for name in tensors if name.endswith(".experts.gate_up_proj")]
    singles = sorted({name.partition("experts.")[0] + "experts." for name in tensors if ".experts.0." in name})
    for prefix in singles:
        experts = range(sum(name.startswith(prefix) for name in tensors) // 3)
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{index}.{role}_proj.weight") for index in experts])
            for role in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}down_proj": down}
    prefixes = layers or singles
    assert len(prefixes) == 4
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "stacked/model.safetensors")
    (tmp_path / "stacked/config.json").write_text((tmp_path / "single/config.json").read_text())
    single, stacked = load(tmp_path / "single").model, load(tmp_path / "stacked").model
    assert all(torch.equal(value, stacked.get_parameter(name)) for name, value in single.named_parameters())
    del tensors[f"{prefixes[0]}down_proj"]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "stacked/model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight'"):
        load(tmp_path / "stacked")


REFUSED: list[tuple[Fields, str]] = [
    ({"attention_warp": 3}, "'attention_warp'"),
    ({"tie_word_embeddings": True}, r"'tie_word_embeddings'.*text_config"),
    ({"quantization_config": {"quant_method": "fp8"}}, "says the weights are quantized"),
    ({"text_config": {"model_type": "opt"}}, "model_type 'qwen3_5'"),
    ({"text_config": None}, "model_type 'qwen3_5'"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_refused_by_name(fields: Fields, sentence: str, tmp_path: Path) -> None:
    text = json.loads(config_of("qwen3_5_text", "plain").to_json_string())
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": QWEN_VISION} | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=sentence):
        load(tmp_path)
