"""Layers that are visited several times: a plain loop, copies of the weights, states, sizes, files, and refusals."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import heddle
from heddle.cli.main import run_command
from heddle.config import parse_config
from heddle.conversion.convert import Conversion
from heddle.conversion.targets import parse_rewrite
from heddle.conversion.weights import ModelWeights
from heddle.data.samples import Batch
from heddle.errors import ConfigError
from heddle.exchange.family import families
from heddle.exchange.family_match import chosen_match, match_family
from heddle.exchange.gguf.match import match_architecture
from heddle.lab.explore.choices import explorer_design
from heddle.lab.plan.costs import model_cost
from heddle.laws.harness import model_under_test, new_state, random_tokens
from heddle.laws.shrink import shrink
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.copies import compiled, quantize_weights
from heddle.model.decoder import Decoder, Layer, build
from heddle.model.lora import adapters, add_lora, merge_lora
from heddle.model.size import size
from heddle.parts.layout import Layout
from heddle.parts.modules.linear import AdaptedLinear, VisitAdapter
from heddle.storage.checkpoints import checkpoint_folder
from heddle.storage.folder import tensors_sha256
from heddle.storage.model import WEIGHTS_FILE, load_lora, save_lora
from heddle.training import loop
from heddle.training.loop import train
from heddle.training.optimizer import build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients
from tests import small
from tests.analysis.explorer.sizes import declared_size
from tests.cases import SHARED, Data, attention, by_day, case, delta, design, differential, layer
from tests.conversion.exactness import converted_model, difference, source_model
from tests.laws.planting import reads
from tests.parts.loops import Errors, assert_none
from tests.storage.shared import Died

GROUP: Data = {"repeat": 3, "shared": True, "layers": [layer(attention(kv_heads=2)), delta(3, repeat=1)]}
RESIDUALS = ("pre_norm", "post_norm", "deep_norm", "sandwich", "reordered", "residual_dual", "parallel")


def random_entries(draw: random.Random, depth: int = 0) -> list[Data]:
    """Entries of layers, some nested, some shared; those with `shared` are visited twice at least."""
    entries = []
    for _ in range(draw.randint(1, 2)):
        mixer = draw.choice((
            attention(kv_heads=draw.choice((1, 2, 4)), window=draw.choice((None, 2, 3)), sink=draw.random() < 0.3),
            attention(heads=3, position=None, softcap=2.0, qk_norm="head"),
            {"kind": "gated_delta", "heads": 3},
            {"kind": "mamba2", "heads": 4, "state_size": 3},
            {"kind": "short_conv", "conv_kernel": 3},
        ))  # fmt: skip
        forward = draw.choice((
            {"kind": "mlp", "hidden": 10}, {"kind": "gated", "hidden": 9},
            {"kind": "moe", "hidden": 5, "experts": 3, "top_k": 2},
        ))  # fmt: skip
        entry = layer(mixer, forward, repeat=draw.randint(1, 3))
        if depth < 2 and draw.random() < 0.4:
            entry = {"repeat": draw.randint(1, 3), "layers": random_entries(draw, depth + 1)}
        if draw.random() < 0.5:
            entry |= SHARED | {"repeat": max(2, entry["repeat"])}
        entries.append(entry)
    return entries


def random_design(seed: int) -> ModelConfig:
    draw = random.Random(seed)
    entries = random_entries(draw)
    while sum(parse_config(LayerConfig, entry).count() for entry in entries) > 12:
        entries = random_entries(draw)
    if not any(parse_config(LayerConfig, entry).has_shared for entry in entries):
        entries = [{"repeat": 2, "shared": True, "layers": entries}]
    return parse_config(ModelConfig, design(*entries, residual=draw.choice(RESIDUALS)))


def with_adapters(config: ModelConfig, seed: int) -> ModelConfig:
    """The design with adapters in about half of the layers that are visited several times."""
    draw = random.Random(seed)

    def adapted(entry: Data, looped: bool) -> Data:
        looped = looped or entry.get("shared", False)
        if "layers" in entry:
            return entry | {"layers": [adapted(inner, looped) for inner in entry["layers"]]}
        return entry | ({"adapter_rank": draw.randint(1, 4)} if looped and draw.random() < 0.6 else {})

    data = config.dump()
    found = parse_config(ModelConfig, data | {"layers": [adapted(each, False) for each in data["layers"]]})
    return found if "adapter_rank" in str(found.dump()) else with_adapters(config, seed + 100)


def adapted_design(seed: int) -> ModelConfig:
    """A random design with adapters, of few visits and of a residual that does not amplify rounding."""
    designs, amplifying = (random_design(each) for each in range(seed, 1000, 44)), ("residual_dual", "reordered")
    config = next(each for each in designs if each.depth <= 6 and each.residual.kind not in amplifying)
    return with_adapters(config, seed)


def with_random_adapters(config: ModelConfig) -> Decoder:
    model, generator = model_under_test(config), torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, VisitAdapter):
            torch.nn.init.normal_(module.b, std=0.1, generator=generator)
    return model


def unshared(config: ModelConfig) -> ModelConfig:
    """The design whose layers have weights of their own, and no adapters."""
    layers = tuple(each.replace(repeat=1, shared=False, adapter_rank=None) for _, each in config.expand())
    return config.replace(layers=layers)


def with_copies(model: Decoder) -> tuple[Decoder, dict[str, list[str]]]:
    """A model of the unshared design with copies of the weights, and the names of the copies of each parameter.

    Adapters are added to the copies; they themselves have none.
    """
    other = build(unshared(model.config), dtype=torch.float64).train(model.training)
    parameters, copied = dict(other.named_parameters()), dict[str, list[str]]()
    for name, parameter in model.named_parameters():
        if ".adapter." not in name:
            names = copied[name] = model.visits(name)
            for each in names:
                parameters[each].data.copy_(parameter.detach())
    for path, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            parameters[f"{path}.weight"].data += (module.adapter.b @ module.adapter.a).detach()
    assert sorted(each for names in copied.values() for each in names) == sorted(parameters)
    return other, copied


def plain_loop(model: Decoder, tokens: Tensor, layout: Layout) -> Tensor:
    """Hidden states by a walk over the entries, which calls the first visits of the layers and knows no others."""
    stream = model.config.residual.expand(model.embed(tokens, layout))
    kept: dict[str, list[Layer]] = {}
    built: Iterator[Any] = iter(model.layers)

    def walk(entry: LayerConfig, path: str) -> Iterator[Layer]:
        for _ in range(entry.repeat):
            if path in kept:
                for again in kept[path]:
                    next(built)
                    yield again
                continue
            visited = []
            if entry.layers is None:
                visited.append(next(built))
                yield visited[0]
            for index, inner in enumerate(entry.layers or ()):
                for each in walk(inner, f"{path}/{index}"):
                    visited.append(each)
                    yield each
            if entry.shared:
                kept[path] = visited

    for index, entry in enumerate(model.config.layers):
        for each in walk(entry, f"{index}"):
            stream, _ = each(stream, layout)
    hidden: Tensor = model.final_norm(stream)
    return hidden


def loss_gradients(model: Decoder, hidden: Tensor) -> dict[str, Tensor]:
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    logits = model.head(hidden)
    gradients = torch.autograd.grad(logits.sin().sum(), list(parameters.values()), allow_unused=True)
    pairs = zip(parameters.items(), gradients, strict=True)
    return {name: torch.zeros_like(each) if slope is None else slope for (name, each), slope in pairs}


def largest(errors: Iterator[Tensor]) -> float:
    return max(float(error.detach().abs().max()) for error in errors)


def compare_with_copies(model: Decoder, seed: int) -> tuple[float, float]:
    """The largest difference of the logits, and of the gradients, from the model with copies; padded and packed."""
    other, copied = with_copies(model)
    logits, gradients = 0.0, 0.0
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 61, (2, 9), generator=generator)
    positions = torch.tensor([[-1, -1, 0, 1, 2, 3, 4, 5, -1], [0, 1, 2, 3, -1, -1, 4, 5, 6]])
    layouts = (Layout.causal(2, 9), Layout.of(positions), Layout.packed(((4, 5), (1, 3, 5)), 9))
    for layout in layouts:
        mine, theirs = (each(tokens, layout)[0] for each in (model, other))
        logits = max(logits, largest(iter([model.head(mine) - other.head(theirs)])))
        slopes, parts = loss_gradients(model, mine), loss_gradients(other, theirs)
        sums = {
            name: sum((parts[each] for each in names if each in parts), torch.zeros(()))
            for name, names in copied.items()
        }
        for path, module in model.named_modules():
            if isinstance(module, AdaptedLinear):
                slope = parts[f"{path}.weight"]
                sums[f"{path}.adapter.a"] = module.adapter.b.mT @ slope
                sums[f"{path}.adapter.b"] = slope @ module.adapter.a.mT
        assert sums.keys() == slopes.keys()
        gradients = max(gradients, largest(slope - sums[name] for name, slope in slopes.items()))
    return logits, gradients


def largest_errors(seed: int) -> Errors:
    """Of hidden states and logits, and of gradients, from a plain loop and from the model with copies."""
    config = random_design(seed)
    assert config.is_looped
    model = model_under_test(config)
    tokens, layout = random_tokens(config, 2, 9), Layout.causal(2, 9)
    hidden, expected = model(tokens, layout)[0], plain_loop(model, tokens, layout)
    slopes, wanted = loss_gradients(model, hidden), loss_gradients(model, expected)
    logits, gradients = compare_with_copies(model, seed)
    apart = largest(slope - wanted[name] for name, slope in slopes.items())
    return max(logits, largest(iter([hidden - expected]))), max(gradients, apart)


@pytest.mark.parametrize("seed", by_day(12, 44))
def test_visits_are_those_of_a_plain_loop_and_of_copies(seed: int) -> None:
    assert_none(largest_errors(seed))


@pytest.mark.parametrize("seed", by_day(6, 44))
def test_each_visit_adds_its_own_adapters(seed: int) -> None:
    """As a model of copies whose weights are W + B A of the visit."""
    model = with_random_adapters(adapted_design(seed))
    logits, gradients = compare_with_copies(model, seed)
    assert logits < 1e-10
    assert gradients < 1e-9
    assert_cuts_are_those_of_copies(model, seed)


def test_adapters_that_are_not_a_visits_own_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    reads(AdaptedLinear.forward, "b", lambda b: 2 * b)(monkeypatch)
    model = with_random_adapters(adapted_design(0))
    assert compare_with_copies(model, 0)[0] > 1e-3


@pytest.mark.parametrize("seed", by_day(12, 44))
def test_decoding_cut_anywhere_is_that_of_copies(seed: int) -> None:
    assert_cuts_are_those_of_copies(model_under_test(random_design(seed)), seed)


def assert_cuts_are_those_of_copies(model: Decoder, seed: int) -> None:
    other, _ = with_copies(model)
    draw, tokens = random.Random(seed), random_tokens(model.config, 2, 11)
    cuts = sorted(draw.sample(range(1, 11), draw.randint(1, 4)))
    whole = other(tokens)[0].detach()
    state, read = new_state(model, 2, 11), []
    with torch.no_grad():
        for start, end in zip([0, *cuts], [*cuts, 11], strict=True):
            hidden, state = model(tokens[:, start:end], state=state)
            read.append(hidden)
    assert largest(iter([torch.cat(read, 1) - whole])) < 1e-10
    assert len(state.layers) == model.config.depth
    storages = [tensor.data_ptr() for tensor in state.tensors().values() if tensor.numel()]
    assert len(set(storages)) == len(storages)  # each visit has a state of its own


LAYER_INDEX = design(layer(differential(), repeat=3) | SHARED, residual={"kind": "deep_norm", "drop_path": 0.3})


def test_what_depends_on_depth_counts_visits() -> None:
    config = parse_config(ModelConfig, LAYER_INDEX)
    logits, gradients = compare_with_copies(model_under_test(config), 0)
    assert (logits < 1e-10, gradients < 1e-9) == (True, True)
    model: Any = build(config)
    assert len({each.mixer.lambda_init for each in model.layers}) == 3
    rates = [each.residual.drops["mixer"].path.rate for each in model.layers]
    assert rates == pytest.approx([0.0, 0.15, 0.3])
    once: Any = build(
        parse_config(ModelConfig, LAYER_INDEX | {"layers": [layer(differential())], "residual": {"kind": "deep_norm"}})
    )
    alphas = [each.layers[0].residual.factors["mixer"][0] for each in (model, once)]
    assert alphas == pytest.approx([6**0.25, 2**0.25])
    ratio = model.layers[0].mixer.out.weight.std() / once.layers[0].mixer.out.weight.std()
    assert float(ratio.detach()) == pytest.approx(3**-0.25, rel=1e-5)
    first = dict(build(unshared(config)).named_parameters())
    for name, parameter in model.named_parameters():  # the draws of the first visit
        assert torch.equal(parameter, first[name])


@pytest.mark.parametrize("name", ["shared-layer", "shared-group", "shared-block", "shared-block-reads-keys"])
def test_sizes_count_weights_once_and_visits_as_layers(name: str) -> None:
    config = case(name)
    shared, apart, model = size(config, 64, 2), size(unshared(config), 64, 2), build(config)
    assert shared.parameters == sum(each.numel() for each in model.parameters()) < apart.parameters
    assert shared.active_parameters < apart.active_parameters
    for field in ("flops_per_token", "state_bytes", "state_bytes_per_token", "position_table_bytes"):
        assert getattr(shared, field) == getattr(apart, field), field
    assert sum(each.count for each in shared.layers) == config.depth
    assert (
        sum(each.weights * each.parameters for each in shared.layers)
        + sum(each.numel() for path, each in model.named_parameters() if not path.startswith("layers."))
        == shared.parameters
    )
    if config.residual.kind != "deep_norm":  # differential attention has no costs there
        declared = declared_size(config, 64, 4)
        assert declared is not None
        assert (declared.parameters, declared.flops) == (shared.parameters, round(shared.flops_per_token * 64))
    cost, other = model_cost(config, 64), model_cost(unshared(config), 64)
    assert cost.parameters == shared.parameters
    assert (cost.forward_flops, cost.layers[0].saved_bytes) == (other.forward_flops, other.layers[0].saved_bytes)
    assert cost.root_parameters + sum(x.count * x.parameters for x in cost.layers if not x.looped) == cost.parameters


def test_adapters_are_counted_for_each_visit() -> None:
    """Weights once, adapters per visit, and 2 · rank · (inputs + outputs) FLOPs for each projection and token."""
    config, rank, visits, tokens = case("shared-adapters"), 2, 3, 64
    plain = config.replace(layers=tuple(each.replace(adapter_rank=None) for each in config.layers))
    own, shared = size(config, tokens, 2), size(plain, tokens, 2)
    attended, hidden = 2 * (24 + 24) + 2 * (24 + 12), 3 * (24 + 9)  # q and out, k and v; gate, up and down
    added = visits * rank * (attended + hidden)
    assert own.parameters - shared.parameters == own.active_parameters - shared.active_parameters == added
    assert own.flops_per_token - shared.flops_per_token == 2 * added
    assert (own.state_bytes, own.state_bytes_per_token) == (shared.state_bytes, shared.state_bytes_per_token)
    cost = model_cost(config, tokens)
    assert (cost.parameters, cost.root_parameters) == (own.parameters, own.parameters)
    with pytest.raises(ConfigError, match=r"layers\[0\].adapter_rank: is not known to the explorer"):
        explorer_design(config)


def test_new_adapters_change_no_bit() -> None:
    """B is zero at first, and the other weights have the draws of the design without adapters."""
    plain = random_design(5)  # of pre_norm
    models = [build(each, seed=2).eval() for each in (plain, with_adapters(plain, 5))]
    tokens = random_tokens(plain, 2, 9)
    assert torch.equal(*(each(tokens)[0] for each in models))
    parameters = dict(models[1].named_parameters())
    assert all(torch.equal(each, parameters[name]) for name, each in models[0].named_parameters())
    assert len(parameters) > len(list(models[0].parameters()))


def test_a_group_keeps_its_order() -> None:
    config = parse_config(ModelConfig, design(GROUP, layer(attention())))
    assert config.weight_sources == (0, 1, 0, 1, 0, 1, 6)
    nested = {"repeat": 2, "layers": [delta(3, repeat=1), layer(attention(), repeat=2) | SHARED]}
    assert parse_config(ModelConfig, design(nested)).weight_sources == (0, 1, 1, 3, 1, 1)
    outer = {"repeat": 2, "layers": [layer(attention(), repeat=2)]} | SHARED
    assert parse_config(ModelConfig, design(outer)).weight_sources == (0, 1, 0, 1)
    assert [each["count"] for each in explorer_design(config)["layers"]] == [3, 3, 1]
    assert [each.get("shared") for each in explorer_design(config)["layers"]] == [True, True, None]


def test_designs_stay_shared() -> None:
    config = parse_config(ModelConfig, design(GROUP, layer(attention())))
    assert config.resolved().weight_sources == config.weight_sources
    assert config.resolved().resolved() == config.resolved()
    assert config.fingerprint() != unshared(config).fingerprint()
    assert parse_config(ModelConfig, config.dump()) == config
    small = shrink(config)
    assert small.is_looped
    assert small.depth == 5
    assert "shared" not in str(case("attention-mha").dump())


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (design(layer(attention()) | SHARED), "layers[0].shared"),
        (design({"layers": [layer(attention(), repeat=2), layer(attention()) | SHARED]}), "layers[0].layers[1].shared"),
        (design(layer(attention(), repeat=2) | SHARED, residual={"kind": "pre_norm", "first_norm": False}),
         "layers[0].shared"),
        (design(layer(attention(), repeat=2) | SHARED, residual={"kind": "attention_residuals"}), "layers[0].shared"),
        (design(layer(attention(), repeat=2) | {"adapter_rank": 2}), "layers[0].adapter_rank"),
        (design(GROUP | {"adapter_rank": 2}), "layers[0].adapter_rank"),
    ],
)  # fmt: skip
def test_designs_that_cannot_share_are_refused(data: Data, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        heddle.build(parse_config(ModelConfig, data))
    assert str(error.value).startswith(f"{field}: ")


def test_a_file_holds_each_weight_once(tmp_path: Path) -> None:
    model = build(parse_config(ModelConfig, design(GROUP, layer(attention()))), seed=4)
    heddle.save(model, tmp_path / "model")
    with safe_open(tmp_path / "model" / WEIGHTS_FILE, "pt") as file:
        assert {name.split(".")[1] for name in file.keys() if name.startswith("layers.")} == {"0", "1", "6"}  # noqa: SIM118
    again, _ = heddle.load(tmp_path / "model")
    tokens = random_tokens(model.config, 1, 6)
    assert torch.equal(again(tokens)[0], model.eval()(tokens)[0])
    assert len(list(again.parameters())) == len(list(model.parameters()))
    assert again.to(torch.float64).layers[2].get_parameter("mixer.q.weight") is again.layers[0].get_parameter(
        "mixer.q.weight"
    )
    duplicate = copy.deepcopy(model)
    assert len(list(duplicate.parameters())) == len(list(model.parameters()))


def test_a_file_holds_the_adapters_of_each_visit(tmp_path: Path) -> None:
    model = with_random_adapters(case("shared-group-adapters")).float()
    heddle.save(model, tmp_path / "model")
    with safe_open(tmp_path / "model" / WEIGHTS_FILE, "pt") as file:
        names = set(file.keys())
    own = {name for name in names if ".adapter." in name}
    assert {name.split(".")[1] for name in own} == {"1", "2", "3", "4"}
    assert {name.split(".")[1] for name in names - own if name.startswith("layers.")} == {"0", "1", "2"}
    again, _ = heddle.load(tmp_path / "model")
    tokens = random_tokens(model.config, 1, 6)
    assert torch.equal(again(tokens)[0], model.eval()(tokens)[0])
    first, later = (again.layers[number].get_parameter for number in (1, 3))
    assert first("mixer.q_up.weight") is later("mixer.q_up.weight")
    assert not torch.equal(first("mixer.q_up.adapter.b"), later("mixer.q_up.adapter.b"))
    with pytest.raises(ConfigError, match=r"'layers\.1\.mixer\.q_up' has adapters of its visits \(adapter_rank\)"):
        add_lora(model, ["layers.1.mixer.q_up"])


def test_an_adapter_acts_at_each_visit(tmp_path: Path) -> None:
    model = model_under_test(parse_config(ModelConfig, design(GROUP)))
    adapted = add_lora(model, ["layers.*.mixer.q", "layers.*.feedforward.up"], rank=2)
    assert list(adapters(adapted)) == [
        "layers.0.mixer.q",
        "layers.0.feedforward.up",
        "layers.1.mixer.q",
        "layers.1.feedforward.up",
    ]
    for each in adapters(adapted).values():
        torch.nn.init.normal_(each.b)
    tokens = random_tokens(model.config, 2, 7)
    merged = merge_lora(adapted)
    assert merged.layers[4].get_parameter("mixer.q.weight") is merged.layers[0].get_parameter("mixer.q.weight")
    assert largest(iter([adapted(tokens)[0] - merged(tokens)[0]])) < 1e-10
    assert largest(iter([adapted(tokens)[0] - model(tokens)[0]])) > 1e-3
    assert len([p for p in adapted.parameters() if p.requires_grad]) == 8
    save_lora(adapted, tmp_path / "adapters")
    assert torch.equal(load_lora(model, tmp_path / "adapters")(tokens)[0], adapted(tokens)[0])
    with pytest.raises(ConfigError, match=r"'layers\.2\.mixer\.q' has the weights of an earlier layer"):
        add_lora(model, ["layers.2.mixer.q"])
    converted = converted_model(model, parse_rewrite(f"adapters={tmp_path / 'adapters'}"))
    assert largest(iter([converted(tokens)[0] - merged(tokens)[0]])) < 1e-10


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler's
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("way", ["checkpointed", "compiled"])
def test_gradients_of_layers_computed_again_and_compiled(way: str) -> None:
    model = model_under_test(case("shared-layer")).train()
    tokens = random_tokens(model.config, 2, 7)
    expected = loss_gradients(model, model(tokens)[0])
    other = compiled(model, "aot_eager") if way == "compiled" else copy.deepcopy(model)
    other.checkpointing = way == "checkpointed"
    actual = loss_gradients(other, other(tokens)[0])
    assert largest(actual[name] - slope for name, slope in expected.items()) < 1e-10


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_optimizer_has_each_weight_once(kind: str) -> None:
    model = build(parse_config(ModelConfig, design(GROUP)))
    optimizer = build_optimizer(model, 0.1, kind)
    tensors = [each for part in optimizer.optimizers for group in part.param_groups for each in group["params"]]
    assert sum(each.numel() for each in tensors) == sum(each.numel() for each in model.parameters())


def test_quantized_weights_are_shared() -> None:
    config = parse_config(ModelConfig, design(layer(attention(), repeat=2) | SHARED, width=64))
    model = build(config).eval()
    quantized = quantize_weights(model, 8)
    assert quantized.quantized <= quantized.weights
    first, again = (quantized.model.get_submodule(f"layers.{index}.mixer.q") for index in (0, 1))
    assert first is again


def test_conversions_around_the_layers_keep_the_logits() -> None:
    source = source_model(parse_config(ModelConfig, design(GROUP, layer(attention()))))
    assert difference(source, converted_model(source, parse_rewrite("head.tied=false"))) < 1e-10
    larger, tokens = converted_model(source, parse_rewrite("vocab_size=70")), random_tokens(source.config, 2, 7)
    assert largest(iter([larger.head(larger(tokens)[0])[..., :61] - source.head(source(tokens)[0])])) < 1e-10


@pytest.mark.parametrize(
    "target", ["kv_heads=1,groups=contiguous,merge=mean", "width=32", "fold_norms", "window,window=2"]
)
def test_other_conversions_and_exports_are_refused(target: str) -> None:
    model = source_model(parse_config(ModelConfig, design(GROUP)))
    source: Any = SimpleNamespace(weights=ModelWeights(model), tokenizer=None)
    with pytest.raises(ConfigError, match=r"layers\.\*\.shared: shares weights between layers"):
        Conversion(source, (parse_rewrite(target),)).plan()


def test_the_command_refuses_to_convert_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heddle.save(build(parse_config(ModelConfig, design(GROUP))), tmp_path / "model")
    for target in ("kv_heads=1", "latent_attention", "linear_attention"):
        arguments = [str(tmp_path / "model"), str(tmp_path / "out"), "--to", target]
        assert run_command(["convert", *arguments, "--data", str(small.folder(tmp_path / "text"))]) == 2
        assert "layers.*.shared: shares weights between layers" in capsys.readouterr().err


def test_other_families_are_refused_by_name() -> None:
    entry = {
        "mixer": {"kind": "attention", "heads": 4, "position": "rope"},
        "feedforward": {"kind": "gated", "hidden": 32},
    }
    config = heddle.load_config({"vocab_size": 61, "width": 24, "layers": [entry | SHARED | {"repeat": 2}]})
    with pytest.raises(ConfigError, match=r"cannot express this design \(layers\.\*\.shared is true\)"):
        chosen_match(config, "llama")
    chosen_match(unshared(config), "llama")
    group = config.replace(layers=(LayerConfig(repeat=2, shared=True, layers=unshared(config).layers),))
    assert [each.path for each in match_family(group, families()["llama"]).mismatches] == ["layers.0.shared"]
    with pytest.raises(ConfigError, match=r"shared is true"):
        match_architecture(config)
    adapted = config.replace(layers=tuple(each.replace(adapter_rank=2) for each in config.layers))
    paths = [each.path for each in match_family(adapted, families()["llama"]).mismatches]
    assert paths == ["layers.*.shared", "layers.*.adapter_rank"]


def test_the_loop_sees_a_visit_with_other_weights() -> None:
    config = random_design(3)
    model = model_under_test(config)
    again = next(index for index, source in enumerate(model.weight_sources) if source != index)
    model.layers[again] = copy.deepcopy(model.layers[again])
    for parameter in model.layers[again].parameters():
        parameter.data += 0.01
    tokens, layout = random_tokens(config, 2, 9), Layout.causal(2, 9)
    assert largest(iter([model(tokens, layout)[0] - plain_loop(model, tokens, layout)])) > 1e-3


LOOPED_RUN = small.design(
    layers=[small.dropping()["layers"][0] | SHARED | {"repeat": 3, "feedforward": small.MOE | {"bias_update": 0.01}}],
    residual={"kind": "pre_norm", "drop_path": 0.4},
)


def test_a_run_that_died_continues_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = small.corpus(tmp_path / "text")
    train(small.job(texts, tmp_path / "whole", LOOPED_RUN, 6, optimizer="muon"))
    right, calls = accumulate_gradients, list[None]()

    def dying(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        if len(calls) == 5:
            raise Died
        return right(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "accumulate_gradients", dying)
        with pytest.raises(Died):
            train(small.job(texts, tmp_path / "cut", LOOPED_RUN, 6, optimizer="muon"))
    train(small.job(texts, tmp_path / "cut", LOOPED_RUN, 6, optimizer="muon"))
    ends = [tensors_sha256(checkpoint_folder(tmp_path / name, 6)) for name in ("whole", "cut")]
    assert ends[0] == ends[1]
    with safe_open(checkpoint_folder(tmp_path / "cut", 6) / WEIGHTS_FILE, "pt") as file:
        assert {name.split(".")[1] for name in file.keys() if name.startswith("layers.")} == {"0"}  # noqa: SIM118


def test_all_visits_balance_experts_once() -> None:
    model = build(small.config(LOOPED_RUN), seed=3).train()
    rows = torch.randint(1, 61, (4, 9), generator=torch.Generator().manual_seed(2)).numpy()
    result = accumulate_gradients(model, Batch(rows, ((8,),) * 4, np.arange(4)), (0, 0))
    assert list(result.router_metrics) == ["layers.0.feedforward"]
    assert int(result.router_metrics["layers.0.feedforward"].tokens) == 3 * 4 * 8
    apply_gradients(model, build_optimizer(model, 0.1), result, 1e-3, 1.0)
    bias = model.layers[0].get_parameter("feedforward.router.expert_bias")
    assert bias is model.layers[2].get_parameter("feedforward.router.expert_bias")
    assert bool(((bias.abs() - 0.01).abs().minimum(bias.abs()) < 1e-8).all())
    assert bool(bias.any())
