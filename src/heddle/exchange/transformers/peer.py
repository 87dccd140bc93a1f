"""A design as the model of transformers that computes it, with equal weights."""

import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.utils import logging

from heddle.exchange.export import export
from heddle.model.config import ModelConfig
from heddle.model.decoder import build


def transformers_model(config: ModelConfig) -> Any:
    """The model with the weights of `heddle.build`, float32 on the CPU. The design fits a family of transformers."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="heddle-") as folder:
        export(build(config), Path(folder, "model"))
        return AutoModelForCausalLM.from_pretrained(Path(folder, "model"))
