"""HeddleConfig: a heddle design as a config of transformers."""

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from heddle.errors import ConfigError
from heddle.exchange import design_parts
from heddle.exchange.families.heddle import AUTO_MAP, FAMILY, SIZE_FIELDS
from heddle.exchange.transformers.external_attention import uses_external_attention
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from heddle.storage.file_io import write_file


class HeddleConfig(PreTrainedConfig):
    """`design` is a design as plain data, or what `heddle.load_config` reads: a file, "preset:gqa-small", a folder.

    The sizes are for other programs. They follow from the design; one that disagrees with it is refused. If the design
    has no vocab_size, it gets this one. Raises ConfigError as `heddle.load_config`.
    """

    model_type = FAMILY.model_type
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012 - transformers reads a list

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
    auto_map: dict[str, str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Read the design. transformers also creates configs without one, to compare with."""
        self.auto_map = dict(AUTO_MAP)  # one that came from a hub names the hub's copy of the same file
        if self.design is not None:
            design = load_config(self.design)
            if design.vocab_size is None:
                design = design.replace(vocab_size=self.vocab_size)
            sizes = FAMILY.write_config(design.resolved())
            for name in SIZE_FIELDS:
                size = getattr(self, name)
                if size is not None and size != sizes[name]:
                    raise ConfigError(f"{name}: is {size}, but the design says {sizes[name]}; change the design")
            self.set_design(design)
        super().__post_init__(**kwargs)

    def set_design(self, design: ModelConfig) -> None:
        """Replace the design and the sizes that follow from it."""
        sizes = FAMILY.write_config(design.resolved())
        self.design = design.dump()
        for name in SIZE_FIELDS:
            setattr(self, name, sizes[name])

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the config as transformers does, and the file that `auto_map` names."""
        super().save_pretrained(save_directory, push_to_hub, **kwargs)
        for name, text in FAMILY.documents.items():
            write_file(Path(save_directory, name), text)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: `auto_map` is always written, and the code of the package is never copied into a folder."""

    @property
    def layer_types(self) -> list[str]:
        """The type of each layer's attention. This and the next field exist only with external attention."""
        return design_parts.layer_types(self._design_for_external_attention("layer_types"))

    @property
    def sliding_window(self) -> int | None:
        """The size of the attention window, or None."""
        return design_parts.first_window(self._design_for_external_attention("sliding_window"))

    def _design_for_external_attention(self, name: str) -> ModelConfig:
        if not uses_external_attention(self):
            raise AttributeError(name)
        return self.load_design().resolved()

    def load_design(self) -> ModelConfig:
        """The design. Raises ConfigError if there is none."""
        if self.design is None:
            raise ConfigError('design: is missing; give HeddleConfig(design="preset:gqa-small"), or a table')
        return load_config(self.design)
