"""A part whose kind alone changes: every kind of every slot can come in the place of every other."""

from itertools import permutations
from typing import Any

import pytest

from heddle.config import DesignError, kind_class, kinds
from heddle.errors import ConfigError
from heddle.model.load_config import apply_override, load_config
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import FeedforwardConfig
from heddle.parts.mixers import MixerConfig
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.positions import AdditivePositionConfig, MixerPositionConfig
from tests.cases import written

HEADS = {"heads": 4, "position": {"kind": "rope"}}
# What files of the field usually give, and another kind cannot have: it must not be in the way.
MIXERS: dict[str, dict[str, Any]] = {
    "attention": {**HEADS, "kv_heads": 2, "bias": "qkv", "gate": "head", "qk_norm": "per_head", "sink": True},
    "compressed_attention": {"window": 8, "compress_ratio": 4, "overlap": True, "top_k": 2, "groups": 2},
    "cross_attention": {"normalization": "double_softmax"},
    "gated_delta": {"key_heads": 2},
    "kda": {"gate_rank": 4},
    "latent_attention": {"kv_rank": 12, "nope_dim": 10, "rope_dim": 6, "value_dim": 14},
    "linear_attention": {"feature_map": "learned"},
    "mamba2": {"state_size": 8, "groups": 2},
    "native_sparse_attention": {"block": 4, "top_k": 5, "window": 8},
    "pair": {"first": {"kind": "attention", **HEADS}, "second": {"kind": "mamba2", "heads": 4}},
    "path_attention": {"vector_rank": 6},
    "retention": {"decay": "learned", "gate": "silu"},
    "rwkv7": {"decay_rank": 4, "gate_rank": 4},
}
FEEDFORWARDS: dict[str, dict[str, Any]] = {
    "gated": {"hidden": 24, "activation": "swiglu_clamped", "limit": 3.0},
    "mlp": {"activation": "relu2", "bias": True},
    "moe": {"experts": 4, "shared": 1, "bias": "shared", "activation": "silu"},
}


def design(mixer: dict[str, Any] | None, feedforward: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"width": 48, "layers": [{"mixer": mixer, "feedforward": feedforward}], **fields}


GATED = {"kind": "gated", "hidden": 24}


def in_place(name: str, part: dict[str, Any], kind: str) -> dict[str, Any]:
    """A part of a kind as it comes in the place of another one."""
    data = {"width": 48, "layers": [{name: dict(part)}]}
    apply_override(data, f"layers.0.{name}.kind={kind}")
    placed: dict[str, Any] = data["layers"][0][name]  # type: ignore[index]
    return placed


def mixer(kind: str) -> dict[str, Any]:
    """A mixer of a kind in the place of attention, with what is usually given."""
    return in_place("mixer", {**HEADS, "kind": "attention", "kv_heads": 2}, kind) | MIXERS.get(kind, {})


def feedforward(kind: str) -> dict[str, Any]:
    """The same in the place of a gated one; with what it needs as a case has it."""
    return written(kind) | in_place("feedforward", GATED, kind) | FEEDFORWARDS.get(kind, {})


def widths_of(part: MixerConfig) -> dict[str, Any]:
    """What follows from a width of 48, written out, in the mixers within a mixer too."""
    resolved = part.resolved(BuildContext(48, RMSConfig()))
    inner = {name: value for name in type(part).model_fields if isinstance(value := getattr(part, name), MixerConfig)}
    own = {name: value for name in ("head_dim", "hidden") if (value := getattr(resolved, name, None)) is not None}
    return own | {name: each.dump() | widths_of(each) for name, each in inner.items()}


@pytest.mark.parametrize("before", kinds("mixers"))
def test_every_mixer_can_come_in_the_place_of_every_other(before: str) -> None:
    """One without heads, in the place of which another asks for them, says so."""
    [first] = load_config(design(mixer(before), GATED)).layers
    assert first.mixer is not None
    has_heads = first.mixer.template.head_shape(48) != (0, 0)
    widths = widths_of(first.mixer)
    for data in (design(mixer(before), GATED), design(mixer(before) | widths, GATED) | {"width": 50}):
        load_config(data)  # no head_dim follows from 50
        asks = {}
        for after in kinds("mixers"):
            try:
                config = load_config(data, [f"layers.*.mixer.kind={after}"])
            except DesignError as error:
                asks[after] = error.path
            else:
                assert config.layers[0].mixer is not None
                assert config.layers[0].mixer.kind == after
        assert not has_heads or asks == {}
        assert all(path.endswith(".heads") for path in asks.values())


