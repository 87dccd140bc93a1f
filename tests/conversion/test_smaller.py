"""Narrower feed-forwards, fewer experts, layers without a branch: exact where nothing is lost, else as a plain loop."""

from typing import Any

import numpy as np
import pytest
import torch

from heddle.conversion.rewrite import Rewrite
from heddle.conversion.rewrites import hidden as hidden_module
from heddle.conversion.rewrites import keep_experts as experts_module
from heddle.conversion.rewrites.hidden import Hidden
from heddle.conversion.rewrites.keep_experts import KeepExperts
from heddle.conversion.rewrites.remove import Remove
from heddle.conversion.targets import parse_rewrite
from heddle.conversion.weights import CalibrationText, ModelWeights
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.parts.layout import Layout
from tests.conversion.exactness import converted_model, design, difference, logits, random_text, source_model
from tests.laws.planting import Plant, assigned

GQA: dict[str, Any] = {"kind": "attention", "heads": 4, "kv_heads": 2, "position": {"kind": "rope"}}
TEXT = random_text(rows=6, length=16)


def with_feedforward(feedforward: dict[str, Any]) -> ModelConfig:
    layers = [{"repeat": 2, "mixer": GQA, "feedforward": feedforward}]
    return load_config({"vocab_size": 40, "width": 16, "layers": layers})


GATED = {"kind": "gated", "hidden": 24, "bias": True}
MLP = {"kind": "mlp", "hidden": 24, "activation": "gelu"}
MIXTURE = {"kind": "moe", "experts": 6, "top_k": 2, "hidden": 8, "router_bias": True, "shared": 1}


@torch.no_grad()
def doubled(model: Decoder) -> Decoder:
    """Every second hidden channel computes what the one before it does, and writes something else."""
    for index in range(2):
        for name in ("gate", "up"):
            for kind in ("weight", "bias"):
                path = f"layers.{index}.feedforward.{name}.{kind}"
                if path in dict(model.named_parameters()):
                    value = model.get_parameter(path)
                    value[1::2] = value[::2]
    return model


@pytest.mark.parametrize("feedforward", [GATED, MLP], ids=["gated", "mlp"])
def test_channels_that_repeat_others_are_removed_without_loss(feedforward: dict[str, Any]) -> None:
    model = doubled(source_model(with_feedforward(feedforward)))
    with torch.no_grad():  # the removed ones write less
        for index in range(2):
            model.get_parameter(f"layers.{index}.feedforward.down.weight")[:, 1::2] *= 1e-2
    narrow = converted_model(model, Hidden(hidden=12), text=TEXT)
    assert narrow.get_parameter("layers.1.feedforward.up.weight").shape == (12, 16)
    assert difference(model, narrow) < 1e-8


def check_least_squares(model: Decoder, kept: int) -> None:
    """The channels that write most stay, and the last projection is numpy's least squares on their activations."""
    weights = Hidden(hidden=kept, layers=(1,)).apply(ModelWeights(model), TEXT)
    new, old = weights.layer(1), ModelWeights(model).layer(1)
    seen: list[torch.Tensor] = []
    layer = model.layers[1].get_submodule("feedforward.down")
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, 1)))
    for batch in TEXT.batches:
        logits(model, batch)
    handle.remove()
    inputs, down = torch.cat(seen).numpy(), old["feedforward.down.weight"].numpy()
    written = (inputs**2).sum(0) * (down**2).sum(0)
    stays = sorted(np.argsort(-written)[:kept].tolist())
    goes = [channel for channel in range(inputs.shape[1]) if channel not in stays]
    taken_over = np.linalg.lstsq(inputs[:, stays], inputs[:, goes] @ down[:, goes].T, rcond=None)[0].T
    assert np.abs(new["feedforward.down.weight"].numpy() - down[:, stays] - taken_over).max() < 1e-8
    for name in ("feedforward.gate.weight", "feedforward.up.bias"):
        assert torch.equal(new[name], old[name][stays]), name
    assert torch.equal(weights.layer(0)["feedforward.up.weight"], ModelWeights(model).layer(0)["feedforward.up.weight"])


def test_what_removed_channels_wrote_is_taken_over_by_least_squares() -> None:
    check_least_squares(source_model(with_feedforward(GATED)), 15)


@pytest.mark.parametrize(
    "plant",
    [
        assigned(hidden_module._Narrower.convert_layer, "moved", lambda moved: 0 * moved),
        assigned(hidden_module._Narrower.convert_layer, "written", lambda written: -written),
    ],
    ids=["nothing-moved", "least-kept"],
)
def test_a_wrong_refit_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_least_squares(source_model(with_feedforward(GATED)), 15)


