"""The tokenizer files of a Hugging Face folder: tokenizer, chat template and generation config, read and written."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from heddle.data.chat import (
    CHAT_TEMPLATE_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    chat_template_text,
    select_template,
    special_token_settings,
    special_token_text,
    turn_end_ids,
)
from heddle.errors import ConfigError, DataError, describe_path
from heddle.exchange.imported_checkpoint import ImportedModel
from heddle.exchange.safetensors_folder import CONFIG_FILE, parse_json, read_text_file, to_json
from heddle.progress import print_status
from heddle.tokenization.backend import is_backend_error, read_backend
from heddle.tokenization.tokenizer import COMPANION_FILES, TOKENIZER_FILE, BoundaryTokens, Tokenizer

GENERATION_CONFIG_FILE = "generation_config.json"
UNLIMITED_LENGTH = int(1e30)  # model_max_length that transformers writes for a tokenizer without a maximum
# The key of tokenizer_config.json under which an export stores the post-processor that it replaced.
POST_PROCESSOR_KEY = "heddle"
ADDED_TOKENS_FILE = "added_tokens.json"
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
PROCESSOR_TEMPLATE_FILE = "chat_template.json"  # of models of images, in the place of CHAT_TEMPLATE_FILE
UNREADABLE_TOKENIZER_FILES = (
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json",
    "*.tiktoken", "tiktoken.model",
)  # fmt: skip


def read_tokenizer_files(
    folder: Path,
    vocab_limit: int,
    read_text: Callable[[Path], str] = read_text_file,
    model_config: Mapping[str, Any] | None = None,
) -> tuple[Tokenizer | None, dict[str, str]]:
    """The tokenizer of a folder, or None, and the text of the files that belong to it.

    vocab_limit: the number of rows of the model's embedding. read_text: the text of a file. model_config: the model's
    config.json, which may name tokens that end a text. Raises ConfigError for a tokenizer with more tokens than that,
    DataError for a damaged tokenizer, CheckpointError for another damaged file.
    """
    text_files = {name: read_text(folder / name) for name in COMPANION_FILES if (folder / name).is_file()}
    json_files = {name: parse_json(text, folder / name) for name, text in text_files.items() if name.endswith(".json")}
    if chat_template_text(text_files) is None and (file := folder / PROCESSOR_TEMPLATE_FILE).is_file():
        template = select_template(parse_json(read_text(file), file).get("chat_template"))
        text_files |= {} if template is None else {CHAT_TEMPLATE_FILE: template}
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        unreadable = next((min(found) for name in UNREADABLE_TOKENIZER_FILES if (found := [*folder.glob(name)])), None)
        if unreadable is not None:
            print_status(
                f"warning: {unreadable}: is not read; save the tokenizer as {TOKENIZER_FILE} with transformers"
            )
        return None, text_files
    text = read_text(path)
    tokenizer_config = json_files.get(TOKENIZER_CONFIG_FILE, {})
    tokenizer = _restore_native(text, tokenizer_config, text_files)
    if tokenizer is None:
        _refuse_many_words(_word_count(text), vocab_limit, path)  # before the library reads them
        backend = read_backend(text, str(path))
        named = special_token_settings(tokenizer_config, json_files.get(SPECIAL_TOKENS_FILE, {}))
        added = named.get("added_tokens_decoder"), TOKENIZER_CONFIG_FILE
        if added[0] is None and (folder / ADDED_TOKENS_FILE).is_file():  # as older versions of transformers write it
            listed = parse_json(read_text(folder / ADDED_TOKENS_FILE), folder / ADDED_TOKENS_FILE)
            special = set(_named_tokens(named))
            added = (
                {
                    str(index): {"content": token, "special": token in special, "normalized": token not in special}
                    for token, index in listed.items()
                },
                ADDED_TOKENS_FILE,
            )
        with_added = _with_added_tokens(text, backend, *added, named, folder)
        with_added = _with_named_tokens(with_added, backend, named, vocab_limit, folder)
        if with_added != text:
            text, backend = with_added, read_backend(with_added, str(path))
        eos_ids = _eos_ids(json_files | {CONFIG_FILE: model_config or {}}, named, backend, folder)
        boundaries = BoundaryTokens(_bos_ids(backend, named), eos_ids, text_files)
        tokenizer = Tokenizer(backend, str(path), text, boundaries)
    _refuse_many_words(tokenizer.vocab_size, vocab_limit, path)
    return tokenizer, text_files


def _word_count(text: str) -> int:
    """The number of tokens of a tokenizer.json, added ones included; 0 if it cannot be read."""
    try:
        content = json.loads(text)
        vocabulary = content["model"]["vocab"]
        words = set(vocabulary) if isinstance(vocabulary, dict) else {word for word, _ in vocabulary}
        return len(words | {token["content"] for token in content.get("added_tokens") or ()})
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):  # refused where it is read
        return 0


def _refuse_many_words(count: int, vocab_limit: int, path: Path) -> None:
    if count > vocab_limit:
        raise ConfigError(f"{path}: has {count} tokens, but the embedding only {vocab_limit} rows; use the model's own")


def chosen_tokenizer(file: Path, vocab_limit: int) -> tuple[Tokenizer | None, dict[str, str]]:
    """The tokenizer that a user names in place of a checkpoint's: a tokenizer.json, read with the files beside it.

    Raises DataError for a file of another name, and as `read_tokenizer_files`.
    """
    if file.name != TOKENIZER_FILE:
        raise DataError(f"--tokenizer {file}: should be a file named {TOKENIZER_FILE}; name it")
    if not file.is_file():
        raise DataError(f"--tokenizer {file}: {describe_path(file)}; name a {TOKENIZER_FILE}")
    return read_tokenizer_files(file.parent, vocab_limit)


def _restore_native(text: str, tokenizer_config: Mapping[str, Any], text_files: Mapping[str, str]) -> Tokenizer | None:
    """The heddle tokenizer that this file was exported from, if exporting it again gives the same file; else None."""
    original = tokenizer_config.get(POST_PROCESSOR_KEY)
    if not isinstance(original, dict) or set(original) != {"post_processor"}:
        return None
    try:
        tokenizer = Tokenizer.from_json(json.dumps(json.loads(text) | original))
    except (DataError, ValueError, TypeError, RecursionError):
        return None
    if _with_bos_post_processor(tokenizer)[0] != text:
        return None
    tokenizer.companion_files = text_files
    return tokenizer


def _with_bos_post_processor(tokenizer: Tokenizer) -> tuple[str, dict[str, Any]]:
    """The file of a heddle tokenizer with a post-processor that begins each text with the end-of-document token.

    Training does this in heddle's code, but transformers does it only if the file says so. Also returns the
    post-processor that was replaced.
    """
    backend = Backend.from_str(tokenizer.to_json())
    eod = backend.id_to_token(tokenizer.eod_id)
    replaced = json.loads(backend.post_processor.__getstate__()) if backend.post_processor is not None else None
    single, pair = f"{eod} $A", f"{eod} $A {eod} $B:1"
    backend.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=[(eod, tokenizer.eod_id)])
    return backend.to_str(pretty=True), {"post_processor": replaced}


def _bos_ids(backend: Backend, named: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that begin each text, from the file's post-processor, the only place where transformers 5 looks.

    If it adds none, `add_bos_token` of tokenizer_config.json may ask for one, as in transformers 4.
    """
    backend.no_padding()
    backend.no_truncation()
    try:
        encoding = backend.encode("a")
    except BaseException as error:
        if not is_backend_error(error):
            raise
        raise DataError(f"{TOKENIZER_FILE}: cannot encode a text ({error}); restore the file") from error
    count = next((i for i, special in enumerate(encoding.special_tokens_mask) if not special), 0)
    bos_ids = encoding.ids[:count]
    bos_token = special_token_text(named.get("bos_token")) if named.get("add_bos_token") is True else None
    bos_id = backend.token_to_id(bos_token) if bos_token is not None and not bos_ids else None
    return tuple(bos_ids) if bos_id is None else (bos_id,)


