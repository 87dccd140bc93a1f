"""Merged experts: exact where experts are equal, else the groups and sums of a plain loop."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from heddle.conversion.rewrite import Rewrite
from heddle.conversion.rewrites import merge_experts as module
from heddle.conversion.rewrites.merge_experts import MergeExperts, expert_groups, expert_outputs
from heddle.conversion.targets import parse_rewrite
from heddle.conversion.weights import CalibrationText, ModelWeights
from heddle.errors import ConfigError
from heddle.lab.search.scores import default_targets
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.parts.layout import Layout
from tests.conversion.exactness import converted_model, design, difference, random_text, source_model
from tests.laws.planting import Plant, assigned

GQA: dict[str, Any] = {"kind": "attention", "heads": 4, "kv_heads": 2, "position": {"kind": "rope"}}
TEXT = random_text(rows=6, length=16)
PAIRS, UNEQUAL = [0, 1, 2, 0, 1, 2], [0, 1, 0, 2, 0, 1]


@torch.no_grad()
def copies(of: list[int], noise: float = 0.0, **fields: Any) -> Decoder:
    """A model whose expert i is the expert of[i], with its hidden channels in another order, and its router's row."""
    mixture = {"kind": "moe", "experts": 6, "hidden": 8, "shared": 1, **fields}
    layers = [{"repeat": 2, "mixer": GQA, "feedforward": mixture}]
    model = source_model(load_config({"vocab_size": 40, "width": 16, "layers": layers}))
    generator = torch.Generator().manual_seed(0)
    for layer in model.layers:
        orders = [torch.randperm(8, generator=generator) for _ in of]
        for name, value in layer.get_submodule("feedforward").named_parameters():
            if name.startswith(("gate.", "up.", "down.", "router.")):
                dim = {"down.weight": -1, "gate.weight": 0, "up.weight": 0, "gate.bias": 0, "up.bias": 0}.get(name)
                rows = [value[i] if dim is None else value[i].index_select(dim, orders[n]) for n, i in enumerate(of)]
                value.copy_(torch.stack(rows))
                value.add_(torch.randn(value.shape, generator=generator, dtype=value.dtype), alpha=noise)
    return model


def merged(model: Decoder, text: CalibrationText = TEXT, **options: Any) -> Decoder:
    return converted_model(model, MergeExperts(experts=3, **options), text=text)


EXACT: dict[str, tuple[list[int], dict[str, Any]]] = {
    "all": (UNEQUAL, {"top_k": 6}),
    "all, by their own softmax": (UNEQUAL, {"top_k": 6, "routing": "topk_softmax", "router_bias": True}),
    "all, not renormalized": (UNEQUAL, {"top_k": 6, "renormalize": False, "bias": True}),
    "pairs": (PAIRS, {"top_k": 2}),
    "pairs, with a bias of the selection": (PAIRS, {"top_k": 4, "bias_update": 0.0, "scale": 1.5}),
    "pairs by logits": (PAIRS, {"top_k": 2, "routing": "topk_softmax", "bias_update": 0.0}),
    "sigmoid": (PAIRS, {"top_k": 4, "routing": "sigmoid", "bias_update": 0.0, "expert": "mlp"}),
    "sigmoid, selected by logits": (PAIRS, {"top_k": 4, "routing": "sigmoid_logits", "bias_update": 0.0}),
    "sigmoid, not renormalized": (UNEQUAL, {"top_k": 6, "routing": "sigmoid", "renormalize": False, "bias": True}),
    "softplus": (PAIRS, {"top_k": 2, "routing": "sqrt_softplus", "renormalize": False}),
}


def top_k_of(fields: dict[str, Any]) -> int:
    """Of the merged mixture: each pair counts once."""
    return int(fields["top_k"]) // 2


@pytest.mark.parametrize("name", EXACT)
def test_equal_experts_are_merged_without_loss(name: str) -> None:
    of, fields = EXACT[name]
    model = copies(of, **fields)
    new = merged(model, top_k=top_k_of(fields))
    assert new.get_parameter("layers.1.feedforward.up.weight").shape[0] == 3
    assert difference(model, new) < 1e-10


@pytest.mark.parametrize(
    "plant",
    [
        assigned(module._Merged.convert_layer, "entropy", lambda entropy: 0 * entropy),
        assigned(module._orders, "order", np.sort),
        assigned(module._Merged.convert_layer, "groups", lambda groups: [[0, 1], [2, 3], [4, 5]]),
        assigned(module._Merged.convert_layer, "shares", lambda shares: shares.gt(0).double()),
    ],
    ids=["rows-not-summed", "channels-not-aligned", "groups-by-number", "router-not-averaged"],
)
def test_a_wrong_merge_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    of, fields = EXACT["all"]
    model = copies(of, **fields)
    assert difference(model, merged(model, top_k=3)) > 1e-3


