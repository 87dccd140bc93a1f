"""NaN isolation: NaN in padding, in unused cache slots or in other rows changes no bit of anything else."""

import torch

from heddle.laws.harness import (
    PADDING_TOKEN,
    LawViolation,
    assert_bitwise_equal,
    assert_gradients_close,
    assert_unaffected,
    fork,
    forward,
    forward_in_chunks,
    forward_no_grad,
    forward_with_state,
    gradients,
    model_under_test,
    probe_loss,
    random_tokens,
    supports_state,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.state import State
from heddle.parts.context.kv_cache import KVCache
from heddle.parts.context.layout import Layout

LENGTHS = (7, 3, 1)
NAN = float("nan")


def _poison_padding_token(model: Decoder) -> None:
    with torch.no_grad():
        model.embed.weight[PADDING_TOKEN] = NAN


def nan_in_padding(config: ModelConfig) -> None:
    """NaN in the padding token's embedding changes no bit of a token and no gradient."""
    model = model_under_test(config)
    rows = random_tokens(config, 3, max(LENGTHS))
    layouts = {side: Layout.padded(LENGTHS, 8, side=side) for side in ("left", "right")}
    padded = {
        side: torch.where(layout.positions >= 0, rows.gather(1, layout.positions.clamp(min=0)), PADDING_TOKEN)
        for side, layout in layouts.items()
    }

    def everything() -> dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        results = {}
        for side, layout in layouts.items():
            is_token = layout.positions >= 0
            hidden = forward(model, padded[side], layout)
            values = hidden.detach()
            if model.causal:
                values = torch.cat((values, forward_in_chunks(model, padded[side], [3, 1, 4], None, layout)[0]), dim=1)
                is_token = is_token.repeat(1, 2)
            grads = gradients(model, probe_loss(hidden, layout.positions >= 0))
            results[side] = torch.where(is_token[..., None], values, 0.0), grads
        return results

    clean = everything()
    _poison_padding_token(model)
    for side, (values, grads) in everything().items():
        assert_bitwise_equal(values, clean[side][0], f"NaN in the padding on the {side} side")
        assert_gradients_close(grads, clean[side][1], f"NaN in the padding on the {side} side", tolerance=0.0)


def nan_in_unused_slots(config: ModelConfig) -> None:
    """NaN in the unused slots of a cache changes no bit of the tokens decoded next."""
    model = model_under_test(config)
    if not supports_state(model):
        return
    tokens, new_tokens = random_tokens(config, 3, 7), random_tokens(config, 3, 6, seed=1)
    ragged = Layout.padded(LENGTHS, 7, side="right")
    for name, layout, cache_length, sizes in (
        ("even rows", None, None, [4, 2]),
        ("even rows", None, 20, [1, 1, 1, 1, 2]),
        ("ragged rows", ragged, None, [1, 2, 3]),
        ("ragged rows", ragged, 20, [4, 1, 1]),
    ):
        _, state = forward_in_chunks(model, tokens, [7], cache_length, layout)
        poisoned = fork(state)
        _poison_slots(poisoned)
        want = _continued(model, state, new_tokens, sizes)
        got = _continued(model, poisoned, new_tokens, sizes)
        assert_bitwise_equal(
            got, want, f"NaN in the unused slots of {name}, then chunks {sizes}, cache_length {cache_length}"
        )


def _continued(model: Decoder, state: State, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    out = []
    for chunk in tokens.split(sizes, dim=1):
        hidden, state = forward_with_state(model, state, chunk)
        out.append(hidden)
    return torch.cat(out, dim=1)


def _poison_slots(state: State) -> None:
    """Fill the unused slots. A row of n tokens uses the first n slots of a cache, or all of a full ring buffer."""
    caches = [part for layer in state.layers if layer is not None for part in layer.nested_states()]
    for cache in caches:
        if isinstance(cache, KVCache):
            for tensor in cache.tensors().values():
                unused = torch.arange(tensor.shape[2]) >= state.table.token_counts[:, None]
                tensor.masked_fill_(unused[:, None, :, None], NAN)


def padding_not_cached(config: ModelConfig) -> None:
    """Padding is written to no state: after a padded call a row holds the same as after a call alone."""
    model = model_under_test(config)
    if not supports_state(model):
        return
    rows = random_tokens(config, 3, max(LENGTHS))
    for side in ("left", "right"):
        layout = Layout.padded(LENGTHS, 8, side=side)
        tokens = torch.where(layout.positions >= 0, rows.gather(1, layout.positions.clamp(min=0)), PADDING_TOKEN)
        _, padded = forward_in_chunks(model, tokens, [8], 12, layout)
        batch_tensors = padded.tensors()
        for row, length in enumerate(LENGTHS):
            _, alone = forward_in_chunks(model, rows[row : row + 1, :length], [length], 12)
            for name, tensor in alone.tensors().items():
                difference = (batch_tensors[name][row] - tensor[0]).abs()
                if not bool((difference <= 1e-10).all()):
                    raise LawViolation(f"{name} of row {row} padded on the {side} side differs from the row alone")


def nan_in_other_rows(config: ModelConfig) -> None:
    """NaN in other rows of a batch changes no bit of a row, in one call and with a state."""
    model = model_under_test(config)
    tokens = random_tokens(config, 3, 8)
    poisoned = tokens.clone()
    poisoned[1, 2:] = PADDING_TOKEN
    others = torch.tensor([0, 2])

    def rows(tokens: torch.Tensor) -> list[torch.Tensor]:
        outputs = [forward_no_grad(model, tokens)[others]]
        if model.causal:
            outputs.append(forward_in_chunks(model, tokens, [3, 1, 4])[0][others])
        return outputs

    clean = rows(tokens)
    _poison_padding_token(model)
    for got, want, how in zip(rows(poisoned), clean, ("in one call", "with a state"), strict=False):
        assert_unaffected(model, got, want, f"NaN in row 1, {how} (rows counted without it)")
