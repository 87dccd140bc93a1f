"""The text model of a model that also sees: its config, and its tensors by the names that they have in a text model.

Such a model has the config of its text model in the table `text_config`, and its tensors below `model.language_model`
(older files: `language_model.model`). What is for images is left out; a notice names the tensors.
"""

from collections.abc import Mapping
from typing import Any

from heddle.errors import ConfigError

# By model_type: the text models that it may have.
TEXT_MODELS = {
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "mistral3": ("ministral3", "mistral"),
}
IMAGE_FIELDS = frozenset(
    """
    text_config vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id
    image_token_index multimodal_projector_bias projector_hidden_act spatial_merge_size vision_feature_layer
    language_model_only
    """.split()  # noqa: SIM905
)
IMAGE_TENSORS = (
    "model.visual.", "model.vision_tower.", "vision_tower.", "model.multi_modal_projector.", "multi_modal_projector.",
)  # fmt: skip
PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
TIED = "tie_word_embeddings"


def has_text_model(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model that also sees, with a text model that may be read."""
    inner = config.get("text_config")
    known = TEXT_MODELS.get(config["model_type"], ()) if isinstance(config.get("model_type"), str) else ()
    return isinstance(inner, dict) and inner.get("model_type") in known


def text_model_config(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The config of the text model. Fields beside it that are not for images stay, so that unknown ones are refused.

    Raises ConfigError if the two tables disagree about the head.
    """
    inner: dict[str, Any] = config["text_config"]
    if TIED in config and inner.get(TIED, config[TIED]) != config[TIED]:
        raise ConfigError(f"{source}: field '{TIED}' of text_config is {inner[TIED]!r}; make it {config[TIED]!r}")
    outer = {name: value for name, value in config.items() if name not in IMAGE_FIELDS}
    return outer | {name: value for name, value in inner.items() if value is not None or name not in outer}


def text_model_name(name: str) -> str:
    """The name of a tensor in a text model."""
    for prefix, replacement in PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
