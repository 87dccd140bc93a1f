"""Keys of a GGUF that are missing, odd or of another type: read as llama.cpp reads them, or refused in a sentence."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFValueType

from heddle.errors import HeddleError
from heddle.exchange.gguf import config_from_keys, load_gguf
from heddle.exchange.gguf.config_from_keys import _scaling
from heddle.exchange.gguf.export import export_gguf
from tests.exchange.hf_models import our_logits
from tests.exchange.test_gguf import APPROXIMATE, CLOSE, CLOSE_WITH_GELU, VARIANTS, model_pair, prompt, run, tokenizer
from tests.exchange.test_gguf_read import finish, writer_with_keys
from tests.laws.planting import Plant, result

UINT, FLOAT, STRING, BOOL = (GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.STRING, GGUFValueType.BOOL)
INTS, TEXTS = (GGUFValueType.ARRAY, GGUFValueType.INT32), (GGUFValueType.ARRAY, GGUFValueType.STRING)
BOOLS = (GGUFValueType.ARRAY, BOOL)
Change = dict[str, tuple[Any, ...] | None]  # None: without the key


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported("llama", tmp_path_factory.mktemp("plain"))


def exported(family: str, folder: Path) -> Path:
    family, _, variant = family.partition(":")
    export_gguf(
        model_pair(family, variant or next(iter(VARIANTS[family])))[1].model, folder / f"{family}.gguf", tokenizer()
    )
    return folder / f"{family}.gguf"


def changed(file: Path, target: Path, keys: Change, dtype: type = np.float32) -> Path:
    """The same file with other keys or without some, {graph} standing for its graph, and its weights as `dtype`."""
    reader = GGUFReader(file)
    graph = reader.fields["general.architecture"].contents()
    keys = {name.format(graph=graph): value for name, value in keys.items()}
    for name in keys.keys() | {"heddle.sha256"}:
        reader.fields.pop(name, None)
    writer = writer_with_keys(reader, target)
    for name, value in keys.items():
        if value is not None:
            writer.add_key_value(name, *value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data).astype(dtype))
    finish(writer)
    return target


YARN: Change = {
    "{graph}.rope.scaling.type": ("yarn", STRING),
    "{graph}.rope.scaling.factor": (4.0, FLOAT),
    "{graph}.rope.scaling.original_context_length": (16, UINT),
}
AS_LLAMA_CPP: dict[str, Change] = {
    "a factor without a type": {"{graph}.rope.scaling.factor": (4.0, FLOAT)},
    "the older name of the factor": {"{graph}.rope.scale_linear": (4.0, FLOAT)},
    "a factor of type none": {
        "{graph}.rope.scaling.factor": (4.0, FLOAT),
        "{graph}.rope.scaling.type": ("none", STRING),
    },
    "a factor of 0": {"{graph}.rope.scaling.factor": (0.0, FLOAT), "{graph}.rope.scaling.type": ("linear", STRING)},
    "a multiplier that the graph does not read": YARN | {"{graph}.rope.scaling.yarn_log_multiplier": (0.3, FLOAT)},
    "the same number for each layer": {"{graph}.attention.head_count_kv": ([2, 2, 2], *INTS)},
}

PATTERN, WINDOW = "{graph}.attention.sliding_window_pattern", "{graph}.attention.sliding_window"
OF_FAMILIES: dict[str, tuple[str, Change]] = {
    "a window in every other layer": ("gemma3_text", {PATTERN: (2, UINT)}),
    "a window in every layer": ("gemma3_text", {PATTERN: (0, UINT)}),
    "windows by layer": ("cohere2", {PATTERN: ([True, True, False, True], *BOOLS)}),
    "windows by layer, as numbers, of the first layers": ("olmo3", {PATTERN: ([1, 0], *INTS)}),
    "no window": ("gemma3_text", {WINDOW: None}),
    "a window of 0": ("gemma3_text", {WINDOW: (0, UINT)}),
    "a base of windows that the graph does not read": ("olmo3", {"{graph}.rope.freq_base_swa": (33.0, FLOAT)}),
    "a window of another depth": ("exaone4", {WINDOW: (4, UINT)}),
    "another window of this depth": ("exaone4:windows-yarn", {WINDOW: (4, UINT), PATTERN: (2, UINT)}),
    "the usual window of this depth": ("exaone4:windows-yarn", {WINDOW: None}),
    "no base": ("olmo3", {"{graph}.rope.freq_base": None}),
    "no scaling in a graph whose family has one": ("gpt_oss", {"{graph}.rope.scaling.type": ("none", STRING)}),
    "no multiplier of logits": ("cohere", {"{graph}.logit_scale": None}),
    "a multiplier of logits of 0": ("cohere", {"{graph}.logit_scale": (0.0, FLOAT)}),
    "one group of experts": ("minimax_m2", {"{graph}.expert_group_count": (1, UINT)}),
    "none in spite of a factor": ("cohere2", AS_LLAMA_CPP["a factor of type none"]),
}


@pytest.mark.parametrize("name", [*AS_LLAMA_CPP, *OF_FAMILIES])
def test_keys_mean_what_llama_cpp_takes_them_for(name: str, plain: Path, tmp_path: Path) -> None:
    family, keys = OF_FAMILIES.get(name) or ("llama", AS_LLAMA_CPP[name])
    base = plain if family == "llama" else exported(family, tmp_path)
    file = changed(base, tmp_path / "changed.gguf", keys)
    answer = torch.tensor(run(file, [{"tokens": prompt(), "n": 0, "logits": True}])[0]["logits"])
    ours = our_logits(load_gguf(file).model, torch.tensor([prompt()]))[0]
    assert float((answer - ours).abs().max()) <= (CLOSE_WITH_GELU if family.startswith(APPROXIMATE) else CLOSE)


def test_a_scaling_that_is_not_read_is_caught(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant: Plant = result(_scaling, lambda scaling: {"rope_type": "default"})
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_keys_mean_what_llama_cpp_takes_them_for("a factor without a type", plain, tmp_path)


GROUPS: Change = {"{graph}.expert_group_count": (3, UINT), "{graph}.expert_group_used_count": (2, UINT)}
MERGES, TOKENS = "tokenizer.ggml.merges", "tokenizer.ggml.tokens"
REFUSED: dict[str, tuple[str, Change, str]] = {
    "a factor of cosines": ("llama", {"{graph}.rope.scaling.attn_factor": (0.5, FLOAT)}, "attn_factor"),
    "another ramp": ("llama", YARN | {"{graph}.rope.scaling.yarn_beta_fast": (4.0, FLOAT)}, "yarn_beta_fast"),
    "no causal mask": ("llama", {"{graph}.attention.causal": (False, BOOL)}, "attention.causal"),
    "a truth value as a count": ("llama", {"{graph}.block_count": (True, BOOL)}, "block_count"),
    "a base that is no number": ("llama", {"{graph}.rope.freq_base": (float("nan"), FLOAT)}, "finite"),
    "numbers as merges": ("llama", {MERGES: ([1, 2], *INTS)}, "tokenizer is damaged"),
    "merges of unknown tokens": ("llama", {MERGES: (["zz q"], *TEXTS)}, "tokenizer is damaged"),
    "merges without a space": ("llama", {MERGES: (["zz"], *TEXTS)}, "tokenizer is damaged"),
    "the RoPE of a window": ("cohere2", {"{graph}.rope.freq_base_swa": (33.0, FLOAT)}, "freq_base_swa"),
    "a factor of windows alone": ("gpt_oss", AS_LLAMA_CPP["a factor of type none"], "rope.scaling.factor"),
    "a base by another rule": ("hunyuan_v1_dense", {"{graph}.rope.scaling.alpha": (5.0, FLOAT)}, "alpha"),
    "another function of routers": ("glm4_moe", {"{graph}.expert_gating_func": (1, UINT)}, "expert_gating_func"),
    "an unknown function of routers": ("deepseek_v2", {"{graph}.expert_gating_func": (3, UINT)}, "expert_gating_func"),
    "gates that sum to 1": ("deepseek_v2", {"{graph}.expert_weights_norm": (True, BOOL)}, "expert_weights_norm"),
    "an epsilon of latents": ("deepseek_v2", {"{graph}.attention.layer_norm_rms_epsilon": (0.1, FLOAT)}, "epsilon"),
    "gates that do not sum to 1": ("afmoe", {"{graph}.expert_weights_norm": None}, "expert_weights_norm"),
    "windows that RoPE does not follow": ("afmoe", {PATTERN: (2, UINT)}, "sliding_window_pattern"),
    "YaRN of latents without a multiplier": ("deepseek_v2", YARN, "yarn_log_multiplier"),
    "a factor of latents": ("deepseek_v2", AS_LLAMA_CPP["a factor without a type"], "rope.scaling.factor"),
    "the older factor of latents": ("deepseek_v2", AS_LLAMA_CPP["the older name of the factor"], "scale_linear"),
    "an epsilon of delta rules": ("qwen3_next", {"{graph}.attention.layer_norm_rms_epsilon": (0.1, FLOAT)}, "epsilon"),
    "rotated dims of a window": ("gemma2", {"{graph}.rope.dimension_count_swa": (4, UINT)}, "dimension_count_swa"),
    "experts of no width": ("ernie4_5_moe", {"{graph}.expert_feed_forward_length": (0, UINT)}, "0"),
    "a window of 0, of which llama.cpp makes no numbers": ("exaone4:windows-yarn", {WINDOW: (0, UINT)}, "window"),
    "very many layers": ("qwen3_5_text", {"{graph}.block_count": (2**31, UINT)}, "layers"),
    "layers without a kind": ("lfm2", {"{graph}.attention.head_count_kv": ([2], *INTS)}, "layer_types"),
    "groups of experts where the family has none": ("minimax_m2", GROUPS, "expert_group_count"),
    "groups of experts by another score": ("deepseek_v2", GROUPS, "expert_group_count"),
    "no positions": ("granite", {"{graph}.rope.scaling.finetuned": (False, BOOL)}, "rope.scaling.finetuned"),
    "a window where the family has none": ("lfm2", {WINDOW: (4, UINT), PATTERN: ([1, 0, 1], *INTS)}, "sliding_window"),
    "axes of images": ("glm4", {"{graph}.rope.dimension_sections": ([1, 1, 0, 0], *INTS)}, "dimension_sections"),
    "inputs of images": ("granite", {"{graph}.deepstack_mapping": ([-1, 0, 1], *INTS)}, "deepstack_mapping"),
    "an epsilon that the family does not have": (
        "olmo",
        {"{graph}.attention.layer_norm_epsilon": (0.1, FLOAT)},
        "layer_norm_epsilon",
    ),
    "a layer too many": ("llama", {"{graph}.block_count": (2, UINT)}, "blk.2."),
    "no length": ("llama", {"{graph}.context_length": None}, "context_length"),
    "no epsilon": ("llama", {"{graph}.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
    "no epsilon of LayerNorms": ("phi", {"{graph}.attention.layer_norm_epsilon": None}, "layer_norm_epsilon"),
    "no scale of logits": ("granite", {"{graph}.logit_scale": None}, "logit_scale"),
    "no kind of residual": ("gpt_neox", {"{graph}.use_parallel_residual": None}, "use_parallel_residual"),
    "heads of no number": ("gemma2", {"{graph}.attention.head_count": (0, UINT)}, "num_attention_heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_mean_nothing_are_refused(name: str, tmp_path: Path) -> None:
    family, keys, said = REFUSED[name]
    file = changed(exported(family, tmp_path), tmp_path / "changed.gguf", keys)
    with pytest.raises(HeddleError, match=re.escape(said)):
        load_gguf(file)


def test_a_factor_beside_factors_of_frequencies_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_from_keys, "LLAMA3_LENGTH", 64)  # as this file's
    file = exported("llama:llama3-tied-biases", tmp_path)
    assert load_gguf(changed(file, tmp_path / "none.gguf", AS_LLAMA_CPP["a factor of type none"])).model is not None
    with pytest.raises(HeddleError, match=r"rope\.scaling\.factor"):
        load_gguf(changed(file, tmp_path / "both.gguf", AS_LLAMA_CPP["a factor without a type"]))


def test_weights_of_double_precision_are_read(plain: Path, tmp_path: Path) -> None:
    model = load_gguf(changed(plain, tmp_path / "wide.gguf", {}, np.float64)).model
    expected = load_gguf(plain).model
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name).double()), name


@pytest.mark.parametrize("dtype", [np.int32, np.int8])
def test_whole_numbers_are_not_said_to_be_quantized(dtype: type, plain: Path, tmp_path: Path) -> None:
    with pytest.raises(HeddleError, match=r"whole numbers \(I\d+\)"):
        load_gguf(changed(plain, tmp_path / "whole.gguf", {}, dtype))


def test_a_missing_tensor_is_named_with_its_file(plain: Path, tmp_path: Path) -> None:
    raw = plain.read_bytes()
    (tmp_path / "bad.gguf").write_bytes(raw.replace(b"blk.0.ffn_up", b"blk.0.ffn_xx"))
    with pytest.raises(HeddleError, match=r"bad\.gguf: tensor 'blk\.0\.ffn_xx\.weight'.*download it again"):
        load_gguf(tmp_path / "bad.gguf")
    (tmp_path / "none.gguf").write_bytes(raw.replace(b"token_embd", b"token_xxxx"))
    with pytest.raises(HeddleError, match=r"none\.gguf: tensor 'token_embd\.weight' is missing"):
        load_gguf(tmp_path / "none.gguf")


def test_an_empty_array_of_heads_is_no_traceback() -> None:
    keys = {"general.architecture": "lfm2", "lfm2.attention.head_count_kv": [], "lfm2.shortconv.l_cache": 3}
    keys |= {"lfm2.embedding_length": 8, "lfm2.attention.head_count": 2, "lfm2.block_count": 1}
    keys |= {"lfm2.feed_forward_length": 8, "lfm2.context_length": 8, "lfm2.attention.layer_norm_rms_epsilon": 0.1}
    config = config_from_keys.config_from_keys(config_from_keys.Keys(keys, "x.gguf"), {"token_embd.weight": (5, 8)})
    assert config["layer_types"] == []
