"""LoRA: nothing changes before the first step, adapters alone learn, merging is the float64 sum; on disk, in laws."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import heddle
from heddle.data.samples import Batch
from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.export import export
from heddle.exchange.load import load as load_foreign
from heddle.laws import LAWS
from heddle.laws import harness as laws
from heddle.model.copies import compiled
from heddle.model.decoder import Decoder, build
from heddle.model.lora import LoraLinear, adapters, add_lora, lora_tensors, merge_lora, merged_weight
from heddle.parts.modules.linear import fill_normal
from heddle.storage.folder import write_folder
from heddle.storage.model import ADAPTER_FILE, ADAPTER_KIND, ADAPTER_TENSORS_FILE, load_lora, save_lora
from heddle.training import width_transfer
from heddle.training.loop import train
from heddle.training.optimizer import build_optimizer
from heddle.training.settings import OPTIMIZERS
from heddle.training.step import accumulate_gradients, apply_gradients
from tests import small
from tests.cases import case, in_turn
from tests.laws.planting import Plant, assigned, calls, constant, operand_dropped, replaced

EVERYTHING = ("layers.*.mixer.*", "layers.*.feedforward.*")
MIXERS = ("layers.*.mixer.*",)
# Cases and the targets that fit them: among them projections that are read, not called, and those beside experts.
FITTING = {
    "attention-gqa": EVERYTHING,
    "attention-window-mixed": ("layers.1.mixer.out", "layers.*.feedforward.down"),
    "latent-low-rank-query": MIXERS,
    "latent-yarn": ("layers.*.mixer.k_up", "layers.*.mixer.v_up"),
    "delta-hybrid": MIXERS,
    "retention-rope-gate": EVERYTHING,
    "cross-grouped": MIXERS,
    "encoder": ("layers.*.mixer.q", "encoder.layers.*.mixer.*"),
    "gated-clamped": EVERYTHING,
    "moe-shared-gate": (*MIXERS, "layers.*.feedforward.shared.*", "layers.*.feedforward.shared_gate"),
    "residual-hyper": EVERYTHING,
}
RANK, ALPHA = 3, 7.0


def rough(model: Decoder) -> Decoder:
    """Adapters that say something."""
    generator = torch.Generator().manual_seed(4)
    for parameter in lora_tensors(model).values():
        parameter.copy_(laws.normal_tensor(parameter.shape, generator) * parameter.shape[-1] ** -0.5)
    return model


def pair(name: str, dtype: torch.dtype = torch.float64) -> tuple[Decoder, Decoder]:
    """A model, and its twin with rough adapters."""
    base = laws.model_under_test(case(name), dtype)
    return base, rough(add_lora(base, FITTING[name], RANK, ALPHA))


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("name", FITTING)
def test_before_the_first_step_nothing_has_changed(name: str) -> None:
    base = laws.model_under_test(case(name))
    twin = add_lora(base, FITTING[name], RANK, ALPHA)
    tokens = laws.random_tokens(case(name), 2, 9)
    torch.testing.assert_close(
        laws.forward_no_grad(twin, tokens), laws.forward_no_grad(base, tokens), rtol=0, atol=1e-13
    )
    for adapter in adapters(twin).values():
        assert float(adapter.a.detach().std()) > 0
        assert not adapter.b.any()
    merged = merge_lora(twin)
    for path, parameter in base.named_parameters():
        assert torch.equal(merged.get_parameter(path), parameter), path
    assert not adapters(base)
    assert all(parameter.requires_grad for parameter in base.parameters())


@pytest.mark.parametrize("name", FITTING)
def test_merged_equals_unmerged_whole_and_in_steps(name: str) -> None:
    base, twin = pair(name)
    merged = merge_lora(twin)
    assert {path: parameter.requires_grad for path, parameter in merged.named_parameters()} == {
        path: parameter.requires_grad for path, parameter in base.named_parameters()
    }
    tokens = laws.random_tokens(case(name), 2, 9)
    want = laws.forward_no_grad(merged, tokens)
    assert float((want - laws.forward_no_grad(base, tokens)).abs().max()) > 0.01
    close(laws.forward_no_grad(twin, tokens), want)
    in_chunks, _ = laws.forward_in_chunks(twin, tokens, [4, 1, 1, 3])
    close(in_chunks, want)


def test_the_formula_number_by_number() -> None:
    base, twin = pair("attention-gqa")
    path = "layers.0.mixer.q"
    original, x = twin.get_submodule(path), torch.randn(5, 24, dtype=torch.float64)
    assert isinstance(original, LoraLinear)
    weight = base.get_parameter(f"{path}.weight").detach().clone()
    (rows, columns), a, b = weight.shape, original.a.tolist(), original.b.tolist()
    for i, j in itertools.product(range(rows), range(columns)):
        weight[i, j] += ALPHA / RANK * sum(b[i][r] * a[r][j] for r in range(RANK))
    close(original(x).detach(), x @ weight.T)
    close(original.weight.detach(), weight)
    close(original.merged(), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merging_rounds_once(dtype: torch.dtype) -> None:
    _, twin = pair("attention-gqa", dtype)
    for path, adapter in adapters(twin).items():
        frozen, a, b = (np.asarray(tensor.detach().double()) for tensor in (adapter.frozen, adapter.a, adapter.b))
        want = torch.from_numpy(frozen + ALPHA / RANK * (b @ a))
        got = merge_lora(twin).get_parameter(f"{path}.weight")
        assert got.dtype == dtype
        step = torch.nextafter(want.to(dtype).abs(), torch.tensor(torch.inf, dtype=dtype)) - want.to(dtype).abs()
        assert bool(((got.double() - want).abs() <= step.double() / 2 * (1 + 1e-6)).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_merging_adapters_of_zero_keeps_every_bit(dtype: torch.dtype) -> None:
    base = build(case("attention-gqa"), dtype=dtype)
    with torch.no_grad():
        base.get_parameter("layers.0.mixer.q.weight")[0, :2] = torch.tensor([-0.0, 0.0])
    merged = merge_lora(add_lora(base, EVERYTHING, RANK))
    for path, parameter in base.named_parameters():
        bits, merged_bits = (tensor.detach().view(torch.uint8) for tensor in (parameter, merged.get_parameter(path)))
        assert torch.equal(bits, merged_bits), path


def test_the_same_text_from_both_and_from_a_compiled_twin() -> None:
    _, twin = pair("attention-gqa")
    prompts = [[5, 7, 11], [3]]
    assert heddle.generate(twin, prompts, max_new_tokens=20) == heddle.generate(
        merge_lora(twin), prompts, max_new_tokens=20
    )
    tokens = laws.random_tokens(case("attention-gqa"), 2, 9)
    close(laws.forward_no_grad(compiled(twin, backend="eager"), tokens), laws.forward_no_grad(merge_lora(twin), tokens))


LAWS_OF_ADAPTERS = (
    "chunked_decoding", "chunked_ragged_batch", "padding_invariance", "padding_gradients", "document_packing",
    "document_isolation", "causality", "nan_in_padding", "nan_in_other_rows", "batch_invariance",
    "gradient_accumulation", "activation_checkpointing", "finite_differences", "kernel_equivalence",
)  # fmt: skip
ADAPTED = ("attention-gqa", "latent-low-rank-query", "moe-shared-gate")


@pytest.mark.parametrize(("name", "law"), in_turn(itertools.product(ADAPTED, LAWS_OF_ADAPTERS), 0, 3))
def test_laws_of_models_with_adapters(name: str, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def adapted(*arguments: Any, **named: Any) -> Decoder:
        return add_lora(build(*arguments, **named), FITTING[name], RANK, ALPHA)

    monkeypatch.setattr(laws, "build", adapted)
    assert adapters(laws.model_under_test(case(name)))
    LAWS[law].check(case(name))


def batch(seed: int = 1) -> Batch:
    tokens = np.random.default_rng(seed).integers(1, small.VOCABULARY, (4, 13))
    return Batch(tokens, ((12,), (5, 7), (1, 11), (12,)), np.arange(4))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("feedforward", [{"kind": "gated", "hidden": 24}, {**small.MOE, "shared": 1}])
def test_training_changes_adapters_and_nothing_else(kind: str, feedforward: dict[str, Any]) -> None:
    mixer = {"kind": "attention", "heads": 2, "kv_heads": 1, "position": {"kind": "rope"}}
    config = small.config(small.design(layers=[{"repeat": 2, "mixer": mixer, "feedforward": feedforward}]))
    base = build(config, seed=3)
    before = copy.deepcopy(base.state_dict())
    shared = ("layers.*.feedforward.shared.up",) if "shared" in feedforward else ()
    model = add_lora(base, ("layers.*.mixer.*", *shared), rank=2, alpha=4.0).train()
    start = {name: tensor.clone() for name, tensor in lora_tensors(model).items()}
    optimizer = build_optimizer(model, weight_decay=0.1, kind=kind)
    assert optimizer.trainable.keys() == start.keys()
    losses = []
    for step in range(6):
        result = apply_gradients(
            model, optimizer, accumulate_gradients(model, batch(), (0, step)), 0.02, max_gradient_norm=1.0
        )
        assert not result.skipped
        losses.append(result.loss)
    assert losses[-1] < losses[0] - 0.01
    assert all(not torch.equal(tensor, start[name]) for name, tensor in lora_tensors(model).items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    merged = merge_lora(model)
    changed = {name for name, parameter in merged.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {f"{path}.weight" for path in adapters(model)}


def test_a_run_goes_on_as_if_never_stopped_and_is_a_plain_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = small.corpus(tmp_path / "texts")
    monkeypatch.setattr(
        width_transfer, "build", lambda *arguments, **named: add_lora(build(*arguments, **named), rank=2)
    )
    small.same_after_a_signal(lambda name: small.job(corpus, tmp_path / name), monkeypatch)
    trained = train(small.job(corpus, tmp_path / "whole")).model
    assert adapters(trained)
    back, _ = heddle.load(tmp_path / "whole")
    for name, parameter in merge_lora(trained).named_parameters():
        assert torch.equal(back.get_parameter(name), parameter), name


def test_saving_and_exporting_merge(tmp_path: Path) -> None:
    _, twin = pair("attention-gqa", torch.float32)
    heddle.save(twin, tmp_path / "model")
    export(twin, tmp_path / "foreign")
    for back in (heddle.load(tmp_path / "model")[0], load_foreign(tmp_path / "foreign").model):
        for name, parameter in merge_lora(twin).named_parameters():
            assert torch.equal(back.get_parameter(name), parameter), name


@pytest.mark.parametrize("name", ["attention-gqa", "moe-shared-gate", "encoder"])
def test_adapters_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    base, twin = pair(name)
    save_lora(twin, tmp_path / "adapter")
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        ADAPTER_FILE,
        ADAPTER_TENSORS_FILE,
        "manifest.json",
    }
    back = load_lora(base, tmp_path / "adapter")
    tokens = laws.random_tokens(case(name), 2, 9)
    assert torch.equal(laws.forward_no_grad(back, tokens), laws.forward_no_grad(twin, tokens))
    assert lora_tensors(back).keys() == lora_tensors(twin).keys()
    assert {path: (adapter.rank, adapter.alpha) for path, adapter in adapters(back).items()} == dict.fromkeys(
        adapters(twin), (RANK, ALPHA)
    )


def test_adapters_of_something_else_are_refused(tmp_path: Path) -> None:
    base, twin = pair("attention-gqa")
    folder = tmp_path / "adapter"
    save_lora(twin, folder)
    with pytest.raises(CheckpointError, match="another design"):
        load_lora(laws.model_under_test(case("attention-mha")), folder)
    with pytest.raises(CheckpointError, match="other weights of this design"):
        load_lora(build(case("attention-gqa"), dtype=torch.float64, seed=1), folder)
    with pytest.raises(CheckpointError, match="another dtype"):
        load_lora(copy.deepcopy(base).float(), folder)
    with pytest.raises(CheckpointError, match="merge them first"):
        load_lora(twin, folder)
    with pytest.raises(ConfigError, match="no adapters to save"):
        save_lora(base, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"rank": 3', '"rank": 4', r"adapter.json"),
        ('"rank": 3', '"rank": true', "wrong type"),
        ('"rank": 3', '"rang": 3', "does not describe"),
        ('"layers.1.mixer.q"', '"layers.9.mixer.q"', r"'layers.9.mixer.q'"),
        ('"layers.1.mixer.q"', '"layers.1.mixer.k"', "layers.1.mixer.q"),
    ],
)
def test_facts_that_do_not_fit_are_refused(old: str, new: str, words: str, tmp_path: Path) -> None:
    base, twin = pair("attention-gqa")
    save_lora(twin, tmp_path / "adapter")
    text = (tmp_path / "adapter" / ADAPTER_FILE).read_text()
    assert old in text
    documents = {ADAPTER_FILE: text.replace(old, new)}
    write_folder(
        tmp_path / "adapter", tensors={ADAPTER_TENSORS_FILE: lora_tensors(twin)}, documents=documents, kind=ADAPTER_KIND
    )
    with pytest.raises(CheckpointError, match=words):
        load_lora(base, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"targets": ("layers.*.mixer.qq",)}, "no projection matches 'layers.*.mixer.qq'; choices: layers.*.mixer.q, "),
        ({"targets": ("layers.*.feedforward.up",)}, "'layers.0.feedforward.up'"),
        ({"targets": ("layers.*.feedforward.router",)}, "no projection matches"),
        ({"rank": 0}, "rank = 0 must be at least 1"),
        ({"alpha": 0.0}, "alpha = 0.0 must be a number above 0"),
        ({"alpha": float("nan")}, "alpha = nan"),
    ],
)
def test_what_cannot_be_adapted_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        add_lora(build(case("moe")), **arguments)
    assert words in str(error.value)


def test_the_start_depends_on_seed_and_path_alone() -> None:
    first, other, small_one = (
        lora_tensors(add_lora(build(case("attention-gqa"), dtype=torch.float64), seed=seed, targets=targets))
        for seed, targets in ((1, EVERYTHING), (2, EVERYTHING), (1, ("layers.1.mixer.v",)))
    )
    name = "layers.1.mixer.v.a"
    assert torch.equal(first[name], small_one[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first["layers.0.mixer.v.a"])
    drawn = build(case("attention-gqa"), dtype=torch.float64, seed=1).get_parameter("layers.1.mixer.v.weight")
    pair = torch.stack((first[name].flatten(), drawn.detach()[: len(first[name])].flatten()))
    assert abs(float(pair.corrcoef()[0, 1])) < 0.5


def unmerged_equals_merged() -> None:
    test_merged_equals_unmerged_whole_and_in_steps("attention-gqa")


def read_projections_are_adapted() -> None:
    test_merged_equals_unmerged_whole_and_in_steps("latent-yarn")


def adapters_alone_learn() -> None:
    test_training_changes_adapters_and_nothing_else("adamw", {**small.MOE, "shared": 1})


def nothing_at_the_start() -> None:
    test_before_the_first_step_nothing_has_changed("attention-gqa")


@pytest.mark.parametrize(
    ("check", "plant"),
    [
        (unmerged_equals_merged, operand_dropped(LoraLinear.forward, "scale", nth=0)),
        (unmerged_equals_merged, calls(
            LoraLinear.merged, "merged_weight", lambda merge, *tensors, self: merge(*tensors[:3], self.alpha))),
        (unmerged_equals_merged, calls(
            merged_weight, "to", lambda x, device, dtype: x.to(device, torch.float32), nth=0)),
        (read_projections_are_adapted, replaced(LoraLinear.weight, lambda lora: lora.frozen)),
        (nothing_at_the_start, calls(
            LoraLinear.init_weights, "zeros_", lambda init, b, *, std, draws: fill_normal(b, std, draws("b")))),
        (nothing_at_the_start, calls(LoraLinear.init_weights, "fill_normal", lambda fill, a, *_: nn.init.zeros_(a))),
        (adapters_alone_learn, constant(add_lora, False, True)),
        (adapters_alone_learn, assigned(
            apply_gradients, "parameters", lambda _, *, feedforward: list(feedforward.parameters()))),
        (lambda: test_merging_adapters_of_zero_keeps_every_bit(torch.float32), calls(
            merged_weight, "where", lambda torch, is_zero, wide, total: total)),
        (lambda: test_merging_rounds_once(torch.bfloat16), assigned(
            merged_weight, "delta", lambda delta, *, weight: delta.to(weight).double())),
    ],
)  # fmt: skip
def test_planted_faults_are_found(check: Callable[[], None], plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    check()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
