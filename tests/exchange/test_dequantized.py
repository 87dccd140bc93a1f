"""Quantized weights, packed here one number at a time as their writers' formats say, are read as their numbers."""

import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.dequantized_folder import (
    _in_order,
    _parse_description,
    unpack_bitsandbytes,
    unpack_fp8,
    unpack_gptq,
    unpack_mxfp4,
)
from heddle.exchange.load import load
from tests.exchange.hf_models import config_of as config
from tests.exchange.hf_models import drawn, read_json, write
from tests.laws.planting import calls, condition, result

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Packed = tuple[dict[str, Tensor], Tensor]  # the stored tensors by suffix, and the weight that they stand for
SHAPES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
SUFFIXES = ("q_proj.weight", "up_proj.weight", "down_proj.weight")


def random(*shape: int, high: int, seed: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def put(words: Tensor, place: tuple[int, int], shift: int, value: int) -> None:
    """Set some bits of a word of 32."""
    word = (int(words[place]) & 0xFFFFFFFF) | value << shift
    words[place] = word - 2**32 if word >= 2**31 else word


def pack_gptq(outputs: int, inputs: int, seed: int, *, shuffled: bool = False, bits: int = 4, plus: int = 1) -> Packed:
    """Groups of 16 inputs, in order or, as with activation order, in any."""
    groups, number = inputs // 16, 32 // bits
    order = torch.arange(inputs) // 16
    order = order[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))] if shuffled else order
    integers, zeros = random(inputs, outputs, high=2**bits, seed=seed), random(groups, outputs, high=2**bits, seed=1)
    scales = (random(groups, outputs, high=50, seed=2) + 1).half() / 64
    weight = torch.zeros(outputs, inputs)
    words = torch.zeros(inputs // number, outputs, dtype=torch.int32)
    zero_words = torch.zeros(groups, outputs // number, dtype=torch.int32)
    for i, o in itertools.product(range(inputs), range(outputs)):
        put(words, (i // number, o), bits * (i % number), int(integers[i, o]))
        group = int(order[i])
        weight[o, i] = (int(integers[i, o]) - int(zeros[group, o])) * float(scales[group, o])
    for g, o in itertools.product(range(groups), range(outputs)):
        put(zero_words, (g, o // number), bits * (o % number), (int(zeros[g, o]) - plus) % 2**bits)
    tensors = {".qweight": words, ".qzeros": zero_words, ".scales": scales, ".g_idx": order.int()}
    return tensors, weight


def pack_awq(outputs: int, inputs: int, seed: int) -> Packed:
    """Eight outputs in a word, in the order 0 2 4 6 1 3 5 7."""
    groups = inputs // 16
    integers, zeros = random(inputs, outputs, high=16, seed=seed), random(groups, outputs, high=16, seed=1)
    scales = (random(groups, outputs, high=50, seed=2) + 1).half() / 64
    tensors = {".scales": scales}
    for name, numbers in ((".qweight", integers), (".qzeros", zeros)):
        tensors[name] = torch.zeros(len(numbers), outputs // 8, dtype=torch.int32)
        for row, word, place in itertools.product(range(len(numbers)), range(outputs // 8), range(8)):
            number = int(numbers[row, 8 * word + (0, 2, 4, 6, 1, 3, 5, 7)[place]])
            put(tensors[name], (row, word), 4 * place, number)
    weight = torch.zeros(outputs, inputs)
    for o, i in itertools.product(range(outputs), range(inputs)):
        weight[o, i] = (int(integers[i, o]) - int(zeros[i // 16, o])) * float(scales[i // 16, o])
    return tensors, weight


def pack_fp8(outputs: int, inputs: int, seed: int) -> Packed:
    """Blocks of 24 × 24, the last of which are cut."""
    stored = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-outputs // 24), -(-inputs // 24), generator=torch.Generator().manual_seed(3)) + 0.5
    weight = torch.zeros(outputs, inputs)
    for o, i in itertools.product(range(outputs), range(inputs)):
        weight[o, i] = stored[o, i].float() * scales[o // 24, i // 24]
    return {".weight": stored, ".weight_scale_inv": scales}, weight


def table(entries: int, seed: int) -> Tensor:
    """A table of numbers between −1 and 1, in rising order as those of bitsandbytes."""
    return torch.sort(torch.rand(entries, generator=torch.Generator().manual_seed(seed)) * 2 - 1).values


def pack_4bit(outputs: int, inputs: int, seed: int, *, kind: str = "nf4", double: bool = False) -> Packed:
    """Blocks of 24 numbers of the flat weight, the last of which is cut, and of 8 factors, if they are packed too."""
    count = outputs * inputs
    entries, codes = random(count, high=16, seed=seed), table(16, 1)
    factors = [0.5 + float(number) / 64 for number in random(-(-count // 24), high=64, seed=2)]
    description: dict[str, Any] = {"quant_type": kind, "blocksize": 24, "dtype": "bfloat16", "shape": [outputs, inputs]}
    tensors = {".weight.quant_map": codes, ".weight.absmax": torch.tensor(factors)}
    if double:
        numbers, nested_codes = random(len(factors), high=256, seed=3), table(256, 4)
        nested = torch.rand(-(-len(factors) // 8), generator=torch.Generator().manual_seed(5)) + 0.5
        factors = [float(nested_codes[int(n)] * nested[i // 8] + 0.75) for i, n in enumerate(numbers)]
        tensors[".weight.absmax"] = numbers.to(torch.uint8)
        tensors |= {".weight.nested_absmax": nested, ".weight.nested_quant_map": nested_codes}
        description |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 0.75}
    packed = torch.zeros(count // 2, 1, dtype=torch.uint8)
    weight = torch.zeros(count)
    for i in range(count):
        packed[i // 2] |= int(entries[i]) << (0 if i % 2 else 4)
        weight[i] = float(codes[int(entries[i])]) * factors[i // 24]
    text = json.dumps(description).encode()
    tensors[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors | {".weight": packed}, weight.view(outputs, inputs)


FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
METHODS: dict[str, tuple[Callable[[int, int, int], Packed], dict[str, Any]]] = {
    "fp8": (pack_fp8, {"quant_method": "fp8", "weight_block_size": [24, 24]}),
    "gptq": (pack_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16}),
    "gptq-shuffled": (
        lambda o, i, seed: pack_gptq(o, i, seed, shuffled=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
    ),
    "gptq-v2-8-bits": (
        lambda o, i, seed: pack_gptq(o, i, seed, bits=8, plus=0),
        {"quant_method": "gptq", "bits": 8, "group_size": 16, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (pack_awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}),
    "nf4": (pack_4bit, FOUR_BITS),
    "nf4-double": (
        lambda o, i, seed: pack_4bit(o, i, seed, double=True),
        FOUR_BITS | {"bnb_4bit_use_double_quant": True},
    ),
    "fp4": (lambda o, i, seed: pack_4bit(o, i, seed, kind="fp4"), FOUR_BITS | {"bnb_4bit_quant_type": "fp4"}),
}


def folders(method: str, change: Callable[[dict[str, Tensor]], None] = lambda tensors: None) -> tuple[Path, Path]:
    """A folder with packed weights, after a change of them, and one with the numbers that they stand for."""
    model = drawn(config("llama", "plain", **SHAPES))
    packed_folder, plain_folder = write(model, "100KB"), write(model, "100KB")
    pack, fields = METHODS[method]
    seeds: Iterator[int] = itertools.count()
    weights: dict[str, Tensor] = {}
    index: dict[str, str] = {}
    for file in sorted(packed_folder.glob("*.safetensors")):
        tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            if not name.endswith(SUFFIXES):
                tensors[name] = tensor
                continue
            outputs, inputs = tensor.shape
            stored, weights[name] = pack(outputs, inputs, next(seeds))
            tensors |= {name.removesuffix(".weight") + suffix: part for suffix, part in stored.items()}
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file.name)
    (packed_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    data = read_json(packed_folder) | {"quantization_config": fields}
    (packed_folder / "config.json").write_text(json.dumps(data))
    for file in sorted(plain_folder.glob("*.safetensors")):
        tensors = {name: weights.get(name, tensor) for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return packed_folder, plain_folder


@pytest.mark.parametrize("method", METHODS)
def test_dequantized_weights_are_their_numbers(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    packed, plain = folders(method)
    ours, want = load(packed, dequantize=torch.float32).model, load(plain).model
    assert ours.config == want.config
    for name, parameter in want.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    name = METHODS[method][1]["quant_method"]
    assert "dequantized: 6 weights" in capsys.readouterr().err
    narrow = load(packed, dequantize=torch.bfloat16).model
    assert torch.equal(
        narrow.get_parameter("layers.0.mixer.q.weight"), want.get_parameter("layers.0.mixer.q.weight").bfloat16()
    )
    assert narrow.embed.weight.dtype == torch.float32


BUGS = {
    "fp8": calls(
        unpack_fp8, "repeat_interleave", lambda scales, rows, dim: scales.repeat_interleave(rows - 1, dim), nth=0
    ),
    "gptq": condition(unpack_gptq, "fields", False),
    "gptq-shuffled": calls(
        unpack_gptq, "get", lambda table, name, *default: None if name == ".g_idx" else table.get(name, *default),
        every=True,
    ),
    "awq": calls(_in_order, "list", lambda *_: [0, 2, 4, 6, 1, 3, 5, 7]),
    "nf4": calls(unpack_bitsandbytes, "stack", lambda torch, halves, dim: torch.stack(halves[::-1], dim=dim)),
    "nf4-double": result(_parse_description, lambda description: description | {"nested_offset": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize("method", BUGS)
def test_a_planted_bug_is_caught(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[method](monkeypatch)
    packed, plain = folders(method)
    ours, want = load(packed, dequantize=torch.float32).model, load(plain).model
    assert not torch.equal(ours.get_parameter("layers.0.mixer.q.weight"), want.get_parameter("layers.0.mixer.q.weight"))


def test_blocks_of_fp8_and_mxfp4_are_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(3, 32, 48, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 4, 3, generator=generator)
    want = torch.stack(
        [Fp8Dequantize(None)._dequantize_one(*pair, torch.float32) for pair in zip(stored, scales, strict=True)]
    )
    assert torch.equal(unpack_fp8({"": stored, "_scale_inv": scales}, {"weight_block_size": [8, 16]}), want)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(100, 140, (3, 10, 2), dtype=torch.uint8, generator=generator)
    want = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    assert torch.equal(unpack_mxfp4({"_blocks": blocks, "_scales": exponents}, {}), want)


def test_gpt_oss_in_mxfp4_is_read(tmp_path: Path) -> None:
    """The experts' blocks as OpenAI publishes them."""
    model = drawn(config("gpt_oss", "yarn", hidden_size=32, intermediate_size=32, head_dim=8))
    folder = write(model, "10MB")
    tensors = load_file(folder / "model.safetensors")
    want = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = random(experts, outputs, inputs // 32, 16, high=256, seed=4).to(torch.uint8)
        tensors[f"{name}_scales"] = (random(experts, outputs, inputs // 32, high=9, seed=5) + 120).to(torch.uint8)
        want[name] = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    data = read_json(folder) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(data))
    ours = load(folder, dequantize=torch.bfloat16).model
    gate_up = want["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(ours.get_parameter("layers.0.feedforward.gate.weight"), gate_up[..., ::2].mT)
    assert torch.equal(ours.get_parameter("layers.0.feedforward.up.weight"), gate_up[..., 1::2].mT)
    assert torch.equal(
        ours.get_parameter("layers.1.feedforward.down.weight"), want["model.layers.1.mlp.experts.down_proj"].mT
    )


def drop_a_scale(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("layers.0.self_attn.q_proj.scales")]:
        del tensors[name]


def cut_a_scale(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("layers.0.self_attn.q_proj.scales")]:
        tensors[name] = tensors[name][:, :5].contiguous()


def lengthen_blocks(tensors: dict[str, Tensor]) -> None:
    change_description(tensors, b'"blocksize": 24', b'"blocksize": 99')


def forget_the_shape(tensors: dict[str, Tensor]) -> None:
    change_description(tensors, b'"shape"', b'"space"')


def shrink_the_offset(tensors: dict[str, Tensor]) -> None:
    change_description(tensors, b'"nested_offset": 0.75', b'"nested_offset": null')


def change_description(tensors: dict[str, Tensor], old: bytes, new: bytes) -> None:
    for name in [name for name in tensors if "bitsandbytes" in name]:
        text = bytes(tensors[name].tolist())
        assert old in text
        tensors[name] = torch.tensor(list(text.replace(old, new)), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("nf4", lengthen_blocks, r"'.*_proj.weight'"),
        ("nf4", forget_the_shape, r"'.*_proj.weight'"),
        ("nf4-double", shrink_the_offset, r"'.*_proj.weight'"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(method: str, change: Any, message: str) -> None:
    packed, _ = folders(method, change)
    with pytest.raises(CheckpointError, match=message):
        load(packed, dequantize=torch.float32)


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (drop_a_scale, {}, r"'model.layers.0.self_attn.q_proj.scales'.*'.*q_proj.qweight'"),
        (cut_a_scale, {}, r"'.*q_proj.weight'"),
        (lambda tensors: None, {"bits": 8}, r"bits is 8, awq has 4"),
        (lambda tensors: None, {"quant_method": "hqq"}, r"quant_method 'hqq'.*fp8"),
        (lambda tensors: None, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "nf4, fp4"),
    ],
)
def test_what_cannot_be_unpacked_is_refused(change: Any, fields: dict[str, Any], message: str) -> None:
    packed, _ = folders("awq", change)
    data = read_json(packed)
    data["quantization_config"] |= fields
    (packed / "config.json").write_text(json.dumps(data))
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load(packed, dequantize=torch.float32)


def test_it_is_an_option_and_only_for_quantized_weights() -> None:
    packed, plain = folders("awq")
    with pytest.raises(ConfigError, match=r"\('awq'\)"):
        load(packed)
    with pytest.raises(ConfigError, match="'quantization_config'"):
        load(plain, dequantize=torch.float32)
