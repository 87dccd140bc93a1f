"""A Hugging Face folder with safetensors: its config, and its tensors one at a time from one file or from shards."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heddle.data.documents import LFS_POINTER
from heddle.errors import CheckpointError, ConfigError, describe_path, no_folder_reason
from heddle.progress import print_status, printable, progress_bar
from heddle.storage.file_io import READ_FLAGS_FOLLOWING_LINKS, open_regular_file, read_error, read_exactly
from heddle.storage.folder import MAX_DOCUMENT_BYTES, read_folder
from heddle.storage.manifest import MANIFEST_FILE, FileRecord, is_file_name, parse_json_object
from heddle.storage.run_log import RUN_FILE
from heddle.storage.tensor_file import read_tensor, read_tensor_file, read_tensor_specs

# The text model of a multimodal model: its config, and its tensors by their names in a text model.
#
# A multimodal model has the config of its text model in the table `text_config`, and its tensors below
# `model.language_model` (older files: `language_model.model`). Image tensors are left out; a notice names them.


# By model_type: the text models that it may have.
TEXT_MODELS = {
    "llama4": ("llama4_text",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen4_exp": ("qwen4_exp_text",),
    "mistral3": ("ministral3", "mistral"),
    "gemma3n": ("gemma3n_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "glm5_next": ("glm5_next_text",),
    "minimax_m3_vl": ("minimax_m3_vl_text",),
    "got_ocr2": ("qwen2",),
    "fuyu": ("persimmon",),
    "emu3": ("emu3_text_model",),
    "moss_transcribe_diarize": ("qwen3",),
    "kimi_k25": ("deepseek_v3", "kimi_k2"),
}
IMAGE_FIELDS = frozenset(
    """
    text_config vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id
    image_token_index multimodal_projector_bias projector_hidden_act spatial_merge_size vision_feature_layer
    language_model_only eoi_token_index
    audio_config audio_token_id boa_token_id boi_token_id eoa_token_id eoa_token_index eoi_token_id
    vision_soft_tokens_per_image video_token_index projector_hidden_size image_seq_length image_size patch_size
    num_channels merged_hidden_size projector_bias audio_merge_size audio_chunk_size vq_config
    vocabulary_map image_start_token_id image_end_token_id video_start_token_id video_end_token_id
    projection_hidden_size projection_layer_norm_eps
    """.split()  # noqa: SIM905
)
IMAGE_TENSORS = (
    "model.visual.", "model.vision_tower.", "vision_tower.", "model.multi_modal_projector.", "multi_modal_projector.",
    "vision_model.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.", "model.vision_embedder.",
    "patch_merge_mlp.", "model.vision_embed_tokens.", "vision_embed_tokens.", "vqmodel.", "model.vqmodel.",
    "model.mm_projector.", "mm_projector.",
)  # fmt: skip
PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.blocks.": "model.layers.",  # Kimi K2.5 as transformers writes it
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
    "text_model.model.": "model.",
    "text_model.lm_head.": "lm_head.",
}
TIED = "tie_word_embeddings"


def has_text_model(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a multimodal model with a text model that heddle may read."""
    inner = config.get("text_config")
    known = TEXT_MODELS.get(config["model_type"], ()) if isinstance(config.get("model_type"), str) else ()
    return isinstance(inner, dict) and inner.get("model_type") in known


