"""Options act or are refused: the law over every field of every kind, and each option that once did nothing."""

from typing import Any

import pytest

from heddle.config import Config, kind_class, kinds, parse_config
from heddle.errors import ConfigError
from heddle.laws import LawViolation
from heddle.laws.options import Behavior, Option, changes, has_effect, options, options_have_effect
from heddle.model.config import EmbeddingConfig, HeadConfig, InitializationConfig, LayerConfig, ModelConfig
from heddle.model.embedding import Embedding, Head
from heddle.model.load_config import load_config
from heddle.parts.feedforwards.moe import MoEConfig
from heddle.parts.mixers.attention import Attention
from heddle.parts.positions import check_base
from heddle.parts.residuals import ResidualConfig
from heddle.parts.residuals.attention_residuals import AttentionResidualsConfig
from heddle.parts.residuals.hyper_connections import HyperConnectionsConfig
from heddle.parts.residuals.parallel import ParallelConfig
from heddle.parts.residuals.residual_dual import ResidualDualConfig
from tests.cases import CASES, MLP, Data, alone, attention, case, design, layer, moe, wired
from tests.laws.planting import Plant, calls, condition, replaced
from tests.source import slots

ENCODER = CASES["encoder"]
INV_FREQ = [1.0, 0.31, 0.007]


def encoder(**fields: Any) -> Data:
    """The design with an encoder, which has these fields."""
    return ENCODER | {"encoder": ENCODER["encoder"] | fields}


