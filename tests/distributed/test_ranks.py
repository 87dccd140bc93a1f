"""A layout of ranks is one more way to cut the work, and cutting changes nothing: losses, norms, gradients, weights."""

import copy
import threading
from collections import defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from heddle.config import parse_config
from heddle.data.samples import Batch
from heddle.distributed import ranks as ranks_module
from heddle.distributed.ranks import ONE_PROCESS, Ranks, whole
from heddle.distributed.sharding import Sharding, initialize_shards, shard_model
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.numerics.cross_entropy import loss_sum
from heddle.numerics.random import RandomStream
from heddle.parts.feedforwards.moe import MoE
from heddle.training import optimizer, step
from tests.cases import CASES, case, in_turn
from tests.distributed.ranks import on_ranks
from tests.distributed.steps import (
    MESHES,
    STEPS,
    WAYS,
    WITHOUT_ENCODER,
    Way,
    batch_of,
    largest_difference,
    on_mesh,
    on_one_process,
)

TOLERANCE = 1e-10
# A few designs that differ in what ranks could break, each in another mesh and way.
COVERING = [
    ("attention-gqa", "FSDP-4", "everything"),
    ("attention-dropout", "FSDP-2", "accumulated"),
    ("latent-low-rank-query", "HSDP-2×2", "recomputed"),
    ("moe-sigmoid", "FSDP-2", "everything"),
    ("moe-capacity", "DDP-2", "accumulated"),
    ("moe-mlp-shared", "HSDP-2×2", "uneven targets"),
    ("delta-hybrid", "FSDP-2", "muon"),
    ("encoder", "FSDP-2", "uneven targets"),
    ("attention-qk-norm-projection", "DDP-2", "muon"),
]


@pytest.mark.parametrize(("name", "mesh", "way"), COVERING)
def test_ranks_change_nothing(name: str, mesh: str, way: str) -> None:
    check(name, mesh, way)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(CASES.keys() - WITHOUT_ENCODER))
def test_ranks_change_nothing_in_any_case(name: str) -> None:
    """Each case in one mesh and way, drawn from its place in the order of names."""
    pairs = list(product(MESHES, WAYS))
    check(name, *pairs[sorted(CASES).index(name) % len(pairs)])


