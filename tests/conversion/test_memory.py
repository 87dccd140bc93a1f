"""Conversion holds few layers at once: the largest sum of live storages, of models that are much larger."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.conversion import weights as conversion_weights
from heddle.conversion.convert import Conversion, convert, open_source
from heddle.conversion.rewrite import Rewrite
from heddle.conversion.rewrites.fold_norms import FoldNorms
from heddle.conversion.rewrites.rope_layout import RopeLayout
from heddle.conversion.rewrites.tied import Tied
from heddle.conversion.weights import ConvertedWeights, parameter_specs
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from heddle.storage.folder import write_folder
from heddle.storage.model import CONFIG_FILE, WEIGHTS_FILE
from heddle.storage.tensor_file import LazyTensors, write_tensor_file
from tests.conversion.memory import LiveStorages

MEGABYTE, GIGABYTE = 10**6, 10**9
VOCABULARY = 4096


class RandomTensors(LazyTensors):
    """Random weights, each made when it is written."""

    def __init__(self, forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self._forms = dict(forms)

    @property
    def specs(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """As given."""
        return self._forms

    def __getitem__(self, name: str) -> Tensor:
        """One row of random numbers, repeated."""
        dtype, shape = self._forms[name]
        return torch.randn(shape[-1]).mul_(0.02).to(dtype).expand(shape)

    def __iter__(self) -> Iterator[str]:
        """Their names."""
        return iter(self._forms)

    def __len__(self) -> int:
        """Their number."""
        return len(self._forms)


def llama(total: int, depth: int, vocabulary: int = VOCABULARY) -> ModelConfig:
    """A Llama-shaped design with about so many bytes of bfloat16 weights, most of them in its layers."""
    width = max(64, int(math.sqrt(total / 2 / depth / 12)) // 64 * 64)
    mixer = {"kind": "attention", "heads": width // 32, "position": {"kind": "rope", "layout": "half"}}
    layer = {"repeat": depth, "mixer": mixer, "feedforward": {"kind": "gated", "hidden": 8 * width // 3}}
    return load_config({"vocab_size": vocabulary, "width": width, "layers": [layer], "head": {"tied": False}})


def heddle_folder(config: ModelConfig, folder: Path) -> Path:
    """A model folder of heddle."""
    tensors = RandomTensors(parameter_specs(config, torch.bfloat16))
    documents = {CONFIG_FILE: json.dumps(config.dump())}
    write_folder(folder, tensors={WEIGHTS_FILE: tensors}, documents=documents, kind="model")
    return folder


def transformers_folder(config: ModelConfig, folder: Path) -> Path:
    """A folder of transformers of the same shape, in one file for each layer, as large models are."""
    folder.mkdir()
    mixer, feedforward = config.layers[0].dump()["mixer"], config.layers[0].dump()["feedforward"]
    names = {
        "mixer.q": "self_attn.q_proj", "mixer.k": "self_attn.k_proj", "mixer.v": "self_attn.v_proj",
        "mixer.out": "self_attn.o_proj", "feedforward.gate": "mlp.gate_proj", "feedforward.up": "mlp.up_proj",
        "feedforward.down": "mlp.down_proj", "residual.norms.mixer": "input_layernorm",
        "residual.norms.feedforward": "post_attention_layernorm", "embed": "model.embed_tokens",
        "final_norm.norm": "model.norm", "head": "lm_head",
    }  # fmt: skip
    forms: dict[str, dict[str, Any]] = {}
    for name, form in parameter_specs(config, torch.bfloat16).items():
        prefix, _, rest = name.partition("layers.")
        number, _, relative = rest.partition(".")
        own = names[(relative if rest else prefix).removesuffix(".weight")]
        full = f"model.layers.{number}.{own}.weight" if rest else f"{own}.weight"
        forms.setdefault(f"model-{number or 'ends'}.safetensors", {})[full] = form
    for file, its_forms in forms.items():
        write_tensor_file(folder / file, RandomTensors(its_forms))
    index = {"weight_map": {name: file for file, its_forms in forms.items() for name in its_forms}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    data = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": config.width,
        "num_hidden_layers": config.depth, "num_attention_heads": mixer["heads"], "vocab_size": config.vocab_size,
        "num_key_value_heads": mixer["heads"], "intermediate_size": feedforward["hidden"], "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": False, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def layer_bytes(config: ModelConfig) -> tuple[int, int]:
    """Bytes of the largest layer, and of all weights, in bfloat16."""
    forms = parameter_specs(config, torch.bfloat16)
    sizes = {name: 2 * math.prod(shape) for name, (_, shape) in forms.items()}
    layers = [sum(size for name, size in sizes.items() if name.startswith(f"layers.{n}.")) for n in range(config.depth)]
    return max(layers), sum(sizes.values())


def peak_of_conversion(folder: Path, out: Path, *rewrites: Rewrite) -> int:
    """The largest sum of storages while a folder is converted."""
    with LiveStorages() as live:
        convert(Conversion(open_source(folder), rewrites), out)
    return live.peak


SMALL = {"heddle": heddle_folder, "transformers": transformers_folder}


@pytest.mark.parametrize("kind", SMALL)
def test_few_layers_are_alive(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = llama(6 * MEGABYTE, depth=16, vocabulary=64)
    layer, total = layer_bytes(config)
    folder = SMALL[kind](config, tmp_path / "model")
    assert peak_of_conversion(folder, tmp_path / "out", FoldNorms()) <= 3 * layer < total / 4
    hoard: list[Tensor] = []
    original = ConvertedWeights.tensor

    def remembering(self: ConvertedWeights, name: str) -> Tensor:
        hoard.append(original(self, name))
        return hoard[-1]

    monkeypatch.setattr(conversion_weights.ConvertedWeights, "tensor", remembering)
    assert peak_of_conversion(folder, tmp_path / "again", FoldNorms()) > total


@pytest.mark.soak
@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("gigabytes", [1, 4])
def test_memory_of_large_models(kind: str, gigabytes: int, tmp_path: Path) -> None:
    config = llama(gigabytes * GIGABYTE, depth=24, vocabulary=32768)
    layer, total = layer_bytes(config)
    assert total > gigabytes * GIGABYTE
    folder = SMALL[kind](config, tmp_path / "model")
    for name, rewrite in (("fold_norms", FoldNorms()), ("rope_layout", RopeLayout(layout="interleaved"))):
        peak = peak_of_conversion(folder, tmp_path / name, rewrite)
        print(f"{kind} {total / GIGABYTE:.2f} GB, {name}: {peak / MEGABYTE:.0f} MB; a layer: {layer / MEGABYTE:.0f} MB")
        assert peak <= GIGABYTE // 2 + 3 * layer


def test_tied_heads_are_read_twice(tmp_path: Path) -> None:
    config = llama(2 * MEGABYTE, depth=2, vocabulary=64)
    tied = config.replace(head=config.head.replace(tied=True))
    folder = heddle_folder(tied, tmp_path / "model")
    weights = convert(Conversion(open_source(folder), (Tied(tied=False),)), tmp_path / "out")
    assert torch.equal(weights.tensor("head.weight"), weights.tensor("embed.weight"))
    assert weights.tensor("head.weight").data_ptr() != weights.tensor("embed.weight").data_ptr()


def test_the_sum_of_storages_is_counted() -> None:
    with LiveStorages() as live:
        first = torch.zeros(1000)
        view = first[:10]
        del first
        assert live.peak == 4000
        second = torch.ones(500)
        assert live.peak == 6000
        del view, second
        torch.zeros(1200)
        assert live.peak == 6000
