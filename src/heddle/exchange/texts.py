"""The texts of a folder: tokenizer, chat template and what generation asks, read, carried along and written again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Engine
from tokenizers.processors import TemplateProcessing

from heddle.errors import ConfigError, DataError
from heddle.exchange.imported import Imported
from heddle.exchange.shards import CONFIG, Foreign, parsed, to_json
from heddle.progress import say
from heddle.tokenization.tokenizer import BESIDE, FILE, Marks, Tokenizer, read_engine

SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
LONGEST = int(1e30)  # what transformers writes for a tokenizer that knows no longest text
# Where tokenizer_config.json notes what the post-processor of our file was before the export wrote its own.
NOTE = "heddle"
OTHERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json")


def read_texts(foreign: Foreign, known: int) -> tuple[Tokenizer | None, dict[str, str]]:
    """The tokenizer of a folder, if it has one, and the texts beside it, for a model of `known` tokens.

    Raises ConfigError for a tokenizer of more tokens than the model's embedding has, DataError for one that is damaged,
    CheckpointError for a text that is.
    """
    documents = {name: foreign.text(name) for name in BESIDE if (foreign.folder / name).is_file()}
    tables = {name: parsed(text, foreign.folder / name) for name, text in documents.items() if name.endswith(".json")}
    path = foreign.folder / FILE
    if not path.is_file():
        other = next((name for name in OTHERS if (foreign.folder / name).is_file()), None)
        if other is not None:
            say(f"warning: {foreign.folder / other}: is not read; save the tokenizer as {FILE} with transformers")
        return None, documents
    text = foreign.text(FILE)
    settings = tables.get(SETTINGS, {})
    tokenizer = _ours(text, settings, documents)
    if tokenizer is None:
        engine = read_engine(text, str(path))
        ends = _ends(tables | {CONFIG: foreign.config}, engine, foreign.folder)
        tokenizer = Tokenizer(engine, str(path), text, Marks(_opening(engine, settings), ends, documents))
    if tokenizer.vocab_size > known:
        raise ConfigError(f"{path}: has {tokenizer.vocab_size} tokens, but the embedding only {known} rows")
    return tokenizer, documents


def _ours(text: str, settings: Mapping[str, Any], documents: Mapping[str, str]) -> Tokenizer | None:
    """The tokenizer that an export of ours was made of, if exporting it again gives the same file."""
    note = settings.get(NOTE)
    if not isinstance(note, dict) or set(note) != {"post_processor"}:
        return None
    try:
        own = Tokenizer.from_json(json.dumps(json.loads(text) | note))
    except (DataError, ValueError, TypeError):
        return None
    if _opened(own)[0] != text:
        return None
    own.beside = documents
    return own


def _opened(own: Tokenizer) -> tuple[str, dict[str, Any]]:
    """The file of a tokenizer of ours, made to open each text with the end token, and the note of what that replaced.

    For transformers opens texts so only if the file does; in training heddle does it.
    """
    engine = Engine.from_str(own.to_json())
    end = engine.id_to_token(own.end)
    note = json.loads(engine.post_processor.__getstate__()) if engine.post_processor is not None else None
    single, pair = f"{end} $A", f"{end} $A {end} $B:1"
    engine.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=[(end, own.end)])
    return engine.to_str(pretty=True), {"post_processor": note}


def _opening(engine: Engine, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that stand before each text: by the file's post-processor, as transformers 5 takes them from it alone.

    Where it sets none, add_bos_token of the settings may ask for one, as it did in transformers 4.
    """
    engine.no_padding()
    engine.no_truncation()
    found = engine.encode("a")
    opening = found.ids[: next((i for i, special in enumerate(found.special_tokens_mask) if not special), 0)]
    begin = _content(settings.get("bos_token")) if settings.get("add_bos_token") is True else None
    token = engine.token_to_id(begin) if begin is not None and not opening else None
    return tuple(opening) if token is None else (token,)


def _ends(tables: Mapping[str, Mapping[str, Any]], engine: Engine, folder: Path) -> tuple[int, ...]:
    """The ids that end a text, as generation asks first, then the model, then the tokenizer's own settings."""
    ends: list[int] = []
    for file in (GENERATION, CONFIG):
        told = tables.get(file, {}).get("eos_token_id")
        for token in told if isinstance(told, list) else [told] * (told is not None):
            if type(token) is not int or token < 0:
                raise ConfigError(f"{folder / file}: field 'eos_token_id' is {told!r}; it should be ids of tokens")
            if token < 2**32 and engine.id_to_token(token) is not None:
                ends.append(token)
    content = _content(tables.get(SETTINGS, {}).get("eos_token"))
    last = None if content is None else engine.token_to_id(content)
    return tuple(dict.fromkeys([*ends, *([] if last is None else [last])]))


def _content(token: Any) -> str | None:
    """The text of a special token, told plainly or as a table."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def write_texts(tokenizer: Tokenizer | None, source: Imported | None) -> tuple[dict[str, str], dict[str, Any]]:
    """The documents of an export, and what config.json says of tokens.

    A tokenizer of ours opens every text with its end token, as in training, so its file says so too; an imported one
    is written as it was, with the files that came with it. None: that of the source.
    """
    if tokenizer is None and source is not None:
        tokenizer = source.tokenizer
    if tokenizer is None:
        return ({} if source is None else dict(source.documents)), {}
    ends = [token for token in tokenizer.ends if token not in tokenizer.opening] or tokenizer.ends
    ids = {
        "bos_token_id": tokenizer.opening[0] if tokenizer.opening else None,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }
    text, note = _opened(tokenizer) if tokenizer.own else (tokenizer.to_json(), None)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.token(tokenizer.opening[0]) if tokenizer.opening else None,
        "eos_token": tokenizer.token(ends[0]) if ends else None,
        "model_max_length": LONGEST,
        "clean_up_tokenization_spaces": False,
    }
    generation = ids | {"pad_token_id": ends[0] if ends else None}
    told = {name: value for name, value in settings.items() if value is not None}
    made = {
        FILE: text,
        SETTINGS: to_json(told if note is None else told | {NOTE: note}),
        GENERATION: to_json({name: value for name, value in generation.items() if value is not None}),
    }
    known = source is not None and tokenizer is source.tokenizer
    return made | dict(tokenizer.beside), ({} if known else ids | {"pad_token_id": None})
