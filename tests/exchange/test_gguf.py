"""GGUF files against llama.cpp itself, run from its npm build, and against transformers' reader of GGUF."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, GGUFWriter

import heddle
from heddle.errors import CheckpointError, ConfigError, DataError, MachineError
from heddle.exchange import design_parts
from heddle.exchange.gguf import architectures, export_gguf, load_gguf
from heddle.exchange.gguf import export as exporting
from heddle.exchange.gguf.architectures import ARCHITECTURES
from heddle.exchange.gguf.file import check_seal
from heddle.exchange.gguf.match import match_architecture
from heddle.exchange.gguf.tokenizer import tokenizer_keys
from heddle.exchange.imported_checkpoint import ImportedModel
from heddle.exchange.load import load
from heddle.lab.verify import DAMAGED, NOT_COVERED, OK, verify_files
from heddle.model.config import ModelConfig
from heddle.tokenization.tokenizer import Tokenizer
from tests.cases import CASES as DESIGNS
from tests.cases import in_turn
from tests.covering import each_option
from tests.exchange.cases import LLAMA3, Fields, scaled
from tests.exchange.hf_models import (
    AutoConfig,
    AutoModelForCausalLM,
    drawn,
    imported,
    our_logits,
    their_logits,
    write,
)
from tests.source import ROOT
from tools.llama_cpp.runner import run

ROWS = 330  # of the embedding: some more than the tokenizer has tokens
WRITTEN = 32
# What llama.cpp's sums and ours may differ by, in logits whose spread is about 1; its GELU is a table of half floats.
CLOSE, CLOSE_WITH_GELU = 1e-4, 1e-2
BASE: Fields = {
    "vocab_size": ROWS,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 300,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    **scaled("default"),
}
YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=32)
EXPERTS: Fields = {"num_experts_per_tok": 3, "initializer_range": 0.25, "intermediate_size": 40}
GEMMA: Fields = {
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 10,
    "sliding_window": 16,
}
CAPS: Fields = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0}
TWO_ROTATIONS: Fields = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 7000.0, "factor": 3.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
}
YARN_IN_FULL_LAYERS: Fields = {
    "rope_parameters": {
        "full_attention": YARN["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
}
# Families whose activation is GELU.
APPROXIMATE = ("gemma", "phi", "gpt2", "gpt_neox", "gpt_bigcode", "falcon", "bloom", "starcoder2")
# Families that llama.cpp runs as the graph of another, whose design is the same.
RUN_AS = {
    "mistral": "llama", "internlm3": "llama", "iquestcoder": "llama", "solar_open": "glm4_moe",
    "glm4_moe_lite": "deepseek_v3", "youtu": "deepseek_v2", "qwen3_5_moe_text": "qwen3_next",
}  # fmt: skip


GRANITE: Fields = {
    "attention_multiplier": 0.25, "embedding_multiplier": 3.0, "residual_multiplier": 0.75, "logits_scaling": 2.5,
}  # fmt: skip
DEEPSEEK: Fields = {
    "n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    "initializer_range": 0.25,
}  # fmt: skip
GROUPS: Fields = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
LATENT: Fields = {
    "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "head_dim": 8, "rms_norm_eps": 1e-6,
}  # fmt: skip
LATENT_YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.7)
GPT_OSS: Fields = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 16, "head_dim": 8}
DELTA: Fields = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "head_dim": 8, "rms_norm_eps": 1e-6,
}  # fmt: skip
DELTA_EXPERTS: Fields = EXPERTS | {
    "num_experts": 5, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
MAMBA: Fields = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
FULL, SLIDING, LINEAR, CONV = "full_attention", "sliding_attention", "linear_attention", "conv"
DEEP: Fields = {"head_dim": 8, "num_hidden_layers": 64, "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 16}


def partial(factor: float) -> Fields:
    """RoPE of a part of the dims of a head."""
    return scaled("default", partial_rotary_factor=factor)


VARIANTS: dict[str, dict[str, Fields]] = {
    "llama": {
        "plain": {},
        "llama3-tied-biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, **LLAMA3},
        "one-kv-head-linear": {"num_key_value_heads": 1, **scaled("linear", factor=3.0)},
        "yarn": YARN,
    },
    "mistral": {"no-window": {"sliding_window": None}},
    "mixtral": {
        "plain": {"num_local_experts": 5, **EXPERTS},
        "tied": {"num_local_experts": 4, "tie_word_embeddings": True, **EXPERTS},
    },
    "qwen2": {"plain": {"head_dim": 8}, "tied-yarn": {"head_dim": 8, "tie_word_embeddings": True, **YARN}},
    "qwen3": {"plain": {}, "tied-linear": {"tie_word_embeddings": True, **scaled("linear", factor=2.0)}},
    "qwen3_moe": {
        "plain": {"num_experts": 5, "moe_intermediate_size": 24, "norm_topk_prob": True, **EXPERTS},
        "tied": {"num_experts": 4, "norm_topk_prob": True, "tie_word_embeddings": True, **EXPERTS},
    },
    "qwen2_moe": {
        "plain": {
            "head_dim": 8,
            "num_experts": 5,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": False,
            **EXPERTS,
        },
    },
    "olmoe": {"plain": {"head_dim": 8, "num_key_value_heads": 6, "num_experts": 5, "norm_topk_prob": False, **EXPERTS}},
    "ernie4_5": {"plain": {}, "tied": {"tie_word_embeddings": True}},
    "hunyuan_v1_dense": {"plain": {}, "tied": {"tie_word_embeddings": True}},
    "gemma": {"plain": {}},
    "gemma2": {"plain": GEMMA | CAPS},
    "gemma3_text": {"plain": GEMMA | TWO_ROTATIONS, "untied": GEMMA | TWO_ROTATIONS | {"tie_word_embeddings": False}},
    "olmo2": {"plain": {"head_dim": 8}, "yarn": {"head_dim": 8, **YARN}},
    "olmo3": {"plain": {"head_dim": 8, "num_hidden_layers": 7, "sliding_window": 16, **YARN_IN_FULL_LAYERS}},
    "smollm3": {
        "plain": {"num_hidden_layers": 5, "tie_word_embeddings": True},
        "untied-yarn": {"num_hidden_layers": 5, "tie_word_embeddings": False, **YARN},
    },
    "phi3": {
        "partial": {"head_dim": 8, "sliding_window": None, **partial(0.5)},
        "partial-tied": {"head_dim": 8, "sliding_window": None, "tie_word_embeddings": True, **partial(0.75)},
    },
    "phi": {"plain": {"hidden_act": "gelu_new", **partial(0.5)}},
    "gpt2": {"plain": {}, "untied": {"n_inner": 100, "tie_word_embeddings": False}},
    "gpt_neox": {
        "parallel": {"hidden_act": "gelu_pytorch_tanh", **partial(0.5)},
        "pre-norm": {"hidden_act": "gelu_pytorch_tanh", "use_parallel_residual": False, **partial(1.0)},
    },
    "cohere": {"plain": {"logit_scale": 0.4, "tie_word_embeddings": True}},
    "cohere2": {"plain": {"num_hidden_layers": 5, "sliding_window": 16, "logit_scale": 0.4}},
    "internlm3": {"biases": {"attention_bias": True, "mlp_bias": True}},
    "iquestcoder": {"plain": {}},
    "arcee": {"plain": {}, "llama3-tied": {"tie_word_embeddings": True, **LLAMA3}},
    "granite": {
        "plain": GRANITE,
        "tied-biases-yarn": GRANITE | YARN | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    },
    "granitemoe": {"plain": GRANITE | EXPERTS | {"num_local_experts": 5}},
    "granitemoeshared": {"plain": GRANITE | EXPERTS | {"num_local_experts": 5, "shared_intermediate_size": 32}},
    "granitemoehybrid": {
        "plain": GRANITE
        | MAMBA
        | EXPERTS
        | {"num_local_experts": 5, "shared_intermediate_size": 32, "layer_types": [LINEAR, FULL, LINEAR]},
        "no-experts-rope-tied": GRANITE
        | MAMBA
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 32}
        | {"layer_types": [FULL, LINEAR, FULL], "position_embedding_type": "rope", "tie_word_embeddings": True},
    },
    "mamba2": {"plain": {"n_groups": 1}, "groups-tied": {"n_groups": 2, "tie_word_embeddings": True}},
    "glm": {
        "plain": {"head_dim": 8, **partial(0.5)},
        "no-biases-tied": {"head_dim": 8, "attention_bias": False, "tie_word_embeddings": True, **partial(0.5)},
    },
    "glm4": {
        "biases": {"head_dim": 12, "attention_bias": True, **partial(0.5)},
        "tied": {"head_dim": 12, "attention_bias": False, "tie_word_embeddings": True, **partial(0.5)},
    },
    "glm4_moe": {
        "plain": DEEPSEEK | {"head_dim": 12, "use_qk_norm": True, "attention_bias": True, **partial(0.5)},
        "groups-tied": DEEPSEEK | GROUPS | {"head_dim": 12, "tie_word_embeddings": True, **partial(0.5)},
    },
    "solar_open": {"plain": {name: DEEPSEEK[name] for name in DEEPSEEK if name != "first_k_dense_replace"}},
    "dots1": {"plain": DEEPSEEK | {"num_key_value_heads": 6, "sliding_window": None}},
    "deepseek_v2": {
        "plain": DEEPSEEK | LATENT | {"norm_topk_prob": False, "n_group": None, "topk_group": None},
        "lite-yarn": DEEPSEEK
        | LATENT
        | LATENT_YARN
        | {"q_lora_rank": None, "num_hidden_layers": 26, "tie_word_embeddings": True, "initializer_range": 0.1}
        | {"n_group": None, "topk_group": None},
    },
    "deepseek_v3": {
        "groups": DEEPSEEK | LATENT | GROUPS,
        "tied-yarn": DEEPSEEK | LATENT | LATENT_YARN | {"tie_word_embeddings": True},
    },
    "glm4_moe_lite": {
        "plain": {name: DEEPSEEK[name] for name in DEEPSEEK if name != "first_k_dense_replace"} | LATENT,
    },
    "youtu": {"plain": LATENT | {"tie_word_embeddings": True}},
    "exaone4": {
        "no-windows": {"head_dim": 8, "sliding_window": None, "layer_types": [FULL] * 3},
        "tied-llama3": {"head_dim": 8, "sliding_window": None, "layer_types": [FULL] * 3, "tie_word_embeddings": True}
        | LLAMA3,
        "windows-yarn": DEEP | YARN | {"sliding_window": 16},
    },
    "seed_oss": {"plain": {"attention_bias": True}, "tied-yarn": {"tie_word_embeddings": True, **YARN}},
    "stablelm": {
        "plain": partial(0.5),
        "parallel-biases": {"use_parallel_residual": True, "use_qkv_bias": True, **partial(1.0)},
    },
    "starcoder2": {"plain": {"sliding_window": None}, "untied": {"sliding_window": None, "tie_word_embeddings": False}},
    "olmo": {"plain": {}, "tied-yarn": {"tie_word_embeddings": True, **YARN}},
    "ernie4_5_moe": {
        "plain": EXPERTS
        | {"num_hidden_layers": 3, "moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 24}
        | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "intermediate_size": 80},
    },
    "hunyuan_v1_moe": {"plain": {"num_experts": 5, "moe_topk": 3, "intermediate_size": 40, "initializer_range": 0.25}},
    "minimax_m2": {"plain": EXPERTS | {"num_local_experts": 6, "head_dim": 8, **partial(0.5)}},
    "afmoe": {
        "plain": {"num_hidden_layers": 5, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"num_shared_experts": 2, "num_dense_layers": 1, "route_scale": 1.5, "sliding_window": 16}
        | {"mup_enabled": True, "initializer_range": 0.25},
    },
    "gpt_oss": {
        "plain": GPT_OSS | {"layer_types": [SLIDING, FULL, SLIDING]},
        "yarn": GPT_OSS | YARN | {"layer_types": [SLIDING, FULL, SLIDING]},
    },
    "lfm2": {
        "plain": {"head_dim": 8, "layer_types": [CONV, FULL, CONV], "conv_L_cache": 3, "norm_eps": 1e-3}
        | {"block_auto_adjust_ff_dim": False},
    },
    "ministral3": {
        "yarn-temperature": {"sliding_window": None}
        | scaled(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=0.8,
            llama_4_scaling_beta=0.3,
        )
    },
    "qwen3_next": {
        "plain": DELTA | DELTA_EXPERTS | partial(0.5),
        "tied": DELTA | DELTA_EXPERTS | partial(1.0) | {"tie_word_embeddings": True, "linear_num_key_heads": 6},
    },
    "qwen3_5_moe_text": {"plain": DELTA | DELTA_EXPERTS | partial(0.5)},
    "qwen3_5_text": {
        "plain": DELTA | partial(0.5),
        "all-turned-tied": DELTA | partial(1.0) | {"tie_word_embeddings": True, "linear_num_key_heads": 6},
    },
    "falcon": {
        "one-kv-head": {"ffn_hidden_size": 80},
        "new": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "new-one-norm-linear": {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1}
        | scaled("linear", factor=3.0),
        "all-heads-untied": {"multi_query": False, "tie_word_embeddings": False},
    },
    "bloom": {"plain": {}, "untied": {"tie_word_embeddings": False}},
    "gpt_bigcode": {
        "plain": {},
        "all-heads-untied": {"multi_query": False, "tie_word_embeddings": False, "n_inner": 80},
    },
    "jais2": {"plain": {"head_dim": 8}, "tied-yarn": {"head_dim": 8, "tie_word_embeddings": True, **YARN}},
}
# Families without an RMSNorm: heads are as wide as width / heads, and the epsilon has another name.
EVEN = {name: value for name, value in BASE.items() if name not in ("head_dim", "rms_norm_eps")}
OLD_GPT: Fields = {
    name: BASE[name] for name in ("vocab_size", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")
}
NORMS_WITH_BIAS = ("phi", "cohere", "cohere2", "stablelm", "jais2")
BASES: dict[str, Fields] = dict.fromkeys(NORMS_WITH_BIAS, EVEN | {"layer_norm_eps": 1e-3}) | {
    "starcoder2": EVEN | {"norm_epsilon": 1e-3},
    "olmo": EVEN,
    "mamba2": {name: BASE[name] for name in (*OLD_GPT, "hidden_size", "num_hidden_layers")}
    | {"layer_norm_epsilon": 1e-3, "num_heads": 6, "head_dim": 16, "state_size": 16},
    "falcon": {name: EVEN[name] for name in EVEN if name not in ("num_key_value_heads", "intermediate_size")}
    | {"layer_norm_epsilon": 1e-3, "activation": "gelu_pytorch_tanh"},
    "bloom": OLD_GPT | {"hidden_size": 48, "n_layer": 3, "n_head": 4, "layer_norm_epsilon": 1e-3},
    "gpt_bigcode": OLD_GPT | {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 300, "layer_norm_epsilon": 1e-3},
    "lfm2": {name: BASE[name] for name in BASE if name != "rms_norm_eps"},
    "granitemoehybrid": EVEN | {"rms_norm_eps": 1e-3},
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), EVEN | {"rms_norm_eps": 1e-3}),
    "gpt_neox": {name: value for name, value in EVEN.items() if name != "num_key_value_heads"}
    | {"layer_norm_eps": 1e-3},
    "gpt2": OLD_GPT | {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 300, "layer_norm_epsilon": 1e-3},
}
PAIRS = [(family, variant) for family in VARIANTS for variant in VARIANTS[family]]


@cache
def tokenizer() -> Tokenizer:
    """One of ours."""
    return Tokenizer.train([(ROOT / "docs/tour.md").read_text(encoding="utf-8")], ROWS - 10)


@cache
def model_pair(family: str, variant: str) -> tuple[Any, ImportedModel]:
    """A model of transformers with random weights, and the same read by us."""
    theirs = drawn(AutoConfig.for_model(family, **(BASES.get(family, BASE) | VARIANTS[family][variant])))
    if family.startswith(("qwen3_next", "qwen3_5")):
        slow_down(theirs)
    return theirs, load(write(theirs))


def slow_down(model: Any) -> None:
    """Let states of delta rules decay slowly: the norm of a state that is all but gone would magnify its rounding."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data -= 6.0