def test_experts_that_are_nearly_equal_lose_little() -> None:
    model = copies(UNEQUAL, noise=1e-3, top_k=6)
    assert 1e-6 < difference(model, merged(model)) < 2e-2


def test_groups_are_those_of_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    outputs, mass = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 9), (6,)))
    mass = mass.exp()
    groups = [[number] for number in range(6)]

    def error(group: list[int]) -> float:
        mean = sum(mass[i] * outputs[i] for i in group) / sum(mass[i] for i in group)
        return float(sum(mass[i] * ((outputs[i] - mean) ** 2).sum() for i in group))

    while len(groups) > 2:
        pairs = list(itertools.combinations(groups, 2))
        first, second = min(pairs, key=lambda pair: error(pair[0] + pair[1]) - error(pair[0]) - error(pair[1]))
        groups = [group for group in groups if group not in (first, second)] + [sorted(first + second)]
    assert expert_groups(outputs @ outputs.T, mass, 2) == sorted(groups)


def test_padding_does_not_count_for_merged_experts() -> None:
    model, tokens = copies([0, 1, 2, 3, 4, 5], top_k=2), TEXT.batches[0]
    rest = torch.randint(1, 40, (6, 4), generator=torch.Generator().manual_seed(3))
    padded = CalibrationText([torch.cat((tokens, rest), 1)], [Layout.packed([[16]] * 6, 20)])
    assert difference(merged(model), merged(model, padded)) < 1e-8


def test_the_outputs_of_experts_are_those_of_a_plain_loop() -> None:
    model = copies([0, 1, 2, 3, 4, 5], top_k=2, bias=True)
    weights = MergeExperts(experts=3).apply(ModelWeights(model), TEXT)
    activations = weights.activations(1)  # type: ignore[attr-defined]
    mixture, seen = model.layers[1].get_submodule("feedforward"), list[torch.Tensor]()
    handle = mixture.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, 1)))
    with torch.no_grad():
        model(TEXT.batches[0])
    handle.remove()
    (x,), parameters = seen, dict(mixture.named_parameters())
    outputs = []
    for number in range(6):
        own = {name: value[number] for name, value in parameters.items() if name.startswith(("gate", "up", "down"))}
        gate, up = (x @ own[f"{name}.weight"].T + own[f"{name}.bias"] for name in ("gate", "up"))
        hidden = torch.nn.functional.silu(gate) * up
        outputs.append((hidden @ own["down.weight"].T + own["down.bias"]).flatten())
    mass = (x @ parameters["router.weight"].T).softmax(1).sum(0)
    rows = torch.stack(outputs)
    found = expert_outputs(activations)
    assert (found[0] - rows @ rows.T).abs().max() < 1e-8
    assert (found[1] - mass).abs().max() < 1e-8


def test_a_search_offers_merged_experts() -> None:
    found = default_targets(copies(PAIRS, top_k=2).config.resolved(), 16)
    assert {"merge_experts=4", "merge_experts=3", "keep_experts=3"} <= set(found)


@pytest.mark.parametrize(
    ("target", "fields", "reason"),
    [
        ("merge_experts=6", {}, r"feedforward:.*more than 6 experts"),
        ("layers.1.merge_experts=6", {}, r"layers\.1\.feedforward: has no more than 6"),
        ("merge_experts=2,top_k=3", {}, r"top_k: 3 is more than the 2"),
        ("layers.0.merge_experts=2", {"weighted": "inputs"}, r"layers\.0\.feedforward: puts gates"),
        ("layers.0.merge_experts=2", {"routing": "sparse_mixer", "top_k": 2}, r"layers\.0\.feedforward: has a router"),
        ("layers.0.merge_experts=2", {"router_softcap": 5.0}, r"layers\.0\.feedforward: has a router"),
        ("layers.0.merge_experts=2", {"routing": "sigmoid", "groups": 3, "top_groups": 2}, "has groups"),
    ],
)
def test_what_cannot_be_merged_is_refused(target: str, fields: dict[str, Any], reason: str) -> None:
    model, rewrite = copies([0, 1, 2, 3, 4, 5], **({"top_k": 2} | fields)), parse_rewrite(target)
    with pytest.raises(ConfigError, match=reason):
        rewrite.apply(ModelWeights(model), TEXT)
    dense: Rewrite = MergeExperts(experts=2, layers=(0,))
    with pytest.raises(ConfigError, match="has no experts"):
        dense.apply(ModelWeights(source_model(design(GQA))), TEXT)
