"""config.json files as they are published: read as transformers reads them, or refused for a reason that is named."""

import json
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import heddle
from heddle.errors import ConfigError
from heddle.exchange.family import families, family_of
from heddle.exchange.family_match import best_match, design_from_config, differences
from heddle.model.config import ModelConfig
from tests.cases import in_turn
from tests.exchange.hf_models import PLAIN, AutoConfig, AutoModelForCausalLM
from tests.exchange.published import Published, published_configs

Fields = dict[str, Any]
READ = {entry.name: entry for entry in published_configs() if entry.refused is None}
REFUSED = {entry.name: entry for entry in published_configs() if entry.refused is not None}
# One of each family with experts, whose parameters are counted in the class of transformers, too.
COUNTED = [
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen3-30B-A3B-Thinking-2507",
    "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V4-Flash-0731",
    "DeepSeek V4, defaults of the class",
    "Qwen/Qwen3-Next-80B-A3B-Thinking",
    "Qwen/Qwen1.5-MoE-A2.7B",
    "Qwen/Qwen3.5-397B-A17B, text model",
    "allenai/OLMoE-1B-7B-0125-Instruct",
    "zai-org/GLM-4.5-Air",
    "MiniMaxAI/MiniMax-M1-80k-hf",
    "MiniMaxAI/MiniMax-M2.7",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    "ibm-granite/granite-4.0-h-small",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "arcee-ai/Trinity-Nano-Preview",
    "LGAI-EXAONE/K-EXAONE-236B-A23B",
    "JetBrains/Mellum2-12B-A2.5B-Base",
    "tencent/Hy3-preview",
    "allenai/FlexOlmo-7x7B-1T",
    "zai-org/GLM-5",
    "MiniMax M3, text model, defaults of the class",
    "A.X K1, defaults of the class",
    "A.X K2 Light, defaults of the class",
    "Hy4, defaults of the class",
    "Qwen4-Exp, text model, defaults of the class",
    "Ling 3.0 Flash, defaults of the class",
    "microsoft/Phi-3.5-MoE-instruct",
    "databricks/dbrx-base",
    "ai21labs/Jamba-v0.1",
]

DTYPES_OF_STATES = {"mamba_ssm_dtype", "mamba_ssm_cache_dtype"}


def design_of(entry: Published) -> ModelConfig:
    return design_from_config(entry.config, family_of(entry.config, "config.json"))


def newer(entry: Published) -> Fields:
    """The config as transformers writes it again, in its own newer words."""
    model_type = family_of(entry.config, "config.json").model_type
    if model_type not in CONFIG_MAPPING_NAMES:  # transformers has it where another package was imported
        return entry.config
    written: Fields = json.loads(AutoConfig.for_model(**entry.config | {"model_type": model_type}).to_json_string())
    return written | {"model_type": model_type}


def test_every_family_is_there() -> None:
    assert {family_of(entry.config, entry.name).model_type for entry in READ.values()} == families().keys() - {"heddle"}
    assert len(READ) + len(REFUSED) == len(published_configs()) >= 117


@pytest.mark.parametrize("name", READ)
def test_it_is_read_and_has_as_many_parameters_as_published(name: str) -> None:
    entry = READ[name]
    parameters = heddle.size(design_of(entry), context_length=8, batch=1).parameters
    assert entry.counts(parameters), f"{parameters} parameters, published are {entry.published}"


@pytest.mark.parametrize("name", [name for name, entry in READ.items() if DTYPES_OF_STATES & entry.config.keys()])
def test_the_dtype_of_states_is_written_as_published(name: str) -> None:
    """Computing here does not depend on it, but vLLM reads it from the config."""
    config, design = READ[name].config, design_of(READ[name])
    written = family_of(config, "config.json").write_config(design)
    for field in DTYPES_OF_STATES & config.keys():
        assert written[field] == config[field], field


def test_forty_totals_come_from_another_than_the_config() -> None:
    """`test_it_is_read...` compares each with heddle's count, to the last digit."""
    totals = {entry.name: entry.published for entry in READ.values() if entry.counted_in is not None}
    assert all(isinstance(total, int) for total in totals.values())
    assert len({name.partition(",")[0] for name in totals}) >= 48
    assert len({family_of(READ[name].config, name).model_type for name in totals}) >= 15


def test_a_wrong_total_is_noticed() -> None:
    """One parameter more or less, and one unit of the last digit."""
    for entry in (READ["TinyLlama/TinyLlama-1.1B-Chat-v1.0"], READ["codellama/CodeLlama-34b-hf"]):
        parameters = heddle.size(design_of(entry), context_length=8, batch=1).parameters
        step = 1 if isinstance(entry.published, int) else 100_000_000
        assert [entry.counts(parameters + off) for off in (-step, 0, step)] == [False, True, False]


@pytest.mark.parametrize("name", in_turn(READ, turn=0))
def test_transformers_reads_the_same_and_it_exports_as_its_family(name: str) -> None:
    design, written = design_of(READ[name]), newer(READ[name])
    assert not differences(design, design_from_config(written, families()[written["model_type"]]))
    assert best_match(design, written["model_type"]).family.model_type == written["model_type"]


@pytest.mark.parametrize("name", REFUSED)
def test_another_is_refused_for_a_reason_that_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name].refused):
        design_of(REFUSED[name])


@pytest.mark.parametrize("name", COUNTED)
def test_the_class_of_transformers_has_as_many_parameters(name: str) -> None:
    config = AutoConfig.for_model(**READ[name].config)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config, **PLAIN)
    count = sum(parameter.numel() for parameter in theirs.parameters())
    kept = ("correction_bias", "tid2eid")  # parameters here
    count += sum(buffer.numel() for name, buffer in theirs.named_buffers() if name.endswith(kept))
    assert heddle.size(design_of(READ[name]), context_length=8, batch=1).parameters == count