def test_a_mixer_of_heads_in_the_place_of_one_without_asks_for_them() -> None:
    data = design(mixer("short_conv"), GATED)
    with pytest.raises(DesignError, match=r"mixer\.heads:"):
        load_config(data, ["layers.*.mixer.kind=attention"])
    assert load_config(data, ["layers.*.mixer={kind: attention, heads: 4}"]).layers[0].mixer is not None


@pytest.mark.parametrize("before", ["attention", "compressed_attention", "mamba2", "native_sparse_attention"])
def test_every_short_name_of_a_mixer_can_come_in_the_place_of_others(before: str) -> None:
    """Only swa asks for a number."""
    for kind in kinds("mixers"):
        for alias in kind_class("mixers", kind).aliases:
            overrides = [f"layers.*.mixer.kind={alias}", *(["layers.*.mixer.window=8"] if alias == "swa" else [])]
            placed = load_config(design(mixer(before), GATED), overrides).layers[0].mixer
            assert placed is not None
            assert placed.kind == kind


def test_groups_of_another_kind_are_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Mamba-2's groups share keys; those of compressed attention share an output projection."""
    placed = load_config(design(mixer("mamba2"), GATED), ["layers.*.mixer.kind=csa"]).layers[0].mixer
    assert placed is not None
    assert "groups" not in placed.dump()
    assert "csa: groups left out, as it does not fit" in capsys.readouterr().err
    drawn = load_config(design(mixer("mamba2"), GATED), ["layers.*.mixer.kind=csa", "layers.*.mixer.groups=2"])
    resolved: Any = drawn.resolved().layers[0].mixer
    assert (resolved.groups, resolved.out_rank) == (2, 6)


@pytest.mark.parametrize(("before", "after"), list(permutations(kinds("feedforwards"), 2)))
def test_every_feedforward_can_come_in_the_place_of_every_other(before: str, after: str) -> None:
    """One without hidden channels is in the way of those that need their number, and so are fields of its own."""
    data = design(mixer("attention"), feedforward(before))
    [first] = load_config(data).layers
    assert isinstance(first.feedforward, FeedforwardConfig)
    cls = kind_class("feedforwards", after)
    known = {*type(first.feedforward).model_fields, *cls.default_fields(first.feedforward, 48)}
    needed = [name for name, field in cls.model_fields.items() if field.is_required() and name not in known]
    sizes = [f"layers.0.feedforward.{name}={feedforward(after)[name]}" for name in needed]
    config = load_config(data, [f"layers.0.feedforward.kind={after}", *sizes]).layers[0].feedforward
    assert isinstance(config, FeedforwardConfig)
    assert config.kind == after
    hidden = {first.feedforward.active_hidden, config.active_hidden}
    assert len(hidden - {None}) == 1 or needed, "a token uses as many channels as before"


@pytest.mark.parametrize("slot", ["residual", "norm"])
def test_every_wiring_and_norm_can_come_in_the_place_of_every_other(slot: str) -> None:
    data = design(mixer("attention"), GATED, residual={"kind": "pre_norm", "dropout": 0.1}, norm={"kind": "rms"})
    for before, after in permutations(kinds(f"{slot}s"), 2):
        config = load_config(data, [f"{slot}.kind={before}", f"{slot}.kind={after}"])
        assert getattr(config, slot).kind == after
    assert load_config(data, ["residual.kind=parallel"]).residual.dropout == 0.1


def test_every_position_can_come_in_the_place_of_every_other() -> None:
    for base, path in (
        (MixerPositionConfig, "layers.0.mixer.position"),
        (AdditivePositionConfig, "embedding.position"),
    ):
        fitting = [kind for kind in kinds("positions") if issubclass(kind_class("positions", kind), base)]
        for before, after in permutations(fitting, 2):
            start = dict(written(before))
            data = design({"kind": "attention", "heads": 4}, GATED)
            where = data["layers"][0]["mixer"] if base is MixerPositionConfig else data.setdefault("embedding", {})
            where["position"] = start
            load_config(data, [f"{path}.kind={after}"])


