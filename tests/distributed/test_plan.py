"""The planner agrees with published trainings, its bytes with counted ones, and its refusals are sentences."""

import json
import re
import shlex
from dataclasses import replace

import click
import numpy as np
import pytest

from heddle.cli.main import VerbCommand, app, run_command
from heddle.distributed.ranks import ParallelDegrees
from heddle.errors import ConfigError
from heddle.lab.plan.costs import (
    AMPERE,
    GIB,
    GPUS,
    HOPPER,
    USABLE,
    ModelCost,
    RankLayout,
    collectives,
    model_cost,
    plan_training,
    rank_memory,
)
from heddle.model.load_config import load_config, with_vocab_size
from heddle.model.size import size
from heddle.settings import shared
from heddle.training.job import TrainingJob
from heddle.training.settings import Settings, TrainSettings
from tests.distributed.fit_speeds import fit, speeds_in, tokens_per_second
from tests.distributed.published import mpt_design, mpt_runs, published_design, published_runs
from tests.distributed.validation import flops, memory, speed_errors

LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"


def llama_cost(sequence_length: int = 8192) -> ModelCost:
    return model_cost(published_design(LLAMA_8B), sequence_length)


def test_flops_are_the_published_ones() -> None:
    errors = sorted(abs(flops(row).error) for row in published_runs("flops"))
    assert errors[-2] < 0.005
    assert errors[-1] < 0.04


