"""`shrink` keeps the structure of a design and makes it small enough for the laws."""

from typing import Any

import pytest

from heddle.laws import LAWS, run, shrink
from heddle.model.load_config import load_config
from heddle.model.presets import names
from heddle.model.size import size
from tests.cases import Data, attention, case, design, layer
from tests.covering import each_option


def shrunk_mixer(data: Data, index: int = 0) -> Any:
    return shrink(load_config(data)).dump()["layers"][index]["mixer"]


SLOWER = ["receptive_field", "kernel_equivalence", "position_shift_invariance"]


@pytest.mark.parametrize("laws", [["chunked_decoding"], pytest.param(SLOWER, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if "tiny" in n else pytest.mark.nightly) for n in names()])
def test_shrunk_presets_are_small_and_satisfy_laws(name: str, laws: list[str]) -> None:
    small = shrink(load_config(f"preset:{name}"))
    assert size(small, context_length=16).parameters < 13_000
    assert [result for result in run(small, laws) if not result.passed] == []


@pytest.mark.parametrize("name", each_option())
def test_cases_keep_their_parts_and_options(name: str) -> None:
    config = case(name)
    small = shrink(config)
    assert fields_and_choices(small.dump()) == fields_and_choices(config.dump())
    assert shrink(small) == small


def fields_and_choices(node: Any) -> set[Any]:
    """The field names of every part, and the values that are not numbers."""
    if isinstance(node, dict):
        fields = {key: value for key, value in node.items() if key != "repeat"}
        own = {(key, value) if isinstance(value, str | bool) else key for key, value in fields.items()} - {"layers"}
        return own.union(*(fields_and_choices(value) for value in fields.values()))
    return set().union(*(fields_and_choices(item) for item in node)) if isinstance(node, list) else set()


def test_distinct_layers_stay_and_repeats_are_reduced() -> None:
    local, full = layer(attention(window=100), repeat=5), layer(attention())
    layers = shrink(load_config(design({"repeat": 8, "layers": [local, full]}))).layers
    assert [entry.dump()["mixer"].get("window") for entry in layers] == [7, None]
    assert shrink(load_config(design(layer(attention(), repeat=30)))).depth == 2
    assert shrink(load_config(design(layer(attention())))).depth == 1


@pytest.mark.parametrize(("block_size", "small"), [(None, (2, None)), (8, (3, 2)), (1, (2, 1)), (30, (3, 2))])
def test_blocks_of_layers_stay_and_shrink(block_size: int | None, small: tuple[int, int | None]) -> None:
    residual = {"kind": "attention_residuals", "block_size": block_size}
    config = shrink(load_config(design(layer(attention(), repeat=30), residual=residual)))
    assert (config.depth, config.dump()["residual"].get("block_size")) == small


@pytest.mark.parametrize(
    ("heads", "kv_heads", "small"),
    [(32, 32, (2, 2)), (32, 8, (4, 2)), (71, 1, (3, 1)), (12, 4, (6, 2)), (9, 3, (9, 3)), (15, 5, (9, 3))],
)
def test_heads_keep_their_grouping(heads: int, kv_heads: int, small: tuple[int, int]) -> None:
    attention_data = shrunk_mixer(design(layer(attention(heads, kv_heads=kv_heads, head_dim=64)), width=512))
    assert (attention_data["heads"], attention_data["kv_heads"]) == small


def test_widths_keep_their_order_and_parity() -> None:
    attention_data = shrunk_mixer(design(layer(attention(8, head_dim=128, value_dim=64)), width=1024))
    assert attention_data["value_dim"] < attention_data["head_dim"] == 8
    attention_data = shrunk_mixer(design(layer(attention(8, head_dim=64, value_dim=128)), width=1024))
    assert attention_data["value_dim"] > attention_data["head_dim"] == 8
    attention_data = shrunk_mixer(design(layer(attention(3, None, head_dim=33)), width=99))
    assert attention_data["head_dim"] == 9
    assert shrink(load_config(design(layer(attention(3, None)), width=99))).width % 2 == 1


def test_rotary_options_fit_the_smaller_heads() -> None:
    rope = {"kind": "rope", "rotary_dim": 16}
    attention_data = shrunk_mixer(design(layer(attention(8, rope, head_dim=64)), width=512))
    assert attention_data["position"]["rotary_dim"] == 2
    rope = {"kind": "rope", "inv_freq": [1.0 / 2**i for i in range(32)]}
    attention_data = shrunk_mixer(design(layer(attention(8, rope, head_dim=64)), width=512))
    assert attention_data["position"]["inv_freq"] == [1.0, 2.0**-8, 2.0**-16, 2.0**-24]


@pytest.mark.parametrize(
    ("fields", "small"),
    [
        ({"experts": 8, "top_k": 2}, (4, 2, None, None)),
        ({"experts": 128, "top_k": 8}, (4, 2, None, None)),
        ({"experts": 64, "top_k": 64}, (4, 4, None, None)),
        ({"experts": 16, "top_k": 1}, (4, 1, None, None)),
        ({"experts": 256, "top_k": 8, "routing": "sigmoid", "groups": 8, "top_groups": 4}, (8, 2, 4, 2)),
        ({"experts": 160, "top_k": 6, "routing": "softmax_group_max", "groups": 8, "top_groups": 3}, (8, 2, 4, 2)),
        ({"experts": 12, "top_k": 9, "routing": "sigmoid", "groups": 3, "top_groups": 3}, (6, 4, 3, 3)),
    ],
)
def test_experts_become_fewer_and_stay_in_groups(fields: Data, small: tuple[int | None, ...]) -> None:
    feedforward = {"kind": "moe", "hidden": 1408, "shared": 1, "shared_hidden": 5632, **fields}
    small_layer = shrink(load_config(design(layer(attention(), feedforward, repeat=9), width=512))).dump()["layers"][0]
    part = small_layer["feedforward"]
    assert tuple(part.get(name) for name in ("experts", "top_k", "groups", "top_groups")) == small
    assert (part["hidden"], part["shared"], part["shared_hidden"]) == (8, 1, 8)


def test_every_law_holds_for_a_shrunk_large_design() -> None:
    data = design(
        {"repeat": 4, "layers": [layer(attention(16, kv_heads=4, window=512), repeat=5), layer(attention(16))]},
        width=2048,
        vocab_size=128256,
        embedding={"position": {"kind": "learned", "length": 10}},
    )
    results = list(run(shrink(load_config(data))))
    assert [result for result in results if not result.passed] == []
    assert [result.name for result in results] == list(LAWS)
