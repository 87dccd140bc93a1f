"""Sizes and kernel choices of the distinct layers, multiplied, equal those of the model built layer by layer."""

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from heddle.errors import ConfigError
from heddle.model.config import MAX_DISTINCT_LAYERS, ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import MAX_YAML_VALUES, load_config, parse_yaml
from heddle.model.size import flops_per_token, kernel_choices, parameter_counts, size, state_bytes
from heddle.numerics.dispatch import KernelChoice, record_choices
from heddle.numerics.linear import packed_weights
from heddle.parts.layout import EncoderOutput, Layout
from tests.cases import CASES, Data, attention, case, design, layer
from tests.covering import designs_with_every_option, uncovered_cases

CONTEXT, ENCODER_LENGTH, BATCH = 11, 7, 2


def encoder_output_of(model: Decoder, rows: int) -> EncoderOutput | None:
    if model.encoder_width is None:
        return None
    if model.encoder is not None:
        return model.encode(torch.zeros(rows, ENCODER_LENGTH, dtype=torch.int64, device="meta"))
    return EncoderOutput(torch.zeros(rows, ENCODER_LENGTH, model.encoder_width, device="meta"))


def choices_of_full_model(config: ModelConfig) -> Counter[KernelChoice]:
    """The choices of a training call of a model with every layer, by torch's own meta kernels."""
    model = build(config, device="meta")
    with record_choices("cpu") as choices:
        layout, encoder_output = Layout.causal(1, CONTEXT, device="meta"), encoder_output_of(model, 1)
        tokens = torch.zeros(1, CONTEXT, dtype=torch.int64, device="meta")
        layout = layout if encoder_output is None else layout.with_encoder_output(encoder_output)
        hidden, _ = model(tokens, layout)
        for states in (hidden, *(each.hidden for each in model.predict_ahead(hidden, tokens, layout))):
            model.head(states)
    return Counter(choices)


def decoding_choices_of_full_model(config: ModelConfig) -> Counter[KernelChoice]:
    """The choices of one token after a text, as `choices_of_full_model`."""
    model = build(config, device="meta").eval()
    with record_choices("cpu") as choices, torch.no_grad(), packed_weights():
        state = model.init_state(1, CONTEXT + 1, encoder_output_of(model, 1))
        _, state = model(torch.zeros(1, CONTEXT, dtype=torch.int64, device="meta"), None, state)
        choices.clear()
        hidden, _ = model(torch.zeros(1, 1, dtype=torch.int64, device="meta"), None, state)
        model.head(hidden)
    return Counter(choices)


def check_against_full_model(config: ModelConfig) -> None:
    """Compare with a model that has every layer."""
    model = build(config, device="meta")
    result = size(config, CONTEXT, BATCH, encoder_length=ENCODER_LENGTH)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (result.parameters, result.active_parameters) == parameter_counts(model)
    assert result.parameters == parameters
    assert result.flops_per_token == flops_per_token(model, CONTEXT, ENCODER_LENGTH)
    rows = [row for row in result.layers for _ in range(row.count)]
    layer_parameters = [sum(parameter.numel() for parameter in built.parameters()) for built in model.layers]
    assert [row.parameters for row in rows] == layer_parameters
    if model.causal:
        state = model.init_state(BATCH, CONTEXT, encoder_output_of(model, BATCH))
        longer = model.init_state(1, CONTEXT + 1, encoder_output_of(model, 1))
        shorter = model.init_state(1, CONTEXT, encoder_output_of(model, 1))
        assert (result.state_bytes, result.position_table_bytes) == (state.bytes, state.table.bytes)
        assert [row.state_bytes for row in rows] == state.layer_bytes
        assert result.state_bytes_per_token == sum(longer.layer_bytes) - sum(shorter.layer_bytes)
    else:
        assert (result.state_bytes, result.state_bytes_per_token) == (0, 0)
    if len(model.multi_token):
        [modules] = result.multi_token
        built = [sum(value.numel() for value in module.parameters()) for module in model.multi_token]
        assert [modules.parameters] * modules.count == built
        drafts = model.init_draft_state(BATCH, CONTEXT, encoder_output_of(model, BATCH))
        assert [modules.state_bytes] == drafts.layer_bytes
        if not any(getattr(part, "expert_info", None) for part in model.layers.modules()):
            assert result.active_parameters == parameters - sum(built)
        added = flops_per_token(model, CONTEXT, ENCODER_LENGTH, training=True) - result.flops_per_token
        assert round(CONTEXT * result.multi_token_flops_per_token) == round(CONTEXT * added) > 0  # whole FLOPs
    if model.encoder is not None:
        encoder_rows = [row.parameters for row in result.encoder for _ in range(row.count)]
        assert encoder_rows == [sum(value.numel() for value in built.parameters()) for built in model.encoder.layers]
    training = kernel_choices(config, CONTEXT, -1, torch.float32, "cpu", ENCODER_LENGTH)
    assert training == choices_of_full_model(config)
    if model.causal:
        decoding = kernel_choices(config, 1, CONTEXT, torch.float32, "cpu", ENCODER_LENGTH)
        assert decoding == decoding_choices_of_full_model(config)


