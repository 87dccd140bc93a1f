"""The fields of somebody's config.json, each read once: what nobody has read is refused by name, never ignored."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from heddle.errors import ConfigError
from heddle.model.config import MOST_LAYERS

T = TypeVar("T")

# What says nothing about the model's function: who wrote the file, for which library, and how it is called.
TELLS_NOTHING = frozenset(
    """
    architectures model_type transformers_version torch_dtype dtype _name_or_path _attn_implementation
    return_dict output_hidden_states output_attentions chunk_size_feed_forward id2label label2id problem_type
    task_specific_params tokenizer_class prefix finetuning_task pruned_heads _commit_hash heddle
    """.split()  # noqa: SIM905
)
# What may stand in a file as long as it is off.
OFF = ("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder", "cross_attention_hidden_size")
# What belongs to texts and training, not to the function: carried along, and written again by an export.
CARRIED = (
    "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    "decoder_start_token_id", "model_max_length", "use_cache",
)  # fmt: skip
# Fields that say how often something is built; a wrong one must not cost the memory that it asks for.
COUNTS = re.compile(r".*(layers?|experts)(_per_tok(en)?)?")


def shown(value: Any) -> str:
    """A value as a message shows it: on one line, and short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


class Fields:
    """A table of fields and which of them were read; `place` is for messages."""

    def __init__(self, data: Mapping[str, Any], place: str = "config.json") -> None:
        self.data, self.place, self.last = data, place, ""
        self.unread = set(data) - TELLS_NOTHING - set(CARRIED) - {name for name in OFF if not data.get(name)}

    def find(self, name: str, *more: str) -> Any:
        """The value of a field, or of the first of `more` that is there, its older names; None: absent or null."""
        self.last = name
        for key in (name, *more):
            self.unread.discard(key)
            found = self.data.get(key)
            if type(found) is int and found > MOST_LAYERS and COUNTS.fullmatch(key):
                raise self.wrong(key, f"heddle builds at most {MOST_LAYERS}")
        return next((self.data[key] for key in (name, *more) if self.data.get(key) is not None), None)

    def take(self, name: str, default: T, *more: str) -> T:
        """As `find`, of the kind of the default, which stands for what is absent or null."""
        found = self.find(name, *more)
        if isinstance(default, float) and type(found) is int:
            found = float(found)
        if found is not None and type(found) is not type(default):
            raise self.wrong(name, f"should be of kind {type(default).__name__}")
        return default if found is None else found

    def need(self, name: str, kind: type[T], *more: str) -> T:
        """The value of a field that must be there. Raises ConfigError naming it."""
        found: Any = self.find(name, *more)
        if found is None:
            raise ConfigError(f"{self.place}: field '{name}' is missing; without it the model cannot be built")
        if kind is float and type(found) is int:
            found = float(found)
        if not isinstance(found, kind) or isinstance(found, bool) != (kind is bool):
            raise self.wrong(name, f"should be of kind {kind.__name__}")
        return found

    def expect(self, name: str, *allowed: Any, default: Any = None) -> Any:
        """A field that may only have these values (absent: the default). Raises ConfigError naming it."""
        self.last = name
        self.unread.discard(name)
        found = self.data.get(name, default)
        if not any(found == value and isinstance(found, bool) == isinstance(value, bool) for value in allowed):
            choices = ", ".join(repr(value) for value in allowed)
            raise self.wrong(name, f"heddle builds {choices} only")
        return found

    def carried(self) -> dict[str, Any]:
        """Fields that an export writes again."""
        return {name: self.data[name] for name in CARRIED if name in self.data}

    def wrong(self, name: str, remedy: str) -> ConfigError:
        """The error about a field's value."""
        return ConfigError(f"{self.place}: field '{name}' is {shown(self.data.get(name))}; {remedy}")

    def finish(self) -> None:
        """Raises ConfigError naming fields that were not read."""
        if self.unread:
            names = ", ".join(map(shown, sorted(self.unread)[:9])) + (" and more" if len(self.unread) > 9 else "")
            model = shown(self.data.get("model_type", "this kind of model")).strip("'")
            raise ConfigError(f"{self.place}: {names}: heddle does not know what this asks of {model}; it was not read")