def test_what_is_chosen_is_said_and_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    latent = "layers.*.mixer.kind=latent_attention"
    chosen = load_config("preset:gqa-tiny", [latent]).dump()["layers"][0]["mixer"]
    dropped = "; kv_heads 2 dropped, as latent_attention has no such field; position rope kept\n"
    said = "latent_attention: kv_rank 64, nope_dim 32, rope_dim 16 chosen; set them to change"
    assert capsys.readouterr().err == said + dropped
    assert (chosen["kv_rank"], chosen["nope_dim"], chosen["rope_dim"]) == (64, 32, 16)
    for overrides in ([latent, "layers.*.mixer.kv_rank=20"], ["layers.*.mixer.kv_rank=20", latent]):
        changed = load_config("preset:gqa-tiny", overrides).dump()["layers"][0]["mixer"]
        assert changed == chosen | {"kv_rank": 20}
        assert capsys.readouterr().err == said.replace("kv_rank 64, ", "") + dropped
    load_config("preset:local_global-tiny", [latent])
    assert "kv_heads 2, window 64 dropped" in capsys.readouterr().err
    load_config("preset:gqa-tiny", ["layers.*.mixer.kind=retention", "layers.*.feedforward.kind=swiglu"])
    assert capsys.readouterr().err == (
        "retention: kv_heads 2 dropped, as retention has no such field; position rope kept\n"
    )


@pytest.mark.parametrize("before", kinds("mixers"))
def test_every_field_that_a_mixer_keeps_of_another_is_said(before: str) -> None:
    """Those that both need, such as heads, are not."""
    given = mixer(before)
    for after in kinds("mixers"):
        data = design(dict(given), GATED)
        replacements = apply_override(data, f"layers.0.mixer.kind={after}")
        fields = kind_class("mixers", after).model_fields
        kept = {
            name
            for name, value in data["layers"][0]["mixer"].items()
            if name != "kind" and given.get(name) == value and not fields[name].is_required()
            and value != fields[name].default
        }  # fmt: skip
        assert all(kept <= {*each.kept, *each.chosen} for each in replacements)
        assert not kept or replacements or before == after


def test_latent_attention_leaves_its_values_to_gqa_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    changed = load_config("preset:mla-medium", ["layers.*.mixer.kind=gqa"]).dump()["layers"][0]["mixer"]
    said = capsys.readouterr().err
    assert (changed["value_dim"], changed["kv_heads"]) == (64, 3)
    assert "value_dim 64" in said
    assert "kv_heads 3" in said, "the preset has 4"
    load_config("preset:mla-medium", ["layers.*.mixer.kind=mqa"])
    assert "kv_heads" not in capsys.readouterr().err, "mqa has no other number"


@pytest.mark.parametrize(("text", "count", "length"), [("32k", 32_000, 32_768), ("1M", 10**6, 2**20)])
def test_a_number_with_a_unit_is_refused_with_both_readings(text: str, count: int, length: int) -> None:
    with pytest.raises(ConfigError, match=rf"^vocab_size: .*'{text}'.* {count}, or {length} "):
        load_config("preset:gqa-tiny", [f"vocab_size={text}"])
    with pytest.raises(ConfigError, match="'32k'") as caught:
        load_config("preset:gqa-tiny", ["layers.*.feedforward.activation=32k"])
    assert "32000" not in str(caught.value)


def test_what_does_not_fit_is_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    rotary = {"kind": "attention", "heads": 4, "position": {"kind": "rope", "base": 50.0, "rotary_dim": 12}}
    position = load_config(design(rotary, GATED), ["layers.0.mixer.kind=mla"]).dump()["layers"][0]["mixer"]["position"]
    assert position == {"kind": "rope", "base": 50.0, "layout": "half"}, "only the dims did not fit"
    assert "mla: position.rotary_dim" in capsys.readouterr().err
    alibi = {"kind": "attention", "heads": 4, "position": {"kind": "alibi"}}
    assert "position" not in load_config(design(alibi, GATED), ["layers.0.mixer=mla"]).dump()["layers"][0]["mixer"]
    assert "mla: position left out, as it does not fit" in capsys.readouterr().err


def test_faults_of_the_design_are_named_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    indivisible = design({"kind": "attention", "heads": 5}, GATED)
    with pytest.raises(ConfigError, match=r"layers\[0\]\.mixer\.heads: 5.*48"):
        load_config(indivisible, ["layers.0.mixer.kind=gated_delta"])
    with pytest.raises(ConfigError, match="'learned'"):
        load_config(design(mixer("attention"), GATED), ["layers.0.mixer.position.kind=learned"])
    assert capsys.readouterr().err == ""