def prompt() -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return [0, *torch.randint(1, ROWS - 10, (40,), generator=generator).tolist()]


def logits_of(theirs: Any, tokens: list[int]) -> torch.Tensor:
    return their_logits(theirs, torch.tensor([tokens]))[0]


def distance(file: Path, theirs: Any) -> float:
    """The largest difference of a logit between llama.cpp on the file and transformers on the model."""
    answer = run(file, [{"tokens": prompt(), "n": 0, "logits": True}])[0]
    want = logits_of(theirs, prompt())
    assert float(want.std()) > 0.3, "logits this even would agree whatever the model does"
    return float((torch.tensor(answer["logits"]) - want).abs().max())


@pytest.mark.parametrize(("family", "variant"), in_turn(PAIRS, turn=0, turns=2))
def test_llama_cpp_computes_what_transformers_does(family: str, variant: str, tmp_path: Path) -> None:
    theirs, ours = model_pair(family, variant)
    file = tmp_path / "model.gguf"
    _, graph = export_gguf(ours.model, file, tokenizer())
    assert graph == ARCHITECTURES[RUN_AS.get(family, family)].name
    answer = run(file, [{"tokens": prompt(), "n": WRITTEN, "logits": True}])[0]
    want = logits_of(theirs, prompt())
    difference = float((torch.tensor(answer["logits"]) - want).abs().max())
    print(f"\n{family} {variant}: largest difference of a logit {difference:.1e}, spread {float(want.std()):.2f}")
    assert float(want.std()) > 0.3
    assert difference <= (CLOSE_WITH_GELU if family.startswith(APPROXIMATE) else CLOSE)
    written = heddle.generate(ours.model, [prompt()], max_new_tokens=WRITTEN)[0]
    ended = written.index(0) if 0 in written else WRITTEN
    assert answer["tokens"] == written[:ended]
    assert ended > 8


