"""Folders come back bit for bit, are the same bytes for the same content, and are what safetensors reads."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from heddle.errors import CheckpointError
from heddle.storage import file_io
from heddle.storage.folder import read_folder, tensors_sha256, verify_folder, write_folder
from heddle.storage.tensor_file import DTYPES, read_tensor_file
from tests.storage.shared import content


def save(path: Path, **tensors: Tensor) -> Path:
    write_folder(path, tensors={"model.safetensors": tensors}, documents={}, kind="model")
    return path


def load(path: Path) -> dict[str, Tensor]:
    return read_folder(path, "model").tensors("model.safetensors")


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits_a, bits_b = (torch.empty(x.shape, dtype=x.dtype).copy_(x).flatten().view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits_a, bits_b)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_every_bit_pattern_of_every_type_returns(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.uint8)  # all of 8 and 16 bits, NaNs too
    bits = bits % 2 if dtype is torch.bool else bits
    tensors = {
        "patterns": bits.view(dtype).reshape(2, -1),
        "scalar": bits[-8:].view(dtype)[0],
        "empty": bits[:0].view(dtype).reshape(3, 0, 2),
        "turned": bits[: 48 * 8].view(dtype).reshape(4, 4, -1).transpose(0, 2),
        "slice": bits.view(dtype)[3::5],
        "one_of_a_column": bits.view(dtype).reshape(-1, 2)[:1, 1],
        "broadcast": bits[:8].view(dtype)[:1].expand(3, 2),
    }
    loaded = load(save(tmp_path / "model", **tensors))
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], tensors[name]) for name in tensors)


def test_nan_payloads_and_signed_zeros_return(tmp_path: Path) -> None:
    payloads = torch.tensor([0x7F800001, -0x3FFFFF, 0x7FC0FFEE, -0x80000000, 0], dtype=torch.int32)
    loaded = load(save(tmp_path / "model", x=payloads.view(torch.float32)))
    assert torch.equal(loaded["x"].view(torch.int32), payloads)


def test_gradients_negative_views_and_parameters(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    negative = torch.randn(1, dtype=torch.complex64).conj().imag  # a view that is only marked as negated
    assert negative.is_neg()
    loaded = load(save(tmp_path / "model", parameter=parameter, negative=negative))
    assert same_bits(loaded["parameter"], parameter.detach())
    assert torch.equal(loaded["negative"], negative)
    assert not loaded["parameter"].requires_grad


def test_safetensors_reads_our_files_and_we_read_its_own(tmp_path: Path) -> None:
    tensors = content(1)["tensors"]["model.safetensors"]
    ours = safetensors.torch.load_file(save(tmp_path / "model", **tensors) / "model.safetensors")
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors")
    theirs = dict(read_tensor_file(tmp_path / "theirs.safetensors"))
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(ours[name], tensor)
        assert same_bits(theirs[name], tensor)


def test_equal_content_is_equal_bytes_whatever_the_order(tmp_path: Path) -> None:
    tensors = content(1)["tensors"]["model.safetensors"]
    save(tmp_path / "a", **tensors)
    save(tmp_path / "b", **dict(reversed(tensors.items())))
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_manifest_holds_sizes_and_hashes_anyone_can_check(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", **content(3))
    manifest = json.loads((tmp_path / "model" / "manifest.json").read_text())
    assert set(manifest["files"]) == {"config.json", "model.safetensors", "training.safetensors"}
    for name, record in manifest["files"].items():
        raw = (tmp_path / "model" / name).read_bytes()
        assert record["size"] == len(raw)
        assert record["sha256"] == hashlib.sha256(raw).hexdigest()
    embed = content(3)["tensors"]["model.safetensors"]["embed"]
    block = hashlib.sha256(embed.numpy().tobytes())
    assert manifest["files"]["model.safetensors"]["tensors"]["embed"] == {
        "dtype": "F32",
        "shape": [6, 4],
        "row_block": 6,
        "sha256": hashlib.sha256(block.digest()).hexdigest(),
        "blocks": [block.hexdigest()],
    }


def test_large_tensors_are_hashed_and_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_io, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(file_io, "MIN_PARALLEL_BYTES", 1024)
    large = torch.arange(100_001, dtype=torch.uint8)
    path = save(tmp_path / "model", large=large)
    assert torch.equal(load(path)["large"], large)
    record = read_folder(path).records["model.safetensors"]
    assert record.sha256 == hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()


def test_documents_return_exactly(tmp_path: Path) -> None:
    documents = {"config.json": '{"a": 1}\r\n\n', "notes.txt": "βῆτα 🧵\x00\u2028", "empty.json": ""}
    write_folder(tmp_path / "model", tensors={}, documents=documents, kind="model")
    contents = verify_folder(tmp_path / "model", "model")
    assert contents.documents == documents
    assert (contents.kind, contents.tensor_sets, contents.log) == ("model", {}, None)


def test_fingerprints_differ_with_names_types_shapes_and_bytes_alone(tmp_path: Path) -> None:
    zeros = torch.zeros(2, 3)
    versions = {
        "zeros": {"a": zeros},
        "name": {"b": zeros},
        "shape": {"a": zeros.T},
        "type": {"a": zeros.int()},
        "bytes": {"a": zeros + 1},
        "more": {"a": zeros, "b": zeros},
    }
    prints = {name: tensors_sha256(save(tmp_path / name, **tensors)) for name, tensors in versions.items()}
    assert len(set(prints.values())) == len(versions)
    write_folder(tmp_path / "same", tensors={"model.safetensors": {"a": zeros}}, documents={"x": "y"}, kind="another")
    assert tensors_sha256(read_folder(tmp_path / "same")) == prints["zeros"]


def test_saving_over_the_files_whose_mapped_tensors_are_saved(tmp_path: Path) -> None:
    path = save(tmp_path / "model", **{f"t{i}": torch.randn(300, 7) for i in range(5)})
    before = load(path)
    mapped = safetensors.torch.load_file(path / "model.safetensors")
    for _ in range(3):
        save(path, **mapped)
        assert all(same_bits(load(path)[name], before[name]) for name in before)
    mapped = safetensors.torch.load_file(path / "model.safetensors")
    save(path, **{name: tensor + 1 for name, tensor in mapped.items()})
    assert all(torch.equal(load(path)[name], before[name] + 1) for name in before)


def test_loaded_tensors_own_their_memory(tmp_path: Path) -> None:
    path = save(tmp_path / "model", a=torch.zeros(4), b=torch.zeros(4))
    first, second = load(path), load(path)
    first["a"].fill_(1)
    assert torch.equal(first["b"], torch.zeros(4))
    assert torch.equal(second["a"], torch.zeros(4))


@pytest.mark.parametrize(
    ("tensors", "documents", "kind", "words"),
    [
        ({"model.bin": {}}, {}, "model", "'model.bin'"),
        ({"../model.safetensors": {}}, {}, "model", "'../model.safetensors'"),
        ({}, {"manifest.json": ""}, "model", "'manifest.json'"),
        ({}, {".lock": ""}, "model", "'.lock'"),
        ({}, {"model.safetensors": ""}, "model", "'model.safetensors'"),
        ({}, {"a.txt": "\ud800"}, "model", "a.txt"),
        ({}, {}, "a model", "'a model'"),
        ({"model.safetensors": {"a b": torch.zeros(1)}}, {}, "model", "'a b'"),
        ({"model.safetensors": {"__metadata__": torch.zeros(1)}}, {}, "model", "'__metadata__'"),
        ({"model.safetensors": {"c": torch.zeros(1, dtype=torch.complex64)}}, {}, "model", "tensor 'c'"),
        ({"model.safetensors": {"m": torch.zeros(1, device="meta")}}, {}, "model", "tensor 'm'"),
        ({"model.safetensors": {"s": torch.eye(2).to_sparse()}}, {}, "model", "tensor 's'"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(
    tmp_path: Path,
    tensors: dict[str, dict[str, Tensor]],
    documents: dict[str, str],
    kind: str,
    words: str,
) -> None:
    with pytest.raises(CheckpointError, match=words):
        write_folder(tmp_path / "model", tensors=tensors, documents=documents, kind=kind)
    assert os.listdir(tmp_path) == []


def test_missing_folders_and_files_and_other_kinds_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder"):
        read_folder(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_folder(tmp_path)
    path = save(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"'model'.*'training'"):
        read_folder(path, "training")
    with pytest.raises(CheckpointError, match=r"'x\.safetensors'"):
        read_folder(path).tensors("x.safetensors")
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors:.*missing"):
        read_folder(path)


def test_files_the_manifest_does_not_list_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "model", a=torch.zeros(1))
    for name in ("model.bin", "optimizer.pt", "state.pkl", "model.ckpt"):
        os.mkfifo(path / name)  # opening one for reading in the common way would wait for ever
    read = []
    original = os.open

    def noting(name: Path, *arguments: int) -> int:
        read.append(Path(name).name)
        return original(name, *arguments)

    monkeypatch.setattr(os, "open", noting)
    verify_folder(path)
    assert set(read) == {"manifest.json", "model.safetensors"}