def check(name: str, mesh: str, way: str) -> None:
    config = case(name)
    expected = on_one_process(config, WAYS[way])
    for actual in on_mesh(config, WAYS[way], MESHES[mesh]):
        assert largest_difference(expected, actual) < TOLERANCE


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_first_weights_are_those_of_one_process(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, a tied head stays tied, and all ranks together draw hardly more numbers than one process."""
    drawn, words = [], RandomStream.words

    def counted(stream: RandomStream, start: int, stop: int) -> np.ndarray:
        drawn.append(stop - start)
        return words(stream, start, stop)

    for name in ("attention-gqa", "moe-sigmoid", "linear-attention-learned-rope", "encoder"):
        config = case(name)
        expected = dict(build(config, torch.float64, seed=3).named_parameters())

        def weights(rank: int, config: ModelConfig = config) -> tuple[dict[str, Tensor], bool]:
            model = build(config, torch.float64, device="meta")
            shard_model(model, init_device_mesh("cpu", (count,)))
            initialize_shards(model, 3)
            named = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
            return named, model.head.weight is model.embed.weight

        drawn.clear()
        with monkeypatch.context() as patch:
            patch.setattr(RandomStream, "words", counted)
            results = on_ranks(count, weights)
        assert sum(drawn) <= 1.1 * sum(p.numel() for p in expected.values()) + 4 * count * len(expected)
        for actual, is_tied in results:
            assert actual.keys() == expected.keys()
            assert all(torch.equal(actual[name], value) for name, value in expected.items())
            assert is_tied == config.head.tied


@pytest.mark.parametrize("mesh", in_turn(["DDP-2", "FSDP-4", "HSDP-2×2"], 1))
def test_muon_orthogonalizes_each_matrix_on_one_rank(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where experts, which ranks hold whole, have the shape of matrices that are sharded."""
    values: dict[str, Any] = copy.deepcopy(CASES["moe-sigmoid"])
    for layer in values["layers"]:
        layer["feedforward"]["hidden"] = values["width"]
    counts: dict[int, int] = defaultdict(int)
    orthogonalize = optimizer._orthogonalize

    def counted(matrices: Tensor, **options: Any) -> Tensor:
        counts[threading.get_ident()] += len(matrices)
        return orthogonalize(matrices, **options)

    monkeypatch.setattr(optimizer, "_orthogonalize", counted)
    config, way = parse_config(ModelConfig, values), WAYS["muon"]
    expected = on_one_process(config, way)
    total = sum(counts.values())
    counts.clear()
    for actual in on_mesh(config, way, MESHES[mesh]):
        assert largest_difference(expected, actual) < TOLERANCE
    experts = STEPS * sum(len(weight) for weight in build(config).parameters() if weight.dim() == 3)
    assert sum(counts.values()) == total + (MESHES[mesh][0] - 1) * experts  # copies of a rank hold the same experts
    assert max(counts.values()) - min(counts.values()) <= 2 * STEPS


def test_evaluation_is_bit_equal() -> None:
    config = case("attention-gqa")
    tokens = torch.from_numpy(batch_of(config, 0, Way(), None).tokens)
    with torch.no_grad():
        expected = build(config, torch.float64).eval()(tokens)[0]

    def hidden(rank: int) -> Tensor:
        model = build(config, torch.float64, device="meta")
        shard_model(model, init_device_mesh("cpu", (2,)))
        initialize_shards(model, 0)
        with torch.no_grad():
            result: Tensor = model.eval()(tokens)[0]
        return result

    assert all(torch.equal(actual, expected) for actual in on_ranks(2, hidden))


def test_products_in_bfloat16_sum_in_float32() -> None:
    config = case("attention-gqa")
    expected = on_one_process(config, Way())

    def loss(rank: int) -> float:
        model = build(config, device="meta")
        shard_model(model, init_device_mesh("cpu", (2,)), Sharding(torch.bfloat16, torch.float32))
        initialize_shards(model, 0)
        prepared = step.prepare_batch(batch_of(config, 0, Way(), None), "cpu", 1, Ranks(rank, 2))
        result = step.accumulate_gradients(model, prepared, (0, 0))
        assert all(whole(p.grad).dtype == torch.float32 for p in model.parameters() if p.grad is not None)
        return float(result.loss)

    losses = on_ranks(2, loss)
    assert losses[0] == losses[1] == pytest.approx(expected["losses"][0], rel=2e-2)


def test_rows_of_ranks() -> None:
    assert ONE_PROCESS.rows(8, 2) == [slice(0, 4), slice(4, 8)]
    assert Ranks(1, 2).rows(8, 2) == [slice(2, 4), slice(6, 8)]
    with pytest.raises(ConfigError, match=r"batch_size 6:.*4 ranks"):
        Ranks(0, 4).rows(6, 1)
    with pytest.raises(ConfigError, match=r"batch_size 6:.*2 ranks"):
        Ranks(0, 2).rows(6, 2)


class Planted:
    """Bugs of distributed trainers. Each must be caught in the design that it names."""

    @staticmethod
    def local_divisor(patch: pytest.MonkeyPatch) -> tuple[str, str]:
        """Each rank divides by its own number of targets."""
        whole_batch, prepare = loss_sum, step._prepare

        def prepare_alone(batch: Batch, rows: slice, device: str) -> step.BatchPart:
            share = (batch.targets >= 0).sum() / (batch.targets[rows] >= 0).sum() / 2
            shares[threading.get_ident()] = float(share)
            return prepare(batch, rows, device)

        shares: dict[int, float] = {}
        patch.setattr(step, "_prepare", prepare_alone)
        patch.setattr(step, "loss_sum", lambda *values: whole_batch(*values) * shares[threading.get_ident()])
        return "attention-gqa", "uneven targets"

    @staticmethod
    def loads_not_summed(patch: pytest.MonkeyPatch) -> tuple[str, str]:
        """The balancing bias follows the expert loads of one rank."""
        patch.setattr(step.RouterMetricsCollector, "sum_over", lambda self, ranks: None)
        return "moe-sigmoid", "plain"

    @staticmethod
    def gradients_averaged(patch: pytest.MonkeyPatch) -> tuple[str, str]:
        """FSDP's own default divides by the number of ranks."""
        patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)
        return "attention-gqa", "plain"

    @staticmethod
    def tie_in_two_groups(patch: pytest.MonkeyPatch) -> tuple[str, str]:
        """The head is a group of its own, so a tied weight would be in two."""

        def shard(model: nn.Module, **options: object) -> nn.Module:
            head = dict(model.named_children()).get("head")
            if head is not None:
                fully_shard(head, **options)  # type: ignore[call-overload]
            return fully_shard(model, **options)  # type: ignore[call-overload]

        patch.setattr("torch.distributed.fsdp.fully_shard", shard)
        return "attention-gqa", "plain"

    @staticmethod
    def noise_of_local_samples(patch: pytest.MonkeyPatch) -> tuple[str, str]:
        """Dropout counts the samples of each rank from 0."""
        prepare = step._prepare

        def renumbered(*arguments: object) -> object:
            part = prepare(*arguments)  # type: ignore[arg-type]
            return part._replace(samples=torch.arange(len(part.samples)))

        patch.setattr(step, "_prepare", renumbered)
        return "attention-dropout", "plain"


PLANTED = [name for name in vars(Planted) if not name.startswith("_")]


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as undone:
        name, way = getattr(Planted, bug)(undone)
    config = case(name)
    expected = on_one_process(config, WAYS[way])
    getattr(Planted, bug)(monkeypatch)
    try:
        results = on_mesh(config, WAYS[way], MESHES["FSDP-2"])
    except Exception:
        return  # refused, which is as good
    assert any(largest_difference(expected, actual) > 1e-6 for actual in results)


def test_moe_keeps_its_balancing_bias_whole() -> None:
    config = case("moe-sigmoid")

    def biases(rank: int) -> list[bool]:
        model = build(config, torch.float64, device="meta")
        shard_model(model, init_device_mesh("cpu", (2,)))
        initialize_shards(model, 0)
        mixtures = [module for module in model.modules() if isinstance(module, MoE)]
        return [
            ranks_module.local_part(mixture.router.get_parameter("expert_bias")).shape == (4,) for mixture in mixtures
        ]

    assert all(on_ranks(2, biases)[0])
