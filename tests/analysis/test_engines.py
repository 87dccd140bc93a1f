"""What engines allocate for a state: tensors of transformers, the log of llama.cpp, and numbers that vLLM published."""

import copy
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.cli.main import run_command
from heddle.errors import ConfigError
from heddle.exchange.family import families, family_of
from heddle.exchange.family_match import design_from_config
from heddle.exchange.gguf import export_gguf
from heddle.lab.engines import Caches, EngineState, block_bytes, engine_states, hybrid_block, vllm_layers
from heddle.model.config import ModelConfig
from heddle.model.size import build_distinct_layers, measure_size
from tests.exchange.cases import CASES
from tests.exchange.hf_models import MASKED, VOCABULARY, AutoConfig, AutoModelForCausalLM, config_of, plain
from tests.exchange.published import published_configs
from tests.exchange.test_gguf import BASE, ROWS, VARIANTS, tokenizer
from tools.llama_cpp.runner import context_log

GIB, MIB = 2**30, 2**20
BATCH, LENGTH, PROMPT = 2, 24, 19


def allocated(
    design: ModelConfig, dtype: torch.dtype, length: int, batch: int = 1, family: str | None = None
) -> dict[str, EngineState]:
    model = build_distinct_layers(design, dtype)
    states = engine_states(model, [measure_size(model, length, batch)], family)
    return {each.engine: each for each in states}


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a layer of a cache, without counters."""
    if isinstance(value, Tensor):
        return [value] if value.numel() > 1 else []
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors_of(each)]
    return []


def static_cache_bytes(family: str, variant: str, dtype: torch.dtype) -> int:
    """Bytes of the tensors of transformers' static cache after a prompt and a token."""
    from transformers import StaticCache

    torch.manual_seed(0)
    config = config_of(family, variant)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **plain(family)).eval()
    cache = StaticCache(config=config, max_cache_len=LENGTH)
    tokens = torch.randint(1, VOCABULARY, (BATCH, PROMPT + 1))
    with torch.no_grad():
        for call in (tokens[:, :PROMPT], tokens[:, PROMPT:]):
            model(call, use_cache=True, **{"cache_params" if family in STATE_SPACES else "past_key_values": cache})
    tensors = [tensor for layer in cache.layers for tensor in tensors_of(vars(layer))]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


UNCACHED = ("deepseek_v4", "minimax", "openai-gpt", "heddle", "recurrent_gemma", "qwen4_exp_text")
CACHED = [family for family in CASES if family not in MASKED and family not in UNCACHED]
STATE_SPACES = ("mamba", "falcon_mamba", "mamba2")
IN_FLOAT32 = ["llama", "gemma3_text", "deepseek_v32", "mamba2", "qwen3_next", "falcon_h1"]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(
            pytest.param(family, torch.bfloat16, marks=() if number % 4 == 0 else pytest.mark.nightly)
            for number, family in enumerate(CACHED)
        ),
        *((family, torch.float32) for family in IN_FLOAT32),
    ],
)
def test_a_static_cache_of_transformers_has_these_bytes(family: str, dtype: torch.dtype) -> None:
    variant = next(iter(CASES[family].variants))
    design = design_from_config(config_of(family, variant).to_dict(), families()[family])
    [ours] = allocated(design, dtype, LENGTH, BATCH, family)["transformers"].state_bytes
    assert ours == static_cache_bytes(family, variant, dtype)


def test_what_transformers_does_not_keep_in_a_static_cache() -> None:
    lightning = design_from_config(config_of("minimax", "plain").to_dict(), families()["minimax"])
    assert allocated(lightning, torch.float32, 24)["transformers"].reason == "its class takes no StaticCache"
    griffin = design_from_config(config_of("recurrent_gemma", "plain").to_dict(), families()["recurrent_gemma"])
    assert "outside of a StaticCache" in allocated(griffin, torch.float32, 24)["transformers"].reason
    memory = design_from_config(config_of("qwen4_exp_text", "plain").to_dict(), families()["qwen4_exp_text"])
    assert "uncounted" in allocated(memory, torch.float32, 24)["transformers"].reason
    encoder = design_from_config(config_of("bert", "plain").to_dict(), families()["bert"])
    assert allocated(encoder, torch.float32, 24) == {}
    own = heddle.load_config("preset:hybrid-tiny", ["vocab_size=300"])
    state = heddle.build(own).init_state(3, 24)
    assert allocated(own, torch.float32, 24, 3)["transformers"].state_bytes == (state.bytes,)