def _with_added_tokens(
    text: str, backend: Backend, added: Any, file: str, named: Mapping[str, Any], folder: Path
) -> str:
    """The tokenizer.json with the tokens that another file adds by id, as transformers adds them.

    Raises ConfigError for a token that would get another id there.
    """
    special, is_changed = set(_named_tokens(named)), False
    entries = added.items() if isinstance(added, dict) else ()
    for key, entry in sorted(entries, key=lambda pair: (len(pair[0]), pair[0])):
        content = special_token_text(entry)
        known = None if content is None else backend.token_to_id(content)
        if content is None or (known is None and key != str(backend.get_vocab_size())):
            raise ConfigError(f"{folder / file}: adds token {key}, which does not fit {TOKENIZER_FILE}; re-save both")
        flags = _flags(entry) | ({"special": True} if content in special else {})
        if known is None or not _is_added(backend, known, flags):
            backend.add_tokens([AddedToken(content, **flags)])
            is_changed = True
    return backend.to_str() if is_changed else text


def _flags(token: Any) -> dict[str, bool]:
    """The flags that settings give a token."""
    return {name: bool(token[name]) for name in TOKEN_FLAGS if name in token} if isinstance(token, dict) else {}


def _is_added(backend: Backend, token_id: int, flags: Mapping[str, bool]) -> bool:
    """Whether a token is split off from a text with these flags; some files differ in `normalized` to no effect."""
    token = backend.get_added_tokens_decoder().get(token_id)
    return token is not None and all(getattr(token, name) == flags[name] for name in flags if name != "normalized")


