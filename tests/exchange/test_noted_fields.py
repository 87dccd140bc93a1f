"""Fields of real downloads that are off, defaults or notes are read and noted. What changes numbers is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from heddle.errors import ConfigError
from heddle.exchange.config_reader import METADATA_FIELDS, MUST_BE_OFF, NOTED_FIELDS, PRESERVED_FIELDS
from heddle.exchange.family import families, family_of
from heddle.exchange.family_match import design_from_config
from heddle.exchange.load import load
from tests.exchange.cases import CASES
from tests.exchange.hf_models import config_of, read_json, saved

Fields = dict[str, Any]


def config(family: str) -> Fields:
    """The config.json of a family's first variant."""
    fields: Fields = json.loads(config_of(family, next(iter(CASES[family].variants))).to_json_string())
    return fields | {"model_type": family}


@pytest.mark.parametrize("family", CASES)
def test_what_is_off_or_a_note_leaves_every_design_as_it_is(family: str) -> None:
    plain, noted = config(family), list[str]()
    off = dict.fromkeys(MUST_BE_OFF - plain.keys(), False)
    null = dict.fromkeys(("attention_warp", "rope_scaling_of_nobody"))
    extra = dict.fromkeys(NOTED_FIELDS - plain.keys(), "some") | off | null
    if family in ("qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi", "cohere", "minimax_m2") or "hunyuan" in family:
        for name in ("use_qk_norm", "qk_layernorm"):
            extra.pop(name, None)  # a field of the family itself
    design = design_from_config(plain | extra, families()[family], noted=noted)
    assert design == design_from_config(plain, families()[family])
    assert set(noted) >= NOTED_FIELDS - plain.keys()
    assert not set(noted) & (off.keys() | null.keys())


def test_the_lists_are_apart() -> None:
    lists = (METADATA_FIELDS, NOTED_FIELDS, MUST_BE_OFF, frozenset(PRESERVED_FIELDS))
    assert len(frozenset().union(*lists)) == sum(map(len, lists))


OWN: list[tuple[str, Fields, tuple[str, ...]]] = [
    ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}, ()),
    ("phi", {"rotary_dim": 4, "attention_bias": False}, ()),
    (
        "gpt2",
        {"n_special": 0, "predict_special_tokens": True, "output_past": True, "n_ctx": 128, "hidden_size": 42},
        (),
    ),
    (
        "gpt_neox",
        {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "type_vocab_size": 2},
        ("attention_probs_dropout_prob", "hidden_dropout_prob", "type_vocab_size"),
    ),
    ("qwen3_moe", {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}, ()),
    ("qwen2", {"use_mrope": False, "unsloth_fixed": True}, ("unsloth_fixed",)),
    ("llama", {"is_llama_config": True, "_flash_attn_2_enabled": True}, ("_flash_attn_2_enabled", "is_llama_config")),
]


@pytest.mark.parametrize(("family", "fields", "expected"), OWN)
def test_older_spellings_of_a_family(family: str, fields: Fields, expected: tuple[str, ...]) -> None:
    noted: list[str] = []
    design = design_from_config(config(family) | fields, families()[family], noted=noted)
    assert design == design_from_config(config(family), families()[family])
    assert tuple(noted) == expected


def test_a_file_that_names_its_class_alone(tmp_path: Path) -> None:
    """As the first GPT-2s; an unknown class or a null is still refused (see test_bad_input)."""
    folder = tmp_path / "model"
    shutil.copytree(saved("gpt2", "plain")[1], folder)
    fields = read_json(folder)
    del fields["model_type"]
    (folder / "config.json").write_text(json.dumps(fields))
    imported = load(folder)
    assert imported.preserved_config["model_type"] == "gpt2"
    assert family_of({"architectures": ["Phi3ForCausalLM"]}, "config.json").model_type == "phi3"


def test_code_of_a_folder_is_noted_and_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(saved("phi3", "plain")[1], folder)
    for name in ("modeling_phi3.py", "configuration_phi3.py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'w')\nraise SystemExit(3)\n")
    classes = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    fields = read_json(folder) | {"auto_map": classes, "unsloth_fixed": True, "temperature": 0.7}
    (folder / "config.json").write_text(json.dumps(fields))
    model = load(folder).model
    assert model.config == load(saved("phi3", "plain")[1]).model.config
    lines, noted = capsys.readouterr().err.splitlines(), f"noted: {folder}/config.json:"
    assert f"{noted} the code that 'auto_map' names is never run; read as phi3" in lines
    assert f"{noted} 'temperature', 'unsloth_fixed' change nothing that the model computes" in lines
    assert not ran.exists()


def test_a_config_is_refused_before_its_weights_are_missed(tmp_path: Path) -> None:
    """Nobody downloads hundreds of gigabytes to learn that they are quantized."""
    fields = config("llama") | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"\('fp8'\)"):
        load(tmp_path)
