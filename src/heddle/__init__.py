"""heddle: interchangeable, verified parts of language models.

Names are imported on first use, so that `import heddle` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from heddle.generation.generate import generate as generate
    from heddle.generation.generate import prefix as prefix
    from heddle.lab.compare.compare import compare as compare
    from heddle.lab.conversion.convert import convert as convert
    from heddle.lab.ladder.ladder import ladder as ladder
    from heddle.lab.plan.training_plan import plan as plan
    from heddle.lab.show import show as show
    from heddle.model.attention_maps import attention_weights as attention_weights
    from heddle.model.decoder import Decoder as Decoder
    from heddle.model.decoder import build as build
    from heddle.model.load_config import load_config as load_config
    from heddle.model.size import size as size
    from heddle.model.state import State as State
    from heddle.numerics.kernels import kernels as kernels
    from heddle.parts.layout import EncoderOutput as EncoderOutput
    from heddle.parts.layout import Layout as Layout
    from heddle.storage.model import load as load
    from heddle.storage.model import load_state as load_state
    from heddle.storage.model import save as save
    from heddle.storage.model import save_state as save_state
    from heddle.training.run import train as train


_HOMES = {
    "Decoder": "heddle.model.decoder",
    "EncoderOutput": "heddle.parts.layout",
    "Layout": "heddle.parts.layout",
    "State": "heddle.model.state",
    "attention_weights": "heddle.model.attention_maps",
    "build": "heddle.model.decoder",
    "compare": "heddle.lab.compare.compare",
    "convert": "heddle.lab.conversion.convert",
    "generate": "heddle.generation.generate",
    "kernels": "heddle.numerics.kernels",
    "ladder": "heddle.lab.ladder.ladder",
    "load": "heddle.storage.model",
    "load_config": "heddle.model.load_config",
    "load_state": "heddle.storage.model",
    "plan": "heddle.lab.plan.training_plan",
    "prefix": "heddle.generation.generate",
    "save": "heddle.storage.model",
    "save_state": "heddle.storage.model",
    "show": "heddle.lab.show",
    "size": "heddle.model.size",
    "train": "heddle.training.run",
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
    "convert",
    "generate",
    "kernels",
    "ladder",
    "load",
    "load_config",
    "load_state",
    "plan",
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


def __dir__() -> list[str]:
    return __all__
