"""`train` on ranks as threads: one process's numbers, stops that all ranks agree on, and failing together."""

import re
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from heddle import progress
from heddle.cli import main
from heddle.distributed import process_group
from heddle.distributed.ranks import ParallelDegrees, Ranks, held_rows, local_part, whole, with_local_part
from heddle.errors import ConfigError, HeddleError, OtherRankFailed, RankLost
from heddle.lab.compare import worker
from heddle.model import decoder
from heddle.model.copies import compiled
from heddle.signals import Interrupted
from heddle.storage.checkpoints import checkpoint_steps
from heddle.storage.run_log import read_log
from heddle.training import built_models, loop, width_transfer
from heddle.training import optimizer as master_weights
from heddle.training.distillation import Distillation, LossWeights
from heddle.training.init_checkpoint import LoraSettings, open_init_checkpoint
from heddle.training.job import TrainingJob
from heddle.training.loop import Diverged, evaluate, train
from heddle.training.optimizer import build_optimizer
from heddle.training.step import accumulate_gradients
from tests import small
from tests.distributed.ranks import on_ranks

TOLERANCE = 1e-10
ROUNDED: dict[str, Any] = {"precision": "bf16-params", "stochastic_rounding": True}
EXPERTS = small.design(
    layers=[
        {"mixer": {"kind": "attention", "heads": 2, "dropout": 0.2}, "feedforward": {"kind": "gated", "hidden": 24}},
        {"mixer": {"kind": "attention", "heads": 2}, "feedforward": small.MOE},
    ]
)


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (built_models, width_transfer):
        monkeypatch.setattr(module, "build", partial(decoder.build, dtype=torch.float64))


def on_threads(job: TrainingJob, count: int, replicate: int = 1) -> list[Any]:
    """The scores and whole weights of each rank, or the signal that stopped it."""
    degrees = ParallelDegrees(data_parallel_replicate_degree=replicate)

    def run(rank: int) -> Any:
        try:
            result = train(replace(job, ranks=Ranks(rank, count), degrees=degrees))
        except Interrupted as interrupted:
            return interrupted.exit_code
        return result.scores, {name: whole(p.detach()).clone() for name, p in result.model.named_parameters()}

    with progress.quiet():
        return on_ranks(count, run)


def numbers(run: Path) -> list[Any]:
    return [(line["loss"], line["gradient_norm"], line.get("validation_bits_per_byte", 0.0)) for line in read_log(run)]


def test_a_run_on_ranks_is_that_of_one_process_and_goes_on_at_other_numbers_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 4 ranks until rank 2 gets a signal, on 2 × 1 ranks until rank 1 does, and to the end on one process."""
    texts = small.corpus(tmp_path / "text")
    job = small.job(texts, tmp_path / "whole", EXPERTS, steps=9, save_every=None, evaluate_every=4)
    expected = train(job)
    stops = {4: 2, 7: 1}  # at which step which rank gets a signal
    stop_if_diverged = loop._stop_if_diverged

    def with_signal(job: TrainingJob, state: Any, step: Any) -> None:
        stop_if_diverged(job, state, step)
        if stops.get(state.progress.step) == job.ranks.rank:
            state.stop_request.signal_number = 15

    cut = replace(job, out=tmp_path / "cut")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_stop_if_diverged", with_signal)
        assert on_threads(cut, 4) == [143] * 4
        assert checkpoint_steps(cut.out) == [4]
        assert on_threads(cut, 2, replicate=2) == [143] * 2
        assert checkpoint_steps(cut.out) == [4, 7]
    finished = train(cut)
    for actual, line in zip(numbers(cut.out), numbers(job.out), strict=True):
        assert actual == pytest.approx(line, abs=TOLERANCE), line
    weights = expected.model.state_dict()
    assert all(float((p - weights[name]).abs().max()) < TOLERANCE for name, p in finished.model.state_dict().items())
    assert finished.bits_per_byte == pytest.approx(expected.bits_per_byte, abs=TOLERANCE)


def test_an_evaluation_on_ranks_has_one_processes_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 ranks, and batches that they do not divide; a planted order of ranks instead of batches is caught."""
    job = small.job(small.corpus(tmp_path / "text"), tmp_path / "run", EXPERTS)
    expected = evaluate(built_models.build_models(job).model, job, 400)

    def scores(rank: int) -> Any:
        own = replace(job, ranks=Ranks(rank, 3))
        return evaluate(built_models.build_models(own).model, own, 400)

    assert on_ranks(3, scores) == [expected] * 3
    gather = Ranks.gather
    monkeypatch.setattr(Ranks, "gather", lambda ranks, tensor: gather(ranks, tensor).flip(0))
    assert on_ranks(3, scores) != [expected] * 3


