"""Every family in and out against transformers: logits, greedy text, files, and each field of its config."""

import copy
import json
import re
from collections.abc import Set
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import heddle
from heddle.exchange.export import export
from heddle.exchange.family import families
from heddle.exchange.family_match import best_match
from heddle.exchange.load import build_weight_map, load, original_design
from heddle.numerics import norms
from heddle.parts.norms import rms
from tests.cases import in_turn
from tests.exchange.cases import CASES, INERT
from tests.exchange.hf_models import (
    LEFT_OUT,
    MASKED,
    WRITTEN_NAMES,
    DoubtfulError,
    auto_class,
    batch,
    config_of,
    distance,
    distances,
    drawn,
    imported,
    our_logits,
    plain,
    read_json,
    reads_padding,
    saved,
    tensors_of,
    their_logits,
    with_config_limits,
    write,
)  # fmt: skip

VARIANTS = [(family, variant) for family, case in CASES.items() for variant in case.variants]
WRITTEN = 64  # tokens of a greedy text
FIRST = [(family, next(iter(case.variants))) for family, case in CASES.items()]
BLOCK_SIZES = {"chunk_size", "mamba_chunk_size", "block_size"}  # of sums; other ones round otherwise
ALIKE = 3e-5  # of a model with one field changed, which may be larger, and its logits with it


def by_day(turn: int) -> list[Any]:
    """Every variant of every family; by day the first variants of every fourth family, and in the night all."""
    others = [pytest.param(*pair, marks=pytest.mark.nightly) for pair in VARIANTS if pair not in FIRST]
    return in_turn(FIRST, turn) + others


TEXTS = [parameter for parameter in by_day(turn=0) if parameter.values[0] not in MASKED]


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_logits(family: str, variant: str) -> None:
    model, case = imported(family, variant).model, CASES[family]
    padded, alone = distances(saved(family, variant)[0], model)
    assert padded <= (0.0 if case.exact and variant not in case.inexact else 1e-5)
    windows = any(mixer is not None and mixer.window is not None for mixer in model.mixers())
    assert alone <= (0.0 if case.exact and not windows and variant not in case.inexact else 1e-5)


@pytest.mark.parametrize(("family", "variant"), by_day(turn=3))
def test_logits_in_bfloat16(family: str, variant: str) -> None:
    """Theirs bit for bit, or else as near to those in float32 as theirs are."""
    want, got, true = in_bfloat16(family, variant)
    if CASES[family].narrow and variant not in CASES[family].inexact:
        assert torch.equal(got, want)
    assert excess(got, want, true) <= 1.25


def test_more_rounding_than_theirs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = norms.rms_norm
    monkeypatch.setattr(rms, "rms_norm", lambda *inputs: exact(*inputs).to(torch.float8_e4m3fn).bfloat16())
    want, got, true = in_bfloat16("mixtral", "plain")
    assert excess(got, want, true) > 1.25


