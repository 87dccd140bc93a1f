"""Folders of others that are damaged, incomplete or hostile: one sentence names what is wrong, and nothing is left."""

import errno
import json
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import heddle
from heddle.errors import CheckpointError, HeddleError, MachineError
from heddle.exchange.export import export
from heddle.exchange.family import family_of
from heddle.exchange.load import load, original_design
from heddle.exchange.safetensors_folder import CONFIG_FILE, INDEX_FILE
from tests.exchange.cases import CASES
from tests.exchange.hf_models import config_of, read_json, saved, tensors_of
from tests.exchange.tokenizer_cases import tokenizer_json
from tests.storage.shared import System, standing_in

FUZZED = [family for family in ("llama", "gemma2", "gpt2", "phi3", "qwen3_moe", "deepseek_v3") if family in CASES]
Damage = Callable[[Path], object]


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def theirs(family: str = "llama") -> Path:
    return saved(family, next(iter(CASES[family].variants)))[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in shards, as transformers wrote it."""
    return copy(theirs(), tmp_path / "model")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The same, exported by us."""
    loaded = load(theirs())
    export(loaded.model, tmp_path / "own", imported=loaded, max_shard_bytes=40_000)
    return tmp_path / "own"


def shard(folder: Path, number: int = 0) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """A tensor file with its tensors changed."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def spread(data: dict[str, Any], **files: str) -> dict[str, Any]:
    return {"weight_map": data["weight_map"] | files}


def first(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in tensors if tensors[name].dim() == 2)


def wider(tensors: dict[str, torch.Tensor]) -> None:
    name = first(tensors)
    tensors[name] = torch.cat((tensors[name], tensors[name]))


def as_type(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[first(tensors)] = tensors[first(tensors)].to(dtype)

    return change


def alone(folder: Path) -> Path:
    """All tensors in one file."""
    tensors = tensors_of(folder)
    for file in [*folder.glob("*.safetensors"), folder / INDEX_FILE]:
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.safetensors"


def instead(folder: Path) -> None:
    alone(folder).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


def disguised(folder: Path) -> None:
    alone(folder).write_bytes(pickle.dumps({"a": 1}))


def twice(folder: Path) -> None:
    tensors = load_file(shard(folder))
    rewrite(shard(folder, 1), lambda others: others.update(tensors))


def gone(file: Path) -> Path:
    file.unlink()
    return file


def index(folder: Path, **files: str) -> None:
    edit(folder / INDEX_FILE, **spread(read_json(folder, INDEX_FILE), **files))


def replaced(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def fields(**changes: Any) -> Damage:
    return lambda folder: edit(folder / CONFIG_FILE, **changes)


def anonymous(*classes: Any) -> Damage:
    """No model_type, and other classes."""

    def change(folder: Path) -> None:
        data = read_json(folder) | {"architectures": list(classes) if isinstance(classes[0], str) else classes[0]}
        del data["model_type"]
        (folder / CONFIG_FILE).write_text(json.dumps(data))

    return change


def duplicate(folder: Path) -> None:
    text = (folder / CONFIG_FILE).read_text()
    (folder / CONFIG_FILE).write_text(text.replace("{", '{"vocab_size": 12,', 1))


HUGE = 2**31 - 1
SMALL = {"quant_method": "bitsandbytes", "load_in_4bit": True}
DAMAGES: dict[str, tuple[Damage, str]] = {
    "a shard is missing": (lambda f: shard(f, 1).unlink(), r"model-00002-of.*safetensors: shard is missing"),
    "no weights": (lambda f: alone(f).unlink(), r"holds neither model\.safetensors nor"),
    "index leads outside": (lambda f: index(f, x="../../secret.safetensors"), r"index\.json: tensor 'x' is said to be"),
    "index leads to a root": (lambda f: index(f, x="/etc/passwd"), r"index\.json: tensor 'x' is said to be"),
    "index is no table": (lambda f: edit(f / INDEX_FILE, weight_map=[1]), r"index\.json: has no table 'weight_map'"),
    "index is empty": (lambda f: edit(f / INDEX_FILE, weight_map={}), r"tensor '.*' is missing"),
    "a tensor of none": (lambda f: rewrite(shard(f), lambda t: t.update(x=torch.ones(2))), r"'x' belongs to no part"),
    "a tensor in two shards": (twice, r"safetensors: tensor '.*' appears twice"),
    "an extra tensor": (lambda f: rewrite(alone(f), lambda t: t.update(x=torch.ones(2))), r"'x' belongs to no part"),
    "a tensor is missing": (lambda f: rewrite(alone(f), lambda t: t.pop("model.norm.weight")), r"norm.*is missing"),
    "a wrong shape": (lambda f: rewrite(alone(f), wider), r"tensor '.*' has shape \[.*\], the config needs \["),
    "bytes for weights": (lambda f: rewrite(alone(f), as_type(torch.int8)), r"tensor '.*' is of type torch\.int8"),
    "fp8 weights": (lambda f: rewrite(alone(f), as_type(torch.float8_e4m3fn)), r"float8_e4m3fn, as quantized"),
    "whole numbers": (lambda f: rewrite(alone(f), as_type(torch.int64)), r"tensor '.*' is of type torch\.int64"),
    "a pickle instead": (instead, r"pytorch_model\.bin: is a pickle .* convert it to safetensors"),
    "a pickle in disguise": (disguised, r"model\.safetensors: is a pickle or an archive"),
    "remote code": (
        fields(model_type="mamba9", auto_map={"AutoModel": "x.Y"}), r"'mamba9' is not supported; .*'auto_map'.*never",
    ),
    "quantised": (fields(quantization_config=SMALL), r"field 'quantization_config' .* \('bitsandbytes'\)"),
    "quantised by MLX": (fields(quantization={"bits": 4}), r"field 'quantization' says the weights are quantized"),
    "a class of nobody": (anonymous("ZambaForCausalLM"), r"config\.json: model_type None is not supported"),
    "classes that are no list": (anonymous(7), r"config\.json: model_type None is not supported"),
    "classes that are no texts": (anonymous([{}]), r"config\.json: model_type None is not supported"),
    "unknown kind": (fields(model_type="mamba9"), r"'mamba9' is not supported; did you mean 'mamba'\? heddle reads"),
    "a long kind": (fields(model_type="x" * 4000), r"\(4002 characters\) is not supported; heddle reads the \d+"),
    "a kind without its parts": (fields(model_type="zamba2"), r"'zamba2' is not supported; .* one block between"),
    "no kind": (fields(model_type=None), r"config\.json: model_type None is not supported"),
    "heddle's own": (fields(model_type=None, layers=[]), r"config\.json: is a design of heddle's"),
    "a kind of wrong kind": (fields(model_type=["llama"]), r"model_type \['llama'\] is not supported"),
    "unknown rope": (fields(rope_parameters={"rope_type": "spiral"}), r"rope_type 'spiral' is not known; heddle reads"),
    "escapes in rope": (fields(rope_parameters={"rope_type": "\x1b[2J"}), r"rope_type '\\x1b\[2J' is not known"),
    "rope is no table": (fields(rope_parameters=[1]), r"field 'rope_parameters' .* should be a table"),
    "no config": (lambda f: (f / CONFIG_FILE).unlink(), r"has no config\.json"),
    "config is a list": (replaced(CONFIG_FILE, b"[1, 2]"), r"config\.json: is not a table in JSON"),
    "config is not UTF-8": (replaced(CONFIG_FILE, b'{"a": "\xff"}'), r"config\.json: is not text in UTF-8"),
    "config is nothing": (replaced(CONFIG_FILE, b""), r"config\.json: is not a table in JSON"),
    "config is deep": (
        replaced(CONFIG_FILE, b'{"a":' * 5000 + b"1" + b"}" * 5000), r"config\.json: .*nested too deeply",
    ),
    "config is rather deep": (replaced(CONFIG_FILE, b'{"a":' * 200 + b"1" + b"}" * 200), r"config\.json: .*too deeply"),
    "config is huge": (lambda f: os.truncate(f / CONFIG_FILE, 2**33), r"config\.json: has \d+ bytes, over"),
    "config is large": (replaced(CONFIG_FILE, b'{"a": "' + b"x" * 2**26 + b'"}'), r"config\.json: has more than"),
    "config with a key twice": (duplicate, r"config\.json: is not a table in JSON \(it has a duplicate key\)"),
    "config with NaN": (replaced(CONFIG_FILE, b'{"rms_norm_eps": NaN}'), r"config\.json: .*NaN is not a JSON number"),
    "a text for a number": (fields(hidden_size="42"), r"field 'hidden_size' is '42'; should be of type int"),
    "true for a number": (fields(num_hidden_layers=True), r"field 'num_hidden_layers' is True; should be of type int"),
    "no heads": (fields(num_attention_heads=0), r"config\.json"),
    "a negative size": (fields(intermediate_size=-3), r"hidden: .*config\.json"),
    "10^30 layers": (fields(num_hidden_layers=10**30), r"field 'num_hidden_layers' .* at most 1024"),
    "a huge width": (fields(hidden_size=HUGE, vocab_size=HUGE, intermediate_size=HUGE), r"config\.json|shape"),
    "a folder for a file": (lambda f: gone(alone(f)).mkdir(), r"holds neither"),
    "a device for a file": (lambda f: gone(alone(f)).symlink_to("/dev/zero"), r"holds neither"),
    "a link to nowhere": (lambda f: gone(shard(f)).symlink_to("gone"), r"00001-of.*safetensors: shard is missing"),
    "a broken tokenizer": (replaced("tokenizer.json", b"{}"), r"tokenizer\.json is not a valid tokenizer\.json"),
    "a tokenizer of bytes": (replaced("tokenizer.json", b"\xff\xfe"), r"tokenizer\.json: is not text in UTF-8"),
    "a large tokenizer": (
        replaced("tokenizer.json", tokenizer_json("gpt2").encode()), r"tokenizer\.json: has 352 tokens, but",
    ),
    "settings that are no table": (replaced("generation_config.json", b"[]"), r"generation_config\.json: is not a tab"),
    "a template of bytes": (replaced("chat_template.jinja", b"\xff"), r"chat_template\.jinja: is not text in UTF-8"),
}  # fmt: skip


def refusal(folder: Path) -> str:
    """The one sentence about a folder, which must stay as it was."""
    before = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    with pytest.raises(HeddleError) as caught:
        load(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 700
    if before:
        assert {path.name for path in folder.iterdir()} == before
    return text


@pytest.mark.parametrize("name", DAMAGES)
def test_each_is_refused_by_name(folder: Path, name: str) -> None:
    damage, words = DAMAGES[name]
    damage(folder)
    text = refusal(folder)
    assert re.search(words, text), text


def test_what_is_no_folder(tmp_path: Path) -> None:
    assert "there is no such folder" in refusal(tmp_path / "gone")
    (tmp_path / "file").write_text("x")
    assert "is a file, not a folder" in refusal(tmp_path / "file")
    assert "has no config.json" in refusal(tmp_path)
    (tmp_path / "model-Q4_K_M.gguf").touch()
    assert refusal(tmp_path).endswith(f"name the GGUF itself, {tmp_path / 'model-Q4_K_M.gguf'}")


def test_pickles_beside_safetensors_are_left_alone(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    (folder / "consolidated.safetensors").write_bytes(b"not read")
    load(folder)


def test_values_that_are_not_finite_are_refused_unless_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][3] = float("nan")

    rewrite(alone(folder), spoil)
    with pytest.raises(CheckpointError, match=r"'model.norm.weight'"):
        load(folder)
    assert load(folder, allow_non_finite=True).model.get_parameter("final_norm.norm.weight").isnan().sum() == 1
    assert "'model.norm.weight'" in capsys.readouterr().err


def test_the_cache_of_a_hub_is_links_to_blobs(folder: Path, own: Path, tmp_path: Path) -> None:
    for source in (folder, own):
        snapshot, blobs = tmp_path / "hub" / source.name / "snapshots" / "a1", tmp_path / "hub" / source.name / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for number, file in enumerate(sorted(source.iterdir())):
            shutil.copy(file, blobs / str(number))
            (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
        loaded, expected = load(snapshot).model, load(source).model
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), expected.parameters(), strict=True))


def test_a_folder_without_permission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with standing_in(System(1, denied, True)), pytest.raises(MachineError, match=r"config\.json:"):
        load(folder)

    def refuse(self: Path) -> bool:
        raise denied

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(MachineError, match=r"model:.*Permission denied"):
        load(folder)


def test_a_file_cut_anywhere(folder: Path) -> None:
    file = shard(folder)
    raw = file.read_bytes()
    head = 8 + int.from_bytes(raw[:8], "little")
    for length in [*range(0, head + 20, 7), *range(head, len(raw), 997), len(raw) - 1]:
        file.write_bytes(raw[:length])
        assert file.name in refusal(folder)


@given(offset=st.integers(0, 10**9), bit=st.integers(0, 7))
@settings(max_examples=150)
def test_a_flipped_bit_in_a_header_is_refused_or_changes_no_shape(offset: int, bit: int) -> None:
    folder = _Flipped.folder()
    file = shard(folder)
    raw = file.read_bytes()
    at = offset % (8 + int.from_bytes(raw[:8], "little"))
    file.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :])
    text = outcome(folder)
    file.write_bytes(raw)
    assert not text or file.name in text or "tensor '" in text


def outcome(folder: Path) -> str:
    """What is said about a folder; nothing where it is read."""
    try:
        assert isinstance(load(folder).model, heddle.Decoder)
    except HeddleError as error:
        return str(error)
    return ""


class _Flipped:
    """One folder for all examples, made once."""

    root: Path | None = None

    @classmethod
    def folder(cls) -> Path:
        if cls.root is None:
            cls.root = copy(theirs(), theirs().with_name(theirs().name + "-flipped"))
        return cls.root


def test_any_flipped_bit_of_our_own_export_is_seen(own: Path) -> None:
    for file in sorted(own.iterdir()):
        raw = file.read_bytes()
        for offset in range(0, len(raw), max(1, len(raw) // 23)):
            file.write_bytes(raw[:offset] + bytes([raw[offset] ^ 16]) + raw[offset + 1 :])
            assert file.name in refusal(own) or "manifest.json" in refusal(own)
        file.write_bytes(raw)
    load(own)


def test_weights_that_the_manifest_does_not_know(own: Path) -> None:
    shutil.copy(alone(copy(own, own.with_name("other"))), own / "model.safetensors")
    assert "model.safetensors:" in refusal(own)


VALUES = st.one_of(
    st.none(), st.booleans(), st.sampled_from([0, 1, -1, 2, 3, 10**30, -(10**30), 2**31 - 1, 0.0, -0.5, 1e300, 7.5]),
    st.text(max_size=5), st.lists(st.integers(-2, 9), max_size=4), st.just({}),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "full_attention", "x"]),
                    st.sampled_from(["yarn", "linear", "llama3", "longrope", "dynamic", 0, -1, 2.0, None, [1]])),
)  # fmt: skip


@pytest.mark.parametrize("family", FUZZED)
@given(data=st.data())
@settings(max_examples=120)
def test_any_value_in_any_field_is_a_model_or_a_sentence(family: str, data: Any) -> None:
    source = theirs(family)
    config = read_json(source)
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=2)):
        value = config[name]
        if isinstance(value, dict) and value and data.draw(st.booleans()):
            config[name] = value | {data.draw(st.sampled_from(sorted(value))): data.draw(VALUES)}
        else:
            config[name] = data.draw(VALUES)
    target = source.with_name(source.name + "-fuzzed")
    if not target.is_dir():
        copy(source, target)
    (target / CONFIG_FILE).write_text(json.dumps(config))
    text = outcome(target)
    assert "\n" not in text
    assert len(text) < 900


def test_an_export_leaves_others_content_alone(tmp_path: Path) -> None:
    model = load(theirs()).model
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="did not write"):
        export(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    model = load(theirs()).model
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 100, 5000, 60_000):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(MachineError, match="free some space"):
                export(model, tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert os.listdir(tmp_path) == []


def test_an_export_that_dies_leaves_no_half_of_a_folder(tmp_path: Path) -> None:
    model = load(theirs()).model
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with standing_in(System()) as system:
        export(model, tmp_path / "out", max_shard_bytes=40_000)
    for at in range(1, len(system.trace) + 1, 5):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        with standing_in(System(at, full)):
            try:
                export(model, tmp_path / "out", max_shard_bytes=40_000)
            except MachineError:
                assert not os.path.lexists(tmp_path / "out")
        if (tmp_path / "out").is_dir():
            load(tmp_path / "out")


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_that_was_written_must_be_the_embedding(same: bool, tmp_path: Path) -> None:
    folder = copy(saved("llama", "llama3-tied-biases")[1], tmp_path / "model")
    tensors = tensors_of(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head if same else head + 1}, folder / "model.safetensors")
    if same:
        assert torch.equal(load(folder).model.head.weight, head)
    else:
        with pytest.raises(HeddleError, match="'tie_word_embeddings'"):
            load(folder)


def test_a_huge_number_of_another_field_does_not_fill_the_sentence() -> None:
    """Seed 3, file 2646 of `tools/soak.py --name files`: the number of one field in the remedy for another."""
    config = json.loads(config_of("granitemoehybrid", next(iter(CASES["granitemoehybrid"].variants))).to_json_string())
    config |= {"mamba_n_heads": 10**300, "mamba_d_head": 4}
    with pytest.raises(HeddleError, match=r"'mamba_expand'.*2.*hidden_size.*10{59}… \(301 characters\)"):
        original_design(config, family_of(config, "config.json"), "config.json")
