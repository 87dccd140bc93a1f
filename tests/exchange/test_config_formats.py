"""Config files as published, in the format of transformers 4; and files that are refused."""

import json
from pathlib import Path

import pytest
import torch

from heddle.exchange.export import export
from heddle.exchange.family import ABSENT, families
from heddle.exchange.family_match import design_from_config, differences, match_family, match_report
from heddle.model.config import LayerConfig
from heddle.model.decoder import build
from tests.cases import CASES as DESIGNS
from tests.cases import case
from tests.covering import fewest, options_of
from tests.exchange.cases import CASES, FULL, SLIDING, Fields
from tests.exchange.hf_models import (
    AutoConfig,
    AutoModelForCausalLM,
    config_of,
    imported,
    our_logits,
    plain,
    their_logits,
)

OLD: Fields = {
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "attention_dropout": 0.0,
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "intermediate_size": 14336, "vocab_size": 32000, "rms_norm_eps": 1e-05,
}  # fmt: skip
SILU: Fields = {"hidden_act": "silu", "tie_word_embeddings": False}
QWEN: Fields = SILU | {"num_hidden_layers": 28, "rope_theta": 1000000.0, "sliding_window": 131072}
GEMMA: Fields = {
    "hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "attention_bias": False,
    "num_attention_heads": 8, "num_hidden_layers": 26, "query_pre_attn_scalar": 144, "pad_token_id": 0,
}  # fmt: skip
OLMO: Fields = SILU | {"attention_bias": False, "rope_theta": 500000, "num_key_value_heads": 32}
PUBLISHED: dict[str, tuple[str, Fields]] = {
    "llama": (
        "llama",
        SILU
        | {
            "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "llama-linear": ("llama", SILU | {"rope_scaling": {"type": "linear", "factor": 2}}),
    "mistral": ("mistral", SILU | {"rope_theta": 10000.0, "sliding_window": 4096}),
    "mistral-full": ("mistral", SILU | {"rope_theta": 1000000.0, "sliding_window": None}),
    "mistral-silent": ("mistral", SILU),
    "qwen2": ("qwen2", QWEN | {"use_sliding_window": False, "max_window_layers": 28}),
    "qwen2-windows": ("qwen2", QWEN | {"use_sliding_window": True, "max_window_layers": 21}),
    "qwen2-yarn": (
        "qwen2",
        QWEN | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    ),
    "qwen3": (
        "qwen3",
        QWEN | {"sliding_window": None, "head_dim": 128, "attention_bias": False, "max_window_layers": 28},
    ),
    "gemma2": (
        "gemma2",
        GEMMA
        | {
            "hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096,
            "use_bidirectional_attention": False,
        },
    ),
    "gemma2-silent": ("gemma2", GEMMA),
    "gemma3": (
        "gemma3_text",
        GEMMA
        | {
            "head_dim": 256, "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_theta": 1000000,
            "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 512, "sliding_window_pattern": 6,
        },
    ),
    "gemma3-linear": (
        "gemma3_text",
        GEMMA
        | {
            "rope_theta": 2000000.0, "rope_local_base_freq": 20000.0, "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 4,
        },
    ),
    "olmo2": ("olmo2", OLMO | {"rope_scaling": None}),
    "olmo3": (
        "olmo3",
        OLMO
        | {
            "sliding_window": 4096, "layer_types": ([SLIDING] * 3 + [FULL]) * 8,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
                "beta_slow": 1.0, "attention_factor": 1.2079441541679836,
            },
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_older_file_says_what_transformers_makes_of_it(name: str) -> None:
    """Their own class turns it into the newer spelling; we read both as the same design."""
    family, fields = PUBLISHED[name]
    old = OLD | fields | {"model_type": family}
    new = json.loads(AutoConfig.for_model(**old).to_json_string())
    assert "rope_theta" not in new
    assert new["rope_parameters"]
    design = design_from_config(old, families()[family])
    assert design == design_from_config(new | {"model_type": family}, families()[family])


OLDER = ("rope_theta", "rope_scaling", "rope_local_base_freq")


@pytest.mark.parametrize("unread", [(), ("rope_parameters",), OLDER])
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_export_says_the_same_to_older_and_newer_readers(name: str, unread: tuple[str, ...]) -> None:
    """What transformers makes of a config of ours is the design again, whichever spelling it knows."""
    family, fields = PUBLISHED[name]
    design = design_from_config(OLD | fields | {"model_type": family}, families()[family])
    match = match_family(design, families()[family])
    assert not match.mismatches
    config_fields = {name: value for name, value in match.config.items() if name not in unread}
    seen = json.loads(AutoConfig.for_model(family, **config_fields).to_json_string())
    assert design_from_config(seen | {"model_type": family}, families()[family]) == design


WINDOWED = ["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo3"]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("family", WINDOWED)
def test_layers_of_one_type_alone_go_out(family: str, window: int | None, tmp_path: Path) -> None:
    variant = "plain" if family in ("gemma2", "gemma3_text", "olmo3") else None
    design = imported(family, variant or {"mistral": "window"}.get(family, "no-window")).model.config
    first = next(layer for _, layer in design.expand())
    assert first.mixer is not None
    mixer = first.mixer.replace(window=window)
    model = build(design.replace(layers=(LayerConfig(repeat=3, mixer=mixer, feedforward=first.feedforward),)), seed=4)
    match = export(model, tmp_path / "out")
    simpler = {} if window else {"mistral": "llama", "olmo3": "olmo2"}
    assert match.family.model_type == simpler.get(family, family)
    assert match_report(model.config).architecture == match.family.architecture
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **plain(match.family.model_type)).eval()
    tokens = torch.randint(1, 90, (2, 23))
    torch.testing.assert_close(our_logits(model, tokens), their_logits(theirs, tokens), rtol=0, atol=1e-5)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
FLAT: list[tuple[str, Fields]] = [
    ("olmo3", {"rope_type": "default", "rope_theta": 500000}),
    ("olmo3", {"rope_type": "default", "rope_theta": 500000, FULL: YARN | {"rope_theta": 500000}}),
    ("olmo3", YARN | {"rope_theta": 7e4, FULL: YARN | {"rope_theta": 7e4}, SLIDING: {"rope_theta": 3e3}}),
    ("olmo3", {"rope_theta": 3e3, FULL: YARN | {"rope_theta": 7e4}, SLIDING: {"rope_theta": 3e3}}),
    ("gemma3_text", {"rope_type": "default"}),
    ("gemma3_text", {"rope_type": "default", "rope_theta": 1e4}),
]


@pytest.mark.parametrize(("family", "table"), FLAT)
def test_one_rope_table_beside_those_of_each_type_of_layers(family: str, table: Fields) -> None:
    """As files have it that were saved by an earlier version of transformers 5, and again by a later one."""
    fields = PUBLISHED["olmo2" if family == "olmo3" else "gemma3"][1]
    config = {name: value for name, value in (OLD | fields).items() if not name.startswith("rope_")}
    config |= {"model_type": family, "rope_parameters": table}
    theirs = json.loads(AutoConfig.for_model(**json.loads(json.dumps(config))).to_json_string())
    assert {FULL, SLIDING} < set(theirs["rope_parameters"]), "they have both, and the one beside them"
    tables = {kind: theirs["rope_parameters"][kind] for kind in (FULL, SLIDING)}
    design = design_from_config(config, families()[family])
    assert design == design_from_config(theirs | {"model_type": family}, families()[family])
    assert design == design_from_config(config | {"rope_parameters": tables}, families()[family])


def test_any_design_fits_heddles_own_family() -> None:
    for name in DESIGNS:
        assert match_family(case(name), families()["heddle"]).mismatches == (), name


@pytest.mark.parametrize("turns", [8, pytest.param(1, marks=pytest.mark.nightly)], ids=["few", "all"])
def test_every_family_has_a_config_that_comes_nearest_to_any_design(turns: int) -> None:
    """Whatever parts a design has, each family writes what it can and says what it cannot.

    By day, of a few designs that have every option, each with every eighth family.
    """
    names = [*DESIGNS] if turns == 1 else fewest({name: options_of(case(name)) for name in DESIGNS})
    for number, name in enumerate(names):
        for family in [*families().values()][number % turns :: turns]:
            match = match_family(case(name), family)
            assert json.dumps(match.config), name
            assert all(str(mismatch) for mismatch in match.mismatches), name


def read_without(family: str, field: str, config: Fields) -> list[str]:
    """The fields of a design that differ from those that transformers takes where a config lacks a field.

    A config that either side refuses is not compared.
    """
    less = {name: value for name, value in config.items() if name != field}
    try:
        theirs = json.loads(AutoConfig.for_model(**less).to_json_string()) | {"architectures": less["architectures"]}
        ours = design_from_config(less, families()[family])
    except Exception:  # its validators raise what they like
        return []
    return [mismatch.path for mismatch in differences(ours, design_from_config(theirs, families()[family]))]


# Latent attention has no heads of keys; where a config lacks the field, a class takes a number that it never uses.
LATENT = "kv_lora_rank"


@pytest.mark.parametrize("family", [family for family in CASES if family not in ("heddle", "rwkv7")])
def test_a_field_that_a_config_lacks_has_the_value_that_its_class_takes(family: str) -> None:
    config = json.loads(config_of(family, next(iter(CASES[family].variants))).to_json_string())
    config |= {"architectures": [families()[family].architecture]}
    unused = {"model_type", "architectures"} | ({"num_key_value_heads"} if LATENT in config else set())
    assert {field: paths for field in config.keys() - unused if (paths := read_without(family, field, config))} == {}


def test_another_default_than_that_of_the_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads(config_of("internlm3", "plain").to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    assert read_without("internlm3", "rms_norm_eps", config) == []
    monkeypatch.delitem(ABSENT["internlm3"], "rms_norm_eps")
    assert read_without("internlm3", "rms_norm_eps", config) == ["norm.eps"]
