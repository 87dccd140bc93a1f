"""HeddleConfig: a design in the config.json of transformers."""

from typing import Any

from transformers import PreTrainedConfig

from heddle.errors import ConfigError
from heddle.exchange import views
from heddle.exchange.families.heddle import FAMILY, TOLD
from heddle.exchange.transformers.elsewhere import elsewhere
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config


class HeddleConfig(PreTrainedConfig):
    """`design` is a design as plain data, or what `heddle.load_config` reads: a file, "preset:gqa-small", a folder.

    The sizes beside it tell other programs; they follow from the design, and one that says otherwise is refused.
    A design that leaves its vocabulary open takes `vocab_size`. Raises ConfigError as `heddle.load_config`.
    """

    model_type = FAMILY.model_type
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - transformers reads a list

    design: Any = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Read the design; transformers also makes configs without one, to compare with."""
        if self.design is not None:
            found = load_config(self.design)
            if found.vocab_size is None:
                found = found.replace(vocab_size=self.vocab_size)
            told = FAMILY.write(found.resolved())
            for name in TOLD:
                given = getattr(self, name)
                if given is not None and given != told[name]:
                    raise ConfigError(f"{name}: is {given}, but the design says {told[name]}; change the design")
            self.take(found)
        super().__post_init__(**kwargs)

    def take(self, design: ModelConfig) -> None:
        """Say this design from now on."""
        told = FAMILY.write(design.resolved())
        self.design = design.dump()
        for name in TOLD:
            setattr(self, name, told[name])

    @property
    def layer_types(self) -> list[str]:
        """Which layers have a window, for those who compute attention themselves; otherwise there is no such field."""
        return views.layer_types(self._told("layer_types"))

    @property
    def sliding_window(self) -> int | None:
        """The window, likewise."""
        return views.window(self._told("sliding_window"))

    @property
    def logit_scale(self) -> float:
        """What logits are multiplied by, likewise."""
        return self._told("logit_scale").head.scale

    @property
    def final_logit_softcapping(self) -> float | None:
        """What bounds them, likewise."""
        return self._told("final_logit_softcapping").head.softcap

    def _told(self, name: str) -> ModelConfig:
        if not elsewhere(self):
            raise AttributeError(name)
        return self.read().resolved()

    def read(self) -> ModelConfig:
        """The design. Raises ConfigError where none was given."""
        if self.design is None:
            raise ConfigError('design: is missing; give HeddleConfig(design="preset:gqa-small"), or a table')
        return load_config(self.design)