def text_model_config(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The config of the text model.

    Fields beside it that are not about images are kept, so that unknown ones are refused.

    Raises ConfigError if the two tables disagree about the head.
    """
    inner: dict[str, Any] = config["text_config"]
    if TIED in config and inner.get(TIED, config[TIED]) != config[TIED]:
        raise ConfigError(f"{source}: field '{TIED}' of text_config is {inner[TIED]!r}; make it {config[TIED]!r}")
    outer = {name: value for name, value in config.items() if name not in IMAGE_FIELDS}
    return outer | {name: value for name, value in inner.items() if value is not None or name not in outer}


def head_remedy(name: str) -> str | None:
    """What to do about a class or tensor of this name if it is of a head that predicts no tokens."""
    remedy = "predicts no tokens: import the language model that it was trained from"
    return f"its {printable(name)[:80]} {remedy}" if OTHER_HEADS.search(name) else None


def text_model_name(name: str) -> str:
    """The name of a tensor in a text model."""
    for prefix, replacement in PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


# Buffers that older files of any family hold: inverse frequencies and tables of RoPE, positions, causal masks.
IGNORED_TENSORS = (
    "*inv_freq", "*rotary_*.cos", "*rotary_*.sin", "*freqs_cis", "rope.freqs", "*position_ids", "*token_type_ids",
    "*.attn.bias", "*.attn.masked_bias", "*.attention.bias", "*.attention.masked_bias", "*.embed_positions",
    "*causal_mask", "*attn_mask", "*.tril", "*cos_cached", "*sin_cached", "*_extra_state",
)  # fmt: skip
CONFIG_FILE = "config.json"
RESTORE = f"restore {CONFIG_FILE}, or download the weights again"  # where the two disagree
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SUFFIX_ALIASES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}  # of BERT's norms
INFINITY = {"__float__": "Infinity"}  # as newer versions of transformers write it
MAX_JSON_LENGTH = 64 * 2**20  # characters
MAX_JSON_DEPTH = 64  # levels of nested objects and arrays
ADAPTER_FILE = "adapter_config.json"
IS_POINTER = "is a Git LFS pointer, not the file; run `git lfs pull` in its folder, or download the file"
# Heads in the place of a language model's, in the names of classes and of tensors.
OTHER_HEADS = re.compile(r"For\w*(Classification|Question|MultipleChoice)|Reward|^(score|classif\w+|qa_outputs)\b")
UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")


class SafetensorsFolder:
    """A folder in the layout of transformers.

    If the folder has a manifest (exports by heddle have one), every byte is checked against it. For a multimodal
    model, config and tensor names are its text model's. Raises CheckpointError, naming file and remedy, for a
    folder that is not a model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.label, self.restore = folder, str(folder), RESTORE
        self._index: dict[str, str] = {}
        try:
            self._open(folder)
        except OSError as error:
            raise read_error(folder, error) from error

    def _open(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: {no_folder_reason(folder)}; name one that holds a {CONFIG_FILE}")
        for path in folder.iterdir():
            is_read = path.suffix in (".json", ".jinja") or path.name == SINGLE_FILE
            if is_read and path.is_symlink() and not path.exists():
                raise CheckpointError(f"{path}: {describe_path(path)}; copy the folder with the files of its links")
        if (folder / ADAPTER_FILE).is_file() and not (folder / CONFIG_FILE).is_file():
            base = self._adapter_base()
            remedy = "merge it into its model with peft's `merge_and_unload`, save that, and import it"
            raise CheckpointError(f"{folder}: is an adapter{base}, not a model; {remedy}")
        if not (folder / CONFIG_FILE).is_file():
            gguf, main = min(folder.glob("*.gguf"), default=None), folder / "refs" / "main"
            remedy = "name the folder of one" if gguf is None else f"name the GGUF itself, {gguf}"
            if snapshots := sorted(path.parent for path in folder.glob(f"snapshots/*/{CONFIG_FILE}")):
                newest = read_text_file(main).strip() if main.is_file() else ""
                snapshot = next((path for path in snapshots if path.name == newest), snapshots[0])
                remedy = f"name the snapshot in this cache of a hub, {snapshot}"
            if (folder / RUN_FILE).is_file():
                remedy = "it is a run of heddle's, which needs no import; in Python use heddle.load"
            raise CheckpointError(f"{folder}: has no {CONFIG_FILE}, so it is not a transformers model; {remedy}")
        if (folder / ADAPTER_FILE).is_file():
            print_status(f"warning: {folder / ADAPTER_FILE}: the adapter{self._adapter_base()} is not applied")
        self.records: Mapping[str, FileRecord] = {}
        self.verified_texts: Mapping[str, str] = {}
        if os.path.lexists(folder / MANIFEST_FILE):
            with self._saved_by_heddle():
                contents = read_folder(folder, flags=READ_FLAGS_FOLLOWING_LINKS)
            self.records, self.verified_texts = contents.records, contents.documents
        self.config = self.read_json(CONFIG_FILE)
        match self.config.get("architectures"):
            case [str(architecture)]:
                self.restore = head_remedy(architecture) or RESTORE
        self.ignored_tensors: tuple[str, ...] = ()
        self._stored_names: dict[str, str] = {}
        if has_text_model(self.config):
            self.config = text_model_config(self.config, str(folder / CONFIG_FILE))
            self.ignored_tensors = IMAGE_TENSORS

    @contextmanager
    def _saved_by_heddle(self) -> Iterator[None]:
        """Within the block, an error of a folder with a manifest says what to do if another program saved it since."""
        try:
            yield
        except CheckpointError as error:
            if not os.path.lexists(self.folder / MANIFEST_FILE):
                raise
            remedy = f"if another program saved the model here again, remove {self.folder / MANIFEST_FILE}"
            raise CheckpointError(f"{error}; {remedy}") from error

    def _adapter_base(self) -> str:
        base = parse_json(read_text_file(self.folder / ADAPTER_FILE), self.folder / ADAPTER_FILE).get(
            "base_model_name_or_path"
        )
        return f" of {printable(base)[:120]}" if isinstance(base, str) else ""

    def read_text(self, name: str) -> str:
        """One of its text files. Raises CheckpointError for one that is too large or not UTF-8."""
        return self.verified_texts[name] if name in self.verified_texts else read_text_file(self.folder / name)

    def read_json(self, name: str) -> dict[str, Any]:
        """The object in one of its JSON files. Raises CheckpointError naming the file."""
        return parse_json(self.read_text(name), self.folder / name)

    @cached_property
    def tensor_files(self) -> list[str]:
        """The tensor files, sorted; looked up late, so that an unsupported config is reported before missing files."""
        try:
            return self._find_tensor_files()
        except OSError as error:
            raise read_error(self.folder, error) from error

    def _find_tensor_files(self) -> list[str]:
        if (self.folder / SINGLE_FILE).is_file():
            return [SINGLE_FILE]
        if (self.folder / INDEX_FILE).is_file():
            shards = self.read_json(INDEX_FILE).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
                raise CheckpointError(f"{self.folder / INDEX_FILE}: has no table 'weight_map' of files; restore it")
            for tensor, name in shards.items():
                if not is_file_name(name):
                    raise CheckpointError(
                        f"{self.folder / INDEX_FILE}: tensor '{tensor}' is said to be in {name!r}; restore it"
                    )
            self._index = shards
            return self._existing_shards(shards)
        if shards_alone := self._shards_without_index():
            return shards_alone
        self._refuse_unsafe_formats()
        others = [name for name in sorted(os.listdir(self.folder)) if name.endswith(".safetensors")]
        is_whole = len(others) == 1 and not others[0].startswith(("adapter", "consolidated"))  # Mistral's own names
        remedy = f"rename {others[0]} to {SINGLE_FILE} if it is the whole model" if is_whole else "download the weights"
        raise CheckpointError(f"{self.folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; {remedy}")

    def _existing_shards(self, shards: Mapping[str, str]) -> list[str]:
        """The shards of an index, without missing ones whose tensors are buffers or in other shards."""
        names = sorted(set(shards.values()))
        existing = [name for name in names if (self.folder / name).is_file()]
        if len(existing) < len(names):
            held = {tensor for name in existing for tensor in self._specs(name)}
            for tensor, name in shards.items():
                is_needed = tensor not in held and not any(fnmatchcase(tensor, f"{each}*") for each in IGNORED_TENSORS)
                if name not in existing and is_needed:
                    raise CheckpointError(f"{self.folder / name}: shard is missing; download it again")
        return existing

    def _shards_without_index(self) -> list[str]:
        """All shards of a folder that lacks their index. Raises CheckpointError where one of them is missing."""
        names = sorted(path.name for path in self.folder.glob("model-*-of-*.safetensors"))
        count = names[0].removesuffix(".safetensors").rpartition("-")[2] if names else ""
        shards = list[str]()
        for number in range(1, int(count) + 1 if count.isdecimal() else 1):
            shards.append(f"model-{number:05}-of-{count}.safetensors")
            if shards[-1] not in names:
                raise CheckpointError(f"{self.folder / shards[-1]}: shard is missing; download it again")
        return shards

    def _specs(self, file: str) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        refuse_lfs_pointer(self.folder / file)
        with self._saved_by_heddle():
            return read_tensor_specs(self.folder / file, self.records.get(file), READ_FLAGS_FOLLOWING_LINKS)

    def _refuse_unsafe_formats(self) -> None:
        for name in sorted(os.listdir(self.folder)):
            if name.endswith(UNSAFE_SUFFIXES):
                raise CheckpointError(
                    f"{self.folder / name}: is a pickle or another format that can run code, and is never read; "
                    "convert it to safetensors, with transformers: from_pretrained(...).save_pretrained(...)"
                )

    @property
    def total_bytes(self) -> int:
        """The size of all tensor files."""
        return sum((self.folder / name).stat().st_size for name in self.tensor_files)

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (file, tensor name, tensor in its own memory) for every tensor, with a progress bar."""
        files = self.tensor_files
        for file in files:
            refuse_lfs_pointer(self.folder / file)
        with progress_bar("reading", self.total_bytes, "bytes") as progress:
            for file in files:
                path, record = self.folder / file, self.records.get(file)
                if self.records and record is None:
                    raise CheckpointError(f"{path}: is not in the {MANIFEST_FILE} beside it; remove one of the two")
                with self._saved_by_heddle():
                    for name, tensor in read_tensor_file(path, record, READ_FLAGS_FOLLOWING_LINKS):
                        yield file, self._name(name), tensor
                        progress.advance(tensor.numel() * tensor.element_size())

    def tensor_specs(self) -> dict[str, tuple[str, torch.dtype, tuple[int, ...]]]:
        """The file, dtype and shape of every tensor, from the headers alone."""
        for file in self.tensor_files:
            refuse_lfs_pointer(self.folder / file)
        return {
            self._name(name): (file, dtype, shape)
            for file in self.tensor_files
            for name, (dtype, shape) in self._specs(file).items()
        }

    def _name(self, stored_name: str) -> str:
        """The name of a tensor in newer files and in the text model."""
        name = text_model_name(stored_name) if self.ignored_tensors else stored_name
        for suffix, newer in SUFFIX_ALIASES.items():
            if name.endswith(suffix):
                name = name.removesuffix(suffix) + newer
        if name != stored_name:
            self._stored_names[name] = stored_name
        return name

    def tensor(self, file: str, name: str) -> Tensor:
        """One tensor, in its own memory, after `tensor_specs` named it."""
        stored_name = self._stored_names.get(name, name)
        with self._saved_by_heddle():
            return read_tensor(self.folder / file, stored_name, self.records.get(file), READ_FLAGS_FOLLOWING_LINKS)


def refuse_lfs_pointer(path: Path) -> None:
    """Raise CheckpointError for a Git LFS pointer in place of a large file."""
    with open_regular_file(path, READ_FLAGS_FOLLOWING_LINKS) as (descriptor, size):
        start = bytearray(min(size, len(LFS_POINTER)))
        read_exactly(descriptor, memoryview(start), path)
    if start == LFS_POINTER:
        raise CheckpointError(f"{path}: {IS_POINTER}")


def read_text_file(path: Path) -> str:
    """A UTF-8 text file, links followed. Raises CheckpointError for one that is too large or not UTF-8."""
    with open_regular_file(path, READ_FLAGS_FOLLOWING_LINKS) as (descriptor, size):
        if size > MAX_DOCUMENT_BYTES:
            raise CheckpointError(
                f"{path}: has {size} bytes, over {MAX_DOCUMENT_BYTES}; it should be a small text file"
            )
        raw = bytearray(size)
        read_exactly(descriptor, memoryview(raw), path)
    if raw.startswith(LFS_POINTER):
        raise CheckpointError(f"{path}: {IS_POINTER}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: is not text in UTF-8; restore the file") from None


def parse_json(text: str, path: Path) -> dict[str, Any]:
    """The object in the text of a JSON file, with INFINITY in place of that word. Raises CheckpointError naming it."""
    if len(text) > MAX_JSON_LENGTH:
        raise CheckpointError(f"{path}: has more than {MAX_JSON_LENGTH} characters; it should be a small text file")
    try:
        data = parse_json_object(text.encode("utf-8"), INFINITY)
        if _depth(data) > MAX_JSON_DEPTH:
            raise ValueError("it is nested too deeply")
    except ValueError as error:
        raise CheckpointError(f"{path}: is not a table in JSON ({error}); restore the file") from None
    return data


def _depth(data: Any) -> int:
    """How deeply objects and arrays are nested, counted without recursion."""
    level, depth = [data], 0
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
    return depth


def to_json(data: Mapping[str, Any]) -> str:
    """The text of a JSON file."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