def in_bfloat16(family: str, variant: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Their logits [tokens, vocab] in bfloat16, ours, and theirs in float32."""
    wide, folder = saved(family, variant)
    theirs = with_config_limits(
        auto_class(family).from_pretrained(folder, dtype=torch.bfloat16, **plain(family)).eval()
    )
    ours = load(folder, dtype=torch.bfloat16).model
    tokens, mask, layout = batch()
    logits = their_logits(theirs, tokens, mask), our_logits(ours, tokens, layout), their_logits(wide, tokens, mask)
    want, got, true = (each[mask.bool()] for each in logits)
    return want, got, true


def excess(got: torch.Tensor, want: torch.Tensor, true: torch.Tensor) -> float:
    """How many times as far from `true` as `want` the logits `got` of a token are, by the median of all tokens.

    Token by token: rounding to bfloat16 may choose another expert, on either side, which moves all tokens after it.
    """
    ours, theirs = ((logits - true).abs().median(-1).values for logits in (got, want))
    return float((ours / theirs).median())


# Their masks of padded rows ask the first layer how long the text is, and theirs may be one without a cache of keys.
MASKED_FROM_FIRST = frozenset({"minimax"})


@pytest.mark.parametrize(("family", "variant"), TEXTS)
def test_greedy_text(family: str, variant: str) -> None:
    tokens, mask, layout = batch()
    theirs, _ = saved(family, variant)
    theirs.generation_config.eos_token_id = None  # which they would not write before the last token
    prompts = [row[position >= 0].tolist() for row, position in zip(tokens, layout.positions, strict=True)]
    pieces = [(tokens, mask)]
    if reads_padding(theirs) or family in MASKED_FROM_FIRST:
        pieces = [
            (row[:, -int(real.sum()) :], real[:, -int(real.sum()) :])
            for row, real in zip(tokens.split(1), mask.split(1), strict=True)
        ]
    length = {"max_new_tokens": WRITTEN, "min_new_tokens": WRITTEN, "num_beams": 1}
    written = [theirs.generate(rows, attention_mask=real, **length)[:, rows.shape[1] :] for rows, real in pieces]
    ours = heddle.generate(imported(family, variant).model, prompts, max_new_tokens=WRITTEN)
    assert ours == torch.cat(written).tolist()


@pytest.mark.parametrize("family", sorted(MASKED))
def test_a_masked_language_model_writes_no_text(family: str) -> None:
    model = imported(family, next(iter(CASES[family].variants))).model
    with pytest.raises(heddle.errors.ConfigError, match="bidirectional"):
        heddle.generate(model, [[5, 9]], max_new_tokens=2)


@pytest.mark.parametrize(("family", "variant"), by_day(turn=1))
def test_exported_again_it_is_the_same_files(family: str, variant: str, tmp_path: Path) -> None:
    theirs, folder = saved(family, variant)
    result = export(
        imported(family, variant).model, tmp_path / "out", imported=imported(family, variant), max_shard_bytes=50_000
    )
    assert result.family.model_type == family
    mine, original = tensors_of(tmp_path / "out"), tensors_of(folder)
    original = {re.sub(*WRITTEN_NAMES.get(family, ("", "")), name): tensor for name, tensor in original.items()}
    original = {name: each for name, each in original.items() if not re.search(LEFT_OUT.get(family, "^$"), name)}
    # A tensor that its class keeps beside the one that it reads: the bias of an untied head.
    rules, beside = (
        build_weight_map(result.family, imported(family, variant).model).rules,
        result.family.ignored_tensors,
    )
    unread = {name for name in original if name not in rules and name.startswith(beside)}
    original = {name: tensor for name, tensor in original.items() if name not in unread}
    assert set(mine) == set(original)
    for name, tensor in original.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name
    before = theirs.config.to_dict()
    blocks = {name: before[name] for name in BLOCK_SIZES & before.keys()}  # which an export does not keep
    again = auto_class(family).from_pretrained(tmp_path / "out", **plain(family), **blocks)
    again = with_config_limits(again.eval())
    assert type(again) is type(theirs)
    tokens, _, _ = batch()
    weights = again.state_dict()
    kept = {name: tensor for name, tensor in theirs.state_dict().items() if name not in unread}
    assert all(torch.equal(weights[name], tensor) for name, tensor in kept.items())
    # In float64, as where weights begin in memory decides the last bit of sums; whole rows, as padding has NaN there.
    exact = family != "xglm"  # whose class bounds scores by a number that is infinite in float32
    pair = (again.double(), copy.deepcopy(theirs).double()) if exact else (again, theirs)
    moved = their_logits(pair[0], tokens) - their_logits(pair[1], tokens)
    assert float(moved.abs().max()) <= (1e-9 if exact else 2e-6)
    config = again.config.to_dict()
    ignored = {"dtype", "architectures", "transformers_version", "_name_or_path", "heddle", "rope_parameters"}
    ignored |= {"attention_types"}  # GPT-Neo's spelling of attention_layers
    for listed, name in {"mlp_layer_types": "first_k_dense_replace", "moe_layers": "interleave_moe_layer_step"}.items():
        ignored |= {name} if before.get(listed) else set()  # the list counts
    # What this variant computes nothing with is not in its design.
    ignored |= {name.removeprefix(f"{variant}:") for name in CASES[family].inert if name.startswith(f"{variant}:")}
    for table in (config, before):
        for name in ("attn_config", "ffn_config"):  # inner tables of MPT and DBRX have one, too
            table.get(name, {}).pop("dtype", None)
    assert {k: config[k] for k in before if k not in ignored} == {k: v for k, v in before.items() if k not in ignored}


@pytest.mark.parametrize(("family", "variant"), by_day(turn=2))
def test_back_and_forth_design_and_weights_are_bit_equal(family: str, variant: str, tmp_path: Path) -> None:
    source = imported(family, variant)
    model = heddle.build(source.model.config.replace(initialization=source.model.config.initialization), seed=5)
    export(model, tmp_path / "out", imported=source)
    again = load(tmp_path / "out")
    assert again.model.config == model.config
    assert again.preserved_config == source.preserved_config
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.model.get_parameter(name)), name


def numbers(data: dict[str, Any], path: str = "") -> list[str]:
    """The paths of all numbers and truth values of a config, inner tables and lists of numbers among them."""
    result = []
    for name, value in data.items():
        if isinstance(value, dict):
            result += numbers(value, f"{path}{name}.")
        elif isinstance(value, bool | int | float) or (
            isinstance(value, list) and value and not isinstance(value[0], str | list)
        ):
            result.append(path + name)
    return result


def changed(value: Any) -> list[Any]:
    """Other values of a field, the first that both sides can build is taken."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, list):
        return [[first, *value[1:]] for first in changed(value[0])]
    if isinstance(value, int):
        others = [value * 2, value + 1, value - 1, value * 7, value // 2, 1] if value else [1, 5]
        return [other for other in others if other != value]
    return [value * 1.5, value * 0.5, value * 2.0] if value else [0.5]


def holds(named: Set[str], variant: str, path: str) -> bool:
    """Whether a field is named, by itself or with its variant."""
    return path in named or f"{variant}:{path}" in named


FIELDS = [
    (family, variant, path)
    for family, variant in VARIANTS
    for path in numbers(json.loads(config_of(family, variant).to_json_string()))
    if path.rpartition(".")[2] not in INERT or holds(CASES[family].live, variant, path)
]


FIRST_OF_ALL = {path.rpartition(".")[2]: (family, variant, path) for family, variant, path in reversed(FIELDS)}
FIRST_WITH = {(family, path): variant for family, variant, path in reversed(FIELDS)}
# By day a field in the first family that has it, at night in all families, and in the soak in every variant.
IS_FIRST = {field: FIRST_OF_ALL[field[2].rpartition(".")[2]] == field for field in FIELDS}
BY_DAY = [field for field in FIELDS if IS_FIRST[field]]
OTHERS = [field for field in FIELDS if not IS_FIRST[field]]


@cache
def unchanged_logits(family: str, variant: str) -> torch.Tensor:
    """Their logits of a variant as it is."""
    tokens, mask, _ = batch()
    return their_logits(saved(family, variant)[0], tokens, mask)


@pytest.mark.parametrize(("family", "variant", "path"), BY_DAY)
def test_each_number_of_the_config_changes_both_sides_alike(family: str, variant: str, path: str) -> None:
    """One that nobody reads leaves the logits as they were, which fails; other shapes get weights of their own."""
    theirs, folder = saved(family, variant)
    config = read_json(folder)
    *outer, last = path.split(".")
    if holds(CASES[family].fixed, variant, last):
        for value in changed(_at(config, outer)[last]):
            data = json.loads(json.dumps(config))
            _at(data, outer)[last] = value
            with pytest.raises(heddle.errors.ConfigError, match=last):
                original_design(data, families()[family], "config.json")
        return
    errors = []
    for value in changed(_at(config, outer)[last]):
        data = json.loads(json.dumps(config))
        _at(data, outer)[last] = value
        follow(data, last, value)
        try:
            other = drawn(type(theirs.config).from_dict(data))
            same = shapes(other) == shapes(theirs)
            if same:
                derived = re.compile(LEFT_OUT.get(family, "^$"))
                kept = {name: each for name, each in theirs.state_dict().items() if not derived.search(name)}
                other.load_state_dict(kept, strict=not LEFT_OUT.get(family))
            target = write(other, max_shard_size="1GB")
            (target / "config.json").write_text(json.dumps(data | {"dtype": "float32"}))
            ours = load(target).model
            tokens, mask, _ = batch()
            moved = not torch.equal(their_logits(other, tokens, mask), unchanged_logits(family, variant)) or not same
        except Exception as error:  # one side refuses such a value: try the next
            errors.append(error)
            continue
        try:
            apart = distance(other, ours)
        except DoubtfulError as error:
            errors.append(error)
            continue
        assert apart <= ALIKE, f"{family}, {variant}: {path}"
        assert moved != holds(CASES[family].inert, variant, path), (
            f"{path}: {value!r} {'changes' if moved else 'does not change'} logits"
        )
        return
    assert holds(CASES[family].refused, variant, path), f"{path}: every other value is refused: {errors}"


@pytest.mark.nightly
@pytest.mark.parametrize("family", CASES)
def test_each_number_changes_both_sides_alike_in_every_family(family: str) -> None:
    for field in OTHERS:
        if field[0] == family and FIRST_WITH[family, field[2]] == field[1]:
            test_each_number_of_the_config_changes_both_sides_alike(*field)


@pytest.mark.soak
@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_each_number_changes_both_sides_alike_in_every_variant(family: str, variant: str) -> None:
    for field in OTHERS:
        if field[:2] == (family, variant) and FIRST_WITH[family, field[2]] != variant:
            test_each_number_of_the_config_changes_both_sides_alike(*field)


# expand · hidden_size is heads · head_dim.
INNER_WIDTHS = {
    "mamba2": ("expand", "num_heads", "head_dim"),
    "granitemoehybrid": ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
    "bamba": ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
}


LISTS = (
    "layer_types",
    "mlp_layer_types",
    "layer_rope_theta",
    "indexer_types",
    "num_attention_heads_per_layer",
    "intermediate_size",
    "activation_sparsity_pattern",
)  # an entry for each layer


def shapes(model: Any) -> dict[str, torch.Size]:
    """Of what its state dict holds, each tensor once."""
    own = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return {name: tensor.shape for name, tensor in model.state_dict().items() if name in own}


def follow(data: dict[str, Any], changed: str, value: Any) -> None:
    """Make lists as long as the changed field asks; drop what both sides find by it; say alike what is said twice."""
    rope = data.get("rope_parameters", {})
    for table in (data, rope):
        if changed == "partial_rotary_factor" and changed in table:
            table[changed] = value
    if changed == "num_hidden_layers" and data.get("per_layer_config"):
        depth, own = len(data["layer_types"]), data["per_layer_config"]
        data["per_layer_config"] = {str(i): own[str(i % depth)] for i in range(value) if str(i % depth) in own}
    for name in LISTS:
        if changed == "num_hidden_layers" and isinstance(data.get(name), list):
            data[name] = (data[name] * data[changed])[: data[changed]]
    if changed == "hidden_size" and data["model_type"] == "roformer":
        data["embedding_size"] = value
    if changed == "vocab_size" and "vocab_size_per_layer_input" in data:
        data["vocab_size_per_layer_input"] = value
    if changed == "multi_query":
        data.pop("num_key_value_heads", None)
    if changed.endswith(("_attn_alpha_factor", "_attn_beta_factor")):
        data |= {re.sub("^[a-z]+", kind, changed): value for kind in ("full", "linear")}
    if changed == "rope_theta" and "attn_config" in data:  # of DBRX, which says it twice
        for table in (data["attn_config"], rope):
            table[changed] = value
    if changed == "qk_rope_head_dim" and data["model_type"] != "deepseek_v4":
        data.pop("head_dim", None)
    if changed in ("hidden_size", "num_attention_heads") and data["model_type"] in ("cohere2", "cohere_compass_text"):
        data.pop("head_dim")  # transformers writes it, and goes by the two
    if data["model_type"] in INNER_WIDTHS:
        expand, heads, head_dim = INNER_WIDTHS[data["model_type"]]
        if changed in (heads, head_dim):
            data[expand] = data[heads] * data[head_dim] // data["hidden_size"]
        data[heads] = data[expand] * data["hidden_size"] // data[head_dim]
    if changed == "head_dim" and "long_factor" in rope:
        for name in ("short_factor", "long_factor"):
            rope[name] = (rope[name] * data["head_dim"])[: data["head_dim"] // 2]


def _at(data: dict[str, Any], path: list[str]) -> dict[str, Any]:
    for name in path:
        data = data[name]
    return data


@pytest.mark.parametrize("family", CASES)
def test_a_field_that_nobody_knows_is_refused_by_name(family: str, tmp_path: Path) -> None:
    _, folder = saved(family, next(iter(CASES[family].variants)))
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(read_json(folder) | {"attention_warp": 3}))
    with pytest.raises(heddle.errors.ConfigError, match="'attention_warp'"):
        load(tmp_path)


@pytest.mark.parametrize(("family", "variant"), by_day(turn=3))
def test_every_parameter_has_its_rule_and_every_family_fits_its_own(family: str, variant: str) -> None:
    model = imported(family, variant).model
    assert best_match(model.config, family).family.model_type == family
    assert config_of(family, variant).model_type == family
