"""Weights of 8 and 4 bits: near the weight, and products with them equal those with the weight they stand for."""

import pytest
import torch

from heddle.errors import ConfigError
from heddle.model.copies import QuantizedLinear, quantize_weights
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.numerics import quantized as quantized_module
from heddle.numerics.kernels import kernels
from heddle.numerics.quantized import QUANTIZED_LINEAR, QuantizedFacts, dequantize, quantize, quantized_linear
from heddle.parts.modules.linear import Linear

GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(48, 64, generator=GENERATOR)


def largest_errors(weight: torch.Tensor, bits: int) -> torch.Tensor:
    difference = (dequantize(quantize(weight, bits), torch.float32) - weight).abs()
    return difference.amax(-1) if bits == 8 else difference.unflatten(1, (-1, 32)).amax(-1)


def test_each_weight_moves_by_half_a_step_at_most_with_8_bits() -> None:
    weight = torch.cat([WEIGHT, torch.zeros(16, 64), torch.full((16, 64), 3.0)])
    width = 2 * weight.abs().amax(-1)
    # bfloat16 rounds a scale by 1/256 of itself at most, which moves the ends of the range.
    assert (largest_errors(weight, 8) <= width / 254 / 2 + width / 200 + 1e-7).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_equal_weights_stay(bits: int) -> None:
    weight = torch.cat([torch.zeros(16, 64), torch.full((16, 64), 3.0), torch.full((16, 64), -0.25)])
    assert largest_errors(weight, bits).max() < 1e-6 if bits == 4 else largest_errors(weight, bits).max() < 0.01


def test_4_bits_have_less_squared_error_than_the_whole_range(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) ** 3  # with large ones among small ones

    def squared_error() -> torch.Tensor:
        return (dequantize(quantize(weight, 4), torch.float32) - weight).square().unflatten(1, (-1, 32)).sum(-1)

    searched = squared_error()
    groups = weight.unflatten(1, (-1, 32))
    low, step = groups.amin(-1), (groups.amax(-1) - groups.amin(-1)) / 15
    codes = ((groups - low[..., None]) / step[..., None]).round()
    plain = (codes * step[..., None] + low[..., None] - groups).square().sum(-1)
    assert searched.sum() < 0.9 * plain.sum()
    assert (searched <= 1.02 * plain + 1e-6).all()  # bfloat16 rounds the scales, which the plain loop does not
    monkeypatch.setattr(quantized_module, "_least_squares", lambda groups, codes: (step * 2, low))  # planted: no fit
    monkeypatch.setattr(quantized_module, "_SHRINKS", (1.0,))
    assert squared_error().sum() > searched.sum()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_dequantized_weight(bits: int, dtype: torch.dtype) -> None:
    matrix = quantize(WEIGHT, bits)
    x = torch.randn(2, 3, 64, generator=GENERATOR).to(dtype)
    bias = torch.randn(48, generator=GENERATOR).to(dtype)
    want = x.double() @ dequantize(matrix, torch.float64).T + bias.double()
    assert QUANTIZED_LINEAR.choose(QuantizedFacts(6, False, "cpu", dtype)).name == "packed"
    got = quantized_linear(x, matrix, bias)
    assert got.dtype == dtype
    assert ((got.double() - want).norm() / want.norm()) < 5e-3
    exact = quantized_linear(x.double(), matrix, bias.double())
    torch.testing.assert_close(exact, want, rtol=0, atol=1e-10)
    with kernels(quantized_linear="reference"):
        torch.testing.assert_close(
            quantized_linear(x.float(), matrix).double(), want - bias.double(), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("name", ["attention", "latent_attention", "gated_delta", "moe"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_model_computes_what_its_dequantized_weights_compute(name: str, bits: int) -> None:
    mixers = {
        "attention": {"kind": "attention", "heads": 4, "kv_heads": 2, "bias": True},
        "latent_attention": {"kind": "latent_attention", "heads": 2, "kv_rank": 32, "nope_dim": 32, "rope_dim": 16},
        "gated_delta": {"kind": "gated_delta", "heads": 2, "head_dim": 32},
        "moe": {"kind": "attention", "heads": 4},
    }
    feedforward = (
        {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 32} if name == "moe" else {"kind": "gated", "hidden": 96}
    )
    design = {"vocab_size": 48, "width": 64, "layers": [{"mixer": mixers[name], "feedforward": feedforward}]}
    model = build(load_config(design), dtype=torch.float64).eval()
    quantized = quantize_weights(model, bits)
    rounded = build(model.config, dtype=torch.float64).eval()
    with torch.no_grad():
        for path, module in quantized.model.named_modules():
            if isinstance(module, QuantizedLinear) and path != "head.projection":
                rounded.get_submodule(path).get_parameter("weight").copy_(module.weight)
        tokens = torch.arange(10)[None]
        got, want = quantized.model(tokens)[0], rounded(tokens)[0]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        head = dequantize(quantize(model.head.weight, 8), torch.float64)
        torch.testing.assert_close(quantized.model.head(got), got @ head.T, rtol=0, atol=1e-10)
        assert quantized.model.head.output_head.weight.equal(head)
    assert any(type(module) is Linear for module in model.modules()), "the model itself stays as it was"
    assert 0 < quantized.quantized <= quantized.weights


def test_what_cannot_be_quantized_is_refused() -> None:
    layer = {"mixer": {"kind": "attention", "heads": 2}, "feedforward": {"kind": "gated", "hidden": 20}}
    model = build(load_config({"vocab_size": 10, "width": 8, "layers": [layer]}))
    for bits in (8, 4):  # torch's kernel of 8 bits reads beyond rows of 8 numbers
        with pytest.raises(ConfigError, match=f"int{bits}"):
            quantize_weights(model, bits)
    with pytest.raises(ConfigError, match="weights: 3 bits"):
        quantize_weights(model, 3)
    with pytest.raises(ConfigError, match="float16"):
        quantize_weights(model.half(), 8)
    with pytest.raises(ConfigError, match=r"int8.*CPU"):
        quantize_weights(model.to("meta"), 8)
