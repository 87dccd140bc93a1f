"""Leaks: what a model must not know, found in the smallest case, with the part that lets it through."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from heddle.data.token_file import TokenFile
from heddle.laws.harness import forward_no_grad, model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.layout import Layout

# The laws that every design must keep before it is trained; code of a proposal's own must keep all.
LEAKS = (
    "causality", "document_isolation", "document_packing", "receptive_field", "row_isolation", "padding_invariance",
    "chunked_decoding", "call_isolation",
)  # fmt: skip
LONGEST = 12  # tokens of a case
TOLERANCE = 1e-9  # in float64; experts change the shape of products
OVERLAP = 32  # tokens in a row that are no coincidence


def smallest_leak(config: ModelConfig) -> str | None:
    """The fewest tokens with which a design sees a later token, or another document, and the part; None: none."""
    model = model_under_test(config)
    for length in range(2, LONGEST + 1):
        tokens = random_tokens(config, 1, length)
        for what, layout, changed, watched in _cases(length):
            moved = _moved(model, tokens, layout, changed, watched)
            if moved is not None:
                return f"{length} tokens{what}: changing token {changed} moves the output of token {moved[0]}{moved[1]}"
    return None


def _cases(length: int) -> Iterator[tuple[str, Layout | None, int, range]]:
    """(words, layout, the changed token, the tokens that must not move)."""
    for changed in range(length - 1, 0, -1):
        yield "", None, changed, range(changed)
    for first in range(1, length):
        layout = Layout.packed([[first, length - first]])
        yield f" in documents of {first} and {length - first}", layout, first - 1, range(first, length)


def _moved(
    model: Decoder, tokens: Tensor, layout: Layout | None, changed: int, watched: range
) -> tuple[int, str] | None:
    """The first watched token whose output moves, and the module in which it first does."""
    others = tokens.clone()
    others[:, changed] = tokens[:, changed] % (model.embed.weight.shape[0] - 1) + 1
    before, after = (_streams(model, each, layout) for each in (tokens, others))
    indices = list(watched)

    def first_difference(name: str, side: int) -> int | None:
        pair = [streams[name][side][:, indices] for streams in (before, after)]
        differs = (pair[1] - pair[0]).abs().amax((0, 2)).nan_to_num(nan=1.0) > TOLERANCE
        return indices[int(differs.nonzero()[0])] if bool(differs.any()) else None

    token = first_difference("", 1)
    if token is None:
        return None
    lets = (
        name for name in after if name and first_difference(name, 0) is None and first_difference(name, 1) is not None
    )
    name = next(lets, "")
    return token, f", by {name}" if name else ""


def _streams(model: Decoder, tokens: Tensor, layout: Layout | None) -> dict[str, tuple[Tensor, Tensor]]:
    """(input, output) of each module that maps one row for each token, inner modules first; of the model, as ""."""
    streams: dict[str, tuple[Tensor, Tensor]] = {}
    names = {module: f"{name} ({type(module).__module__.rpartition('.')[2]})" for name, module in model.named_modules()}

    def keep(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        result = output[0] if isinstance(output, tuple) and output else output
        pair = [x for x in (*arguments[:1], result) if isinstance(x, Tensor) and x.dim() == 3]
        if len(pair) == 2 and all(x.shape[:2] == tokens.shape for x in pair):
            streams.setdefault(names[module], (pair[0].detach().clone(), pair[1].detach().clone()))

    handles = [module.register_forward_hook(keep) for module in names if module is not model]
    try:
        logits = forward_no_grad(model, tokens, layout)
    finally:
        for handle in handles:
            handle.remove()
    return streams | {"": (logits, logits)}


def training_overlap(held_out: TokenFile, own: Sequence[TokenFile], texts: Sequence[Any]) -> str | None:
    """Where a text has `OVERLAP` tokens in a row that the held-out text has, and the ledger's training text has not."""
    secret = np.unique(_hashes(held_out.read(0, len(held_out))))
    secret = secret[~np.isin(secret, np.concatenate([_hashes(file.read(0, len(file))) for file in own]))]
    for index, text in enumerate(texts):
        found = np.flatnonzero(np.isin(_hashes(np.asarray(text, dtype=np.int64)), secret))
        if found.size:
            return f"tokens {int(found[0])} to {int(found[0]) + OVERLAP - 1} of part {index + 1}"
    return None


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """A hash of each OVERLAP tokens in a row: a polynomial modulo 2^64."""
    count = max(0, len(tokens) - OVERLAP + 1)
    result = np.zeros(count, dtype=np.uint64)
    values = tokens.astype(np.uint64) + np.uint64(1)
    for offset in range(OVERLAP):
        result = result * np.uint64(0x9E3779B97F4A7C15) + values[offset : offset + count]
    return result