@pytest.mark.parametrize(("block_size", "sources"), [(None, 15), (4, 8)])
def test_a_source_that_all_later_layers_read_is_kept_once(block_size: int | None, sources: int) -> None:
    """Layers after the first: in full their two outputs below, in blocks the sum so far; and the embedding."""
    costs = []
    for residual in ({"kind": "pre_norm"}, {"kind": "attention_residuals", "block_size": block_size}):
        layers = [
            {"repeat": 8, "mixer": {"kind": "attention", "heads": 4}, "feedforward": {"kind": "mlp", "hidden": 64}}
        ]
        design = {"vocab_size": 50, "width": 64, "layers": layers, "residual": residual}
        costs.append(model_cost(load_config(design), 128))
    one = 2 * 64 * 128
    assert [layer.input_bytes // one for layer in costs[0].layers] == [1]
    assert sum(layer.input_bytes for layer in costs[1].layers) == sources * one
    kept = [sum(layer.count * layer.saved_bytes for layer in cost.layers) / one for cost in costs]
    assert 0 < kept[1] - kept[0] < 16 * 4  # not all sources of every mix, which are over a hundred


@pytest.mark.parametrize("row", published_runs("memory"), ids=lambda row: f"{row['gpus']}-{row['gib']}")
def test_memory_is_within_15_percent_of_the_published(row: dict[str, float]) -> None:
    assert abs(memory(row).error) < 0.15


def test_throughput_of_trainings_that_were_not_fitted() -> None:
    fitted, others = speed_errors()
    assert len(fitted) + len(others) == 216
    assert np.median(np.abs(others)) < 0.25


def test_the_constants_are_the_fitted_ones() -> None:
    fitted = fit(mpt_runs()[::2])
    for gpu, constants in (("a100", AMPERE), ("h100", HOPPER)):
        expected = speeds_in(fitted, gpu)
        assert np.allclose(list(vars(constants).values()), list(vars(expected).values()), rtol=0.02)


def test_the_designs_have_the_published_parameters() -> None:
    for row in mpt_runs()[::9]:
        design = mpt_design(row["model"], int(row["sequence_length"]))
        assert size(design, context_length=8).parameters == int(row["parameters"])


def test_bytes_of_collectives_are_those_of_a_traced_training() -> None:
    """Four layers of Llama 3 8B under fully_shard on 64 ranks, counted call by call by a fake process group."""
    layers = [{"repeat": 4, **_llama_layer()}]
    config = load_config({"vocab_size": 128256, "width": 4096, "layers": layers, "head": {"tied": False}})
    cost = model_cost(config, 128)
    total = {each.name: each.bytes for each in collectives(cost, RankLayout(1, 64, rows=1))}
    assert total == {"all_gather": 5_591_146_496, "reduce_scatter": 7_692_500_992}


def _llama_layer() -> dict[str, object]:
    mixer = {"kind": "attention", "heads": 32, "kv_heads": 8, "position": {"kind": "rope"}}
    return {"mixer": mixer, "feedforward": {"kind": "gated", "hidden": 14336}}


def test_a_state_takes_sixteen_bytes_a_parameter() -> None:
    cost = llama_cost()
    held = [rank_memory(cost, RankLayout(1, shard, rows=1)) for shard in (8, 128)]
    state = [memory["parameters"] + memory["gradients"] + memory["moments"] for memory in held]
    assert state[0] - state[1] == pytest.approx(16 * cost.parameters * (1 / 8 - 1 / 128), rel=1e-6)
    assert {name: value for name, value in held[0].items() if held[1][name] != value}.keys() == {
        "parameters", "gradients", "moments",
    }  # fmt: skip


def test_what_each_choice_changes() -> None:
    cost = llama_cost(2048)
    plain = RankLayout(1, 8, rows=1)
    recomputed = RankLayout(1, 8, rows=1, recompute="layers")
    assert rank_memory(cost, recomputed)["activations"] < 0.3 * rank_memory(cost, plain)["activations"]
    gpu = GPUS["h100"]
    assert 0.7 < tokens_per_second(cost, recomputed, gpu) / tokens_per_second(cost, plain, gpu) < 0.8
    replicated = {each.name: each for each in collectives(cost, RankLayout(4, 8, rows=1))}
    assert replicated["all_reduce"].bytes == 4 * cost.parameters / 8
    assert replicated["all_reduce"].traffic == 2 * replicated["all_reduce"].bytes * 3 / 4
    once = {each.name: each.bytes for each in collectives(cost, RankLayout(1, 8, 1, accumulation=4, reduce_once=True))}
    each = {each.name: each.bytes for each in collectives(cost, RankLayout(1, 8, 1, accumulation=4))}
    assert once["all_gather"] == each["all_gather"]
    assert 4 * once["reduce_scatter"] == each["reduce_scatter"]


def test_planted_peaks_of_sparse_products_make_throughput_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, gpu in GPUS.items():
        monkeypatch.setitem(GPUS, name, replace(gpu, tflops=2 * gpu.tflops))
    _, others = speed_errors()
    assert np.median(np.abs(others)) > 0.25


def test_planted_attention_that_is_not_halved_makes_flops_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    doubled = property(lambda cost: cost.head_flops + sum(x.count * (x.flops + x.attention_flops) for x in cost.layers))
    monkeypatch.setattr(ModelCost, "forward_flops", doubled)
    assert max(abs(flops(row).error) for row in published_runs("flops")) > 0.04


def test_a_plan_is_ranked_and_fits() -> None:
    plan = plan_training(published_design(LLAMA_8B), GPUS["h100"], 64, sequence_length=8192)
    rates = [candidate.tokens_per_second for candidate in plan.candidates]
    assert rates == sorted(rates, reverse=True)
    assert all(candidate.layout.gpus == 64 for candidate in plan.candidates)
    assert all(candidate.bytes <= USABLE * plan.gpu.memory * GIB for candidate in plan.candidates)
    assert {each.layout.shard for each in plan.too_large if each.layout.recompute == "layers"} == {1, 2}
    assert {each.layout.shard for each in plan.too_large if each.layout.recompute == "none"} >= {1, 2}
    shapes = [(each.layout.shard, each.layout.recompute) for each in (*plan.candidates, *plan.too_large)]
    assert len(shapes) == len(set(shapes)) == 14, "every shard degree with and without recomputed layers, once"
    causal, full = plan.utilization(plan.candidates[0])
    assert causal < full < 1


def test_every_kind_of_mixer_has_a_plan() -> None:
    for name in ("mha", "mla", "linear", "retention", "gated_delta", "moe", "hybrid", "local_global"):
        config = load_config(f"preset:{name}-tiny", ["vocab_size=1024"])
        plan = plan_training(config, GPUS["h200"], 2, sequence_length=256)
        assert plan.candidates, name
        assert plan.cost.parameters == size(config, context_length=8).parameters


def test_a_step_of_many_sequences_is_cut_into_micro_batches() -> None:
    plan = plan_training(published_design(LLAMA_8B), GPUS["h100"], 64, sequence_length=8192, batch_size=1024)
    for candidate in plan.candidates:
        layout = candidate.layout
        assert layout.rows * layout.accumulation * layout.gpus == 1024


def test_refusals() -> None:
    config = published_design(LLAMA_8B)
    with pytest.raises(ConfigError, match=r"batch_size 100:.*64 GPUs.*64.*128"):
        plan_training(config, GPUS["h100"], 64, batch_size=100)
    with pytest.raises(ConfigError, match="gpus 0:"):
        plan_training(config, GPUS["h100"], 0)
    with pytest.raises(ConfigError, match="sequence_length 0:"):
        plan_training(config, GPUS["h100"], 8, sequence_length=0)
    with pytest.raises(ConfigError, match="rows 0:"):
        RankLayout(1, 1, rows=0)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    design = ["preset:gqa-tiny", "width=16384", "layers.0.repeat=126", "layers.0.mixer.heads=128"]
    sizes = ["layers.0.mixer.kv_heads=8", "layers.0.feedforward.hidden=53248", "vocab_size=128256"]
    assert run_command(["plan", *design, *sizes, "--gpus", "16384", "--gpu", "h100", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] > 400e9
    assert len(facts["layouts"]) + len(facts["too_large"]) >= 10
    assert run_command(["plan", "preset:mla-small", "--gpus", "16", "--gpu", "a100", "--tokens", "1e10"]) == 0
    printed = capsys.readouterr().out
    assert "tokens/s per GPU" in printed
    assert "all_gather" in printed
    asked = ["plan", "preset:gqa-medium", "--gpus", "8", "--gpu", "rtx4090", "--sequence-length", "64k"]
    assert run_command(asked) == 0
    named = re.search(
        "recompute none does not fit at shard degree .*: .* needs .* GB of 23.2 usable, .*", capsys.readouterr().out
    )
    assert named is not None
    assert named[0].endswith("activations")
    assert run_command(["plan", *design, *sizes, "--gpus", "8"]) == 0
    printed = capsys.readouterr().out
    (nearest,) = re.findall("no layout fits; .* shorter sequences: (--gpus [0-9]+) fits", printed)
    assert run_command(["plan", *design, *sizes, *nearest.split()]) == 0
    assert "no layout fits" not in capsys.readouterr().out
    assert run_command(["plan", "preset:gqa-1b", "--gpus", "1", "--gpu", "rtx4090", "--sequence-length", "8k"]) == 0
    (shorter,) = re.findall("or (--sequence-length [0-9]+) fits", capsys.readouterr().out)
    assert run_command(["plan", "preset:gqa-1b", "--gpus", "1", "--gpu", "rtx4090", *shorter.split()]) == 0
    assert "no layout fits" not in capsys.readouterr().out


def printed_command(printed: str) -> str:
    """The command that trains as planned: a line of its own."""
    (line,) = re.findall(r"^(?:torchrun .*)?heddle train .*$", printed, re.MULTILINE)
    return str(line)


def read_command(line: str) -> TrainSettings:
    """The settings of a printed `heddle train`."""
    command = app.get_command(click.Context(app), "train")
    assert isinstance(command, VerbCommand)
    words = shlex.split(line.partition("heddle train ")[2])
    settings = command.read_settings(command.make_context("train", words))
    assert isinstance(settings, TrainSettings)
    return settings


def test_the_command_of_the_fastest_layout_trains_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "preset:gqa-tiny", "width=64", "--gpus", "4", "--batch-size", "512", "--tokens", "8M"]
    assert run_command(asked) == 0
    settings = read_command(printed_command(capsys.readouterr().out))
    assert (settings.design, settings.overrides, settings.tokens) == ("preset:gqa-tiny", ("width=64",), 8 * 10**6)
    assert run_command([*asked, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    best = facts["layouts"][0]
    assert any(each["accumulation"] > 1 for each in facts["layouts"])
    assert all(each["accumulation"] == 1 or each["reduce_once"] for each in facts["layouts"])  # as the trainer does
    assert best["tokens_per_step"] == 512 * facts["sequence_length"]
    assert best["batch_size"] == settings.batch_size == 512
    assert (settings.nproc, settings.precision, settings.sequence_length) == (4, "bf16", facts["sequence_length"])
    assert settings.gradient_accumulation_steps == best["accumulation"]
    assert settings.checkpoint_activations == (best["recompute"] == "layers")
    degrees = ParallelDegrees(**shared(settings, ParallelDegrees))
    assert degrees.mesh_shape(4) == (best["data_parallel_replicate_degree"], best["data_parallel_shard_degree"])
    assert run_command(["plan", "preset:gqa-tiny", "--gpus", "32"]) == 0
    line = printed_command(capsys.readouterr().out)
    assert line.startswith("torchrun --nnodes 4 --nproc-per-node 8 --node-rank $NODE_RANK ")
    assert read_command(line).nproc is None


def test_what_limits_long_sequences_on_one_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for length, is_said in (("32k", True), ("256", False)):
        assert run_command(["plan", "preset:mla-medium", "--gpus", "1", "--sequence-length", length]) == 0
        printed = capsys.readouterr().out
        assert ("activations limit the micro-batch: one sequence of 32,768 tokens takes " in printed) == is_said
        assert bool(re.search("attention takes [0-9]+% of a step: ", printed)) == is_said
    assert "training GFLOPs per token at 256 tokens" in printed


def test_an_assumed_vocabulary_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, length in (("show", "--context-length"), ("plan", "--sequence-length")):
        for override, is_said in ((), True), (("vocab_size=4096",), False):
            assert run_command([verb, "preset:gqa-tiny", *override, length, "64"]) == 0
            assert (" assumed" in capsys.readouterr().out) == is_said


def test_the_command_refuses_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "preset:gqa-tiny", "--gpu", "h10"]) == 2
    assert "gpu h10:" in capsys.readouterr().err
    assert run_command(["plan", "preset:gqa-tiny", "--tokens", "-1"]) == 2
    assert "--tokens -1:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("design", "missing"),
    [
        (["preset:hybrid-tiny"], ["gated_delta", "fewer than 125 M parameters"]),
        (["preset:gqa-medium", "vocab_size=65536"], []),
        (["preset:gqa-medium", "layers.*.feedforward.kind=moe", "--gpu", "l40s"], ["moe", "l40s"]),
        (["preset:gqa-tiny"], ["fewer than 125 M parameters"]),
    ],
)
def test_a_plan_names_what_no_fitted_training_had(
    design: list[str], missing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", *design, "--tokens", "20B", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_fitted"] == missing
    assert run_command(["plan", *design, "--tokens", "20B"]) == 0
    printed = capsys.readouterr().out
    assert all(each in printed for each in missing)
    assert ("was fitted" in printed) == bool(missing)


