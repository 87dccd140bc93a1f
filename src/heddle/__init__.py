"""heddle: interchangeable, verified parts of language models.

Names are imported on first use, so that `import heddle` costs nothing until a model is wanted.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from heddle.cli.calls import compare as compare
    from heddle.cli.calls import show as show
    from heddle.cli.calls import train as train
    from heddle.generation.generate import generate as generate
    from heddle.generation.generate import prefix as prefix
    from heddle.model.attention_maps import attention_weights as attention_weights
    from heddle.model.decoder import Decoder as Decoder
    from heddle.model.decoder import build as build
    from heddle.model.load_config import load_config as load_config
    from heddle.model.size import size as size
    from heddle.model.state import State as State
    from heddle.numerics.kernels import kernels as kernels
    from heddle.parts.layout import EncoderOutput, Layout
    from heddle.storage.model import load as load
    from heddle.storage.model import load_state, save_state
    from heddle.storage.model import save as save

_HOMES = {
    "Decoder": "heddle.model.decoder",
    "EncoderOutput": "heddle.parts.layout",
    "Layout": "heddle.parts.layout",
    "State": "heddle.model.state",
    "attention_weights": "heddle.model.attention_maps",
    "build": "heddle.model.decoder",
    "compare": "heddle.cli.calls",
    "generate": "heddle.generation.generate",
    "kernels": "heddle.numerics.kernels",
    "load": "heddle.storage.model",
    "load_config": "heddle.model.load_config",
    "load_state": "heddle.storage.model",
    "prefix": "heddle.generation.generate",
    "save": "heddle.storage.model",
    "save_state": "heddle.storage.model",
    "show": "heddle.cli.calls",
    "size": "heddle.model.size",
    "train": "heddle.cli.calls",
}

__all__ = [
    "Decoder",
    "EncoderOutput",
    "Layout",
    "State",
    "__version__",
    "attention_weights",
    "build",
    "compare",
    "generate",
    "kernels",
    "load",
    "load_config",
    "load_state",
    "prefix",
    "save",
    "save_state",
    "show",
    "size",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'heddle' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