@pytest.mark.parametrize("share", range(4))
def test_every_option(share: int) -> None:
    for config in [*designs_with_every_option(), *map(case, uncovered_cases())][share::4]:
        check_against_full_model(config)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_every_case(name: str) -> None:
    check_against_full_model(case(name))


LAYERS = [entry | {"repeat": 1} for data in (CASES["attention-gqa"], CASES["attention-window-mixed"], CASES["delta"],
          CASES["moe"], CASES["alibi"], CASES["latent-full-query"]) for entry in data["layers"]]  # fmt: skip
ENTRIES: st.SearchStrategy[Data] = st.recursive(
    st.builds(lambda entry, repeat: entry | {"repeat": repeat}, st.sampled_from(LAYERS), st.integers(1, 3)),
    lambda entries: st.builds(
        lambda layers, repeat: {"layers": layers, "repeat": repeat}, st.lists(entries, min_size=1, max_size=2),
        st.integers(1, 2),
    ),
    max_leaves=3,
)  # fmt: skip


@st.composite
def random_designs(draw: st.DrawFn) -> ModelConfig:
    """Nested and repeated layers, with or without what belongs to a whole design."""
    entries = draw(st.lists(ENTRIES, min_size=1, max_size=3))
    drop_path, tied = draw(st.sampled_from([None, 0.0, 0.3])), draw(st.booleans())
    position = draw(st.sampled_from([None, {"kind": "sinusoidal"}]))
    fields: dict[str, Any] = {"head": {"tied": tied}, "embedding": {"position": position}}
    if drop_path is not None and load_config(design(*entries)).depth > 1:
        fields["residual"] = {"kind": "pre_norm", "drop_path": drop_path}
    return load_config(design(*entries, **fields))


@settings(max_examples=4, deadline=None)
@given(random_designs())
def test_random_designs(config: ModelConfig) -> None:
    check_against_full_model(config)


@pytest.mark.soak
@settings(max_examples=60, deadline=None)
@given(random_designs())
def test_many_random_designs(config: ModelConfig) -> None:
    check_against_full_model(config)


def test_distinct_layers_are_counted_in_order_of_occurrence() -> None:
    local, full = layer(attention(window=3)), layer(attention())
    config = load_config(design({"repeat": 3, "layers": [local | {"repeat": 2}, full]}, full))
    assert config.depth == 10
    assert config.layer_order == (0, 0, 1, 0, 0, 1, 0, 0, 1, 1)
    assert [(layer_row.path, layer_row.index, layer_row.count) for layer_row in config.distinct_layers] == [
        ("layers[0].layers[0]", 0, 6),
        ("layers[0].layers[1]", 2, 4),
    ]


def test_deep_designs_are_measured_by_their_distinct_layers() -> None:
    shallow_config, deep_config = (load_config(design(layer(attention(), repeat=repeat))) for repeat in (1, 1024))
    single, deep = size(shallow_config, CONTEXT), size(deep_config, CONTEXT)
    outside = 61 * 24 + 24
    assert deep.parameters - outside == 1024 * (single.parameters - outside)
    assert [row.count for row in deep.layers] == [1024]
    assert state_bytes(deep_config, CONTEXT) == deep.state_bytes
    assert deep_config.fingerprint() != shallow_config.fingerprint()


def test_parameters_beyond_64_bits_are_counted() -> None:
    wide = load_config(design(layer(attention(heads=1, head_dim=8, position=None), {"kind": "moe", "experts": 4,
                                    "top_k": 1, "hidden": 2**31 - 1}, repeat=1024), width=2**20))  # fmt: skip
    assert size(wide, 1).parameters > 2**63


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (design(layer(attention()), width=10**9), r"^width:.*1048576.*1000000000"),
        (design(*[layer(attention())] * 100_000), r"^layers:.*100000 layers.*most 1024"),
        (design(layer(attention(), repeat=100_000)), r"^layers:.*100000 layers.*most 1024"),
        (
            design(*[layer(attention(window=index + 1)) for index in range(MAX_DISTINCT_LAYERS + 1)]),
            r"^layers:.*129 different.*most 128",
        ),
    ],
)
def test_limits_are_checked_before_anything_is_built(data: Data, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "__init__", lambda *_: pytest.fail("a model was built"))
    with pytest.raises(ConfigError, match=message):
        load_config(data)


def test_large_yaml_is_refused() -> None:
    text = "layers:\n" + "- {repeat: 1}\n" * MAX_YAML_VALUES
    with pytest.raises(ConfigError, match="20000 keys"):
        parse_yaml(text, "it")
