"""A field that is absent, null, false or 0 means what transformers takes it for, in every family, or is refused.

One field of a config at a time, as plain data: our design of the file is our design of what transformers' class makes
of it, in which nothing is left to defaults. A null that stays there means false, or what the class makes of none.
"""

import copy
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from heddle.errors import HeddleError
from heddle.exchange import family as family_module
from heddle.exchange.config_reader import METADATA_FIELDS, ConfigReader
from heddle.exchange.family import families
from heddle.exchange.family_match import design_from_config, differences
from heddle.model.config import ModelConfig
from tests.exchange.cases import BASE, CASES, Fields, words
from tests.exchange.hf_models import AutoConfig

ABSENT, LEAST, AS_ABSENT = "absent", "every field", "null is the default"
OTHERS = (1, 2, 5, 7, 0.5, 1.5)  # values that show whether a field is read
LATENT = words("""
    axk1 axk2 bailing_hybrid deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_linear minicpm3 youtu
""")
# Why heddle reads something else: by family and field.
MEANT: dict[tuple[str, str], str] = {
    (family, name): "latent attention has as many heads of keys as of queries, and is refused with transformers' number"
    for family in LATENT
    for name in ("num_key_value_heads", LEAST)
}
# Why heddle reads null as if the field were absent.
NULL_IS_ABSENT: dict[str, str] = {
    "attention_dropout": "of training",
    "use_bidirectional_attention": "of images",
    **dict.fromkeys(
        words("""
            rope_parameters rope_theta rope_type partial_rotary_factor activation attention_in_multiplier
            attention_out_multiplier embedding_multiplier head_dim intermediate_size key_multiplier layer_norm_eps
            layer_norm_epsilon linear_conv_kernel_dim linear_head_dim linear_num_heads lm_head_multiplier logit_scale
            logits_scaling mamba_d_conv mamba_d_state mamba_n_groups moe_layer_end_index moe_layer_interval
            moe_layer_start_index moe_num_shared_experts num_dense_layers num_expert_group num_experts
            num_experts_per_tok num_local_experts num_shared_experts residual_multiplier route_scale sliding_window
            ssm_in_multiplier ssm_out_multiplier time_step_limit topk_group
        """),
        "transformers raises: its class computes with the number",
    ),
}


def theirs(config: Fields) -> Fields | None:
    """What transformers makes of a config; None if its class refuses it."""
    fields = {name: value for name, value in copy.deepcopy(config).items() if name != "model_type"}
    try:
        made = AutoConfig.for_model(config["model_type"], **fields).to_dict()
    except Exception:  # of many kinds
        return None
    return json.loads(json.dumps(made, default=str)) | {"model_type": config["model_type"]}


def ours(config: Fields) -> ModelConfig | None:
    """Our design of it; None if it is refused."""
    return design_of(json.dumps(config))


@cache
def design_of(text: str) -> ModelConfig | None:
    """`ours` of a config as JSON: one config is asked for several times, as many changes change nothing."""
    config = json.loads(text)
    try:
        return design_from_config(config, families()[config["model_type"]])
    except HeddleError:
        return None


def alike(one: ModelConfig | None, other: ModelConfig | None) -> bool:
    """Whether both compute the same."""
    return one is not None and other is not None and (one == other or not differences(one, other))


def whole(family: str) -> Fields:
    """A config of a family's first variant, in which no field is left to a default."""
    case = CASES[family]
    made = theirs((case.base or BASE) | next(iter(case.variants.values())) | {"model_type": family})
    assert made is not None
    return made


def paths(table: Fields, outer: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each field, inner tables' among them."""
    for name, value in table.items():
        if name not in METADATA_FIELDS and not name.startswith("_"):
            yield (*outer, name)
            if isinstance(value, dict):
                yield from paths(value, (*outer, name))


def at(config: Fields, path: tuple[str, ...], default: Any = ABSENT) -> Any:
    """The value at a path."""
    for name in path:
        if not isinstance(config, dict) or name not in config:
            return default
        config = config[name]
    return config


def changed(config: Fields, path: tuple[str, ...], value: Any) -> Fields:
    """The config with this value at a path, or without the field."""
    if len(path) > 1:
        return config | {path[0]: changed(config[path[0]], path[1:], value)}
    return {name: value for name, value in (config | {path[0]: value}).items() if value is not ABSENT}


def off(value: Any) -> list[Any]:
    """What says that a field with this value is off."""
    zero = {float: 0.0, dict: {}}.get(type(value), 0)
    return [each for each in (ABSENT, None, False, zero) if each is not value or isinstance(value, bool)]


def misread(config: Fields, path: tuple[str, ...], value: Any, design: ModelConfig) -> str | None:
    """How our design of a config with this value at a path is not what transformers makes of it."""
    made = theirs(changed(config, path, value))
    if made is None:
        return None
    if not alike(design, want := ours(made)):
        return "refuses what transformers makes of it" if want is None else f"{differences(design, want)}"
    if value is not None or at(made, path) is not None:
        return None
    is_number = isinstance(at(config, path), int | float) and not isinstance(at(config, path), bool)
    false, true = (None if is_number else ours(changed(config, path, each)) for each in (False, True))
    if true is not None and not alike(false, true) and (false is not None or alike(design, true)):
        return None if alike(design, false) else "null is not false"
    made = theirs(changed(config, path, ABSENT))
    usual = None if made is None else at(made, path, None)
    if usual is None or isinstance(usual, bool) or not alike(design, ours(changed(config, path, usual))):
        return None
    others = [each for value in OTHERS if (each := ours(changed(config, path, value))) is not None]
    read = not others or any(not alike(design, other) for other in others)
    return AS_ABSENT if read else None


def faults(family: str) -> Iterator[str]:
    """Each field that is read otherwise than by transformers, and is not in MEANT."""
    design_of.cache_clear()  # a fault may be planted in what reads configs
    config = least = whole(family)
    for path in paths(config):
        for value in off(at(config, path)):
            if (design := ours(changed(config, path, value))) is None:
                continue
            fault = misread(config, path, value, design)
            meant = (family, path[-1]) in MEANT or (fault == AS_ABSENT and path[-1] in NULL_IS_ABSENT)
            if fault and not meant:
                yield f"{'.'.join(path)} = {value!r}: {fault}"
            if value is ABSENT and len(path) == 1:
                less = changed(least, path, ABSENT)
                least = less if ours(less) is not None and theirs(less) is not None else least
    made, design = theirs(least), ours(least)
    assert made is not None
    if not alike(design, ours(made)) and (family, LEAST) not in MEANT:
        yield f"{LEAST} that it may lack: {sorted(config.keys() - least.keys())}"


@pytest.mark.parametrize("family", [family for family in CASES if family in CONFIG_MAPPING_NAMES])
def test_what_is_off_means_what_transformers_takes_it_for(family: str) -> None:
    assert not list(faults(family))


def null_is_absent(reader: ConfigReader, name: str, default: Any, *aliases: str) -> Any:
    """As `ConfigReader.get`, but null is the default."""
    value = reader.optional(name, *aliases)
    return default if value is None else value


PLANTS = {
    "the defaults of a class": (family_module, "CLASS_DEFAULTS", (), ["deepseek_v3", "gpt_oss", "internlm3"]),
    "null for true or false": (ConfigReader, "get", null_is_absent, ["deepseek_v3", "gpt_oss", "falcon"]),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_field_that_is_read_otherwise_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, attribute, planted, caught = PLANTS[name]
    monkeypatch.setattr(target, attribute, planted)
    for family in caught:
        assert list(faults(family)), family