SMALL: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}  # fmt: skip
GEMMA = SMALL | {"query_pre_attn_scalar": 64, "rope_parameters": {
    "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}}  # fmt: skip
# family, fields, tokens of a sequence, sequences.
CONTEXTS = {
    "grouped": ("llama", SMALL, 1024, 1),
    "padded": ("llama", SMALL, 1000, 1),
    "two sequences": ("llama", SMALL, 300, 2),
    "full": ("llama", SMALL | {"num_key_value_heads": 4}, 512, 1),
    "experts": ("mixtral", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}, 256, 1),
    "window": ("gemma3_text", GEMMA | {"sliding_window": 64}, 2048, 1),
    "wide window": ("gemma3_text", GEMMA | {"sliding_window": 700}, 2048, 1),
    "window as long as the context": ("gemma3_text", GEMMA | {"sliding_window": 400}, 512, 1),
    "window, two sequences": ("gemma3_text", GEMMA | {"sliding_window": 64}, 2048, 2),
}


SIZE = re.compile(
    r"size = +(?P<mib>[\d.]+) MiB \( *(?P<cells>\d+) cells, +(?P<layers>\d+) layers, +(?P<sequences>\d+)/ *\d+ seqs\)"
)


def in_llama_cpp(
    family: str, fields: dict[str, Any], length: int, sequences: int, folder: Path
) -> tuple[int, list[str]]:
    """The bytes that we say of a context, and what llama.cpp logs while it makes it."""
    config = AutoConfig.for_model(family, **copy.deepcopy(fields)).to_dict()
    design = design_from_config(config, families()[family])
    export_gguf(heddle.build(design, seed=0), folder / "model.gguf", tokenizer())
    [ours] = allocated(design, torch.bfloat16, length, sequences, family)["llama.cpp"].state_bytes
    lines = context_log(folder / "model.gguf", contextSize=length, sequences=sequences, batchSize=512)
    return ours, lines


@pytest.mark.parametrize("name", CONTEXTS)
def test_llama_cpp_logs_caches_of_these_bytes(name: str, tmp_path: Path) -> None:
    """Its log has cells, layers and sequences of each cache, and its MiB with two digits."""
    fields = CONTEXTS[name][1]
    ours, lines = in_llama_cpp(*CONTEXTS[name], tmp_path)
    caches = [match for line in lines if (match := SIZE.search(line))]
    token, logged = 2 * 2 * 64 * fields["num_key_value_heads"], 0
    for match in caches:
        kept = token * int(match["cells"]) * int(match["layers"]) * int(match["sequences"])
        assert f"{kept / MIB:.2f}" == match["mib"]
        logged += kept
    assert ours == logged


# Mamba-2, a state of 0.5 MiB a layer; two such layers beside one of attention; and latents, which are only keys.
RECURRENT = {
    "recurrent": ("mamba2", {
        "vocab_size": ROWS, "hidden_size": 512, "num_heads": 16, "head_dim": 64, "state_size": 128, "n_groups": 1,
        "num_hidden_layers": 3, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    }, 512, 2),
    "hybrid": ("granitemoehybrid", BASE | VARIANTS["granitemoehybrid"]["plain"] | {
        "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 512,
    }, 4096, 2),
    "latents": ("deepseek_v2", BASE | VARIANTS["deepseek_v2"]["plain"], 4096, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", RECURRENT)
def test_llama_cpp_logs_states_of_these_bytes(name: str, tmp_path: Path) -> None:
    """Each cache of its log, keys and values or recurrent states, with its MiB with two digits."""
    ours, lines = in_llama_cpp(*RECURRENT[name], tmp_path)
    logged = [float(match[1]) for line in lines if (match := re.search(r": size = +([\d.]+) MiB \(", line))]
    assert ours > MIB / 4
    assert abs(ours / MIB - sum(logged)) <= 0.005 * len(logged)


PUBLISHED = {entry.name: entry for entry in published_configs() if entry.refused is None}
# "To serve at least one request with the model's max seq len (…), … GiB KV cache is needed": logs of `vllm serve`.
NEEDED = {
    ("mistralai/Devstral-Small-2-24B-Instruct-2512, text model", 393216): "60.00",  # full
    ("microsoft/Phi-3.5-mini-instruct", 131072): "48.01",  # a window in every layer, longer than the context
    ("openai/gpt-oss-120b", 131072): "4.79",  # every other layer has a window
}
# "Setting attention block size to … tokens", "Padding mamba page size by … %": logs of models with recurrent layers.
HYBRIDS = {
    "Qwen/Qwen3-Next-80B-A3B-Thinking": (544, "1.49"),
    "Qwen/Qwen3.5-27B, text model": (784, "0.13"),
}


def published_design(name: str) -> tuple[ModelConfig, str]:
    config = PUBLISHED[name].config
    family = family_of(config, name)
    return design_from_config(config, family), family.model_type


@pytest.mark.parametrize(("name", "length"), NEEDED)
def test_vllm_needs_as_much_for_a_request_as_it_logged(name: str, length: int) -> None:
    design, family = published_design(name)
    [ours] = allocated(design, torch.bfloat16, length, family=family)["vLLM"].state_bytes
    assert f"{ours / GIB:.2f}" == NEEDED[name, length]


@pytest.mark.parametrize("name", HYBRIDS)
def test_blocks_of_hybrids_are_those_that_vllm_logged(name: str) -> None:
    design, family = published_design(name)
    caches, states = vllm_layers(build_distinct_layers(design, torch.bfloat16), family)
    block, percent = HYBRIDS[name]
    assert hybrid_block(caches, states) == block
    [(token, _)], [state] = caches, states
    assert f"{100 * (block * token - state) / state:.2f}" == percent


def test_vllm_holds_as_many_requests_as_it_logged() -> None:
    """vLLM 0.13 of google/gemma-3-1b-it for 2,048 tokens: 25.39 GiB are 950,864 tokens, a concurrency of 461.21.

    26 layers, 4 of them without a window, are 7 groups of 4, two of whose layers are padding ("Add 2 padding layers").
    """
    design, family = published_design("google/gemma-3-1b-it")
    [ours] = allocated(design, torch.bfloat16, 2048, family=family)["vLLM"].state_bytes
    group = 4 * 16 * 2 * 256 * 2  # layers, tokens, keys and values, their width, bytes
    pools = range(950_864 // 16 * 7, 950_864 // 16 * 7 + 7)  # blocks that are so many tokens
    fitting = [blocks for blocks in pools if f"{blocks * group / GIB:.2f}" == "25.39"]
    assert "461.21" in {f"{blocks * group / ours:.2f}" for blocks in fitting}
    assert ours % group == 0


def test_a_latent_of_vllm_is_as_large_as_its_authors_say() -> None:
    """70.272 kB a token of DeepSeek-V3 in bfloat16 (Insights into DeepSeek-V3, 2025, table 1), in blocks of 16."""
    design, family = published_design("deepseek-ai/DeepSeek-V3")
    for length, tokens in ((4096, 4096), (4097, 4112)):
        for batch in (1, 3):
            state = allocated(design, torch.bfloat16, length, batch, family)["vLLM"]
            assert state.state_bytes == (batch * tokens * 70_272,)


def test_vllm_counts_blocks_as_its_unit_tests_do() -> None:
    """`test_estimate_max_model_len` and `test_get_max_concurrency_for_kv_cache_config` of vLLM.

    32 layers of 32 heads of 128 in float16: 16,384 tokens need 8 GiB, 1,024 blocks. A window of 1,024 with steps of
    1,024 tokens needs 129 blocks, and as many layers with and without a window share 1,024 + 129.
    """
    token = 2 * 32 * 128 * 2
    full, window = Caches({(token, None): 32}), Caches({(token, 1024): 32})
    assert block_bytes(full, Counter(), 16384) == 8 * GIB == 1024 * 16 * 32 * token
    assert block_bytes(full, Counter(), 16385) > 8 * GIB
    assert block_bytes(full, Counter(), 16383) == 8 * GIB
    assert block_bytes(window, Counter(), 16384, 1024) == 129 * 16 * 32 * token
    assert block_bytes(full + window, Counter(), 16384, 1024) == (1024 + 129) * 16 * 32 * token


def test_groups_of_vllm_are_padded_as_its_comments_say() -> None:
    """2 full and 3 windowed layers make groups of 2, one of them with a padding layer; 12 and 13 are padded to 13."""
    page = 16 * 512
    full, window = (512, None), (512, 64)  # bytes of a token, and the window
    blocks, ring = 64, -(-(63 + 256) // 16) + 1
    assert block_bytes(Caches({full: 2, window: 3}), Counter(), 1024, 256) == 2 * page * (blocks + 2 * ring)
    assert block_bytes(Caches({full: 13, window: 12}), Counter(), 1024, 256) == 13 * page * (blocks + ring)
    hybrid = block_bytes(Caches({full: 1}), Counter({10_000: 3}), 1024)
    assert hybrid == 32 * 512 * (1024 // 32 + 3)  # blocks of 32 tokens; a state takes a page
    half = block_bytes(Caches({(1024, None): 2, (512, 64): 2}), Counter(), 1024, 256)
    assert half == 2 * 2 * page * (blocks + -(-(63 + 256) // 32) + 1)  # the smaller ones have blocks of 32 tokens
    with pytest.raises(ConfigError, match="pages of one size"):
        block_bytes(Caches({(768, None): 2, (512, 64): 2}), Counter(), 1024)


def test_what_engines_cannot_hold_is_said_in_one_phrase() -> None:
    reasons = {
        name: {each.engine: each.reason for each in allocated(heddle.load_config(*design), torch.float32, 64).values()}
        for name, design in {
            "gqa": ("preset:gqa-tiny", ["vocab_size=300"]),
            "linear": ("preset:linear-tiny", ["vocab_size=300"]),
        }.items()
    }
    assert reasons["gqa"] == {"transformers": "", "vLLM": "", "llama.cpp": ""}
    assert reasons["linear"] == {
        "transformers": "",
        "vLLM": "no class of its registry holds this design (as HeddleForCausalLM)",
        "llama.cpp": "heddle writes no GGUF",
    }
    assert {
        name: allocated(published_design(name)[0], torch.bfloat16, 64, family=published_design(name)[1])["vLLM"].reason
        for name in ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3.2", "moonshotai/Kimi-Linear-48B-A3B-Instruct")
    } == {
        "deepseek-ai/DeepSeek-V3": "",
        "deepseek-ai/DeepSeek-V3.2": "packs an indexer's keys, uncounted",
        "moonshotai/Kimi-Linear-48B-A3B-Instruct": "its pages of latents depend on the GPU",
    }


def test_show_and_plan_print_a_row_for_each_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["show", "preset:gqa-tiny", "--context-length", "1000", "--device", "cpu"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["transformers,", "float32", "3.1", "MB"] in rows
    assert ["vLLM,", "float32", "3.1", "MB"] in rows
    assert ["llama.cpp,", "float16", "1.6", "MB"] in rows
    assert run_command(["show", "preset:linear-tiny", "--context-length", "64", "--device", "cpu"]) == 0
    assert "llama.cpp: heddle writes no GGUF" in capsys.readouterr().out
    assert run_command(["plan", "preset:gqa-tiny"]) == 0
    line = "the state of 4,096 tokens, when served: transformers 6.3 MB (bfloat16), vLLM 6.3 MB (bfloat16), llama.cpp"
    assert line in capsys.readouterr().out
    assert run_command(["plan", "preset:gqa-tiny", "--json"]) == 0
    engines = json.loads(capsys.readouterr().out)["engines"]
    assert [each["state_bytes"] for each in engines] == [[4096 * 6 * 2 * 2 * 32 * 2]] * 3
