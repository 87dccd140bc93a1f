"""Checkpoints by slices: any layout of ranks writes what any other reads, bit for bit, and no damage is silent."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import heddle
from heddle.distributed.ranks import ONE_PROCESS, Ranks, call_on_all, held_rows, whole, with_local_part
from heddle.distributed.sharding import initialize_shards, shard_model
from heddle.errors import CheckpointError, ConfigError, MachineError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.storage import folder as folder_module
from heddle.storage import manifest as manifest_module
from heddle.storage import rank_folder, tensor_file
from heddle.storage.checkpoints import checkpoint_folder
from heddle.storage.folder import FolderContents, read_folder, tensors_sha256, verify_folder, write_folder
from heddle.storage.manifest import FileRecord, LogPosition, Manifest, TensorRecord, read_manifest
from heddle.storage.model import load_shards
from heddle.storage.rank_folder import HeldTensor, plan_rows, write_rank_folder
from heddle.storage.run_log import RunLog
from heddle.storage.tensor_file import write_tensor_file
from heddle.training.checkpoint import CheckpointSaver, TrainingProgress, resume_run, save_run
from heddle.training.init_checkpoint import open_init_checkpoint
from heddle.training.optimizer import Optimizer, build_optimizer
from tests.cases import case
from tests.distributed.ranks import on_ranks

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SMALL_BLOCK = 256  # bytes, so that small tensors have blocks, too
LAYOUTS = {"one": (1, 1), "FSDP-3": (1, 3), "HSDP-2×2": (2, 2), "DDP-2": (2, 1), "FSDP-2": (1, 2), "FSDP-4": (1, 4)}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "BLOCK_BYTES", SMALL_BLOCK)


def mesh_of(layout: str) -> Any:
    replicate, shard = LAYOUTS[layout]
    if replicate == 1:
        return init_device_mesh("cpu", (shard,))
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


def on_layout(layout: str, function: Callable[[Ranks], Any]) -> list[Any]:
    """Call function(ranks) on each rank of a layout; one process forms no group."""
    replicate, shard = LAYOUTS[layout]
    count = replicate * shard
    return [function(ONE_PROCESS)] if layout == "one" else on_ranks(count, lambda rank: function(Ranks(rank, count)))


def model_on(layout: str, config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    if layout == "one":
        return build(config, dtype, seed=seed)
    model = build(config, dtype, device="meta")
    shard_model(model, mesh_of(layout))
    initialize_shards(model, seed)
    return model


def step_once(model: Decoder, optimizer: Optimizer) -> None:
    """Update with gradients that depend on the parameters' names alone, which fills all moments."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(len(name))
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = with_local_part(parameter, gradient[held_rows(parameter)].clone())
    optimizer.step(1e-2)


DESIGNS = {
    "muon": ("moe-sigmoid", torch.float32, "muon"),
    "master weights": ("attention-gqa", torch.bfloat16, "adamw"),
}


@pytest.mark.parametrize("design", DESIGNS)
def test_any_layout_reads_what_any_other_wrote(design: str, tmp_path: Path, small_blocks: None) -> None:
    """Each layout resumes the checkpoint of the one before it and saves it again: all tensors keep their hashes."""
    name, dtype, kind = DESIGNS[design]
    config = case(name)

    def save_again(ranks: Ranks, layout: str, step: int) -> None:
        model = model_on(layout, config, dtype, seed=step)  # other weights than those that are read
        optimizer = build_optimizer(model, 0.1, kind)
        log = RunLog(tmp_path)
        if step == 1:
            step_once(model, optimizer)
            progress = TrainingProgress()
        else:
            progress = resume_run(tmp_path, model, optimizer, log, ranks)
            log.close()
            assert progress.step == step - 1
        save_run(
            CheckpointSaver(tmp_path, ranks),
            model,
            optimizer,
            TrainingProgress(step),
            {"notes.txt": "βῆτα"},
            LogPosition(),
        )

    layouts = ["one", "FSDP-3", "HSDP-2×2", "DDP-2", "FSDP-4", "FSDP-2", "one"]
    hashes = []
    for step, layout in enumerate(layouts, start=1):
        on_layout(layout, lambda ranks, layout=layout, step=step: save_again(ranks, layout, step))  # type: ignore[misc]
        contents = verify_folder(checkpoint_folder(tmp_path, step), "training")
        hashes.append(tensors_sha256(contents))
        assert contents.documents["notes.txt"] == "βῆτα"
        if layout.startswith("FSDP"):
            assert len(contents.tensor_sets[FILE]) == LAYOUTS[layout][1]
            assert '"slices"' in (contents.folder / INDEX).read_text()
    assert set(hashes) == {hashes[0]}
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000006", "step-00000007"]
    expected, _ = heddle.load(checkpoint_folder(tmp_path, 7))
    model, _ = heddle.load(checkpoint_folder(tmp_path, 6))  # one process reads the slices of two
    assert all(torch.equal(value, model.get_parameter(key)) for key, value in expected.named_parameters())


