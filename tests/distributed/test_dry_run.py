"""A dry run tells of all layers from a few of them, and agrees with the plan and with a real step."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from torch import distributed
from torch._C._distributed_c10d import HashStore

from heddle.cli.main import run_command
from heddle.errors import ConfigError
from heddle.lab.plan import dry_run as dry_run_module
from heddle.lab.plan.costs import RankLayout, collectives, model_cost
from heddle.lab.plan.dry_run import DryRun, Run, dry_run, extrapolate, folded, runs_of
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from tests.distributed.steps import memory_of_four_ranks

ATTENTION = {"kind": "attention", "heads": 4, "kv_heads": 2, "position": {"kind": "rope"}}
DELTA = {"kind": "gated_delta", "heads": 2, "head_dim": 8}
GATED = {"kind": "gated", "hidden": 64}
EXPERTS = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 16}
SEQUENCE_LENGTH = 32


def hybrid() -> ModelConfig:
    """Attention once, then five times a block of a delta rule with experts and attention."""
    block = [{"mixer": DELTA, "feedforward": EXPERTS}, {"mixer": ATTENTION, "feedforward": GATED}]
    layers = [{"mixer": ATTENTION, "feedforward": GATED}, {"repeat": 5, "layers": block}]
    return load_config({"vocab_size": 128, "width": 32, "layers": layers})


def uniform(repeat: int = 8, width: int = 64, vocab_size: int = 128, **residual: Any) -> ModelConfig:
    layer = {"repeat": repeat, "mixer": ATTENTION, "feedforward": {"kind": "gated", "hidden": 2 * width}}
    data = {"vocab_size": vocab_size, "width": width, "layers": [layer]}
    return load_config(data | ({"residual": residual} if residual else {}))


def looped() -> ModelConfig:
    """A layer of its own, and two that are visited three times, whose weights stay gathered."""
    layer = {"mixer": ATTENTION, "feedforward": {"kind": "gated", "hidden": 128}}
    layers = [layer, {"repeat": 3, "shared": True, "layers": [layer, layer]}]
    return load_config({"vocab_size": 128, "width": 64, "layers": layers})


def windowed() -> ModelConfig:
    """Windows, whose attention is compiled FlexAttention on a GPU."""
    layer = {"repeat": 8, "mixer": {**ATTENTION, "window": 8}, "feedforward": GATED}
    return load_config({"vocab_size": 128, "width": 64, "layers": [layer]})


def growing() -> ModelConfig:
    """Each layer has a larger stream than the one before: none stands for another."""
    return uniform(6, kind="attention_residuals", block_size=2)


def largest_error(predicted: DryRun, whole: DryRun) -> float:
    """Relative, of memory by component, FLOPs and bytes of each collective."""
    pairs = [(predicted.flops, whole.flops)]
    pairs += [(predicted.memory.get(name, 0), size) for name, size in whole.memory.items()]
    sent = {(each.name, each.ranks): each.bytes for each in predicted.collectives}
    pairs += [(sent[each.name, each.ranks], each.bytes) for each in whole.collectives]
    return max(abs(a / b - 1) for a, b in pairs if b)


CASES = {
    "hybrid": (hybrid, RankLayout(1, 4, rows=2)),
    "growing": (growing, RankLayout(1, 2, rows=1)),
    "windowed": (windowed, RankLayout(1, 1, rows=2)),
    "accumulated": (uniform, RankLayout(2, 4, rows=1, accumulation=4, recompute="layers", reduce_once=True)),
}


@cache
def of_all_layers(name: str) -> DryRun:
    design, layout = CASES[name]
    return dry_run(design(), layout, SEQUENCE_LENGTH, fold=False)


@pytest.mark.parametrize("name", CASES)
def test_a_few_layers_tell_of_all(name: str) -> None:
    design, layout = CASES[name]
    predicted, traced = dry_run(design(), layout, SEQUENCE_LENGTH), of_all_layers(name)
    assert traced.layers == design().depth
    assert largest_error(predicted, traced) < 0.02


def test_planted_repeat_that_is_not_counted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def shorter(runs: Sequence[Run], base: float, with_extra: Callable[[int], float]) -> float:
        return extrapolate([Run(run.block, run.count - 1) for run in runs], base, with_extra)

    monkeypatch.setattr(dry_run_module, "extrapolate", shorter)
    design, layout = CASES["windowed"]
    assert largest_error(dry_run(design(), layout, SEQUENCE_LENGTH), of_all_layers("windowed")) > 0.02


@pytest.mark.parametrize("make", [uniform, looped])
def test_bytes_of_collectives_are_the_planned_ones(make: Callable[[], ModelConfig]) -> None:
    config, layout = make(), RankLayout(2, 8, rows=1)
    result = dry_run(config, layout, SEQUENCE_LENGTH)
    sent = {(each.name, each.ranks): each.bytes for each in result.collectives}
    for each in collectives(model_cost(config, SEQUENCE_LENGTH), layout):
        assert sent[each.name, each.ranks] == pytest.approx(each.bytes, rel=1e-3)  # norms of gradients are summed, too


def test_runs_of_layers() -> None:
    assert runs_of([0] * 8) == [Run((0,), 8)]
    assert runs_of([0, 1, 1, 2] * 9) == [Run((0, 1, 1, 2), 9)]
    assert runs_of([0, *[1, 2] * 8, 0, 0]) == [Run((0,), 1), Run((1, 2), 8), Run((0,), 1), Run((0,), 1)]
    assert runs_of([0] * 30 + [1] * 40) == [Run((0,), 30), Run((1,), 40)]
    runs = runs_of([3, *[1, 2] * 8])
    layers = folded(runs, extra=1)
    assert [layer.kind for layer in layers] == [3, 1, 2, 1, 2, 1, 2, 1, 2]
    assert [layer.label for layer in layers][2:6] == [(1, "first", 1), None, None, (1, "inner", 0)]
    assert extrapolate(runs, 10.0, lambda index: 12.0) == 20.0


def test_memory_of_a_rank_is_the_planned_one() -> None:
    """The storages of one of four ranks at the peak of a real step, over the formula."""
    measured, planned = memory_of_four_ranks(width=256)
    assert 0.8 < measured / planned <= 1.1


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="the trainer recomputes whole layers"):
        dry_run(uniform(), RankLayout(1, 4, rows=1, accumulation=2), SEQUENCE_LENGTH)
    with pytest.raises(ConfigError, match="vocab_size:"):
        dry_run(uniform().replace(vocab_size=None), RankLayout(1, 4, rows=1), SEQUENCE_LENGTH)
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="dry run:"):
            dry_run(uniform(), RankLayout(1, 4, rows=1), SEQUENCE_LENGTH)
    finally:
        distributed.destroy_process_group()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--gpus", "16", "--sequence-length", "64", "--dry-run"]
    assert run_command(["plan", "preset:gqa-tiny", *sizes, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["dry_run"]
    assert facts["memory_total"] == sum(facts["memory"].values())
    assert {"all_gather", "reduce_scatter"} <= {each["name"] for each in facts["collectives"]} or (
        facts["data_parallel_shard_degree"] == 1
    )