# What transformers' reader of GGUF knows: no scaling, no bias, and head_dim and experts of its own defaults.
READABLE: list[tuple[str, Fields]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("qwen2", {"head_dim": 8}),
    ("qwen3", {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}),
    ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts_per_tok": 2}),
]
ROUNDED = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", ROUNDED, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("family", "fields"), READABLE)
def test_transformers_reads_the_same_bits(family: str, fields: Fields, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = drawn(AutoConfig.for_model(family, **(BASE | fields)))
    export_gguf(load(write(theirs)).model, tmp_path / "model.gguf", tokenizer(), dtype=dtype)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    for name, parameter in theirs.named_parameters():
        if parameter.dim() > 1 and not name.endswith("mlp.gate.weight"):  # vectors and routers stay float32
            parameter.data = parameter.data.to(dtype).float()
    assert torch.equal(logits_of(again, prompt()), logits_of(theirs, prompt()))


TEXTS = [
    "Once upon a time", "  two  spaces ", "a\n\n\n  b\t\tc\r\nd", "don't I'LL we've x'y 's",
    "3.14159 1234567 ٣٤٥ ½²",
    "e\u0301 \u00e9 \ufb01 ＡＢ", "日本語の文章。 한국어 العربية हिन्दी ไทย",
    "👩\u200d👩\u200d👧🏽 ☃ → ∑", "\u3000\u00a0\u2028x\u200by",
    "def f(x):\n    return x**2  # !!!\n", "<|end|> <s> </s> [PAD325]", "a" * 200 + " " * 200 + "!" * 200, "",
]  # fmt: skip


def test_llama_cpp_cuts_texts_as_we_do(tmp_path: Path) -> None:
    _, ours = model_pair("llama", "plain")
    export_gguf(ours.model, tmp_path / "model.gguf", tokenizer())
    texts = [*TEXTS, (ROOT / "README.md").read_text(encoding="utf-8")]
    answers = run(tmp_path / "model.gguf", [{"text": text, "spell": True} for text in texts])
    for text, answer in zip(texts, answers, strict=True):
        assert answer["prompt"] == [tokenizer().eod_id, *tokenizer().encode(text)], repr(text[:40])


def test_llama_cpp_writes_the_same_text(tmp_path: Path) -> None:
    """From text to text: the tokenizer, what opens a text and what ends it, and every type of weights runs."""
    _, ours = model_pair("llama", "llama3-tied-biases")
    for dtype in ROUNDED:
        export_gguf(ours.model, tmp_path / "model.gguf", tokenizer(), dtype=dtype)
        answer = run(tmp_path / "model.gguf", [{"text": "The six nouns", "n": WRITTEN}])[0]
        if dtype == torch.float32:
            want = heddle.generate(ours.model, ["The six nouns"], tokenizer(), max_new_tokens=WRITTEN)[0]
            assert answer["text"] == want
        assert len(answer["tokens"]) > 8


def test_the_file_tells_all_that_llama_cpp_asks(tmp_path: Path) -> None:
    _, ours = model_pair("llama", "plain")
    export_gguf(ours.model, tmp_path / "named.gguf", tokenizer())
    fields = {name: field.contents() for name, field in GGUFReader(tmp_path / "named.gguf").fields.items()}
    assert {name.partition(".")[2]: value for name, value in fields.items() if name.startswith("llama.")} == {
        "context_length": 300,
        "embedding_length": 48,
        "block_count": 3,
        "feed_forward_length": 80,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.key_length": 10,
        "attention.value_length": 10,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-3),
        "vocab_size": ROWS,
        "rope.dimension_count": 10,
        "rope.freq_base": 5000.0,
    }
    assert fields["general.name"] == "named"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    end = tokenizer().eod_id
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]) == (end, end)
    assert fields["tokenizer.ggml.add_bos_token"] is True
    assert fields["tokenizer.ggml.tokens"][end] == "<|end|>"
    assert fields["tokenizer.ggml.token_type"][end] == 3
    assert fields["tokenizer.ggml.token_type"][-1] == 5
    assert len(fields["tokenizer.ggml.tokens"]) == len(fields["tokenizer.ggml.token_type"]) == ROWS
    export_gguf(ours.model, tmp_path / "named.gguf", tokenizer(), imported=ours)
    carried = GGUFReader(tmp_path / "named.gguf").fields["llama.context_length"].contents()
    assert carried == 300


