"""Masks and positions of transformers against rows and documents by themselves, and what is refused."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.errors import ConfigError
from heddle.exchange.transformers.masks import Columns, read
from tests.exchange.transformers.designs import DESIGNS, alone, decoder, logits, model, padded, prompts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig
    from transformers.masking_utils import create_causal_mask

EACH = pytest.mark.parametrize("name", DESIGNS)
PACKED = [4, 1, 6]


def near(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=0, atol=1e-9)


def joined(documents: list[list[int]]) -> list[int]:
    return [token for document in documents for token in document]


def starts() -> Tensor:
    """The position ids of packed rows, [1, T]."""
    return torch.cat([torch.arange(size) for size in PACKED])[None]


def check_padded(name: str, side: str) -> None:
    rows = prompts()
    given = padded(rows, side)
    found = logits(name, **given)
    for row, mask, one in zip(rows, given["attention_mask"].bool(), found, strict=True):
        near(one[mask], alone(name, row))


def check_packed(name: str) -> None:
    documents = prompts(PACKED)
    found = logits(name, input_ids=torch.tensor([joined(documents)]), position_ids=starts())
    near(found[0], torch.cat([alone(name, row) for row in documents]))


@EACH
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_rows_alone(name: str, side: str) -> None:
    check_padded(name, side)


@EACH
def test_padding_in_the_middle_is_as_if_it_were_not_there(name: str) -> None:
    row = prompts([9])[0]
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1, 1]])
    found = logits(name, input_ids=torch.tensor([row]), attention_mask=mask)[0]
    near(found[mask[0].bool()], alone(name, [token for token, real in zip(row, mask[0], strict=True) if real]))


@EACH
def test_positions_that_begin_anew_are_documents(name: str) -> None:
    check_packed(name)


def test_positions_that_say_nothing_new() -> None:
    rows = torch.tensor(prompts([7, 7]))
    want = logits("gqa", input_ids=rows)
    for positions in (torch.arange(7)[None], torch.arange(7).expand(2, 7)):
        assert torch.equal(logits("gqa", input_ids=rows, position_ids=positions), want)
        mask = torch.ones(2, 7)
        assert torch.equal(logits("gqa", input_ids=rows, position_ids=positions, attention_mask=mask), want)


def test_positions_that_begin_later_reach_learned_rows() -> None:
    row = torch.tensor(prompts([5]))
    layout = heddle.Layout(torch.arange(7, 12)[None])
    with torch.no_grad():
        want = decoder("learned").head(decoder("learned")(row, layout)[0])
    near(logits("learned", input_ids=row, position_ids=torch.arange(7, 12)[None]), want)
    both = torch.stack((torch.arange(5), torch.arange(7, 12)))
    found = logits("learned", input_ids=row.repeat(2, 1), position_ids=both)
    near(found[1], want[0])
    near(found[0], alone("learned", row[0].tolist()))


def theirs(kind: str, mask: Tensor | None, positions: Tensor | None, batch: int, length: int) -> Tensor:
    """The 4-D mask that transformers makes."""
    config = LlamaConfig(num_hidden_layers=1, attn_implementation=kind)
    like = torch.zeros(batch, length, 4)
    made = create_causal_mask(
        config=config, inputs_embeds=like, attention_mask=mask, past_key_values=None, position_ids=positions
    )
    assert made is not None
    assert made.dim() == 4
    return made


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gqa", "mla", "hybrid"])
def test_four_dimensions_as_transformers_makes_them(name: str, kind: str) -> None:
    rows, documents = prompts(), prompts(PACKED)
    given = padded(rows)
    mask = theirs(kind, given["attention_mask"], None, *given["input_ids"].shape)
    found = logits(name, input_ids=given["input_ids"], attention_mask=mask)
    for row, real, one in zip(rows, given["attention_mask"].bool(), found, strict=True):
        near(one[real], alone(name, row))
    tokens = torch.tensor([joined(documents)])
    mask = theirs(kind, None, starts(), *tokens.shape)
    want = torch.cat([alone(name, row) for row in documents])
    near(logits(name, input_ids=tokens, attention_mask=mask)[0], want)
    near(logits(name, input_ids=tokens, attention_mask=mask, position_ids=starts())[0], want)


def test_packed_and_padded_at_once_by_a_mask_of_pairs() -> None:
    documents = prompts(PACKED)
    number = torch.tensor([-1, -1, *(n for n, size in enumerate(PACKED) for _ in range(size)), -1])
    seen = (number[:, None] == number[None, :]) & (number >= 0) & torch.ones(14, 14, dtype=torch.bool).tril()
    found = logits("hybrid", input_ids=torch.tensor([[9, 9, *joined(documents), 9]]), attention_mask=seen[None, None])
    near(found[0, 2:13], torch.cat([alone("hybrid", row) for row in documents]))


def test_pairs_after_a_cache() -> None:
    row = prompts([9])[0]
    with torch.no_grad():
        first = model("hybrid")(torch.tensor([[5, *row[:4]]]), attention_mask=torch.tensor([[0, 1, 1, 1, 1]]))
        seen = torch.ones(5, 10, dtype=torch.bool).tril(5)
        seen[:, 0] = False
        found = model("hybrid")(
            torch.tensor([row[4:]]), attention_mask=seen[None, None], past_key_values=first.past_key_values
        )
    near(found.logits[0], alone("hybrid", row)[4:])


def band(window: int) -> Tensor:
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    return (seen & ~torch.ones(6, 6, dtype=torch.bool).tril(-window))[None, None]


HEADS = torch.stack((torch.ones(6, 6).tril(), torch.eye(6)))[None].bool()
REFUSED: dict[str, dict[str, Any]] = {
    "attention_mask: hides column 0 of row 0 to its token 2": {"attention_mask": band(2)},
    "attention_mask: adds numbers other than 0": {"attention_mask": torch.full((1, 1, 6, 6), -0.5)},
    "attention_mask: differs between heads": {"attention_mask": HEADS},
    r"attention_mask: has shape \[1, 5\]; expected \[1, 6\]": {"attention_mask": torch.ones(1, 5)},
    r"attention_mask: has shape \[1, 1, 6, 7\]; expected \[1, 1, 6, 6\]": {"attention_mask": torch.ones(1, 1, 6, 7)},
    "attention_mask: is a table of masks": {"attention_mask": {"full_attention": None}},
    "position_ids: 0 follows 2 in row 0": {
        "attention_mask": torch.ones(1, 6), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])
    },
    "position_ids: 4 follows 1 in row 0": {
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]]), "position_ids": torch.tensor([[0, 0, 1, 4, 5, 6]])
    },
    "position_ids: do not go on by one at token 3 of row 0": {
        "attention_mask": torch.ones(1, 1, 6, 6).tril().bool(), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])
    },
    "position_ids: hold negative numbers": {"position_ids": torch.tensor([[-1, 0, 1, 2, 3, 4]])},
    r"position_ids: have shape \[1, 7\]": {"position_ids": torch.arange(7)[None]},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_layout_says_is_refused(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        logits("gqa", input_ids=torch.tensor(prompts([6])), **REFUSED[message])


def test_after_a_cache_masks_and_positions_may_not_change_their_minds() -> None:
    rows = torch.tensor(prompts([4]))
    with torch.no_grad():
        cache = model("gqa")(rows).past_key_values
        with pytest.raises(ConfigError, match="its first 4 columns are not those"):
            model("gqa")(rows, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]]), past_key_values=cache)
        with pytest.raises(ConfigError, match="position_ids: 0 follows 3 in row 0"):
            model("gqa")(rows, position_ids=torch.arange(4)[None], past_key_values=cache)


def test_what_is_plain_stays_plain() -> None:
    """Kernels choose by these facts."""
    tokens, ones = torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5)
    assert read(tokens, None, None, Columns()) == (None, None)
    assert read(tokens, ones, torch.arange(5)[None], Columns()) == (None, None)
    packed = read(tokens, None, torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]), Columns()).layout
    assert packed is not None
    assert packed.pieces == ((2, 3), (4, 1))
    later = read(tokens, None, torch.arange(3, 8)[None], Columns()).layout
    assert later is not None
    assert later.start == 3