def test_padding_does_not_count_for_a_narrower_layer() -> None:
    model, tokens = source_model(with_feedforward(GATED)), TEXT.batches[0]
    rest = torch.randint(1, 40, (6, 4), generator=torch.Generator().manual_seed(3))
    padded = CalibrationText([torch.cat((tokens, rest), 1)], [Layout.packed([[16]] * 6, 20)])
    plain, other = (converted_model(model, Hidden(hidden=15), text=text) for text in (TEXT, padded))
    assert difference(plain, other) < 1e-8


def idle(model: Decoder, experts: list[int]) -> Decoder:
    """The router never chooses these experts."""
    with torch.no_grad():
        for index in range(2):
            model.get_parameter(f"layers.{index}.feedforward.router.bias")[experts] = -1e4
            for name, value in model.layers[index].named_parameters():
                if name.endswith("router.expert_bias"):
                    value[experts] = -1e2
    return model


@pytest.mark.parametrize("fields", [{}, {"routing": "sigmoid", "bias_update": 0.0}], ids=["softmax", "sigmoid"])
def test_experts_that_no_token_chooses_are_dropped_without_loss(fields: dict[str, Any]) -> None:
    model = idle(source_model(with_feedforward(MIXTURE | fields)), [0, 3])
    fewer = converted_model(model, KeepExperts(experts=4), text=TEXT)
    assert fewer.get_parameter("layers.1.feedforward.router.weight").shape[0] == 4
    assert difference(model, fewer) < 1e-10
    up = model.get_parameter("layers.1.feedforward.up.weight")
    assert torch.equal(fewer.get_parameter("layers.1.feedforward.up.weight"), up[[1, 2, 4, 5]])


def test_dropping_the_experts_that_are_chosen_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assigned(experts_module._Fewer.convert_layer, "counts", lambda counts: -counts)(monkeypatch)
    model = idle(source_model(with_feedforward(MIXTURE)), [0, 3])
    assert difference(model, converted_model(model, KeepExperts(experts=4), text=TEXT)) > 1e-3


@pytest.mark.parametrize("branch", ["mixer", "feedforward"])
@pytest.mark.parametrize("residual", [{"kind": "pre_norm"}, {"kind": "sandwich"}, {"kind": "parallel"}], ids=str)
def test_a_branch_that_writes_nothing_is_removed_without_loss(branch: str, residual: dict[str, Any]) -> None:
    model = source_model(design(GQA, depth=3, residual=residual))
    last = {"mixer": "out", "feedforward": "down"}[branch]
    rewrite = Remove.model_validate({"remove": branch, "layers": (0, 2)})
    loud = difference(model, converted_model(model, rewrite))
    with torch.no_grad():
        for index in (0, 2):
            model.get_parameter(f"layers.{index}.{branch}.{last}.weight").zero_()
    assert difference(model, converted_model(model, rewrite)) < 1e-10 < loud
    left = [getattr(layer, branch) is None for _, layer in converted_model(model, rewrite).config.expand()]
    assert left == [True, False, True]


@pytest.mark.parametrize(
    ("target", "fields", "reason"),
    [
        ("hidden=24", {}, "feedforward:.*wider than 24"),
        ("layers.0.hidden=24", {}, r"layers\.0\.feedforward: has no more than 24 channels"),
        ("hidden=4", {"layers": [{"mixer": GQA}]}, "feedforward:"),
        ("keep_experts=2", {}, "feedforward:.*more than 2 experts"),
        ("layers.1.keep_experts=2", {}, r"layers\.1\.feedforward:"),
        ("keep_experts=1", {"layers": [{"mixer": GQA, "feedforward": MIXTURE}]}, r"^layers\.0\.feedforward\.top_k: "),
        ("remove=mixer", {"layers": [{"mixer": GQA}]}, "layers: have one branch"),
        ("layers.0.remove=mixer", {"layers": [{"mixer": GQA}]}, r"layers\.0: has one branch"),
        ("remove=mixer", {"residual": {"kind": "hyper_connections", "streams": 2}}, "residual:"),
    ],
)
def test_what_cannot_become_smaller_is_refused(target: str, fields: dict[str, Any], reason: str) -> None:
    source = ModelWeights(source_model(load_config(design(GQA).dump() | fields)))
    rewrite: Rewrite = parse_rewrite(target)
    with pytest.raises(ConfigError, match=reason):
        rewrite.apply(source, TEXT)
