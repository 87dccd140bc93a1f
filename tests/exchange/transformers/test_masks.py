"""Masks and positions of transformers against rows and documents by themselves, and what is refused."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.errors import ConfigError
from heddle.exchange.transformers.masks import CachedTokens, layout_from_inputs
from tests.exchange.transformers.designs import DESIGNS, alone, decoder, logits, model, padded, prompts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig
    from transformers.masking_utils import create_causal_mask

EACH = pytest.mark.parametrize("name", DESIGNS)
PACKED = [4, 1, 6]


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def concatenate(documents: list[list[int]]) -> list[int]:
    return [token for document in documents for token in document]


def packed_positions() -> Tensor:
    """The position ids of packed rows, [1, T]."""
    return torch.cat([torch.arange(size) for size in PACKED])[None]


def check_padded(name: str, side: str) -> None:
    rows = prompts()
    inputs = padded(rows, side)
    actual = logits(name, **inputs)
    for row, mask, row_logits in zip(rows, inputs["attention_mask"].bool(), actual, strict=True):
        assert_near(row_logits[mask], alone(name, row))


def check_packed(name: str) -> None:
    documents = prompts(PACKED)
    actual = logits(name, input_ids=torch.tensor([concatenate(documents)]), position_ids=packed_positions())
    assert_near(actual[0], torch.cat([alone(name, row) for row in documents]))


@EACH
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_rows_alone(name: str, side: str) -> None:
    check_padded(name, side)


@EACH
def test_padding_in_the_middle_is_as_if_it_were_not_there(name: str) -> None:
    row = prompts([9])[0]
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1, 1]])
    actual = logits(name, input_ids=torch.tensor([row]), attention_mask=mask)[0]
    assert_near(
        actual[mask[0].bool()], alone(name, [token for token, is_token in zip(row, mask[0], strict=True) if is_token])
    )


@EACH
def test_positions_that_begin_anew_are_documents(name: str) -> None:
    check_packed(name)


def test_positions_that_say_nothing_new() -> None:
    rows = torch.tensor(prompts([7, 7]))
    expected = logits("gqa", input_ids=rows)
    for positions in (torch.arange(7)[None], torch.arange(7).expand(2, 7)):
        assert torch.equal(logits("gqa", input_ids=rows, position_ids=positions), expected)
        mask = torch.ones(2, 7)
        assert torch.equal(logits("gqa", input_ids=rows, position_ids=positions, attention_mask=mask), expected)


def test_positions_that_begin_later_reach_learned_rows() -> None:
    row = torch.tensor(prompts([5]))
    layout = heddle.Layout(torch.arange(7, 12)[None])
    with torch.no_grad():
        expected = decoder("learned").head(decoder("learned")(row, layout)[0])
    assert_near(logits("learned", input_ids=row, position_ids=torch.arange(7, 12)[None]), expected)
    both = torch.stack((torch.arange(5), torch.arange(7, 12)))
    actual = logits("learned", input_ids=row.repeat(2, 1), position_ids=both)
    assert_near(actual[1], expected[0])
    assert_near(actual[0], alone("learned", row[0].tolist()))


def hf_causal_mask(kind: str, mask: Tensor | None, positions: Tensor | None, batch: int, length: int) -> Tensor:
    """The 4-D mask that transformers makes."""
    config = LlamaConfig(num_hidden_layers=1, attn_implementation=kind)
    like = torch.zeros(batch, length, 4)
    hf_mask = create_causal_mask(config, like, mask, None, positions)
    assert hf_mask is not None
    assert hf_mask.dim() == 4
    return hf_mask


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gqa", "mla", "hybrid"])
def test_four_dimensions_as_transformers_makes_them(name: str, kind: str) -> None:
    rows, documents = prompts(), prompts(PACKED)
    inputs = padded(rows)
    mask = hf_causal_mask(kind, inputs["attention_mask"], None, *inputs["input_ids"].shape)
    actual = logits(name, input_ids=inputs["input_ids"], attention_mask=mask)
    for row, is_token, row_logits in zip(rows, inputs["attention_mask"].bool(), actual, strict=True):
        assert_near(row_logits[is_token], alone(name, row))
    tokens = torch.tensor([concatenate(documents)])
    mask = hf_causal_mask(kind, None, packed_positions(), *tokens.shape)
    expected = torch.cat([alone(name, row) for row in documents])
    assert_near(logits(name, input_ids=tokens, attention_mask=mask)[0], expected)
    assert_near(logits(name, input_ids=tokens, attention_mask=mask, position_ids=packed_positions())[0], expected)


def test_packed_and_padded_at_once_by_a_mask_of_pairs() -> None:
    documents = prompts(PACKED)
    number = torch.tensor([-1, -1, *(n for n, size in enumerate(PACKED) for _ in range(size)), -1])
    visible = (number[:, None] == number[None, :]) & (number >= 0) & torch.ones(14, 14, dtype=torch.bool).tril()
    actual = logits(
        "hybrid", input_ids=torch.tensor([[9, 9, *concatenate(documents), 9]]), attention_mask=visible[None, None]
    )
    assert_near(actual[0, 2:13], torch.cat([alone("hybrid", row) for row in documents]))


def test_pairs_after_a_cache() -> None:
    row = prompts([9])[0]
    with torch.no_grad():
        first = model("hybrid")(torch.tensor([[5, *row[:4]]]), attention_mask=torch.tensor([[0, 1, 1, 1, 1]]))
        visible = torch.ones(5, 10, dtype=torch.bool).tril(5)
        visible[:, 0] = False
        actual = model("hybrid")(
            torch.tensor([row[4:]]), attention_mask=visible[None, None], past_key_values=first.past_key_values
        )
    assert_near(actual.logits[0], alone("hybrid", row)[4:])


def band(window: int) -> Tensor:
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    return (visible & ~torch.ones(6, 6, dtype=torch.bool).tril(-window))[None, None]


HEADS = torch.stack((torch.ones(6, 6).tril(), torch.eye(6)))[None].bool()
REFUSED: dict[str, dict[str, Any]] = {
    "attention_mask:.*column 0.*row 0.*token 2": {"attention_mask": band(2)},
    "attention_mask:.*numbers": {"attention_mask": torch.full((1, 1, 6, 6), -0.5)},
    "attention_mask:.*heads": {"attention_mask": HEADS},
    r"attention_mask:.*\[1, 5\].*\[1, 6\]": {"attention_mask": torch.ones(1, 5)},
    r"attention_mask:.*\[1, 1, 6, 7\].*\[1, 1, 6, 6\]": {"attention_mask": torch.ones(1, 1, 6, 7)},
    "attention_mask:.*dict of masks": {"attention_mask": {"full_attention": None}},
    "position_ids: 0 .*2 in row 0": {
        "attention_mask": torch.ones(1, 6), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])
    },
    "position_ids: 4 .*1 in row 0": {
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]]), "position_ids": torch.tensor([[0, 0, 1, 4, 5, 6]])
    },
    "position_ids:.*token 3.*row 0": {
        "attention_mask": torch.ones(1, 1, 6, 6).tril().bool(), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])
    },
    "position_ids:.*negative": {"position_ids": torch.tensor([[-1, 0, 1, 2, 3, 4]])},
    r"position_ids:.*\[1, 7\]": {"position_ids": torch.arange(7)[None]},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_layout_says_is_refused(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        logits("gqa", input_ids=torch.tensor(prompts([6])), **REFUSED[message])


def test_after_a_cache_masks_and_positions_may_not_change_their_minds() -> None:
    rows = torch.tensor(prompts([4]))
    with torch.no_grad():
        cache = model("gqa")(rows).past_key_values
        with pytest.raises(ConfigError, match="first 4 columns"):
            model("gqa")(rows, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]]), past_key_values=cache)
        with pytest.raises(ConfigError, match=r"position_ids: 0 .*3 in row 0"):
            model("gqa")(rows, position_ids=torch.arange(4)[None], past_key_values=cache)


def test_what_is_plain_stays_plain() -> None:
    """Kernels choose by these facts."""
    tokens, ones = torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5)
    assert layout_from_inputs(tokens, None, None, CachedTokens()) == (None, None)
    assert layout_from_inputs(tokens, ones, torch.arange(5)[None], CachedTokens()) == (None, None)
    packed = layout_from_inputs(tokens, None, torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]), CachedTokens()).layout
    assert packed is not None
    assert packed.doc_lengths == ((2, 3), (4, 1))
    later = layout_from_inputs(tokens, None, torch.arange(3, 8)[None], CachedTokens()).layout
    assert later is not None
    assert later.start == 3