def test_a_sharded_model_is_saved_and_filled_by_slices(tmp_path: Path, small_blocks: None) -> None:
    config = case("attention-gqa")
    expected = dict(build(config, seed=5).named_parameters())

    def save(ranks: Ranks) -> None:
        model = model_on("FSDP-3", config, seed=5)
        with pytest.raises(CheckpointError, match=r"tensor '.*'.*`ranks`"):
            heddle.save(model, tmp_path / "m")
        heddle.save(model, tmp_path / "m", documents={"a.txt": "a"}, ranks=ranks)

    def fill(ranks: Ranks) -> dict[str, Tensor]:
        model = build(config, device="meta")
        shard_model(model, mesh_of("FSDP-2"))
        init_checkpoint = open_init_checkpoint(tmp_path / "m", ranks)
        init_checkpoint.load_shards(model, "cpu", ranks)
        assert (model.head.weight is model.embed.weight) == config.head.tied
        return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}

    on_layout("FSDP-3", save)
    for weights in on_layout("FSDP-2", fill):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
    heddle.save(build(config, seed=5), tmp_path / "one")
    assert tensors_sha256(tmp_path / "one") == tensors_sha256(tmp_path / "m")
    other = case("moe-sigmoid")

    def misfit(ranks: Ranks) -> None:
        model = build(other, device="meta")
        shard_model(model, mesh_of("FSDP-2"))
        load_shards(model, tmp_path / "m", ranks=ranks)

    with pytest.raises(CheckpointError, match=r"'layers.0.feedforward.*"):
        on_layout("FSDP-2", misfit)