# Each was accepted once and did nothing.
REFUSED = {
    "a softcap of an encoder": (encoder(head={"softcap": 2.0}), "encoder.head.softcap: does nothing, because"),
    "a scale of an encoder": (
        encoder(head={"scale": 2.0}),
        "encoder.head.scale: does nothing, because an encoder has no",
    ),
    "a bias of an encoder": (
        encoder(head={"bias": True}),
        "encoder.head.bias: does nothing, because an encoder has no",
    ),
    "rope's base beside its frequencies": (
        alone(position={"kind": "rope", "base": 500.0, "inv_freq": INV_FREQ}),
        "layers[0].mixer.position.base: 500 has no effect with inv_freq, which replaces its frequencies; keep one",
    ),
    "axial rope's base beside its frequencies": (
        alone(head_dim=12, position={"kind": "axial_rope", "base": 20.0, "inv_freq": INV_FREQ}),
        "layers[0].mixer.position.base: 20 has no effect with inv_freq, which replaces its frequencies; keep one",
    ),
    "the number of shared experts beside their width": (
        moe(shared=2, shared_hidden=11),
        "layers[0].feedforward.shared: 2 has no effect with shared_hidden = 11, the width of the shared experts",
    ),
    "drop_path of one layer": (
        design(layer(attention()), residual={"kind": "pre_norm", "drop_path": 0.2}),
        "residual.drop_path: 0.2 does nothing in a model of one layer, which is the first",
    ),
    "drop_path of an encoder of one layer": (
        encoder(
            layers=[layer(attention(2, head_dim=6, causal=False))], residual={"kind": "pre_norm", "drop_path": 0.2}
        ),
        "encoder.residual.drop_path: 0.2 does nothing in a model of one layer",
    ),
    "two norms for one branch": (
        design(layer(attention(), None, 2), residual={"kind": "parallel", "norms": 2}),
        "residual.norms: 2 is one norm for each branch, but every layer has only one; leave it out",
    ),
    **{
        f"one number under the norm of {kind}": (
            design(layer({"kind": kind, "heads": 24} | fields)),
            f"layers[0].mixer.{field}: leaves the norm one number per head, so at most its sign survives",
        )
        for kind, field, fields in (
            ("kda", "value_dim", {"conv_kernel": 2}),
            ("gated_delta", "value_dim", {"conv_kernel": 2}),
            ("rwkv7", "value_dim", {}),
            ("retention", "value_dim", {}),
            ("differential_attention", "value_dim", {"head_dim": 2, "value_dim": 1}),
            ("mamba2", "groups", {"groups": 24, "head_dim": 1, "state_size": 2}),
        )
    },
    "a cast of heads that are float32": (
        design(layer({"kind": "linear_attention", "heads": 3, "position": {"kind": "rope", "cast": "after"}}, MLP, 2)),
        "layers[0].mixer.position.cast: does nothing here, because features are at least float32; leave it out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_would_do_nothing_is_refused(name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        load_config(data)
    assert str(error.value).startswith(message)


ACCEPTED: dict[str, Data] = {
    "the default base beside frequencies": alone(position={"kind": "rope", "base": 10000.0, "inv_freq": INV_FREQ}),
    "one shared expert of another width": moe(shared=1, shared_hidden=11),
    "the default head of an encoder": encoder(head={"tied": True, "bias": False, "scale": 1.0, "softcap": None}),
    "a drop_path of zero": design(layer(attention()), residual={"kind": "pre_norm", "drop_path": 0.0}),
    "two norms where one layer has two branches": wired("parallel", layer(attention(), None), layer(None), norms=2)
    | {"layers": [layer(attention(), None), layer(attention())]},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_default_written_out_is_accepted(name: str) -> None:
    config = load_config(ACCEPTED[name])
    assert parse_config(ModelConfig, config.dump()) == config


UNREAD_SOFTCAP = calls(Head.forward, "scale_and_cap", lambda change, logits, scale, cap: change(logits, scale, None))
# Without its refusal, the law catches each of them: plant, field, design.
PLANTED: dict[str, tuple[Plant, str, Data]] = {
    "encoder.head.bias": (condition(ModelConfig._check, "default", False), "encoder.head.bias", ENCODER),
    "rope.base": (
        replaced(check_base, lambda base, inv_freq: None),
        "layers[0].mixer.position.base",
        CASES["rope-frequencies"],
    ),
    "moe.shared": (
        condition(MoEConfig._check, "shared", False, nth=4),
        "layers[0].feedforward.shared",
        design(layer(None, {"kind": "moe", "experts": 2, "top_k": 1, "hidden": 2, "shared": 1, "shared_hidden": 3})),
    ),
    "residual.drop_path": (
        condition(ResidualConfig.check_layers, "drop_path", False),
        "residual.drop_path",
        CASES["head-tied-bias"],
    ),
    "parallel.norms": (
        condition(ParallelConfig.check_layers, "norms", False),
        "residual.norms",
        design(layer(attention(), None, 2), residual={"kind": "parallel"}),
    ),
    "a multiplier of embeddings that is never read": (
        condition(Embedding.forward, "multiplier", False),
        "embedding.multiplier",
        CASES["embedding-multiplier"],
    ),
    "a norm after the rotation that is never read": (
        condition(Attention._heads, "norm_after_rotation", False),
        "layers[0].mixer.norm_after_rotation",
        CASES["attention-norm-after-rotation"],
    ),
    "a softcap that is never read": (UNREAD_SOFTCAP, "head.softcap", CASES["attention-mha"]),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_law_catches_an_option_that_does_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, path, data = PLANTED[name]
    assert has_effect(*option_at(path, data))
    plant(monkeypatch)
    assert changes(*option_at(path, data)) is False


@pytest.mark.nightly
@pytest.mark.parametrize("name", PLANTED)
def test_no_number_beside_it_hides_that_it_does_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, path, data = PLANTED[name]
    plant(monkeypatch)
    assert not has_effect(*option_at(path, data))


def option_at(path: str, data: Data) -> tuple[Option, Behavior]:
    """The field at a path of a design, and what the design computes."""
    config = parse_config(ModelConfig, data)
    return next(option for option in options(config) if option.path == path), Behavior(config)


YARN: Data = {"kind": "yarn", "factor": 4.0, "original_length": 1000}
TINY: dict[str, Data] = {"beta_slow": {"head_dim": 2}, "truncate": {"head_dim": 2, "window": 1}}


@pytest.mark.parametrize("field", TINY)
def test_a_scaling_in_tiny_heads_has_an_effect(field: str) -> None:
    """No other number alone shows it: the base, the heads and the window are too small."""
    data = alone(**TINY[field], position={"kind": "rope", "base": 2.0, "scaling": YARN})
    assert has_effect(*option_at(f"layers[0].mixer.position.scaling.{field}", data))


def test_the_law_names_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    UNREAD_SOFTCAP(monkeypatch)
    config = case("layers-feedforward-only")
    message = r"head.softcap:"
    with pytest.raises(LawViolation, match=f"^{message}"):
        options_have_effect(config)


def own_fields() -> set[tuple[type[Config], str]]:
    """Every field of every kind and of the model's own configs, but for those that only hold other fields."""
    holders: list[type[Config]] = [EmbeddingConfig, HeadConfig, InitializationConfig]
    classes: list[type[Config]] = [ModelConfig, LayerConfig, *holders]
    classes += [kind_class(slot, kind) for slot in slots() for kind in kinds(slot)]
    return {
        (cls, name) for cls in classes for name, field in cls.model_fields.items() if field.annotation not in holders
    }


def test_every_field_of_every_kind_changes_something_in_a_case() -> None:
    """The first case in which a field acts is enough here; the law itself runs on every case.

    A residual of several streams refuses `layer_scalar` (tests/model/test_per_layer.py).
    """
    several = (HyperConnectionsConfig, ResidualDualConfig, AttentionResidualsConfig)
    missing = own_fields() - {(cls, "layer_scalar") for cls in several}
    for name in CASES:
        config = case(name)
        behavior: Behavior | None = None
        for option in options(config):
            key = (type(option.config), option.name)
            if key in missing:
                behavior = behavior or Behavior(config)
                if changes(option, behavior):
                    missing.discard(key)
    assert missing == set()
