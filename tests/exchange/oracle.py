"""Random models of transformers as folders on disk, and what both sides make of them."""

import json
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import heddle
from heddle.exchange.load import Imported, load
from tests.exchange.cases import BASE, CASES, Fields

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

VOCABULARY = BASE["vocab_size"]
LENGTHS = [41, 17, 1]  # of the rows that are padded together


def their_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def config_of(family: str, variant: str, **changes: Any) -> Any:
    """The config of a variant, with some fields changed."""
    return AutoConfig.for_model(family, **(BASE | CASES[family].variants[variant] | changes))


def drawn(config: Any) -> Any:
    """A model with weights so wide that logits and choices are far from even, and no gain or bias at its start."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 and "inv_freq" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model


@cache
def saved(family: str, variant: str) -> tuple[Any, Path]:
    """Their model and the folder that it was saved in, cut into shards."""
    model = drawn(config_of(family, variant))
    return model, write(model)


def write(model: Any) -> Path:
    """A folder of their model."""
    folder = Path(tempfile.mkdtemp(prefix="heddle-exchange-"))
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


@cache
def imported(family: str, variant: str) -> Imported:
    """The same model, read by us."""
    return load(saved(family, variant)[1])


def read_json(folder: Path, name: str = "config.json") -> Fields:
    """A file of a folder."""
    data: Fields = json.loads((folder / name).read_text(encoding="utf-8"))
    return data


def batch() -> tuple[Tensor, Tensor, heddle.Layout]:
    """Rows padded on the left, their mask and our layout."""
    layout = heddle.Layout.padded(LENGTHS, side="left")
    tokens = torch.randint(1, VOCABULARY, tuple(layout.positions.shape), generator=torch.Generator().manual_seed(9))
    real = layout.positions >= 0
    return torch.where(real, tokens, 0), real.long(), layout


@torch.no_grad()
def their_logits(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    found: Tensor = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return found


@torch.no_grad()
def our_logits(model: heddle.Decoder, tokens: Tensor, layout: heddle.Layout | None = None) -> Tensor:
    found: Tensor = model.head(model(tokens, layout)[0])
    return found


def distance(theirs: Any, ours: heddle.Decoder) -> float:
    """The largest difference of logits, rows padded together and the longest alone."""
    tokens, mask, layout = batch()
    real = mask.bool()
    want = their_logits(theirs, tokens, mask)[real]
    assert float(want.std()) > 0.3, "logits this even would agree whatever the model does"
    padded = (our_logits(ours, tokens, layout)[real] - want).abs().max()
    alone = (our_logits(ours, tokens[:1]) - their_logits(theirs, tokens[:1])).abs().max()
    return float(torch.maximum(padded, alone))
