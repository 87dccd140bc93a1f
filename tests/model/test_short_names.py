"""The field's short names: resolved wherever a design is read, canonical on disk, refused where they contradict."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from heddle.config import find_kind, kind_class, kinds, load_part
from heddle.errors import ConfigError
from heddle.lab.compare.plan import load_entries, parse_varied_fields
from heddle.model.config import schema
from heddle.model.load_config import load_config
from tests.small import forget_parts
from tests.source import slots


def design(mixer: Any, feedforward: Any = None, **fields: Any) -> dict[str, Any]:
    return {"width": 32, "layers": [{"mixer": mixer, "feedforward": feedforward}], **fields}


SHORT = design(
    {"kind": "gqa", "heads": 8, "position": "rope"}, {"kind": "swiglu", "hidden": 8}, norm="rmsnorm", residual="prenorm"
)
LONG = design(
    {"kind": "attention", "heads": 8, "kv_heads": 2, "position": {"kind": "rope"}},
    {"kind": "gated", "hidden": 8, "activation": "silu"},
    norm={"kind": "rms"},
    residual={"kind": "pre_norm"},
)


def test_short_names_make_the_same_design_in_a_dict_and_in_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SHORT))
    (tmp_path / "a.toml").write_text(
        'width = 32\nnorm = "rmsnorm"\nresidual = "prenorm"\n[[layers]]\n'
        'mixer = { kind = "gqa", heads = 8, position = "rope" }\nfeedforward = { kind = "swiglu", hidden = 8 }\n'
    )
    (tmp_path / "a.yaml").write_text(
        "width: 32\nnorm: rmsnorm\nresidual: prenorm\nlayers:\n- mixer: {kind: gqa, heads: 8, position: rope}\n"
        "  feedforward: {kind: swiglu, hidden: 8}\n"
    )
    files = [tmp_path / f"a.{ending}" for ending in ("json", "toml", "yaml")]
    sources: list[Any] = [SHORT, *files]
    assert [load_config(source) for source in sources] == [load_config(LONG)] * 4
    assert load_config(SHORT).dump() == load_config(LONG).dump(), "on disk stands the kind"


@pytest.mark.parametrize(
    ("mixer", "fields"),
    [
        ({"kind": "mha", "heads": 8}, {"kv_heads": 8}),
        ({"kind": "mha", "heads": 8, "kv_heads": 8}, {"kv_heads": 8}),
        ({"kind": "mqa", "heads": 8}, {"kv_heads": 1}),
        ({"kind": "gqa", "heads": 32}, {"kv_heads": 8}),
        ({"kind": "gqa", "heads": 4}, {"kv_heads": 2}),
        ({"kind": "gqa", "heads": 8, "kv_heads": 4}, {"kv_heads": 4}),
        ({"kind": "swa", "heads": 8, "window": 5}, {"window": 5}),
    ],
)
def test_names_of_attention_set_what_they_say(mixer: dict[str, Any], fields: dict[str, Any]) -> None:
    dump = load_config(design(mixer)).dump()["layers"][0]["mixer"]
    assert dump["kind"] == "attention"
    assert dump.items() >= fields.items()


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        ({"kind": "mqa", "heads": 4, "kv_heads": 2}, "kv_heads: 2 contradicts mqa"),
        ({"kind": "mha", "heads": 4, "kv_heads": 2}, "kv_heads: 2 contradicts mha"),
        (
            {"kind": "gqa", "heads": 4, "kv_heads": 1},
            r"kv_heads: 1.*mqa.*gqa",
        ),
        ({"kind": "gqa", "heads": 2}, r"heads: 2 cannot.*gqa.*mha.*mqa"),
        ({"kind": "swa", "heads": 4}, r"window:.*swa"),
        ("gqa", "heads:"),
    ],
)
def test_contradictions_are_refused(mixer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^layers\[0\]\.mixer\.{message}"):
        load_config(design(mixer))


def test_a_name_of_a_feedforward_means_its_activation() -> None:
    for name, activation in (("swiglu", "silu"), ("geglu", "gelu"), ("reglu", "relu")):
        data = design(None, {"kind": name, "hidden": 8})
        assert load_config(data).dump()["layers"][0]["feedforward"]["activation"] == activation
    with pytest.raises(ConfigError, match=r"feedforward\.activation: 'relu'.*swiglu.*'silu'"):
        load_config(design(None, {"kind": "swiglu", "hidden": 8, "activation": "relu"}))


def test_an_unknown_name_is_refused_with_kinds_and_names() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(design({"kind": "mhla", "heads": 4}))
    message = str(caught.value)
    assert "unknown kind 'mhla'; did you mean 'mla'? choices: attention, " in message
    names = sorted(alias for kind in kinds("mixers") for alias in kind_class("mixers", kind).aliases)
    assert {"gqa", "mla"} < set(names)
    assert f"{', '.join(names)}; for your own part, " in message


def test_every_name_has_one_kind() -> None:
    for slot in slots():
        names = [(alias, kind) for kind in kinds(slot) for alias in kind_class(slot, kind).aliases]
        for alias, kind in names:
            assert alias not in kinds(slot)
            assert find_kind(slot, alias) is kind_class(slot, kind)


def test_an_ambiguous_name_is_refused(tmp_path: Path) -> None:
    part = (
        "from heddle.parts.norms import NormConfig\n\n"
        "class SecondConfig(NormConfig):\n    aliases = ('rmsnorm',)\n\n"
        "    def build(self, width, heads=None):\n        return None\n"
    )
    (tmp_path / "second_rms.py").write_text(part)
    load_part(tmp_path / "second_rms.py")
    try:
        with pytest.raises(ConfigError, match=r"^norm: 'rmsnorm'.*second_rms"):
            load_config(SHORT)
    finally:
        forget_parts()


def test_overrides_take_names_and_words() -> None:
    expected = load_config(LONG, ["layers.0.mixer.kv_heads=1", "layers.0.mixer.position.base=50.0"])
    assert load_config(SHORT, ["layers.*.mixer.kind=mqa", "layers.0.mixer.position.base=50.0"]) == expected
    assert load_config(LONG, ["layers.*.mixer=mqa", "layers.0.mixer.position.base=50.0"]) == expected
    assert load_config(LONG, ["layers.*.mixer.kind=gqa"]) == load_config(LONG), "2 of 8 key heads are gqa"
    assert load_config(LONG, ["norm=layernorm"]).norm.kind == "layer"
    assert load_config(LONG, ["residual=sandwich"]).residual.kind == "sandwich"
    activations = [
        load_config(LONG, [f"layers.*.feedforward.kind={name}"]).dump()["layers"][0]["feedforward"]["activation"]
        for name in ("swiglu", "geglu")
    ]
    assert activations == ["silu", "gelu"]
    with pytest.raises(ConfigError, match="kv_heads: 2 contradicts mqa"):
        load_config(LONG, ["layers.*.mixer.kind=mqa", "layers.*.mixer.kv_heads=2"])


def test_names_are_varied() -> None:
    fields = parse_varied_fields(["layers.*.mixer.kind=mha,gqa,mqa,mla"])
    entries = load_entries(["preset:gqa-tiny"], [], varied_fields=fields)
    assert [entry.name for entry in entries] == ["mha", "gqa", "mqa", "mla"]
    assert [entry.is_unmodified for entry in entries] == [False, True, False, False]
    mixers = [entry.config.dump()["layers"][0]["mixer"] for entry in entries]
    assert [mixer["kind"] for mixer in mixers] == ["attention"] * 3 + ["latent_attention"]
    assert [mixer.get("kv_heads") for mixer in mixers] == [4, 2, 1, None]


def test_the_schema_knows_names_and_words() -> None:
    validator = jsonschema.Draft202012Validator(schema())
    validator.validate(SHORT)
    for path, wrong in (("mixer", "gqa"), ("mixer", {"kind": "gqaa", "heads": 8}), ("feedforward", "rope")):
        data = copy.deepcopy(SHORT)
        data["layers"][0][path] = wrong
        assert not validator.is_valid(data)