def sharded(ranks: Ranks, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors sharded by rows over all ranks."""
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.placement_types import Shard

    mesh = init_device_mesh("cpu", (ranks.count,))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}


def write_on(ranks: int, folder: Path, tensors: dict[str, Tensor]) -> None:
    def write(rank: int) -> None:
        each = Ranks(rank, ranks)
        write_rank_folder(folder, tensors={FILE: sharded(each, tensors)}, documents={}, kind="model", ranks=each)

    on_ranks(ranks, write)


@pytest.mark.parametrize("writers", [1, 4])
def test_ranks_read_hardly_more_than_they_hold(
    writers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    tensors = {f"layers.{n}.weight": torch.randn(1024, 32) for n in range(2)}  # 128 bytes a row, 512 blocks
    if writers == 1:
        write_folder(tmp_path / "m", tensors={FILE: tensors}, documents={}, kind="model")
    else:
        write_on(writers, tmp_path / "m", tensors)
    contents, original, read = read_folder(tmp_path / "m"), os.readv, [0]

    def counting(descriptor: int, buffers: Any) -> int:
        count = original(descriptor, buffers)
        read[0] += count
        return count

    monkeypatch.setattr(os, "readv", counting)
    for count in (1, 2, 3, 4, 5):
        share = -(-1024 // count)
        parts: dict[str, list[Tensor]] = {name: [] for name in tensors}
        for rank in range(count):
            rows = range(rank * share, min(1024, rank * share + share))
            read[0] = 0
            for name, part in contents.read_slices(FILE, dict.fromkeys(tensors, rows)).items():
                parts[name].append(part)
            assert read[0] <= 1.05 * 2 * len(rows) * 128
        assert all(torch.equal(torch.cat(parts[name]), tensor) for name, tensor in tensors.items())


def test_a_rank_that_fails_fails_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    write_on(2, tmp_path / "m", {"a": torch.zeros(64, 8)})
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    right = write_tensor_file

    def full_disk(path: Path, *arguments: Any, **options: Any) -> FileRecord:
        if "-00002-of" in path.name:
            raise MachineError(f"{path.name}: cannot be written (No space left on device); free some space")
        return right(path, *arguments, **options)

    def write(rank: int) -> str:
        each = Ranks(rank, 2)
        tensors = {FILE: sharded(each, {"a": torch.ones(64, 8)})}
        with pytest.raises(MachineError) as caught:
            write_rank_folder(tmp_path / "m", tensors=tensors, documents={}, kind="model", ranks=each)
        return str(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(rank_folder, "write_tensor_file", full_disk)
        sentences = on_ranks(2, write)
    assert (
        sentences
        == ["model-00002-of-00002.safetensors: cannot be written (No space left on device); free some space"] * 2
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    assert os.listdir(tmp_path) == ["m"]


def test_a_file_that_rank_0_does_not_see_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = write_tensor_file

    def elsewhere(path: Path, *arguments: Any, **options: Any) -> FileRecord:
        record = right(path, *arguments, **options)
        if "-00002-of" in path.name:
            path.unlink()
        return record

    monkeypatch.setattr(rank_folder, "write_tensor_file", elsewhere)
    with pytest.raises(CheckpointError, match="rank 1"):
        write_on(2, tmp_path / "m", {"a": torch.ones(64, 8), "b": torch.ones(64, 8)})
    assert os.listdir(tmp_path) == []


def test_errors_of_ranks_are_shared() -> None:
    class Odd(ConfigError):
        """A kind of error that other ranks need not know."""

    def run(rank: int) -> str:
        def act() -> str:
            if rank == 1:
                raise Odd("batch_size 3: is odd; take an even one")
            if rank == 2:
                raise ZeroDivisionError("by zero")
            return f"βῆτα {rank}"

        assert call_on_all(Ranks(rank, 3), lambda: "x" * rank) == ["", "x", "xx"]
        try:
            call_on_all(Ranks(rank, 3), act)
        except Exception as error:
            return f"{type(error).__name__} {error}"
        return ""

    sentence = "batch_size 3: is odd; take an even one"
    assert on_ranks(3, run) == [f"ConfigError {sentence}", f"Odd {sentence}", f"ConfigError {sentence}"]


@pytest.fixture
def folder(tmp_path: Path, small_blocks: None) -> Path:
    """Two tensors in slices of two ranks, and a small one that one of them wrote."""
    tensors = {"a": torch.arange(512.0).reshape(64, 8), "b": torch.ones(64, 16), "c": torch.ones(3)}
    write_on(2, tmp_path / "m", tensors)
    return tmp_path / "m"


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_a_lost_a_stale_and_an_altered_shard_are_named(folder: Path, tmp_path: Path) -> None:
    right = {name: (folder / name).read_bytes() for name in (*SHARDS, INDEX)}
    write_on(2, tmp_path / "other", {"a": torch.zeros(64, 8), "b": torch.ones(64, 16), "c": torch.ones(3)})
    flipped = bytearray(right[SHARDS[0]])
    flipped[-1] ^= 1
    wrong: list[tuple[str, bytes | None, str]] = [
        (SHARDS[0], None, f"{SHARDS[0]}: is missing; restore it"),
        (INDEX, None, f"{INDEX}: is missing; restore it"),
        (SHARDS[1], (tmp_path / "other" / SHARDS[1]).read_bytes(), f"{SHARDS[1]}: tensor 'a' was altered in block 0"),
        (SHARDS[0], right[SHARDS[1]], f"{SHARDS[0]}: "),
        (SHARDS[0], bytes(flipped), f"{SHARDS[0]}: tensor "),
    ]
    for name, content, sentence in wrong:
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            read_folder(folder).read_slices(FILE, {"a": range(20, 60), "b": None, "c": None})
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)
        (folder / name).write_bytes(right[name])
    verify_folder(folder)


def resign(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write the manifest again after a change of the entry of slice `a` in the second shard, with the right hash."""
    content = json.loads((folder / "manifest.json").read_text())
    change(content["files"])
    del content["sha256"]
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def second(**fields: Any) -> Callable[[dict[str, Any]], object]:
    def change(files: dict[str, Any]) -> None:
        entry = files[SHARDS[1]]["tensors"]["a"]
        entry.update(fields)
        for name, value in fields.items():
            if value is None:
                del entry[name]

    return change


HOSTILE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (second(row_offset=40, shape=[24, 8]), "row 40"),
    (second(row_offset=24), "row 24"),
    (second(row_offset=0), "(an overlap)"),
    (second(total_rows=72), "has another type or shape than its slice in"),
    (second(row_offset=None, total_rows=None), "tensor 'a'"),
    (second(row_offset=None), "the rows of the slice of tensor a are malformed"),
    (second(row_offset=-32), "the rows of the slice of tensor a are malformed"),
    (second(row_offset="32"), "the rows of the slice of tensor a are malformed"),
    (second(row_offset=2**70, total_rows=2**71), "the rows of the slice of tensor a are malformed"),
    (second(row_offset=True), "the rows of the slice of tensor a are malformed"),
    (second(total_rows=32), "the rows of the slice of tensor a are malformed"),
    (second(total_rows=[64]), "the rows of the slice of tensor a are malformed"),
    (second(row_block=4), "has another type or shape than its slice in"),
    (second(dtype="I32"), "has another type or shape than its slice in"),
    (lambda files: files[SHARDS[1]]["tensors"].pop("a"), "tensor 'a' ends at row 32"),
    (lambda files: files.pop(SHARDS[0]), f"{SHARDS[0]}:"),
]