STARTS = ["checkpoint", "lora", "distillation", "bf16-params", "compiled", "transfer"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of dynamo
@pytest.mark.parametrize("kind", STARTS)
def test_every_start_is_that_of_one_process(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved weights, adapters, a teacher, bfloat16 weights, compiled layers, weights scaled from another width."""
    texts = small.corpus(tmp_path / "text")
    monkeypatch.setattr(built_models, "compiled", partial(compiled, backend="eager"))
    settings: dict[str, dict[str, Any]] = {
        "bf16-params": {"precision": "bf16-params"},
        "compiled": {"compile": True},
        "transfer": {"transfer_width": 8},
    }
    job = small.job(texts, tmp_path / "one", steps=2, **settings.get(kind, {}))
    if kind in ("checkpoint", "lora", "distillation"):
        train(small.job(texts, tmp_path / "earlier", steps=1))
        saved = open_init_checkpoint(tmp_path / "earlier")
        start = None if kind == "distillation" else saved
        lora = LoraSettings(rank=2) if kind == "lora" else None
        job = replace(job, init_checkpoint=start, lora=lora)
        job = replace(job, distillation=Distillation(saved) if kind == "distillation" else None)
    expected = train(job)
    results = on_threads(replace(job, out=tmp_path / "two"), 2)
    tolerance = 1e-2 if kind == "bf16-params" else 1e-6
    for actual, line in zip(numbers(tmp_path / "two"), numbers(tmp_path / "one"), strict=True):
        assert actual == pytest.approx(line, abs=tolerance)
    weights = expected.model.state_dict()
    for name, value in results[0][1].items():
        assert float((value.double() - weights[name].double()).abs().max()) < tolerance, name


def test_what_ranks_cannot_do_is_refused(tmp_path: Path) -> None:
    """By a sentence for each row of the docs' table."""
    texts = small.corpus(tmp_path / "text")
    train(small.job(texts, tmp_path / "earlier", steps=1))
    job = small.job(texts, tmp_path / "run")
    layers = Distillation(open_init_checkpoint(tmp_path / "earlier"), LossWeights(layers=1.0))
    jobs = {
        "fp8": replace(job, settings=replace(job.settings, precision="bf16", fp8=True)),
        "loss layers": replace(job, distillation=layers),
        "qk_clip": replace(job, settings=replace(job.settings, qk_clip=100.0)),
    }
    for refusal in built_models.REFUSED_ON_RANKS:
        sentence = f"{refusal.name}: {refusal.reason}"
        with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}"):
            built_models._refuse_on_ranks(replace(jobs[refusal.name], ranks=Ranks(0, 2)))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stochastic_rounding_draws_by_parameter_and_element(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal gradients give equal bits at 1 and 3 ranks; draws that begin anew on each rank are caught."""
    job = small.job(small.corpus(tmp_path / "text"), tmp_path / "run", EXPERTS, optimizer=optimizer, **ROUNDED)

    def rounded(ranks: Ranks) -> dict[str, torch.Tensor]:
        model = built_models.build_models(replace(job, ranks=ranks)).model
        updates = build_optimizer(model, 0.1, optimizer, stochastic_rounding=True)
        for step in range(2):
            updates.key = (0, step)
            for index, parameter in enumerate(updates.trainable.values()):
                draws = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index + 99 * step))
                own = draws.to(parameter.dtype)[held_rows(parameter)]
                parameter.grad = with_local_part(parameter.detach(), own)
            updates.step(1e-3)
        return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}

    expected = rounded(Ranks())

    def is_equal(weights: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(value, expected[name]) for name, value in weights.items())

    assert all(map(is_equal, on_ranks(3, lambda rank: rounded(Ranks(rank, 3)))))
    monkeypatch.setattr(master_weights, "_first_element", lambda _: 0)
    assert not any(map(is_equal, on_ranks(3, lambda rank: rounded(Ranks(rank, 3)))))


def test_a_spike_leads_all_ranks_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks go back to their checkpoint, and past the data, as one process does."""
    monkeypatch.setattr(loop, "MIN_LOSSES", 3)

    def gradients(model: Any, batch: Any, *arguments: Any) -> Any:
        result, is_spike = accumulate_gradients(model, batch, *arguments), int(batch.batch.sample_indices[0]) == 5 * 4
        return replace(result, loss=result.loss * (100.0 if is_spike else 1.0))

    monkeypatch.setattr(loop, "accumulate_gradients", gradients)
    texts = small.corpus(tmp_path / "text")
    job = small.job(texts, tmp_path / "one", save_every=4, spike_guard=20.0)
    train(job)
    on_threads(replace(job, out=tmp_path / "two"), 2)
    lines = read_log(tmp_path / "two")
    assert [line.get("skipped_batches") for line in lines] == [None] * 4 + [2] * 4
    for actual, line in zip(numbers(tmp_path / "two"), numbers(tmp_path / "one"), strict=True):
        assert actual == pytest.approx(line, abs=TOLERANCE), line


def test_a_bad_number_in_the_rows_of_any_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of a weight lies on rank 1, and rank 0 writes the log."""
    build_models = built_models.build_models

    def damaged(job: TrainingJob) -> Any:
        models = build_models(job)
        rows = local_part(models.model.get_parameter("layers.0.mixer.q.weight").detach())
        if job.ranks.rank == 1:
            rows[-1] = torch.nan
        return models

    monkeypatch.setattr(loop, "build_models", damaged)
    monkeypatch.setattr(loop, "MAX_CONSECUTIVE_SKIPS", 2)
    job = small.job(small.corpus(tmp_path / "text"), tmp_path / "run", save_every=None)
    reason = "weight layers.0.mixer.q.weight holds "

    def ending(rank: int) -> str:
        with pytest.raises(Diverged) as raised:
            train(replace(job, ranks=Ranks(rank, 2)))
        return str(raised.value)

    with progress.quiet():
        assert all(reason in message for message in on_ranks(2, ending))
    assert reason in read_log(job.out)[-1]["first_non_finite"]
    monkeypatch.setattr(Ranks, "first_text", lambda ranks, text: text)
    job = replace(job, out=tmp_path / "alone")
    with progress.quiet():
        assert [reason in message for message in on_ranks(2, ending)] == [False, True]


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "context", "expert"])
def test_reserved_degrees_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind}_parallel_degree 2: {kind} parallelism"):
        ParallelDegrees(**{f"{kind}_parallel_degree": 2})


def test_degrees_take_all_ranks() -> None:
    assert ParallelDegrees().mesh_shape(8) == (1, 8)
    assert ParallelDegrees(data_parallel_replicate_degree=2).mesh_shape(8) == (2, 4)
    assert ParallelDegrees(data_parallel_replicate_degree=8, data_parallel_shard_degree=1).mesh_shape(8) == (8, 1)
    with pytest.raises(ConfigError, match=r"data_parallel_replicate_degree 3:.*8 ranks"):
        ParallelDegrees(data_parallel_replicate_degree=3).mesh_shape(8)
    with pytest.raises(ConfigError, match=r"data_parallel_shard_degree 2:.*data_parallel_replicate_degree 2"):
        ParallelDegrees(data_parallel_replicate_degree=2, data_parallel_shard_degree=2).mesh_shape(8)
    with pytest.raises(ConfigError, match=r"data_parallel_shard_degree 0:.*-1"):
        ParallelDegrees(data_parallel_shard_degree=0)


class Rooms:
    """The same store for all threads, and a machine of its own for every two of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.machines = HashStore(), dict[int, int]()
        monkeypatch.setattr(process_group, "_store", lambda: self.store)
        monkeypatch.setattr("socket.gethostname", lambda: f"machine-{self.machines.get(threading.get_ident(), 0)}")

    def enter(self, rank: int) -> None:
        self.machines[threading.get_ident()] = rank // 2


def test_rank_0_goes_first_then_the_first_of_each_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms, calls = Rooms(monkeypatch), list[int]()

    def run(rank: int) -> int:
        rooms.enter(rank)

        def note() -> int:
            calls.append(rank)
            return rank

        return Ranks(rank, 4).in_order(note)

    assert on_ranks(4, run) == [0, 1, 2, 3]
    assert calls.index(0) == 0
    assert calls.index(2) < calls.index(3)


def test_the_first_failure_is_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = Rooms(monkeypatch)

    def run(rank: int) -> BaseException:
        rooms.enter(rank)
        watch = process_group._FailureWatch(Ranks(rank, 3))
        if rank == 1:
            return watch.shared(ConfigError("batch_size 3: is odd"))
        while process_group._Failure.read(rooms.store) is None:
            pass
        return watch.shared(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))

    errors = on_ranks(3, run)
    assert [type(error) for error in errors] == [OtherRankFailed, ConfigError, OtherRankFailed]
    assert [str(error) for error in errors] == ["batch_size 3: is odd"] * 3
    assert [getattr(error, "exit_code", None) for error in errors] == [2, 2, 2]


def test_an_error_of_another_library_names_its_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rooms = Rooms(monkeypatch)

    def run(rank: int) -> BaseException:
        rooms.enter(rank)
        return process_group._FailureWatch(Ranks(rank, 2)).shared(torch.OutOfMemoryError("CUDA out of memory"))

    def raise_it(error: BaseException) -> Any:
        raise error

    [first] = [error for error in on_ranks(2, run) if not isinstance(error, OtherRankFailed)]
    [note] = first.__notes__
    assert note in ("on rank 0 of 2", "on rank 1 of 2")
    assert worker.perform(lambda: raise_it(first))[0]["message"] == f"out of memory {note}"
    assert main._handle_other(first, []) == 1
    assert capsys.readouterr().err.startswith(f"heddle: out of memory {note}; try")


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("Timed out waiting 45000ms for recv operation to complete", "of 3 hangs: the others waited too long"),
        ("[gloo/transport/tcp/pair.cc] Connection closed by peer", "of 3 has ended without an error"),
    ],
)
def test_a_rank_that_does_not_answer_is_named(message: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = Rooms(monkeypatch)

    def run(rank: int) -> BaseException | None:
        rooms.enter(rank)
        watch = process_group._FailureWatch(Ranks(rank, 3))
        return None if rank == 1 else watch.shared(RuntimeError(message))

    errors = on_ranks(3, run)
    lost = [error for error in errors if isinstance(error, RankLost)]
    assert len(lost) == 1
    assert str(lost[0]).startswith("rank 1 (process ")
    assert sentence in str(lost[0])
    assert {error.exit_code for error in errors if isinstance(error, HeddleError)} == {75}


def test_ranks_that_start_again_do_not_meet_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with the keys of two earlier attempts; in the second one rank 1 died before it confirmed."""
    store = HashStore()
    first = on_ranks(3, lambda rank: process_group._new_prefix(store, rank, 3))
    store.set("heddle/asks/1", "of a dead rank")
    second = on_ranks(3, lambda rank: process_group._new_prefix(store, rank, 3))
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]
