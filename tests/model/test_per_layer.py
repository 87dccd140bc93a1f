"""Per-layer embeddings and scalars of layers: hidden states by hand, sizes, and what is refused."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import heddle
from heddle.config import parse_config
from heddle.conversion.rewrite import Rewrite
from heddle.conversion.targets import parse_rewrite
from heddle.errors import ConfigError
from heddle.laws.harness import model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import Layer
from heddle.model.embedding import PerLayerBranch, PerLayerEmbedding
from heddle.parts.feedforwards.mlp import MLPConfig
from tests.cases import Data, attention, by_day, design, layer
from tests.conversion.exactness import converted_model, source_model
from tests.laws.planting import Plant, replaced, wrapped
from tests.parts.loops import Errors, assert_none, errors, normalized

WIDTH, DIM, LENGTH = 24, 5, 9


def mlp_design(**fields: Any) -> Data:
    """Layers without attention, whose hidden states are short to compute by hand."""
    feedforward = {"kind": "mlp", "hidden": 20, "activation": "relu"}
    per_layer = {"dim": DIM, "activation": "silu"}
    residual = {"kind": "sandwich", "layer_scalar": True}
    entries = layer(None, feedforward, repeat=2), layer(None, feedforward | {"activation": "gelu"})
    return design(*entries, embedding={"per_layer": per_layer, "scale": True}, residual=residual, **fields)


def random_design(seed: int) -> Data:
    """Some layers without attention, of any widths, with and without a smaller table, a scale and scalars of layers."""
    draw = random.Random(seed)
    width, activations = draw.randint(4, 20), ("relu", "gelu")
    layers = [
        layer(None, {"kind": "mlp", "hidden": draw.randint(3, 20), "activation": draw.choice(activations)})
        for _ in range(draw.randint(1, 5))
    ]
    rows = {"vocab_size": draw.randint(20, 60)} if draw.random() < 0.5 else {}
    per_layer = {"dim": draw.randint(2, 8), "activation": draw.choice(("silu", "relu")), **rows}
    residual = {"kind": "sandwich", "layer_scalar": draw.random() < 0.5}
    embedding = {"per_layer": per_layer, "scale": draw.random() < 0.5}
    return design(*layers, width=width, embedding=embedding, residual=residual)


def by_hand(model: heddle.Decoder, tokens: Tensor) -> Tensor:
    """The hidden states of a row of tokens, one token and one layer at a time."""
    weights, config = dict(model.named_parameters()), model.config
    per_layer = config.embedding.per_layer
    assert per_layer is not None
    width, dim, table = config.width, per_layer.dim, weights["embed.per_layer.weight"]

    def normed(x: Tensor, name: str) -> Tensor:
        return normalized(x, weights[name])

    rows = []
    for token in tokens.tolist():
        x = weights["embed.weight"][token] * (width**0.5 if config.embedding.scale else 1.0)
        stream, row = x, token if token < len(table) else 0
        for index, (_, each) in enumerate(config.expand()):
            part, at = slice(index * dim, (index + 1) * dim), f"layers.{index}"
            projected = weights["embed.per_layer.projection.weight"][part] @ x
            of_text = normed(projected / width**0.5, "embed.per_layer.norm.weight")
            own = (of_text + dim**0.5 * table[row, part]) / 2**0.5
            hidden = weights[f"{at}.feedforward.up.weight"] @ normed(stream, f"{at}.residual.norms.feedforward.weight")
            assert isinstance(each.feedforward, MLPConfig)
            hidden = functional.gelu(hidden) if each.feedforward.activation == "gelu" else hidden.relu()
            y = weights[f"{at}.feedforward.down.weight"] @ hidden
            stream = stream + normed(y, f"{at}.residual.after.feedforward.weight")
            gate = weights[f"{at}.per_layer.gate.weight"] @ stream
            gate = gate.relu() if per_layer.activation == "relu" else gate * gate.sigmoid()
            read = weights[f"{at}.per_layer.out.weight"] @ (gate * own)
            stream = stream + normed(read, f"{at}.per_layer.norm.weight")
            stream = stream * weights.get(f"{at}.scalar.weight", 1.0)
        rows.append(normed(stream, "final_norm.norm.weight"))
    return torch.stack(rows)


def largest_errors(seed: int | None = None) -> Errors:
    """The largest difference of the hidden states, and of the gradients of all weights; of `mlp_design` by default."""
    data = mlp_design() if seed is None else random_design(seed)
    model = model_under_test(parse_config(ModelConfig, data))
    tokens = random_tokens(model.config, 1, LENGTH, seed or 0)
    weights = [each for name, each in model.named_parameters() if not name.startswith("head")]
    return errors(model(tokens)[0][0], by_hand(model, tokens[0]), weights)


def test_tokens_beyond_the_table_read_its_first_row() -> None:
    few = mlp_design() | {"embedding": {"per_layer": {"dim": DIM, "vocab_size": 30}}}
    model = model_under_test(parse_config(ModelConfig, few))
    assert model.get_parameter("embed.per_layer.weight").shape == (30, 3 * DIM)
    tokens, x = torch.tensor([[29, 30, 0, 60]]), torch.randn(1, 4, WIDTH, dtype=torch.float64)
    assert model.embed.per_layer is not None
    read, first = (
        model.embed.per_layer(each, x, heddle.Layout.causal(1, 4)) for each in (tokens, tokens * (tokens < 30))
    )
    assert torch.equal(read, first)
    assert not torch.equal(read[0, 0], model.embed.per_layer(0 * tokens, x, heddle.Layout.causal(1, 4))[0, 0])


@pytest.mark.parametrize("seed", [None, *by_day(11, 48)])
def test_hidden_states_and_gradients_are_those_by_hand(seed: int | None) -> None:
    assert_none(largest_errors(seed))


def next_layer(layer: Layer, layout: heddle.Layout) -> Tensor:
    """The embedding of the layer after it."""
    assert layout.handed_over is not None
    assert layout.handed_over.per_layer is not None
    return layout.handed_over.per_layer[:, :, (layer.layer_index + 1) % 3]


def unscaled(embedding: PerLayerEmbedding, tokens: Tensor, x: Tensor, layout: heddle.Layout) -> Tensor:
    """Rows of the table without sqrt(dim)."""
    of_text = embedding.norm((embedding.projection(x) * embedding.projection_scale).unflatten(-1, (-1, embedding.dim)))
    y: Tensor = (of_text + functional.embedding(tokens, embedding.weight).unflatten(-1, (-1, embedding.dim))) / 2**0.5
    return y


def scalar_first(function: Any, layer: Layer, stream: Tensor, layout: heddle.Layout) -> Tensor:
    """The scalar before the layer's embedding is added."""
    assert layer.scalar is not None
    y: Tensor = function(layer, layer.scalar(stream), layout) / layer.scalar.weight
    return y