@pytest.mark.parametrize(("change", "sentence"), HOSTILE)
def test_slices_that_make_no_whole_are_named(
    folder: Path, change: Callable[[dict[str, Any]], object], sentence: str
) -> None:
    resign(folder, change)
    with pytest.raises(CheckpointError) as caught:
        verify_folder(folder)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_index_that_lists_other_slices_is_named(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    assert index["slices"]["a"] == {SHARDS[0]: [0, 32], SHARDS[1]: [32, 64]}
    assert "a" not in index["weight_map"]
    index["slices"]["a"][SHARDS[1]] = [30, 64]
    raw = json.dumps(index).encode()
    (folder / INDEX).write_bytes(raw)
    manifest = read_manifest(folder)
    records = {**manifest.files, INDEX: FileRecord(len(raw), hashlib.sha256(raw).hexdigest())}
    (folder / "manifest.json").write_bytes(Manifest(manifest.kind, records).encode())
    with pytest.raises(CheckpointError, match=r"slices.*manifest"):
        read_folder(folder)


def test_a_reader_that_does_not_check_coverage_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: an overlap is read over, by the reader of the manifest and that of the index."""

    def careless(folder: Path, files: Any, records: dict[str, FileRecord]) -> dict[str, list[tuple[str, TensorRecord]]]:
        pieces: dict[str, list[tuple[str, TensorRecord]]] = {}
        for file in files:
            for name, tensor in (records[file].tensors or {}).items():
                pieces.setdefault(name, []).append((file, tensor))
        return pieces

    monkeypatch.setattr(tensor_file, "find_slices", careless)
    monkeypatch.setattr(folder_module, "find_slices", careless)
    monkeypatch.setattr(folder_module, "check_index", lambda *arguments: None)
    with pytest.raises(pytest.fail.Exception):
        test_slices_that_make_no_whole_are_named(folder, *HOSTILE[1])


def test_ranks_that_go_back_to_an_earlier_checkpoint_go_together(
    tmp_path: Path, small_blocks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = case("attention-gqa")

    def save(ranks: Ranks) -> None:
        for step in (1, 2):
            model = model_on("FSDP-2", config, seed=step)
            optimizer = build_optimizer(model, 0.1)
            save_run(CheckpointSaver(tmp_path, ranks), model, optimizer, TrainingProgress(step), {}, LogPosition())

    def resume(ranks: Ranks) -> tuple[int, Tensor]:
        model = model_on("FSDP-2", config, seed=7)
        log = RunLog(tmp_path)
        progress = resume_run(tmp_path, model, build_optimizer(model, 0.1), log, ranks)
        log.close()
        return progress.step, whole(model.embed.weight.detach())

    on_layout("FSDP-2", save)
    path = checkpoint_folder(tmp_path, 2) / SHARDS[1]  # what only the second rank reads
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    for step, weight in on_layout("FSDP-2", resume):
        assert step == 1
        assert torch.equal(weight, build(config, seed=1).embed.weight)
    assert f"{SHARDS[1]}: tensor " in capsys.readouterr().err


def held(*rows: tuple[int, int], shape: tuple[int, ...] = (64, 8)) -> list[dict[str, HeldTensor]]:
    return [{"a": HeldTensor("F32", shape, *each)} for each in rows]


def test_who_writes_what(small_blocks: None) -> None:
    """A row has 32 bytes: 8 rows a block."""
    plan = plan_rows(Path("f"), held((0, 32), (32, 64)))["a"]
    assert (plan.is_gathered, plan.rows) == (False, {0: range(32), 1: range(32, 64)})
    plan = plan_rows(Path("f"), held((0, 22), (22, 44), (44, 64)))["a"]  # not where blocks begin
    assert (plan.is_gathered, plan.rows) == (True, {0: range(16), 1: range(16, 40), 2: range(40, 64)})
    plan = plan_rows(Path("f"), held((0, 32), (32, 64), (0, 32), (32, 64)))["a"]  # two copies of each half
    assert plan.rows == {0: range(16), 2: range(16, 32), 1: range(32, 48), 3: range(48, 64)}
    plan = plan_rows(Path("f"), held((0, 2), (2, 4), (4, 4), shape=(4, 8)))["a"]
    assert (plan.is_gathered, plan.rows) == (True, {0: range(4)})
    assert plan_rows(Path("f"), held((0, 1), (0, 1), shape=()))["a"].rows == {0: range(1)}
    assert plan_rows(Path("f"), held((0, 0), (0, 0), shape=(0, 5)))["a"].rows == {0: range(0)}
    small = [{name: HeldTensor("F32", (2,), 0, 2) for name in "abcd"} for _ in range(2)]
    writers = [next(iter(plan.rows)) for plan in plan_rows(Path("f"), small).values()]
    assert writers == [0, 1, 0, 1]  # each has as much to write
    for rows in ([(0, 32), (40, 64)], [(0, 40), (32, 64)], [(0, 32), (32, 60)], [(0, 0), (0, 0)]):
        with pytest.raises(CheckpointError, match="row of tensor 'a'"):
            plan_rows(Path("f"), held(*rows))
    with pytest.raises(CheckpointError, match="1 hold tensor 'a'"):
        plan_rows(Path("f"), [*held((0, 64)), *held((0, 32), shape=(32, 8))])


def test_slices_of_one_process_are_whole_tensors(folder: Path) -> None:
    contents: FolderContents = read_folder(folder)
    assert torch.equal(contents.tensor(FILE, "a"), torch.arange(512.0).reshape(64, 8))
    assert torch.equal(contents.tensors(FILE)["a"], torch.arange(512.0).reshape(64, 8))
    assert contents.read_rows(FILE, "a", 5, 5).shape == (0, 8)
    assert torch.equal(contents.read_rows(FILE, "a", 30, 35), torch.arange(240.0, 280.0).reshape(5, 8))
