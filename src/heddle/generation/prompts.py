"""Prompts as callers have them: texts, lists of tokens or tensors of tokens, a single one or a batch.

What is generated is returned in the same form.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heddle.errors import ConfigError

Prompts = str | Tensor | Sequence[str] | Sequence[int] | Sequence[Tensor] | Sequence[Sequence[int]]

NewRows = str | Tensor | list[str] | list[int] | list[Tensor] | list[list[int]]

TEXT_WITHOUT_TOKENIZER = (
    "prompts: are strings; give the tokenizer too, from `model, tokenizer = heddle.load(folder)`, or lists of tokens"
)
TOKENS_WITH_TOKENIZER = "prompts: with a tokenizer every prompt is a string; leave the tokenizer out for tokens"


@dataclass(frozen=True)
class PromptBatch:
    """texts, or else the token_ids of each prompt. restore: the new text or tokens of each row -> the caller's form."""

    texts: list[str]
    token_ids: list[list[int]]
    restore: Callable[[list[Any]], NewRows]


def read_prompts(prompts: Any, has_tokenizer: bool) -> PromptBatch:
    """Read prompts in any form of `Prompts`; numpy arrays count as lists.

    Raises ConfigError for no prompts, for texts without a tokenizer or tokens with one, and for what is no token.
    """
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, str | Tensor) and (not isinstance(prompts, Sequence) or not prompts):
        raise ConfigError("prompts: expected at least one: a string, a list of tokens, a tensor, or a list of these")
    texts = [prompts] if isinstance(prompts, str) else [row for row in prompts if isinstance(row, str)]
    if has_tokenizer:
        if not isinstance(prompts, str) and len(texts) != len(prompts):
            raise ConfigError(TOKENS_WITH_TOKENIZER)
        return PromptBatch(texts, [], _first if isinstance(prompts, str) else list)
    if texts:
        raise ConfigError(TEXT_WITHOUT_TOKENIZER)
    if isinstance(prompts, Tensor):
        return _read_tensor(prompts)
    if _is_token(prompts[0]):
        return PromptBatch([], [token_list(prompts)], _first)
    token_ids = [token_list(row) for row in prompts]
    if all(isinstance(row, Tensor) for row in prompts):
        devices = [row.device for row in prompts if isinstance(row, Tensor)]
        return PromptBatch(
            [], token_ids, lambda rows: [torch.tensor(row, device=d) for row, d in zip(rows, devices, strict=True)]
        )
    return PromptBatch([], token_ids, list)


def token_list(tokens: Any) -> list[int]:
    """The tokens of one prompt: whole numbers in any iterable, or a tensor [T]. Raises ConfigError otherwise."""
    if isinstance(tokens, Tensor):
        _check_tensor(tokens, dims=(1,))
        tokens = tokens.tolist()
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise ConfigError(f"prompts: hold {tokens!r:.80} where a list of tokens is expected")
    result = []
    for token in tokens:
        if not _is_token(token):
            raise ConfigError(f"prompts: hold {token!r:.80} where a token is expected; tokens are whole numbers")
        result.append(index(token))
    return result


def _is_token(value: Any) -> bool:
    """Whether a value is a whole number, also as a tensor or an array without dimensions."""
    try:
        index(value)
    except (TypeError, ValueError):  # a tensor of several numbers raises either
        return False
    return not isinstance(value, bool) and not (isinstance(value, Tensor) and value.dtype == torch.bool)


def _read_tensor(tokens: Tensor) -> PromptBatch:
    _check_tensor(tokens, dims=(1, 2))
    if tokens.dim() == 1:
        return PromptBatch([], [tokens.tolist()], lambda rows: torch.tensor(rows[0], device=tokens.device))
    return PromptBatch([], tokens.tolist(), lambda rows: torch.tensor(rows, device=tokens.device))


def _check_tensor(tokens: Tensor, dims: tuple[int, ...]) -> None:
    shapes = " or ".join("[batch, length]" if dim == 2 else "[length]" for dim in dims)
    if tokens.dim() not in dims or tokens.numel() == 0:
        raise ConfigError(f"prompts: a tensor has shape {list(tokens.shape)}; expected {shapes}, none of them 0")
    if tokens.dtype == torch.bool or tokens.is_floating_point() or tokens.is_complex():
        raise ConfigError(f"prompts: a tensor is of {tokens.dtype}; tokens are whole numbers, such as torch.int64")


def _first(rows: list[Any]) -> Any:
    return rows[0]
