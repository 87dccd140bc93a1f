"""Designs with an encoder: equal to torch's transformer; decoding, saving, sizes, training; errors."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import heddle
from heddle.config import parse_config
from heddle.data.samples import Batch
from heddle.errors import ConfigError
from heddle.lab.compare.plan import load_entries
from heddle.laws import run, shrink
from heddle.laws.harness import model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.copies import compiled
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.parts.layout import Layout
from heddle.training.loop import train
from heddle.training.optimizer import build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients
from tests import small
from tests.cases import Data, attention, case, cross

WIDTH, DEPTH = 16, 2
MLP: Data = {"kind": "mlp", "hidden": 20, "activation": "relu", "bias": True}
PLAIN: Data = {"heads": 4, "bias": True, "position": None}
TRANSFORMER: Data = {
    "vocab_size": 31,
    "width": WIDTH,
    "norm": {"kind": "layer"},
    "encoder": {
        "vocab_size": 13,
        "width": WIDTH,
        "norm": {"kind": "layer"},
        "layers": [{"repeat": DEPTH, "mixer": attention(**PLAIN, causal=False), "feedforward": MLP}],
    },
    "layers": [
        {"repeat": DEPTH, "layers": [{"mixer": attention(**PLAIN)}, {"mixer": cross(4, bias=True), "feedforward": MLP}]}
    ],
}


def attention_weights(mixer: nn.Module, name: str) -> dict[str, Tensor]:
    """The tensors of torch's attention, from heddle's."""
    q, k, v, out = (getattr(mixer, name_of_projection) for name_of_projection in ("q", "k", "v", "out"))
    return {
        f"{name}.in_proj_weight": torch.cat([part.weight for part in (q, k, v)]),
        f"{name}.in_proj_bias": torch.cat([part.bias for part in (q, k, v)]),
        f"{name}.out_proj.weight": out.weight,
        f"{name}.out_proj.bias": out.bias,
    }


def weight_and_bias(module: Any, name: str) -> dict[str, Tensor]:
    """Weight and bias of a projection or norm."""
    return {f"{name}.weight": module.weight, f"{name}.bias": module.bias}


def torch_transformer(model: Decoder) -> nn.Transformer:
    """torch's pre-norm transformer with heddle's weights."""
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True, "dtype": torch.float64}
    final_norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 20, **options), DEPTH, final_norm, False)
    transformer = nn.Transformer(WIDTH, 4, DEPTH, DEPTH, 20, custom_encoder=encoder, **options).eval()
    assert model.encoder is not None
    tensors = weight_and_bias(model.encoder.final_norm.norm, "encoder.norm")
    tensors |= weight_and_bias(model.final_norm.norm, "decoder.norm")
    encoder_layers: list[Any] = list(model.encoder.layers)
    for index, layer in enumerate(encoder_layers):
        prefix = f"encoder.layers.{index}"
        tensors |= attention_weights(layer.mixer, f"{prefix}.self_attn")
        tensors |= feedforward(layer, prefix, "norm2")
        tensors |= weight_and_bias(layer.residual.norms.mixer, f"{prefix}.norm1")
    decoder_layers: list[Any] = list(model.layers)
    for index in range(DEPTH):
        self_layer, cross_layer = decoder_layers[2 * index], decoder_layers[2 * index + 1]
        prefix = f"decoder.layers.{index}"
        tensors |= attention_weights(self_layer.mixer, f"{prefix}.self_attn")
        tensors |= attention_weights(cross_layer.mixer, f"{prefix}.multihead_attn")
        tensors |= feedforward(cross_layer, prefix, "norm3")
        tensors |= weight_and_bias(self_layer.residual.norms.mixer, f"{prefix}.norm1")
        tensors |= weight_and_bias(cross_layer.residual.norms.mixer, f"{prefix}.norm2")
    transformer.load_state_dict(tensors)
    return transformer


def feedforward(layer: Any, prefix: str, norm: str) -> dict[str, Tensor]:
    return (
        weight_and_bias(layer.feedforward.up, f"{prefix}.linear1")
        | weight_and_bias(layer.feedforward.down, f"{prefix}.linear2")
        | weight_and_bias(layer.residual.norms.feedforward, f"{prefix}.{norm}")
    )


LENGTHS = [5, 2, 4]


def source_of(model: Decoder, side: str = "right") -> tuple[Tensor, Layout]:
    assert model.encoder is not None
    layout = Layout.padded(LENGTHS, side=side)
    return random_tokens(model.encoder.config, 3, 5), layout


def test_output_equals_that_of_torchs_transformer() -> None:
    model = model_under_test(load_config(TRANSFORMER))
    assert model.encoder is not None
    source, layout = source_of(model)
    tokens, padding = random_tokens(model.config, 3, 7), layout.positions < 0
    with torch.no_grad():
        encoder_output = model.encode(source, layout)
        actual, _ = model(tokens, Layout.causal(3, 7).with_encoder_output(encoder_output))
        expected = torch_transformer(model)(
            torch.nn.functional.embedding(source, model.encoder.embed.weight),
            torch.nn.functional.embedding(tokens, model.embed.weight),
            tgt_mask=torch.ones(7, 7, dtype=torch.bool).triu(1),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_decoding_equals_one_call_and_runs_the_encoder_once(side: str) -> None:
    model = model_under_test(case("encoder"))
    assert model.encoder is not None
    source, layout = source_of(model, side)
    tokens, calls = random_tokens(model.config, 3, 6), []
    model.encoder.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        encoder_output = model.encode(source, layout)
        whole, _ = model(tokens, Layout.causal(3, 6).with_encoder_output(encoder_output))
        state, steps = model.init_state(3, 6, encoder_output), []
        for position in range(6):
            hidden, state = model(tokens[:, position : position + 1], None, state)
            steps.append(hidden)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-10)
    assert len(calls) == 1


def test_generation_reads_the_encoder_output_of_each_row() -> None:
    model = model_under_test(case("encoder"))
    source, layout = source_of(model)
    with torch.no_grad():
        batched = heddle.generate(
            model, [[1], [2, 3], [4]], encoder_output=model.encode(source, layout), max_new_tokens=6
        )
        for row, prompt in enumerate([[1], [2, 3], [4]]):
            encoder_output = model.encode(source[row : row + 1, : LENGTHS[row]])
            assert heddle.generate(model, [prompt], encoder_output=encoder_output, max_new_tokens=6) == [batched[row]]
    with pytest.raises(ConfigError, match="encoder_output:"):
        heddle.generate(model, [[1]], max_new_tokens=1)


def outputs_of(*models: Decoder) -> list[Tensor]:
    source, layout = source_of(models[0])
    tokens = random_tokens(models[0].config, 3, 4)
    return [each(tokens, Layout.causal(3, 4).with_encoder_output(each.encode(source, layout)))[0] for each in models]


def test_save_and_load(tmp_path: Path) -> None:
    model = heddle.build(case("encoder"), seed=3).eval()
    heddle.save(model, tmp_path / "saved")
    loaded, _ = heddle.load(tmp_path / "saved")
    assert loaded.config == model.config
    assert loaded.encoder is not None
    assert loaded.encoder.head.weight is loaded.encoder.embed.weight
    outputs = outputs_of(model, loaded)
    assert torch.equal(*outputs)
    names = [name for name, _ in model.named_parameters()]
    assert {"encoder.embed.weight", "encoder.layers.1.mixer.q.weight", "layers.1.mixer.k.weight"} <= set(names)


def test_each_stack_is_initialized_by_its_own_depth_and_std() -> None:
    config = load_config(TRANSFORMER, ["encoder.initialization.std=0.5", "width=64", "encoder.width=64"])
    weights = dict(heddle.build(config).named_parameters())
    std = {
        name: float(weights[f"{name}.weight"].detach().std())
        for name in ("encoder.layers.0.mixer.out", "layers.0.mixer.out")
    }
    assert std["encoder.layers.0.mixer.out"] == pytest.approx(0.5 * (2 * DEPTH) ** -0.5, rel=0.1)
    assert std["layers.0.mixer.out"] == pytest.approx(0.02 * (2 * 2 * DEPTH) ** -0.5, rel=0.1)


def test_size_counts_the_encoder_and_its_output() -> None:
    config = load_config(TRANSFORMER)
    full, short = (
        heddle.size(config, context_length=8, batch=2),
        heddle.size(config, context_length=8, batch=2, encoder_length=3),
    )
    assert (full.encoder_length, short.encoder_length, full.parameters) == (8, 3, short.parameters)
    assert full.embedding_parameters == (31 + 13) * WIDTH
    assert [layer.count for layer in full.encoder] == [DEPTH]
    assert full.state_bytes - short.state_bytes == DEPTH * 2 * 5 * 2 * WIDTH * 4
    assert full.state_bytes_per_token == DEPTH * 2 * WIDTH * 4
    mlp, linear = 2 * 20 * WIDTH, WIDTH * WIDTH
    encoder_flops = 3 * (4 * linear + mlp) + 3 * 3 * 2 * WIDTH
    cross_layers = 2 * 3 * linear + 8 * (2 * linear + mlp) + 8 * 3 * 2 * WIDTH
    self_layers = 8 * 4 * linear + (8 * 9 // 2) * 2 * WIDTH
    assert short.flops_per_token == 2 * (DEPTH * (encoder_flops + cross_layers + self_layers) + 8 * 31 * WIDTH) / 8


def batch_of(model: Decoder) -> Batch:
    tokens = random_tokens(model.config, 4, 8).numpy()
    source = np.array([[1, 2, 3], [4, -1, -1], [5, 6, -1], [-1, 7, 8]])
    return Batch(tokens, ((7,),) * 4, np.array([5, 2, 9, 4]), source)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_micro_batches_give_the_gradients_of_the_batch(micro_batches: int) -> None:
    """Dropout included: that of the encoder is keyed by sample, too."""
    model = model_under_test(case("encoder")).train()
    results = []
    for count in (1, micro_batches):
        loss = accumulate_gradients(model, batch_of(model), (1, 2), count).loss
        results.append((loss, {name: value.grad for name, value in model.named_parameters()}))
        model.zero_grad(set_to_none=True)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-10)
    assert all(grad is not None and bool((grad != 0).any()) for grad in results[0][1].values())


def test_training_with_checkpointing_and_bfloat16_learns() -> None:
    model = heddle.build(case("encoder")).train()
    model.checkpointing = True
    optimizer, batch = build_optimizer(model, 0.1), batch_of(model)
    losses = [float(accumulate_gradients(model, batch, (0, 0), 1, torch.bfloat16).loss)]
    for step in range(8):
        assert not apply_gradients(
            model, optimizer, accumulate_gradients(model, batch, (0, step), 2, torch.bfloat16), 1e-2, 1.0
        ).skipped
    losses.append(float(accumulate_gradients(model, batch, (0, 0), 1, torch.bfloat16).loss))
    assert losses[1] < losses[0]


# The compiler reads the .grad of tensors that are not leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_compiled_model_shares_the_encoder() -> None:
    config = load_config(TRANSFORMER, ["encoder.layers.0.repeat=1", "layers.0.repeat=1"])
    model = heddle.build(config).eval()
    compiled_model = compiled(model, backend="eager")
    outputs = outputs_of(model, compiled_model)
    torch.testing.assert_close(outputs[1], outputs[0])
    assert {id(value) for value in compiled_model.parameters()} == {id(value) for value in model.parameters()}


def test_the_shrunk_design_satisfies_the_laws() -> None:
    large = ["width=512", "encoder.width=512", "layers.0.layers.1.mixer.kv_heads=2", "encoder.layers.0.repeat=9"]
    small = shrink(load_config(TRANSFORMER, large))
    assert small.encoder is not None
    assert (small.width, small.encoder.width, small.encoder.depth) == (16, 16, 2)
    results = run(
        small,
        [
            "chunked_decoding",
            "cross_attention",
            "size_matches_model",
            "config_round_trip",
            "activation_checkpointing",
            "state_dict_completeness",
        ],
    )
    assert [result for result in results if not result.passed] == []


def test_an_encoder_inherits_defaults_and_vocab_size() -> None:
    short = {"width": 8, "layers": [{"mixer": {"kind": "attention", "heads": 2, "causal": False}}]}
    data = {
        "vocab_size": 9,
        "width": 8,
        "encoder": short,
        "layers": [{"mixer": {"kind": "cross_attention", "heads": 2}}],
    }
    config = load_config(data, ["encoder.norm.eps=1e-3"])
    assert config.encoder is not None
    assert config.encoder.norm.dump() == {"kind": "rms", "eps": 1e-3, "offset": 0.0, "cast": "before"}
    model = heddle.build(config)
    assert model.encoder is not None
    assert model.encoder.embed.weight.shape == (9, 8)
    assert load_config(config.dump()) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("encoder.width=8", "encoder.width: 8"),
        ("layers.0.layers.1.mixer.kind=attention",
         "encoder:"),
        ("encoder.layers.0.mixer={kind: cross_attention, heads: 2}",
         "encoder.layers:"),
        ("encoder.head.tied=false", "encoder.head.tied:"),
        ("encoder.layers.0.mixer.heads=3",
         "encoder.layers[0].mixer.heads: 3"),
        ("encoder=3", "encoder:"),
    ],
)  # fmt: skip
def test_wrong_designs_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        load_config(TRANSFORMER, [override])


def test_an_encoder_within_an_encoder_is_refused() -> None:
    inner = load_config(TRANSFORMER["encoder"]).dump()
    inner = inner | {"encoder": inner}
    with pytest.raises(ConfigError, match=r"^encoder\.encoder:"):
        load_config(TRANSFORMER | {"encoder": inner})


def test_encode_without_an_encoder_is_refused() -> None:
    model = heddle.build(parse_config(ModelConfig, load_config(TRANSFORMER, ["encoder=null"]).dump()))
    assert model.encoder_width == WIDTH
    with pytest.raises(ConfigError, match=r"^encoder:"):
        model.encode(torch.zeros(1, 3, dtype=torch.int64))


def test_training_and_comparing_on_plain_text_are_refused(tmp_path: Path) -> None:
    sentence = r"^encoder_width:"
    with pytest.raises(ConfigError, match=sentence):
        train(small.job(small.corpus(tmp_path / "text"), tmp_path / "run", TRANSFORMER | {"vocab_size": 300}))
    design = small.design_file(tmp_path / "both.yaml", json.loads(json.dumps(TRANSFORMER)))
    with pytest.raises(ConfigError, match="encoder's output"):
        load_entries([str(design)], [])