def timed(monkeypatch: pytest.MonkeyPatch, bf16: float) -> list[Settings]:
    """Steps of 0.5 s in float32, twice as fast in bfloat16, whose products have `bf16` times the speed."""
    steps: list[Settings] = []

    def time_steps(job: TrainingJob) -> list[float]:
        steps.append(job.settings)
        factor = 1.0 if job.settings.precision == "fp32" else 0.5
        return [factor * each for each in (0.5, 0.25, 4.0)]

    limits = {"fp32_flops_per_second": 1e12, "bf16_flops_per_second": bf16 * 1e12}
    monkeypatch.setattr("heddle.lab.compare.probes.time_training_steps", time_steps)
    monkeypatch.setattr("heddle.lab.bench.run.measure_limits", lambda device: limits)
    return steps


def test_a_plan_of_this_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    steps = timed(monkeypatch, bf16=0.5)
    line = ["plan", "preset:gqa-tiny", "--cpu", "--sequence-length", "64", "--batch-size", "2", "--tokens", "5.12e6"]
    assert run_command([*line, "--json"]) == 0
    captured = capsys.readouterr()
    facts = json.loads(captured.out)
    assert "2 × 64 tokens, fp32" in captured.err  # before the wait
    assert [(each.precision, each.checkpoint_activations) for each in steps] == [("fp32", False)]
    assert facts["step_seconds"] == 0.5
    assert facts["tokens_per_second"] == 256
    assert facts["training_seconds"] == 20_000
    parameters = size(with_vocab_size(load_config("preset:gqa-tiny"), 4096), context_length=8).parameters
    assert facts["parameters"] == parameters
    assert facts["flops_per_token"] > 6 * (parameters - 4096 * 128)
    assert 0 < facts["peak_memory"] <= facts["memory"]
    assert run_command(line) == 0
    printed = capsys.readouterr().out
    assert "256 tokens/s" in printed
    assert "training GFLOPs per token at 64 tokens" in printed
    settings = read_command(printed_command(printed))
    assert (settings.precision, settings.batch_size, settings.sequence_length) == ("fp32", 2, 64)