def _named_tokens(named: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    """The special tokens that settings name, with flags, in the order in which transformers adds missing ones."""
    extra = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
    others = [name for name in named if name.endswith("_token") and name not in TOKEN_NAMES]
    tokens = [named.get(name) for name in (*TOKEN_NAMES, *others)]
    for more in (named.get("model_specific_special_tokens"), extra):
        tokens += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    found: dict[str, dict[str, bool]] = {}
    for token in tokens:
        if text := special_token_text(token):
            found.setdefault(text, _flags(token) | {"special": True})
    return found


def _with_named_tokens(text: str, backend: Backend, named: Mapping[str, Any], vocab_limit: int, folder: Path) -> str:
    """The tokenizer.json with the special tokens that settings name, as transformers adds them.

    A token without a row of the embedding is left out, with a warning: a text with it could not be read.
    """
    is_changed, left_out = False, list[str]()
    for token, flags in _named_tokens(named).items():
        known = backend.token_to_id(token)
        if known is None and backend.get_vocab_size() >= vocab_limit:
            left_out.append(token)
        elif known is None or not _is_added(backend, known, {"special": True}):
            added = None if known is None else backend.get_added_tokens_decoder().get(known)
            own = {} if added is None else {name: getattr(added, name) for name in TOKEN_FLAGS}
            backend.add_special_tokens([AddedToken(token, **{"normalized": False} | flags | own | {"special": True})])
            is_changed = True
    if left_out:
        names = ", ".join(map(repr, left_out[:4]))
        print_status(f"warning: {folder}: special tokens without a row of the embedding are left out: {names}")
    return backend.to_str() if is_changed else text


def _eos_ids(
    json_files: Mapping[str, Mapping[str, Any]], named: Mapping[str, Any], backend: Backend, folder: Path
) -> tuple[int, ...]:
    """The ids that end a text: of generation_config.json, then of config.json, then the `eos_token`."""
    eos_ids: list[int] = []
    for file in (GENERATION_CONFIG_FILE, CONFIG_FILE):
        value = json_files.get(file, {}).get("eos_token_id")
        for token in value if isinstance(value, list) else [value] * (value is not None):
            if type(token) is not int or token < 0:
                raise ConfigError(f"{folder / file}: field 'eos_token_id' is {value!r}; it should be token ids")
            if token < 2**32 and backend.id_to_token(token) is not None:
                eos_ids.append(token)
    eos_token = special_token_text(named.get("eos_token"))
    eos_id = None if eos_token is None else backend.token_to_id(eos_token)
    return tuple(dict.fromkeys([*eos_ids, *([] if eos_id is None else [eos_id])]))


def _with_turn_ends(generation_config: str, turn_ends: tuple[int, ...]) -> str:
    """Add the turn-end ids to the EOS ids of a generation_config.json; a damaged one is returned unchanged."""
    try:
        fields = json.loads(generation_config)
        ends = fields.get("eos_token_id")
    except (ValueError, AttributeError, RecursionError):
        return generation_config
    ends = ends if isinstance(ends, list) else [ends] * (ends is not None)
    missing = [token for token in turn_ends if token not in ends]
    return to_json(fields | {"eos_token_id": [*ends, *missing]}) if missing else generation_config


def write_tokenizer_files(
    tokenizer: Tokenizer | None, imported: ImportedModel | None
) -> tuple[dict[str, str], dict[str, Any]]:
    """The tokenizer files of an export, and the token ids for its config.json. tokenizer None: `imported`'s.

    The file of a heddle tokenizer is made to begin every text with the end-of-document token, as in training. An
    imported tokenizer is written unchanged, with the files that came with it.
    """
    if tokenizer is None and imported is not None:
        tokenizer = imported.tokenizer
    if tokenizer is None:
        return ({} if imported is None else dict(imported.text_files)), {}
    eos_ids = [token for token in tokenizer.eos_ids if token not in tokenizer.bos_ids] or tokenizer.eos_ids
    token_ids = {
        "bos_token_id": tokenizer.bos_ids[0] if tokenizer.bos_ids else None,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
    }
    text, replaced = _with_bos_post_processor(tokenizer) if tokenizer.is_native else (tokenizer.to_json(), None)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.id_to_token(tokenizer.bos_ids[0]) if tokenizer.bos_ids else None,
        "eos_token": tokenizer.id_to_token(eos_ids[0]) if eos_ids else None,
        "model_max_length": UNLIMITED_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    tokenizer_config: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if replaced is not None:
        tokenizer_config[POST_PROCESSOR_KEY] = replaced
    files = {
        TOKENIZER_FILE: text,
        TOKENIZER_CONFIG_FILE: to_json(tokenizer_config),
        GENERATION_CONFIG_FILE: to_json({name: value for name, value in token_ids.items() if value is not None}),
    }
    files |= dict(tokenizer.companion_files)
    files[GENERATION_CONFIG_FILE] = _with_turn_ends(files[GENERATION_CONFIG_FILE], turn_end_ids(tokenizer))
    is_unchanged = imported is not None and tokenizer is imported.tokenizer
    return files, ({} if is_unchanged else token_ids | {"pad_token_id": None})