def test_a_name_is_resolved_before_its_kind_changes() -> None:
    data = design({"kind": "mqa", "heads": 4}, {"kind": "swiglu", "hidden": 8})
    changed = load_config(data, ["layers.0.mixer.kind=attention", "layers.0.feedforward.kind=mlp"]).dump()["layers"][0]
    assert (changed["mixer"]["kv_heads"], changed["feedforward"]["activation"]) == (1, "silu")


def test_a_field_that_no_kind_has_is_still_refused() -> None:
    with pytest.raises(ConfigError, match="'windw'"):
        load_config(design(mixer("attention"), GATED), ["layers.0.mixer.windw=3", "layers.0.mixer.kind=mla"])


def test_the_layers_of_an_encoder_have_its_width() -> None:
    inner = {"width": 16, "layers": [{"mixer": {"kind": "attention", "heads": 2}}]}
    data = design({"kind": "cross_attention", "heads": 4}, GATED, encoder=inner)
    replacements = apply_override(data, "encoder.layers.*.mixer.kind=mla")
    assert replacements[0].chosen == {"kv_rank": 8, "nope_dim": 8}


def test_a_kind_that_forgets_its_fields_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: without `default_fields` the kind alone is not enough."""
    cls = kind_class("mixers", "latent_attention")
    monkeypatch.setattr(cls, "default_fields", classmethod(lambda cls, previous, width: {}))
    assert issubclass(cls, MixerConfig)
    with pytest.raises(ConfigError, match="kv_rank:"):
        load_config(design(mixer("attention"), GATED), ["layers.0.mixer.kind=latent_attention"])


ATTENTION = {"kind": "attention", "heads": 4}
GROUPS = {"vocab_size": 50, "width": 24, "layers": [
    {"mixer": ATTENTION}, {"repeat": 2, "layers": [{"mixer": ATTENTION}, {"layers": [{"mixer": ATTENTION}]}]},
]}  # fmt: skip


def test_a_star_reaches_the_layers_of_groups() -> None:
    config = load_config(GROUPS, ["layers.*.mixer.heads=6", "layers.1.layers.0.mixer.heads=3"])
    mixers = [layer.mixer.dump() for _, layer in config.expand() if layer.mixer is not None]
    assert [mixer["heads"] for mixer in mixers] == [6, 3, 6, 3, 6]
    assert load_config(GROUPS, ["layers.*.repeat=3"]).layers[1].repeat == 3
    changed = load_config(GROUPS, ["layers.*.mixer=linear_attention"])
    assert {getattr(layer.mixer, "kind", None) for _, layer in changed.expand()} == {"linear_attention"}


def test_a_group_that_is_named_as_a_layer_names_its_layers() -> None:
    with pytest.raises(
        DesignError, match=r"layers\[1\] is a group .*layers\.1\.layers\.0\.mixer\.heads.*layers\.\*\.mixer"
    ):
        load_config(GROUPS, ["layers.1.mixer.heads=6"])


def test_a_list_of_entries_is_each_of_them() -> None:
    layers = [
        {"mixer": {"kind": "attention", **HEADS}, "feedforward": {"kind": "gated", "hidden": 24}} for _ in range(3)
    ]
    data: dict[str, Any] = {"width": 24, "vocab_size": 7, "layers": layers}
    one_by_one = [f"layers.{index}.mixer.window={8 + step}" for step in (0, 1) for index in (0, 2)]
    assert load_config(data, ["layers.0,2.mixer.window=8", "layers.2,0.mixer.window=9"]) == load_config(
        data, one_by_one
    )
    assert load_config(data, ["layers.0,2.mixer.window=8"]).layers[1].mixer == load_config(data).layers[1].mixer


@pytest.mark.parametrize(
    ("step", "where"),
    [
        ("5", "not '5'; an entry is a group of equal layers: layer 5 is in entry 1"),
        ("0,3", "not '3'; an entry is a group of equal layers: layer 3 is in entry 1"),
        ("6", "not '6'"),
        ("0,x", "not '0,x'"),
    ],
)
def test_a_layer_taken_for_an_entry_is_told_its_entry(step: str, where: str) -> None:
    layer = {"repeat": 3, "mixer": {"kind": "attention", **HEADS}, "feedforward": {"kind": "gated", "hidden": 24}}
    with pytest.raises(ConfigError) as caught:
        load_config({"width": 24, "vocab_size": 7, "layers": [layer, layer]}, [f"layers.{step}.mixer.window=8"])
    assert str(caught.value).endswith(f"layers has entries 0 to 1, a list such as 0,2, or *, {where}")
