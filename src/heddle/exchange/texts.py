"""The texts of a folder: tokenizer, chat template and what generation asks, read, carried along and written again."""

from typing import TYPE_CHECKING, Any

from heddle.data.tokenizer import Tokenizer
from heddle.errors import ConfigError
from heddle.exchange.shards import Foreign, to_json
from heddle.model.decoder import Decoder

if TYPE_CHECKING:
    from heddle.exchange.load import Imported

TOKENIZER = "tokenizer.json"
ALONG = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")


def read_texts(foreign: Foreign, known: int) -> tuple[Tokenizer | None, dict[str, str]]:
    """The tokenizer of a folder, if it has one, and the texts beside it, for a model of `known` tokens.

    Raises ConfigError for a tokenizer of more tokens than the model's embedding has.
    """
    path = foreign.folder / TOKENIZER
    documents = {}
    for name in ALONG:
        if (foreign.folder / name).is_file():
            documents[name] = (foreign.folder / name).read_text(encoding="utf-8")
    if not path.is_file():
        return None, documents
    tokenizer = Tokenizer.load(path)
    if tokenizer.vocab_size > known:
        raise ConfigError(f"{path}: has {tokenizer.vocab_size} tokens, but the embedding only {known} rows")
    return tokenizer, documents


def write_texts(
    model: Decoder, tokenizer: Tokenizer | None, source: "Imported | None"
) -> tuple[dict[str, str], dict[str, Any]]:
    """The documents of an export, and what config.json says of tokens.

    A tokenizer of ours opens every text with its end token, as in training, so its file says so too.
    """
    documents = {} if source is None else dict(source.documents)
    if tokenizer is None:
        return documents, {}
    documents[TOKENIZER] = tokenizer.to_json()
    if source is not None and source.documents:
        return documents, {}
    end = tokenizer.end
    documents["generation_config.json"] = to_json({"bos_token_id": end, "eos_token_id": end, "pad_token_id": end})
    return documents, {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
