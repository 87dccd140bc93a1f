"""Published trainings: facts of tables that their programs' projects publish, for the planner's validation.

runs.json: torchtitan's benchmarks/llama3_h100_202412 (commit 31a17bf), docs/performance-summary.md of Megatron-Bridge
(00b7660) and of NeMo Automodel (01926a5). llm_foundry.csv: scripts/train/benchmarking/README.md of llm-foundry
(8c8dd48), 216 trainings of MPT under FSDP.
"""

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

from heddle.exchange.family import family_of
from heddle.exchange.family_match import design_from_config
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from tests.exchange.published import published_configs

FOLDER = Path(__file__).parent
MPT = {  # width, heads, layers
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
LLAMA_405B = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126}


def published_runs(kind: str) -> list[dict[str, Any]]:
    """The rows of runs.json: "flops" or "memory"."""
    rows: list[dict[str, Any]] = json.loads((FOLDER / "runs.json").read_text())[kind]
    return rows


def mpt_runs() -> list[dict[str, str]]:
    """The rows of llm_foundry.csv."""
    with open(FOLDER / "llm_foundry.csv", newline="") as file:
        return list(csv.DictReader(file))


@cache
def published_design(name: str) -> ModelConfig:
    """The design of a published config.json."""
    configs = {entry.name: entry.config for entry in published_configs()}
    large = configs["meta-llama/Llama-3.1-8B-Instruct"] | LLAMA_405B
    config = large if name == "Llama-3.1-405B" else configs[name]
    return design_from_config(config, family_of(config, "config.json"))


@cache
def mpt_design(name: str, sequence_length: int) -> ModelConfig:
    """A design of llm-foundry's benchmarks: learned positions, biases everywhere, a tied head."""
    width, heads, layers = MPT[name]
    return load_config(
        {
            "vocab_size": 50368,
            "width": width,
            "norm": {"kind": "layer"},
            "residual": {"kind": "pre_norm"},
            "embedding": {"position": {"kind": "learned", "length": sequence_length}},
            "layers": [
                {
                    "repeat": layers,
                    "mixer": {"kind": "attention", "heads": heads, "bias": True},
                    "feedforward": {"kind": "mlp", "hidden": 4 * width, "activation": "gelu", "bias": True},
                }
            ],
            "head": {"tied": True},
        }
    )
