"""Read the fields of a config.json. A field that was not read is refused by name, never ignored."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from heddle.errors import ConfigError
from heddle.model.config import MAX_LAYERS

T = TypeVar("T")

# Fields that do not change what the model computes: who wrote the file, for which library, and display names.
METADATA_FIELDS = frozenset(
    """
    architectures model_type transformers_version torch_dtype dtype _name_or_path _attn_implementation
    return_dict output_hidden_states output_attentions chunk_size_feed_forward id2label label2id num_labels problem_type
    task_specific_params tokenizer_class prefix finetuning_task pruned_heads _commit_hash heddle
    torchscript use_bfloat16 tf_legacy_loss _attn_implementation_autoset
    """.split()  # noqa: SIM905
)
# Fields of other programs, or of training and generation. They do not change what the model computes either, but a user
# may expect that they do: an import names them.
NOTED_FIELDS = frozenset(
    """
    auto_map custom_pipelines transformers.js_config unsloth_fixed unsloth_version is_llama_config internal_version
    _flash_attn_2_enabled attn_implementation gradient_checkpointing neftune_noise_alpha
    max_sequence_length seq_length
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens
    """.split()  # noqa: SIM905
)
# Fields that are accepted only when they are off (null, false, 0 or empty), if the family does not read them itself.
MUST_BE_OFF = frozenset(
    """
    is_encoder_decoder is_decoder add_cross_attention tie_encoder_decoder cross_attention_hidden_size
    use_mrope rope_interleaved use_dynamic_ntk use_logn_attn
    attention_bias qkv_bias mlp_bias lm_head_bias qk_layernorm use_qk_norm shared_expert_intermediate_size
    """.split()  # noqa: SIM905
)
# Fields about tokens and training lengths. They do not change the model; an export writes them again.
PRESERVED_FIELDS = (
    "max_position_embeddings", "n_positions", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "sep_token_id", "cls_token_id", "eod_token_id", "decoder_start_token_id", "model_max_length", "max_seq_len",
    "use_cache",
)  # fmt: skip
LONG_WORD = re.compile(r"\S{81,}")
MAX_LISTED = 9  # names that a sentence lists
# Names of fields that count layers or experts. A huge wrong value must be refused before memory is allocated for it.
LAYER_OR_EXPERT_COUNT = re.compile(r".*(layers?|experts)(_per_tok(en)?)?")


def short_repr(value: Any) -> str:
    """`repr` of a value on one line, cut to fit an error message."""
    return short_word(repr(value))


def short_word(text: str) -> str:
    """The text, cut if it is longer than 80 characters."""
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def list_fields(names: Sequence[str]) -> str:
    """Names of fields in quotes, cut to fit a sentence."""
    return ", ".join(map(short_repr, names[:MAX_LISTED])) + (" and more" if len(names) > MAX_LISTED else "")


class ConfigReader:
    """Typed access to a config's fields that remembers which were read.

    source: name of the file in error messages. unread: fields not read yet; null counts as absent.
    last_read: the field that was read last, as a hint for errors. noted: fields that are set but change nothing.
    names: the file's names of fields that are read by other names.
    """

    def __init__(self, data: Mapping[str, Any], source: str = "config.json") -> None:
        self.data, self.source, self.last_read = data, source, ""
        off = {name for name, value in data.items() if value is None or (name in MUST_BE_OFF and not value)}
        self.noted: list[str] = []
        self.names: Mapping[str, str] = {}
        self.unread = set(data) - METADATA_FIELDS - set(PRESERVED_FIELDS) - off

    def optional(self, name: str, *aliases: str) -> Any:
        """The value of a field, or of its first alias (an older name) that is set. None if absent or null.

        Raises ConfigError if two of the names are set to different numbers or texts.
        """
        self.last_read = name = self.names.get(name, name)
        values = {key: self.data[key] for key in (name, *aliases) if self.data.get(key) is not None}
        first = next(iter(values), name)
        for key, value in values.items():
            if type(value) is int and value > MAX_LAYERS and LAYER_OR_EXPERT_COUNT.fullmatch(key):
                raise self.invalid(key, f"heddle builds at most {MAX_LAYERS}")
            if key != first and value != values[first] and not isinstance(value, dict | list):
                raise self.invalid(key, f"but '{first}' is {short_repr(values[first])}; make them equal")
        self.unread -= {name, *aliases}
        return values.get(first)

    def note(self, *names: str) -> None:
        """Mark fields that change nothing as read, and note the ones that are set."""
        self.noted += sorted(self.unread.intersection(names))
        self.unread -= set(names)

    def get(self, name: str, default: T, *aliases: str) -> T:
        """The value of a field, or `default` if it is absent or null. It must have the default's type.

        In place of true or false, null is false, as in transformers.
        """
        value: Any = self.optional(name, *aliases)
        if value is None and default is True:
            value = not any(self.names.get(key, key) in self.data for key in (name, *aliases))
        if isinstance(default, float) and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not type(default):
            raise self.invalid(name, f"should be of type {type(default).__name__}")
        return default if value is None else value

    def get_nullable(self, name: str, default: Any) -> Any:
        """The value of a field where null means off. `default` is used only if the field is absent."""
        name = self.names.get(name, name)
        self.unread.discard(name)
        return self.data.get(name, default)

    def require(self, name: str, kind: type[T], *aliases: str) -> T:
        """The value of a field that must be present and of type `kind`. Raises ConfigError naming it."""
        value: Any = self.optional(name, *aliases)
        if value is None:
            own = self.names.get(name, name)
            raise ConfigError(f"{self.source}: field '{own}' is missing; without it the model cannot be built")
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise self.invalid(name, f"should be of type {kind.__name__}")
        return value

    def require_count(self, name: str, *aliases: str, maximum: int = 2**31) -> int:
        """As `require`, for an int from 1 to `maximum`."""
        value = self.require(name, int, *aliases)
        if not 1 <= value <= maximum:
            raise self.invalid(name, f"should be from 1 to {maximum}")
        return value

    def expect(self, name: str, *allowed: Any, default: Any = None) -> Any:
        """The value of a field (`default` if absent), which must be one of `allowed`. Raises ConfigError naming it."""
        self.last_read = name = self.names.get(name, name)
        self.unread.discard(name)
        value = self.data.get(name, default)
        if value is None and True in allowed and name in self.data:
            value = False  # as in `get`
        if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed):
            choices = ", ".join(repr(choice) for choice in allowed)
            raise self.invalid(name, f"heddle builds {choices} only")
        return value

    def expect_all(self, **values: Any) -> None:
        """Raises ConfigError naming the first of these fields that is present, not null, and has another value."""
        for name, value in values.items():
            self.expect(name, value, None)

    def ignore(self, *names: str) -> None:
        """Mark fields as read without noting them; counts among them must still be in range."""
        for name in names:
            self.optional(name)

    def preserved(self) -> dict[str, Any]:
        """The fields that an export writes back."""
        return {name: self.data[name] for name in PRESERVED_FIELDS if name in self.data}

    def invalid(self, name: str, remedy: str) -> ConfigError:
        """The error for a field with a wrong value. Numbers of other fields that its remedy names are cut, too."""
        name = self.names.get(name, name)
        remedy = LONG_WORD.sub(lambda word: short_word(word[0]), remedy)
        return ConfigError(f"{self.source}: field '{name}' is {short_repr(self.data.get(name))}; {remedy}")

    def check_all_read(self) -> None:
        """Raises ConfigError naming the fields that were not read."""
        for name in sorted(self.unread & MUST_BE_OFF):
            raise self.invalid(name, "heddle reads only models in which it is off")
        if self.unread:
            names = list_fields(sorted(self.unread))
            model = short_repr(self.data.get("model_type", "this kind of model")).strip("'")
            raise ConfigError(
                f"{self.source}: {names}: heddle does not know what this means in {model}; remove it if unused"
            )
