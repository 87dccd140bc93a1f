"""GGUF files are read as what they were written from: every type of ggml, every graph, and the tokenizer."""

import re
import struct
import tracemalloc
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize

from heddle.cli import export as cli_export
from heddle.errors import CheckpointError, ConfigError, MachineError
from heddle.exchange.families._common import DEFAULT_MAX_POSITIONS
from heddle.exchange.family_match import differences
from heddle.exchange.gguf import export as quantize_module
from heddle.exchange.gguf import export_gguf, load_gguf
from heddle.exchange.gguf.architectures import _separate_rope_rows
from heddle.exchange.gguf.config_from_keys import config_from_keys
from heddle.exchange.gguf.export import K_QUANTS, _library_of_a_binding
from heddle.exchange.gguf.file import check_seal
from heddle.exchange.load import load
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from tests.cases import in_turn
from tests.exchange.cases import scaled
from tests.exchange.hf_models import AutoConfig, drawn, our_logits, write
from tests.exchange.test_gguf import BASE, PAIRS, RUN_AS, model_pair, prompt, tokenizer
from tests.laws.planting import Plant, calls, result
from tests.source import ROOT
from tools.llama_cpp.runner import HERE, install, run

BLOCK_TYPES = [kind for kind in GGMLQuantizationType if GGML_QUANT_SIZES[kind][0] > 1]
PAGE = ROOT / "docs/huggingface/quantized.md"
LLAMA3_1 = scaled(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
# Whose keys say what the design says: llama.cpp has its own lengths of Llama 3's scaling, and no name for its family.
READ = [pair for pair in PAIRS if "llama3" not in pair[1]]
# Where 1 was added to norms and taken away again, or rates of decay are stored as such and not as their logarithms.
WITHOUT_LENGTH = ("bloom", "mamba2")  # in whose config no length is
ROUNDED = ("gemma", "qwen3_next", "qwen3_5", "mamba2", "granitemoehybrid")


@pytest.mark.parametrize(("family", "variant"), in_turn(READ, 1, 2))
def test_what_was_written_is_read(family: str, variant: str, tmp_path: Path) -> None:
    _, ours = model_pair(family, variant)
    file = tmp_path / "model.gguf"
    export_gguf(ours.model, file, tokenizer())
    again = load_gguf(file)
    tokens = torch.tensor([prompt()])
    assert float((our_logits(again.model, tokens) - our_logits(ours.model, tokens)).abs().max()) <= (
        2e-5 if family.startswith(ROUNDED) else 0.0
    )
    for name, parameter in ours.model.named_parameters():
        torch.testing.assert_close(again.model.get_parameter(name), parameter, rtol=0, atol=1e-6)
    expected = RUN_AS.get(family, family)
    length = DEFAULT_MAX_POSITIONS if family in WITHOUT_LENGTH else 300
    assert again.preserved_config == {"max_position_embeddings": length, "model_type": expected}
    assert again.tokenizer is not None
    for text in ["Once upon a time", "  two  spaces ", "3.14159 don't \n\n x"]:
        assert again.tokenizer.encode(text) == tokenizer().encode(text)
    assert again.tokenizer.eos_ids == [tokenizer().eod_id]


def test_the_cache_of_a_hub_is_links_to_blobs(wide: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(wide)
    loaded, expected = load_gguf(tmp_path / "model.gguf").model, load_gguf(wide).model
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    _, ours = model_pair("llama", "plain")
    export_gguf(ours.model, tmp_path / "model.gguf", dtype=dtype)
    again = load_gguf(tmp_path / "model.gguf")
    assert again.tokenizer is None
    for name, parameter in ours.model.named_parameters():
        assert torch.equal(again.model.get_parameter(name), parameter.to(dtype)), name


def test_the_scaling_of_llama_3_is_found_by_its_factors(tmp_path: Path) -> None:
    for factor in (8.0, 16.0, 5.0):  # Llama 3.1's, EXAONE 4's, nobody's
        fields = {"rope_parameters": LLAMA3_1["rope_parameters"] | {"factor": factor}}
        ours = load(write(drawn(AutoConfig.for_model("llama", **(BASE | fields)))))
        export_gguf(ours.model, tmp_path / "model.gguf")
        if factor != 5.0:
            assert not differences(load_gguf(tmp_path / "model.gguf").model.config, ours.model.config)
    with pytest.raises(ConfigError, match=r"RoPE.*Llama 3"):
        load_gguf(tmp_path / "model.gguf")


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Blocks of random small bytes, in which every number of half precision is finite."""
    block, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(4).integers(1, 56, (rows, columns // block * size), dtype=np.uint8)
    assert np.isfinite(dequantize(blocks, kind)).all()
    return blocks


def writer_with_keys(reader: GGUFReader, target: Path) -> GGUFWriter:
    """A writer of a file with the same keys."""
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0], *field.types[-1:])
    return writer


def test_dims_of_one_may_be_left_out(tmp_path: Path) -> None:
    _, ours = model_pair("qwen2_moe", "plain")
    export_gguf(ours.model, tmp_path / "whole.gguf", tokenizer())
    reader = GGUFReader(tmp_path / "whole.gguf")
    writer, squeezed = writer_with_keys(reader, tmp_path / "squeezed.gguf"), set()
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        squeezed |= {tensor.name} if 1 in data.shape else set()
        writer.add_tensor(tensor.name, data.squeeze())
    finish(writer)
    assert squeezed == {f"blk.{layer}.ffn_gate_inp_shexp.weight" for layer in range(3)}
    again = load_gguf(tmp_path / "squeezed.gguf").model
    assert all(torch.equal(again.get_parameter(name), want) for name, want in ours.model.named_parameters())


def finish(writer: GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def repack(file: Path, target: Path, kind: GGMLQuantizationType) -> dict[str, np.ndarray]:
    """The same file with random blocks in place of the matrices up and down; the numbers of these, by name."""
    reader, numbers = GGUFReader(file), {}
    writer = writer_with_keys(reader, target)
    for tensor in reader.tensors:
        if "ffn_up" in tensor.name or "ffn_down" in tensor.name:
            blocks = random_blocks(kind, *tensor.data.shape)
            numbers[tensor.name] = dequantize(blocks, kind)
            writer.add_tensor(tensor.name, blocks, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    finish(writer)
    return numbers


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices are whole blocks of 256."""
    fields = BASE | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8}
    fields["head_dim"] = 32
    file = tmp_path_factory.mktemp("wide") / "plain.gguf"
    export_gguf(load(write(drawn(AutoConfig.for_model("llama", **fields)), "10MB")).model, file, tokenizer())
    return file


def can_unpack(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


PACKED = [kind.name for kind in BLOCK_TYPES if can_unpack(kind)]


def test_the_page_lists_every_type_with_its_bits() -> None:
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| GGUF: ")]
    listed: dict[str, float] = {}
    for _, names, bits, *_ in rows:
        listed |= dict(zip(re.findall(r"`(\w+)`", names), map(float, bits.split(",")), strict=True))
    assert listed.keys() == set(PACKED)
    for name, stated in listed.items():
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        assert stated == pytest.approx(8 * size / block, abs=0.0051), name


@pytest.mark.parametrize("kind", sorted({kind.name for kind in BLOCK_TYPES} - set(PACKED)))
def test_a_type_that_the_package_does_not_unpack_is_refused(kind: str, wide: Path, tmp_path: Path) -> None:
    reader = GGUFReader(wide)
    writer = writer_with_keys(reader, tmp_path / "packed.gguf")
    for tensor in reader.tensors:
        if tensor.name == "blk.0.ffn_up.weight":
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
            blocks = np.zeros((tensor.data.shape[0], tensor.data.shape[1] // block * size), dtype=np.uint8)
            writer.add_tensor(tensor.name, blocks, raw_dtype=GGMLQuantizationType[kind])
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    finish(writer)
    with pytest.raises(CheckpointError, match=rf"tensor 'blk.0.ffn_up.weight' of type {kind} cannot be unpacked"):
        load_gguf(tmp_path / "packed.gguf", torch.float32)


@pytest.mark.parametrize("kind", PACKED)
def test_blocks_are_unpacked_when_asked_for(
    kind: str, wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "packed.gguf"
    numbers = repack(wide, file, GGMLQuantizationType[kind])
    with pytest.raises(ConfigError, match=rf"\({kind}\)"):
        load_gguf(file)
    model = load_gguf(file, torch.float32).model
    for name in ("up", "down"):
        want = torch.from_numpy(numbers[f"blk.0.ffn_{name}.weight"])
        assert torch.equal(model.get_parameter(f"layers.0.feedforward.{name}.weight"), want)
    assert f"dequantized: {kind}, " in capsys.readouterr().err
    assert load_gguf(file, torch.bfloat16).model.embed.weight.dtype == torch.bfloat16


def test_llama_cpp_computes_the_same_with_the_blocks(wide: Path, tmp_path: Path) -> None:
    """It rounds what it multiplies with Q8_0 to 8 bits too, so the two are near alone."""
    file = tmp_path / "packed.gguf"
    repack(wide, file, GGMLQuantizationType.Q8_0)
    answer = torch.tensor(run(file, [{"tokens": prompt(), "n": 0, "logits": True}])[0]["logits"])
    ours = our_logits(load_gguf(file, torch.float32).model, torch.tensor([prompt()]))[0]
    assert float(ours.std()) > 0.3
    assert float((answer - ours).abs().median()) < 0.05 * float(ours.std())


@pytest.mark.parametrize(
    "plant",
    [
        calls(_separate_rope_rows, "unflatten", lambda x, dim, sizes: x.unflatten(dim, (sizes[0], 2, -1))),
        result(config_from_keys, lambda fields: fields | {"tie_word_embeddings": True}),
    ],
    ids=["the other layout", "a tied head"],
)
def test_a_planted_bug_is_caught(plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, CheckpointError, ConfigError)):
        test_what_was_written_is_read("llama", "plain", tmp_path)


def test_damaged_and_foreign_files_are_refused(wide: Path, tmp_path: Path) -> None:
    raw = wide.read_bytes()
    for index, cut in enumerate([0, 3, 20, 200, 5000, len(raw) - 10_000]):
        (tmp_path / f"{index}.gguf").write_bytes(raw[:cut])
        with pytest.raises(CheckpointError, match=rf"{index}\.gguf.*download it again"):
            load_gguf(tmp_path / f"{index}.gguf")
    with pytest.raises(CheckpointError, match=r"none\.gguf"):
        load_gguf(tmp_path / "none.gguf")
    for old, new, message in [
        (b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama", b"warp!", "'warp!'"),
        (b"llama.block_count", b"llama.blockxcount", r"'llama.block_count'"),
        (b"blk.0.ffn_up", b"blk.0.ffx_up", r"'blk.0.ffx_up.weight'"),
    ]:
        replaced = raw.replace(old, old[: len(old) - len(new)] + new)
        assert replaced != raw
        (tmp_path / "bad.gguf").write_bytes(replaced)
        with pytest.raises((CheckpointError, ConfigError), match=message):
            load_gguf(tmp_path / "bad.gguf")


def header(keys: bytes, count: int = 1) -> bytes:
    """The start of a GGUF with its architecture and other keys, without tensors."""
    architecture = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1 + count) + architecture + keys


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


BOMBS = {
    "an array of 2^62": header(text(b"a") + struct.pack("<IIQ", 9, 0, 2**62)),
    "arrays in arrays": header(text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 2000 + bytes(12)),
    "2^60 keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
    "2^60 tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
    "a long name": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63),
    "no UTF-8": header(text(b"\xff\xfe") + struct.pack("<II", 4, 1)),
    "a key twice": header((text(b"a") + struct.pack("<II", 4, 1)) * 2, 2),
    "an unknown type": header(text(b"a") + struct.pack("<II", 77, 1)),
    "an alignment of 0": header(text(b"general.alignment") + struct.pack("<II", 4, 0)),
    "version 1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "the other byte order": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_asks_for_much_is_refused_at_once(name: str, tmp_path: Path) -> None:
    file = tmp_path / "bomb.gguf"
    file.write_bytes(BOMBS[name])
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"bomb\.gguf: is"):
        load_gguf(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20


def test_tensors_that_lie_elsewhere_are_refused(wide: Path, tmp_path: Path) -> None:
    """Every number of a tensor's entry is changed: none leads outside of the file, or to the bytes of another."""
    raw = bytearray(wide.read_bytes())
    start = raw.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight")
    for place, value in [(0, 5), (4, 2**40), (12, 2**40), (20, 999), (24, 0), (24, 2**50)]:
        wrong = bytearray(raw)
        size = 4 if place in (0, 20) else 8
        wrong[start + place : start + place + size] = value.to_bytes(size, "little")
        (tmp_path / "wrong.gguf").write_bytes(wrong)
        with pytest.raises(CheckpointError, match=r"ffn_up|is damaged"):
            load_gguf(tmp_path / "wrong.gguf")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("general.type", "adapter", "adapter"), ("split.count", 3, "part 1 of 3")],
)
def test_what_is_no_whole_model_is_named(key: str, value: str | int, words: str, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "part.gguf", "llama")
    if isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_uint16(key, value)
    writer.add_tensor("x.weight", np.zeros(32, np.float32))
    finish(writer)
    with pytest.raises(ConfigError, match=words):
        load_gguf(tmp_path / "part.gguf")


def llama_cpp_library() -> Path:
    """The library of llama.cpp's npm build."""
    install()
    [library] = (HERE / "node_modules").glob("@node-llama-cpp/*/bins/*/libllama.*")
    return library


@pytest.mark.parametrize("kind", K_QUANTS)
def test_llama_cpp_quantizes_what_it_is_given(kind: str, wide: Path, tmp_path: Path) -> None:
    ours, file = load_gguf(wide), tmp_path / "packed.gguf"
    export_gguf(ours.model, file, ours.tokenizer, k_quant=kind, library=llama_cpp_library())
    assert list(tmp_path.iterdir()) == [file]
    assert check_seal(file)
    reader = GGUFReader(file)
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if "norm" not in tensor.name}
    assert kinds == {"Q4_K", "Q6_K"} if kind == "q4_k_m" else {"Q5_K", "Q6_K"} if kind == "q5_k_m" else {"Q6_K"}
    assert reader.fields["general.file_type"].contents() == K_QUANTS[kind]
    bits = int(kind[1])
    again = load_gguf(file, torch.float32).model
    for name, parameter in ours.model.named_parameters():
        want = parameter.detach()
        assert float((again.get_parameter(name).detach() - want).norm() / want.norm()) < 1.6 * 2.0**-bits, name
    answer = run(file, [{"tokens": prompt(), "n": 0, "logits": True}])[0]
    logits = our_logits(again, torch.tensor([prompt()]))[0]
    assert float((torch.tensor(answer["logits"]) - logits).abs().median()) < 0.05 * float(logits.std())


def test_rows_that_are_no_whole_blocks_are_named_by_field(tmp_path: Path) -> None:
    for width, hidden, field in ((48, 256, "width"), (256, 80, "layers.*.feedforward.hidden")):
        design = load_config(
            "preset:gqa-tiny",
            overrides=["vocab_size=300", f"width={width}", f"layers.*.feedforward.hidden={hidden}"],
        )
        model = build(design, device="meta")
        with pytest.raises(ConfigError, match=re.escape(f"{field}: rows of ")):
            export_gguf(model, tmp_path / "model.gguf", k_quant="q4_k_m", library=llama_cpp_library())
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_or_one_that_fails_is_told(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_gguf(wide).model
    monkeypatch.setattr(quantize_module, "PACKAGES", {"no_such_binding": "lib"})
    with pytest.raises(ConfigError, match="--library"):
        export_gguf(model, tmp_path / "model.gguf", k_quant="q4_k_m")
    (tmp_path / "libllama.so").write_text("not a library")
    extension = find_spec("tokenizers.tokenizers")
    assert extension is not None
    for wrong in (tmp_path / "libllama.so", Path(str(extension.origin))):
        with pytest.raises(ConfigError, match=f"{wrong.name}: is not llama"):
            export_gguf(model, tmp_path / "model.gguf", k_quant="q4_k_m", library=wrong)
    (tmp_path / "libllama.so").unlink()
    monkeypatch.setitem(quantize_module.K_QUANTS, "q4_k_m", 999)
    with pytest.raises(MachineError, match=r"model\.gguf: llama\.cpp could not quantize it"):
        export_gguf(model, tmp_path / "model.gguf", k_quant="q4_k_m", library=llama_cpp_library())
    assert list(tmp_path.iterdir()) == []
    assert tuple(sorted(quantize_module.K_QUANTS)) == tuple(sorted(cli_export.K_QUANTS))


def test_the_library_of_a_binding_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "llama_cpp" / "lib"
    folder.mkdir(parents=True)
    (tmp_path / "llama_cpp" / "__init__.py").touch()
    (folder / "libllama.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert _library_of_a_binding() == folder / "libllama.so"
