"""Coordinate checks: with transfer, activations move equally far at every width; without it they do not."""

from typing import Any

import pytest
import torch

from heddle.config import kinds
from heddle.model.load_config import apply_override, load_config
from heddle.training import width_transfer
from heddle.training.optimizer import ParameterScale, build_optimizer
from heddle.training.width_transfer import WidthTransfer, transfer_over_width
from tests.cases import attention, design, layer, written
from tests.training import coordinates
from tests.training.coordinates import BASE, BATCH, activation_changes, growth, not_flat

WIDTHS = (32, 64, 128, 256)
NARROW = (32, 128)
PATHS = ("layers.0.mixer", "layers.0.feedforward", "layers.1.mixer", "layers.1.feedforward")
GATED = {"kind": "gated", "hidden": 64}


def two_layers(mixer: dict[str, Any] | None = None, feedforward: dict[str, Any] | None = None, **fields: Any) -> Any:
    return design(layer(mixer or attention(2), feedforward or GATED, repeat=2), width=BASE, **fields)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_activations_move_equally_far_at_every_width(optimizer: str, tied: bool) -> None:
    data = two_layers(head={"tied": tied})
    assert not_flat(growth(data, optimizer, WIDTHS)) == {}
    standard = growth(data, optimizer, NARROW, transfer=False)
    assert min(standard[path] for path in (*PATHS, "head")) > 0.6


def plant_rate(scale: ParameterScale) -> ParameterScale:
    return scale._replace(learning_rate=1.0)


def plant_std(scale: ParameterScale) -> ParameterScale:
    return scale._replace(initial_std=1.0)


@pytest.mark.parametrize("plant", [plant_rate, plant_std])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_hidden_matrices_that_are_not_scaled_are_caught(
    optimizer: str, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix_scale = width_transfer._matrix_scale
    monkeypatch.setattr(width_transfer, "_matrix_scale", lambda *arguments: plant(matrix_scale(*arguments)))
    assert not_flat(growth(two_layers(), optimizer, NARROW))


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_not_scaled_is_caught(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(config: Any, base_width: int | None, optimizer: str) -> WidthTransfer:
        transfer = transfer_over_width(config, base_width, optimizer)
        scales = transfer.scales if tied else {**transfer.scales, "head.weight": ParameterScale()}
        return WidthTransfer(config, scales)

    monkeypatch.setattr(coordinates, "transfer_over_width", plant)
    assert "head" in not_flat(growth(two_layers(head={"tied": tied}), "adamw", NARROW))


def of_kind(slot: str, kind: str) -> dict[str, Any]:
    """Two layers with a part of this kind in the place of the usual one, with the fields that the kind takes there."""
    data: dict[str, Any] = load_config(two_layers()).dump()
    apply_override(
        data, f"{'layers.0.' if slot in ('mixers', 'feedforwards') else ''}{slot.removesuffix('s')}.kind={kind}"
    )
    return data


# Fields beside those that a kind takes by itself; other kinds are there by their names.
KINDS: dict[str, dict[str, Any]] = {
    "mqa": two_layers(attention(2, kv_heads=1, qk_norm="head", gate="channel", sink=True)),
    "latent_attention": two_layers(
        {"kind": "latent_attention", "heads": 2, "kv_rank": 16, "query_rank": 16, "nope_dim": 16}
    ),
    "differential_attention": two_layers({"kind": "differential_attention", "heads": 2, "head_dim": 8}),
    "compressed_attention": two_layers({"kind": "compressed_attention", "heads": 2, "window": 4, "compress_ratio": 4}),
    "native_sparse_attention": two_layers({"kind": "native_sparse_attention", "heads": 2, "block": 4, "top_k": 4}),
    "mamba2": two_layers({"kind": "mamba2", "heads": 4, "state_size": 16}),
    "linear_attention": two_layers({"kind": "linear_attention", "heads": 2, "feature_map": "learned"}),
    "moe": two_layers(None, {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 32, "shared": 1}),
    "mlp": two_layers(attention(2, bias=True), {"kind": "mlp", "hidden": 128, "bias": True}, norm={"kind": "layer"}),
    "ngram_memory": two_layers(None, written("ngram_memory")),
    "embedding_scale": two_layers(embedding={"scale": True}, head={"bias": True}),
}
OTHERS = {
    kind: slot for slot in ("mixers", "feedforwards", "residuals", "norms") for kind in kinds(slot) if kind not in KINDS
}
# Their widths are those of an encoder, or their function depends on the number of heads.
WITHOUT_WIDTHS = {"cross_attention", "retention"}


@pytest.mark.parametrize("kind", ["latent_attention", "mamba2", "moe"])
def test_other_kinds_are_flat(kind: str) -> None:
    assert not_flat(growth(KINDS[kind], "muon", NARROW)) == {}


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", sorted({*KINDS, *OTHERS} - WITHOUT_WIDTHS))
def test_every_kind_is_flat(kind: str, optimizer: str) -> None:
    """From width 128 on also with AdamW, whose steps are the signs of noisy gradients in narrower models."""
    exponents = growth(KINDS.get(kind) or of_kind(OTHERS[kind], kind), optimizer, (128, 512))
    assert {path: exponent for path, exponent in exponents.items() if exponent > coordinates.FLAT[1]} == {}


def test_changes_are_those_of_the_model() -> None:
    """A rate of nearly 0 moves nothing; each output is seen; the model is left with its hooks removed."""
    model = transfer_over_width(load_config(two_layers()), None).build_model()
    before = [parameter.clone() for parameter in model.parameters()]
    changes = activation_changes(model, build_optimizer(model, 0.0), BATCH, 1e-30, 2)
    assert set(changes) == {*PATHS, "final_norm", "head"}
    assert all(values == [0.0, 0.0] for values in changes.values())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(module._forward_hooks for module in model.modules())