def test_a_plan_of_a_cpu_that_multiplies_bfloat16_fast_and_has_little_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = timed(monkeypatch, bf16=2.0)
    line = ["plan", "preset:gqa-tiny", "--cpu", "--sequence-length", "512", "--batch-size", "8"]
    assert run_command([*line, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    sizes = {(each["precision"], each["recompute"]): each["memory_total"] for each in plans}
    assert [(each.precision, each.checkpoint_activations) for each in steps] == [("fp32", False), ("bf16", False)]
    steps.clear()
    little = (sizes["bf16", "none"] + sizes["fp32", "none"]) // 2
    monkeypatch.setattr("heddle.runtime.hardware", lambda: {"cpu": "small", "memory_bytes": little})
    assert run_command(line) == 0
    assert [(each.precision, each.checkpoint_activations) for each in steps] == [("fp32", True), ("bf16", False)]
    settings = read_command(printed_command(capsys.readouterr().out))
    assert (settings.precision, settings.checkpoint_activations) == ("bf16", False)


@pytest.mark.parametrize("options", [["--gpus", "8"], ["--gpus", "0"], ["--gpu", "h100"], ["--dry-run"]])
def test_options_of_gpus_beside_a_cpu_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "preset:gqa-tiny", "--cpu", *options]) == 2
    assert options[0] in capsys.readouterr().err


def test_a_cpu_with_too_little_memory_is_refused_before_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed(monkeypatch, bf16=0.5)
    monkeypatch.setattr("heddle.runtime.hardware", lambda: {"cpu": "small", "memory_bytes": 10**6})
    assert run_command(["plan", "preset:gqa-tiny", "--cpu"]) == 1
    assert "choose a smaller design" in capsys.readouterr().err
    monkeypatch.setattr("heddle.runtime.hardware", lambda: {"cpu": "small", "memory_bytes": 10**8})
    assert run_command(["plan", "preset:gqa-tiny", "--cpu", "--batch-size", "64"]) == 1
    refusal = capsys.readouterr().err
    (nearest,) = re.findall("(--batch-size [0-9]+ --sequence-length [0-9]+) fits, with about ", refusal)
    assert run_command(["plan", "preset:gqa-tiny", "--cpu", *nearest.split()]) == 0
    assert "fp32, recomputed layers: about " in capsys.readouterr().out