def ungated(branch: PerLayerBranch, stream: Tensor, inputs: Tensor) -> Tensor:
    """Without the activation of the gate."""
    y: Tensor = branch.norm(branch.out(branch.gate(stream) * inputs))
    return y


WRONG: dict[str, Plant] = {
    "the embedding of the next layer": replaced(Layer._own_embedding, next_layer),
    "rows that are not scaled": replaced(PerLayerEmbedding.forward, unscaled),
    "the scalar before the embedding": wrapped(Layer.after_branches, scalar_first),
    "a gate without its activation": replaced(PerLayerBranch.forward, ungated),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_formula_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[name](monkeypatch)
    assert largest_errors()[0] > 1e-3


def test_sizes() -> None:
    config = parse_config(ModelConfig, mlp_design())
    plain = parse_config(ModelConfig, mlp_design() | {"embedding": {"scale": True}, "residual": {"kind": "sandwich"}})
    size, before = heddle.size(config, 8), heddle.size(plain, 8)
    of_layers = 3 * (2 * WIDTH * DIM + WIDTH + 1)
    assert size.parameters - before.parameters == (61 + WIDTH) * 3 * DIM + DIM + of_layers
    assert size.parameters == sum(parameter.numel() for parameter in heddle.build(config).parameters())
    assert size.flops_per_token - before.flops_per_token == 2 * (3 * DIM * WIDTH + 3 * 2 * WIDTH * DIM)
    assert size.state_bytes == before.state_bytes


def test_modules_of_later_tokens_read_no_embedding_of_their_own() -> None:
    model = model_under_test(parse_config(ModelConfig, mlp_design(multi_token={})))
    tokens = random_tokens(model.config, 1, LENGTH)
    [prediction] = model.predict_ahead(model(tokens)[0], tokens)
    assert bool(prediction.hidden.isfinite().all())
    assert not any(isinstance(module, PerLayerBranch) for module in model.multi_token.modules())


def test_vectors_in_place_of_tokens_are_refused() -> None:
    model = heddle.build(parse_config(ModelConfig, mlp_design()))
    with pytest.raises(ConfigError, match=r"^tokens: are vectors, but embedding.per_layer looks up the ids"):
        model(torch.zeros(1, 3, WIDTH))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"embedding": {"per_layer": {"dim": 3}}}, "embedding.per_layer: is added to one stream, and"),
        ({"residual": {"layer_scalar": True}}, "residual.layer_scalar: multiplies one stream, and"),
    ],
)
@pytest.mark.parametrize("kind", ["hyper_connections", "residual_dual", "attention_residuals"])
def test_several_streams_are_refused(kind: str, fields: Data, message: str) -> None:
    data = design(layer(attention(), repeat=2)) | fields
    data["residual"] = {"kind": kind, **fields.get("residual", {})}
    with pytest.raises(ConfigError, match=f"^{message} {kind} has several; leave it out"):
        heddle.load_config(data)


def checked(model: heddle.Decoder, rewrite: Rewrite) -> heddle.Decoder:
    """The converted model, if the rewrite keeps its layers."""
    rewrite.check_layers(model.config)
    return converted_model(model, rewrite)


@pytest.mark.parametrize(
    ("rewrite", "fields", "message"),
    [
        ("depth=6", {"residual": {"kind": "sandwich", "layer_scalar": True}}, "residual.layer_scalar: multiplies"),
        ("depth=6", {"embedding": {"per_layer": {"dim": 3}}}, "embedding.per_layer: gives every layer"),
    ],
)
def test_conversions_that_would_change_the_stream_are_refused(rewrite: str, fields: Data, message: str) -> None:
    model = source_model(parse_config(ModelConfig, design(layer(attention(), repeat=2)) | fields))
    with pytest.raises(ConfigError, match=f"^{message}"):
        checked(model, parse_rewrite(rewrite))


def test_more_ids_give_both_tables_more_rows() -> None:
    model = source_model(parse_config(ModelConfig, mlp_design()))
    wider = converted_model(model, parse_rewrite("vocab_size=70"))
    tokens = random_tokens(model.config, 2, LENGTH)
    assert wider.get_parameter("embed.per_layer.weight").shape == (70, 3 * DIM)
    torch.testing.assert_close(wider(tokens)[0], model(tokens)[0], rtol=0, atol=1e-10)