def test_without_a_tokenizer_it_runs_on_tokens(tmp_path: Path) -> None:
    theirs, ours = model_pair("llama", "plain")
    export_gguf(ours.model, tmp_path / "model.gguf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    assert torch.equal(logits_of(again, prompt()), logits_of(theirs, prompt()))


def _drop(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A key is not written."""
    add = exporting._add_key
    return lambda patch: patch.setattr(
        exporting, "_add_key", lambda writer, key, value: None if key.endswith(name) else add(writer, key, value)
    )


def _graph(family: str, **fields: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """A graph is taken for another."""
    return lambda patch: patch.setitem(ARCHITECTURES, family, replace(ARCHITECTURES[family], **fields))


INTERLEAVED = architectures.interleave_rope_rows
PLANTED: dict[str, tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "rows as they are": ("llama", "plain", _graph("llama", interleaved_rope=False)),
    "rows of all heads as one": (
        "llama",
        "plain",
        lambda patch: patch.setattr(architectures, "interleave_rope_rows", lambda x, heads: INTERLEAVED(x, 1)),
    ),
    "no factors": (
        "llama", "llama3-tied-biases", lambda patch: patch.setattr(exporting, "_rope_factors", lambda model: {}),
    ),
    "no base": ("llama", "plain", _drop("rope.freq_base")),
    "no factor": ("llama", "one-kv-head-linear", _drop("rope.scaling.factor")),
    "no original length": ("llama", "yarn", _drop("rope.scaling.original_context_length")),
    "no base of windows": ("gemma3_text", "plain", _drop("rope.freq_base_swa")),
    "no window": ("gemma2", "plain", _drop("attention.sliding_window")),
    "no cap of scores": ("gemma2", "plain", _drop("attn_logit_softcapping")),
    "no cap of logits": ("gemma2", "plain", _drop("final_logit_softcapping")),
    "rows in pairs": ("ernie4_5", "plain", _graph("ernie4_5", interleaved_rope=True)),
    "rows in pairs after their norm": ("hunyuan_v1_dense", "plain", _graph("hunyuan_v1_dense", interleaved_rope=True)),
    "offset left out of the first Gemma": ("gemma", "plain", _graph("gemma", norm_plus_one=False)),
    "keys before queries": (
        "gpt_neox", "parallel", _graph("gpt_neox", names=dict.fromkeys(("mixer.k", "mixer.q", "mixer.v"), "attn_qkv")),
    ),
    "values in heddle's order in Qwen3.5": ("qwen3_5_text", "plain", _graph("qwen3_5_text", tiled_values=False)),
    "offset left out of Qwen3-Next": ("qwen3_next", "plain", _graph("qwen3_next", norm_plus_one=False)),
    "no scale of experts": ("deepseek_v3", "groups", _drop("expert_weights_scale")),
    "no groups of experts": ("deepseek_v3", "groups", _drop("expert_group_count")),
    "no multiplier of YaRN": ("deepseek_v3", "tied-yarn", _drop("yarn_log_multiplier")),
    "no multiplier of branches": ("granite", "plain", _drop("residual_scale")),
    "rotated without positions": ("granitemoehybrid", "plain", _drop("rope.scaling.finetuned")),
    "norms exchanged": (
        "falcon", "new", _graph("falcon", names=architectures.FUSED_QKV | {
            "residual.norms.mixer": "attn_norm", "residual.norms.feedforward": "attn_norm_2",
        }),
    ),
    "dims of a part of a head left out": ("phi3", "partial", _drop("rope.dimension_count")),
    "rows as they are in SmolLM3": ("smollm3", "plain", _graph("smollm3", interleaved_rope=False)),
    "rows in pairs in Command R7B": ("cohere2", "plain", _graph("cohere2", interleaved_rope=True)),
    "offset left out": ("gemma2", "plain", _graph("gemma2", norm_plus_one=False)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, variant, plant = PLANTED[name]
    theirs, ours = model_pair(family, variant)
    plant(monkeypatch)
    export_gguf(ours.model, tmp_path / "model.gguf", tokenizer())
    assert distance(tmp_path / "model.gguf", theirs) > 2 * CLOSE_WITH_GELU


REFUSED = [
    ("layers.*.mixer.window=64", "layers.*.mixer.window"),
    ("layers.*.feedforward.activation=gelu", "layers.*.feedforward.activation"),
    ("layers.*.mixer.sink=true", "layers.*.mixer.sink"),
    ("head.softcap=30", "head.softcap"),
    ("residual.kind=post_norm", "residual.kind"),
    ('layers.*.mixer.position.scaling={"kind": "ntk", "factor": 2.0}', "layers.*.mixer.position.scaling"),
    (
        'layers.*.mixer.position.scaling={"kind": "yarn", "factor": 2.0, "original_length": 64, "beta_fast": 8.0}',
        "layers.*.mixer.position.scaling.beta_fast",
    ),
]


@pytest.mark.parametrize(("override", "path"), REFUSED)
def test_what_llama_cpp_cannot_run_is_named_with_a_change_that_helps(override: str, path: str, tmp_path: Path) -> None:
    design = heddle.load_config("preset:gqa-tiny", overrides=["vocab_size=300", override])
    with pytest.raises(ConfigError, match=r"llama\.cpp") as caught:
        export_gguf(heddle.build(design, device="meta"), tmp_path / "model.gguf")
    assert f"{path} " in str(caught.value)
    changes = str(caught.value).rpartition(" with ")[2].split(" ")
    match_architecture(heddle.load_config("preset:gqa-tiny", overrides=["vocab_size=300", override, *changes]))
    assert list(tmp_path.iterdir()) == []


# What a family can express, and llama.cpp's graph for it computes otherwise: a variant, changed fields, the path.
COMPUTED_OTHERWISE: list[tuple[str, str, Fields, str]] = [
    ("falcon", "new", {"activation": "gelu"}, "layers.*.feedforward.activation"),
    ("falcon", "one-kv-head", {"parallel_attn": False}, "residual.kind"),
    ("exaone4", "no-windows", {"sliding_window": 16, "layer_types": [SLIDING, SLIDING, FULL]}, "layers.0.mixer.window"),
    ("exaone4", "windows-yarn", {"sliding_window": None, "layer_types": [FULL] * 64}, "layers.0.mixer.window"),
    ("deepseek_v3", "groups", {"rms_norm_eps": 1e-5}, "norm.eps"),
    ("deepseek_v3", "groups", {"q_lora_rank": None}, "layers.*.mixer.query_rank"),
    ("deepseek_v3", "groups", {"rope_interleave": False}, "layers.*.mixer.position.layout"),
    ("deepseek_v2", "plain", {"topk_method": "group_limited_greedy", **GROUPS}, "layers.*.feedforward.routing"),
    ("qwen3_next", "plain", {"rms_norm_eps": 1e-3}, "norm.eps"),
    ("qwen3_next", "plain", {"linear_value_head_dim": 4}, "layers.*.mixer.value_dim"),
    ("mamba2", "plain", {"time_step_limit": [0.01, 0.1]}, "layers.*.mixer.time_step_limit"),
    ("mamba2", "plain", {"use_conv_bias": False}, "layers.*.mixer.conv_bias"),
    ("granitemoehybrid", "plain", {"mamba_d_head": 8, "mamba_expand": 1}, "layers.*.mixer.head_dim"),
    ("glm4_moe", "plain", {"num_hidden_layers": 3, "hidden_act": "gelu"}, "layers.*.feedforward.activation"),
    ("ernie4_5_moe", "plain", {"moe_layer_end_index": 1}, "layers.2.feedforward.kind"),
    ("afmoe", "plain", {"mup_enabled": False}, "embedding.multiplier"),
    ("gpt_oss", "yarn", {"swiglu_limit": 5.0}, "layers.*.feedforward.limit"),
    ("starcoder2", "plain", {"sliding_window": 16}, "layers.*.mixer.window"),
    ("seed_oss", "plain", {"mlp_bias": True}, "layers.*.feedforward.bias"),
]


@pytest.mark.parametrize(("family", "variant", "changed", "path"), COMPUTED_OTHERWISE)
def test_what_a_graph_computes_otherwise_is_named(family: str, variant: str, changed: Fields, path: str) -> None:
    fields = BASES.get(family, BASE) | VARIANTS[family][variant]
    match_architecture(load(write(drawn(AutoConfig.for_model(family, **fields)))).model.config, family)
    design = load(write(drawn(AutoConfig.for_model(family, **(fields | changed))))).model.config
    with pytest.raises(ConfigError) as caught:
        match_architecture(design, family)
    assert f"{path} " in str(caught.value)


def test_a_scale_of_scores_is_run_by_the_graph_of_granite_alone() -> None:
    overrides = ["vocab_size=300", "layers.*.mixer.scale=0.5"]
    assert match_architecture(heddle.load_config("preset:gqa-tiny", overrides=overrides))[1].name == "granite"
    with pytest.raises(ConfigError, match=r"layers\.\*\.mixer\.scale is 0\.5; its qwen3 runs it"):
        match_architecture(
            heddle.load_config("preset:gqa-tiny", overrides=[*overrides, "layers.*.mixer.qk_norm=head"]), "qwen3"
        )


def test_a_design_may_have_the_pairs_of_another_family(tmp_path: Path) -> None:
    """Llama's graph pairs dims as Llama does; ERNIE's pairs neighbours."""
    design = heddle.load_config(
        "preset:gqa-tiny", overrides=["vocab_size=300", "layers.*.mixer.position.layout=interleaved"]
    )
    assert match_architecture(design)[1].name == "ernie4_5"


def test_a_part_of_a_head_is_rotated_by_the_graph_of_phi3() -> None:
    design = heddle.load_config(
        "preset:gqa-tiny", overrides=["vocab_size=300", "layers.*.mixer.position.rotary_dim=16"]
    )
    assert match_architecture(design)[1].name == "phi3"


@pytest.mark.parametrize(("every", "runs"), [(4, True), (3, False)])
def test_layers_without_positions_are_those_of_the_graph(every: int, runs: bool) -> None:
    design = heddle.load_config("preset:gqa-tiny", overrides=["vocab_size=300"])
    layers = [layer.replace(repeat=1) for layer in design_parts.layers(design)]
    for index in range(every - 1, len(layers), every):
        mixer = layers[index].mixer
        assert mixer is not None
        layers[index] = layers[index].replace(mixer=mixer.replace(position=None))
    design = design.replace(layers=tuple(layers))
    if runs:
        assert match_architecture(design)[1].name == "smollm3"
    else:
        assert "layers.2.mixer.position is " in (refused(design) or "")


def test_a_refusal_is_of_the_graph_of_the_family_that_a_model_came_from() -> None:
    design = imported("gemma3_text", "plain").model.config
    for preferred in ("gemma3_text", "llama"):
        with pytest.raises(ConfigError, match=f"its {preferred.removesuffix('_text')} runs it with"):
            match_architecture(design.replace(residual=heddle.load_config("preset:gqa-tiny").residual), preferred)


def test_a_refusal_is_of_a_graph_with_the_same_kinds() -> None:
    reason = refused(heddle.load_config("preset:mla-tiny", ["vocab_size=61"]))
    assert reason is not None
    assert "its deepseek2 runs it with" in reason
    assert "mixer.kind" not in reason


def test_a_refusal_names_entries_with_their_layers() -> None:
    """An entry's number is not its layers', and a trained model is not changed by overrides."""
    design = heddle.load_config("preset:gqa-tiny", overrides=["vocab_size=300"])
    first = design.layers[0].replace(repeat=3)
    linear = heddle.load_config("preset:gqa-tiny", overrides=["layers.*.mixer.kind=linear_attention"]).layers[0]
    design = design.replace(layers=(first, linear.replace(repeat=2)))
    named = "layers.1.mixer.kind (entry 1, layers 3–4) is linear_attention"
    assert (
        refused(design)
        == f"llama.cpp cannot run this design: {named}; its llama runs it with layers.1.mixer.kind=attention"
    )


@pytest.mark.parametrize("family", architectures.LEFT_OUT)
def test_a_family_that_llama_cpp_computes_otherwise_is_refused_with_the_reason(family: str) -> None:
    design = imported(family, "plain").model.config
    with pytest.raises(ConfigError, match=architectures.LEFT_OUT[family]):
        match_architecture(design, family)
    assert "llama.cpp cannot run" in (refused(design) or "")


def test_relative_biases_that_layers_share_are_refused_by_name() -> None:
    named = r"layers\.0\.mixer\.position is \{'kind': 'relative_bias'.* layers\.1\.mixer\.position .*'shared': True"
    with pytest.raises(ConfigError, match=f"^llama.cpp cannot run this design: {named}"):
        match_architecture(imported("mpnet", "plain").model.config, "mpnet")


def refused(design: ModelConfig) -> str | None:
    """Why llama.cpp cannot run a design."""
    try:
        match_architecture(design)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", each_option())
def test_any_design_runs_alike_or_is_refused(name: str, tmp_path: Path) -> None:
    design = heddle.load_config(DESIGNS[name], overrides=[f"vocab_size={ROWS}"])
    reason = refused(design)
    assert (name == "gated-silu") <= (reason is None)
    if reason is not None:
        assert "llama.cpp cannot run this design: " in reason
        return
    model = heddle.build(design, seed=3).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    export_gguf(model, tmp_path / "model.gguf", tokenizer())
    answer = run(tmp_path / "model.gguf", [{"tokens": prompt(), "n": 0, "logits": True}])[0]
    want = our_logits(model, torch.tensor([prompt()]))[0]
    assert float(want.std()) > 0.3
    assert float((torch.tensor(answer["logits"]) - want).abs().max()) <= CLOSE


def test_a_tokenizer_that_llama_cpp_does_not_know_is_refused() -> None:
    other = tokenizer().to_json().replace(r"\\p{N}{1,256}", r"\\p{N}{1,2}")
    assert other != tokenizer().to_json()
    with pytest.raises(DataError, match=r"llama\.cpp does not support"):
        tokenizer_keys(Tokenizer.from_json(other), ROWS)


class Torn(Exception):
    """What stops a writing."""


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = model_pair("llama", "plain")
    file = tmp_path / "model.gguf"
    export_gguf(ours.model, file, tokenizer())
    before = file.read_bytes()

    def build(spec: architectures.GGUFTensor, tensors: Any) -> torch.Tensor:
        raise Torn

    with monkeypatch.context() as patch:
        patch.setattr(architectures.GGUFTensor, "build", build)
        with pytest.raises(Torn):
            export_gguf(ours.model, file, tokenizer(), dtype=torch.float16)
        with pytest.raises(Torn):
            export_gguf(ours.model, tmp_path / "new/other.gguf", tokenizer())
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["model.gguf"]
    export_gguf(ours.model, file, tokenizer(), dtype=torch.float16)
    assert len(file.read_bytes()) < len(before)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = model_pair("llama", "plain")

    def write_tensor_data(writer: GGUFWriter, tensor: Any) -> None:
        raise OSError("1200 requested and 17 written")  # as numpy says it

    monkeypatch.setattr(GGUFWriter, "write_tensor_data", write_tensor_data)
    with pytest.raises(MachineError, match="free some space"):
        export_gguf(ours.model, tmp_path / "model.gguf", tokenizer())
    assert list(tmp_path.iterdir()) == []


def test_what_stands_there_is_left_as_it_is(tmp_path: Path) -> None:
    _, ours = model_pair("llama", "plain")
    (tmp_path / "notes.gguf").write_text("my notes")
    (tmp_path / "folder.gguf").mkdir()
    for name, message in (("notes.gguf", "GGUF"), ("folder.gguf", "is a folder"), ("model.bin", "ends in .gguf")):
        with pytest.raises(CheckpointError, match=message):
            export_gguf(ours.model, tmp_path / name, tokenizer())
    assert (tmp_path / "notes.gguf").read_text() == "my notes"


def test_a_missing_package_or_a_wrong_type_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = model_pair("llama", "plain")
    with pytest.raises(ConfigError, match=r"torch\.int8"):
        export_gguf(ours.model, tmp_path / "model.gguf", dtype=torch.int8)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install.*\[gguf\]"):
        export_gguf(ours.model, tmp_path / "model.gguf")


def test_every_changed_byte_of_a_file_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the hash that the file has of itself, by `verify` of a file or its folder, and by an import."""
    file = tmp_path / "model.gguf"
    export_gguf(model_pair("llama", "plain")[1].model, file, tokenizer())
    whole = file.read_bytes()
    assert check_seal(file)
    assert [result.status for result in verify_files(file)] == [OK]
    generator = torch.Generator().manual_seed(1)
    places = [0, len(whole) - 1, *torch.randint(0, len(whole), (60,), generator=generator).tolist()]
    for place in places:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        statuses = {result.status for target in (file, tmp_path) for result in verify_files(target)}
        assert statuses == {DAMAGED}, place
    file.write_bytes(whole)
    load_gguf(file)
    assert "warning" not in capsys.readouterr().err
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    load_gguf(file)
    assert f"warning: {file}: was changed" in capsys.readouterr().err
    file.write_bytes(whole.replace(b"heddle.sha256", b"heddle.sha255"))
    assert not check_seal(file)
    assert [result.status for result in verify_files(file)] == [NOT_COVERED]
