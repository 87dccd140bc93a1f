"""The cache by itself: taking tokens back, choosing rows, copies, limits; each against rows read anew."""

import copy
import random
import warnings

import pytest
import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.exchange.transformers import HeddleCache
from heddle.exchange.transformers.cache import CACHE_NAME, CACHE_NAMES, ROLLBACK_SLACK
from tests.exchange.transformers.designs import DESIGNS, alone, model, padded, prompts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import DynamicCache, StaticCache

EACH = pytest.mark.parametrize("name", DESIGNS)


@torch.no_grad()
def read(name: str, tokens: list[list[int]], cache: HeddleCache, mask: Tensor | None = None) -> Tensor:
    """Logits of more tokens after a cache."""
    actual: Tensor = model(name)(torch.tensor(tokens), attention_mask=mask, past_key_values=cache).logits
    return actual


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def check_crop(name: str) -> None:
    """Tokens taken back, also over several calls and twice, were never read."""
    row = prompts([20])[0]
    cache = HeddleCache()
    cache.activate_past_recording()
    read(name, [row[:8]], cache)
    cache.crop(0)
    read(name, [[3, 4]], cache)
    read(name, [[5, *row[:3]]], cache)
    cache.crop(-3)
    cache.crop(-3)
    assert cache.get_seq_length() == 8
    assert_near(read(name, [row[8:13]], cache)[0], alone(name, row)[8:13])
    cache.crop(-2)
    assert_near(read(name, [row[11:]], cache)[0], alone(name, row)[11:])
    cache.crop(15)  # as older versions say it: what is left
    assert_near(read(name, [row[15:]], cache)[0], alone(name, row)[15:])


def check_crop_of_padding(name: str) -> None:
    """Columns of padding are taken back as columns."""
    row = prompts([9])[0]
    cache = HeddleCache()
    cache.activate_past_recording()
    read(name, [[0, 0, *row[:3]], row[:5]], cache, torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]))
    cache.crop(0)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1], [1] * 8])
    read(name, [[row[3], 0, 9], [row[5], 9, 9]], cache, mask)
    cache.crop(-1)
    cache.crop(-1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0], [1] * 8])
    actual = read(name, [[row[4], 0], row[6:8]], cache, mask)
    assert_near(actual[0, 0], alone(name, row)[4])
    assert_near(actual[1], alone(name, row)[6:8])
    assert cache.layers[0].is_token.tolist() == mask.bool().tolist()


def check_rows(name: str) -> None:
    """Rows chosen, in another order and often, go on as themselves, also after taking tokens back."""
    rows = prompts([9, 9])
    inputs = padded([rows[0][:4], rows[1][:6]])
    cache = HeddleCache()
    cache.activate_past_recording()
    read(name, inputs["input_ids"].tolist(), cache, inputs["attention_mask"])
    cache.crop(0)
    read(name, [[rows[0][4], 2], [rows[1][6], 4]], cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-1)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([True, False, True, True]))
    actual = read(name, [rows[1][7:9], rows[0][5:7], rows[0][5:7]], cache)
    for row_logits, (row, begin) in zip(actual, ((rows[1], 7), (rows[0], 5), (rows[0], 5)), strict=True):
        assert_near(row_logits, alone(name, row)[begin : begin + 2])


@EACH
def test_tokens_taken_back_leave_no_trace(name: str) -> None:
    check_crop(name)


@EACH
def test_columns_of_padding_are_taken_back(name: str) -> None:
    check_crop_of_padding(name)


@EACH
def test_rows_are_chosen(name: str) -> None:
    check_rows(name)


def check_program(name: str, seed: int) -> None:
    """Calls of any length with padding anywhere, columns taken back, rows chosen: always as the rows alone."""
    draw = random.Random(seed)
    cache = HeddleCache()
    cache.activate_past_recording()
    rows: list[list[tuple[int, int]]] = [[], [], []]  # (token, 1) or (any, 0) for padding
    fresh = 0  # columns that may be taken back
    for _ in range(12):
        kind = draw.choice(("read", "read", "crop", "rows"))
        if kind == "read" or not rows[0]:
            length = draw.randint(1, 5)
            new = [[(draw.randint(1, 60), int(draw.random() < 0.7)) for _ in range(length)] for _ in rows]
            rows = [row + new_row for row, new_row in zip(rows, new, strict=True)]
            mask = torch.tensor([[is_token for _, is_token in row] for row in rows])
            actual = read(name, [[token for token, _ in new_row] for new_row in new], cache, mask)
            fresh += length
            for row, row_logits in zip(rows, actual, strict=True):
                is_token = torch.tensor([bool(is_token) for _, is_token in row])
                if bool(is_token[-length:].any()):
                    expected = alone(name, [token for token, is_token in row if is_token])
                    assert_near(
                        row_logits[is_token[-length:]], expected[len(expected) - int(is_token[-length:].sum()) :]
                    )
        elif kind == "crop":
            removed = draw.randint(0, fresh)
            cache.crop(-removed)
            rows, fresh = [row[: len(row) - removed] for row in rows], 0
        else:
            chosen = [draw.randrange(len(rows)) for _ in rows]
            cache.reorder_cache(torch.tensor(chosen))
            rows = [list(rows[i]) for i in chosen]
        assert cache.get_seq_length() == len(rows[0])


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 8))])
@pytest.mark.parametrize("name", ["gqa", "rings", "hybrid", "mla"])
def test_any_program_of_a_cache(name: str, seed: int) -> None:
    check_program(name, seed)


@pytest.mark.parametrize("name", ["gqa", "rings", "hybrid"])
def test_a_copy_is_independent(name: str) -> None:
    row = prompts([9])[0]
    cache = HeddleCache()
    read(name, [row[:5]], cache)
    other = copy.deepcopy(cache)
    read(name, [[7, 7, 7]], cache)
    assert_near(read(name, [row[5:]], other)[0], alone(name, row)[5:])


def test_only_what_cannot_go_back_is_forked() -> None:
    for name, forked in (("gqa", False), ("rings", False), ("hybrid", True)):
        cache = HeddleCache()
        cache.activate_past_recording()
        read(name, [[1] * 9], cache)
        cache.crop(0)
        read(name, [[1] * 9], cache)
        assert (cache.layers[0].fork is not None) == forked
    read("rings", [[1] * (ROLLBACK_SLACK + 1)], rings := HeddleCache())
    rings.activate_past_recording()
    read("rings", [[1] * (ROLLBACK_SLACK + 1)], rings)
    assert rings.layers[0].fork is not None


def test_what_was_not_kept_cannot_be_taken_back() -> None:
    cache = HeddleCache()
    read("hybrid", [[1, 2, 3]], cache)
    with pytest.raises(ConfigError, match="1 tokens"):
        cache.crop(-1)
    with pytest.raises(ConfigError, match=r"4 columns.*3"):
        cache.crop(-4)
    cache.activate_past_recording()
    read("hybrid", [[4]], cache)
    with pytest.raises(ConfigError, match=r"1 columns.*2"):
        cache.crop(-2)


def test_a_static_cache_is_never_exceeded_and_begins_anew() -> None:
    row = prompts([6])[0]
    cache = HeddleCache(max_cache_len=6)
    assert cache.get_max_length() == 6
    read("gqa", [row], cache)
    with pytest.raises(ConfigError, match=r"cache_length 6.*7 tokens"):
        read("gqa", [[1]], cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_near(read("gqa", [row], cache)[0], alone("gqa", row))


def test_empty_caches_of_transformers_take_ours_in() -> None:
    row = prompts([6])[0]
    for cache in (
        DynamicCache(),
        DynamicCache(config=model("gqa").config),
        StaticCache(config=model("gqa").config, max_cache_len=9),
    ):
        assert_near(read("gqa", [row[:4]], cache)[0], alone("gqa", row)[:4])
        assert_near(read("gqa", [row[4:]], cache)[0], alone("gqa", row)[4:])
        assert cache.get_seq_length() == 6
        assert cache.get_max_length() == (9 if isinstance(cache, StaticCache) else -1)
        assert not cache.is_compileable


def test_a_cache_goes_by_either_name() -> None:
    """transformers 5.24 says `cache`, releases before it `past_key_values`, and the models understand both."""
    row, steps = torch.tensor(prompts([6])), {"max_new_tokens": 3, "do_sample": False}
    expected = model("gqa").generate(row, **steps)
    for name in CACHE_NAMES:
        with torch.no_grad():
            first = model("gqa")(row[:, :4], **{name: HeddleCache()})
            logits = model("gqa")(row[:, 4:], **{name: first[CACHE_NAME]}).logits
        assert_near(logits[0], alone("gqa", row[0].tolist())[4:])
        assert torch.equal(model("gqa").generate(row, **{name: HeddleCache()}, **steps), expected)
    both = dict.fromkeys(CACHE_NAMES, HeddleCache())
    for call in (model("gqa"), model("gqa").generate, model("gqa").model):
        with pytest.raises(ConfigError, match="cache and past_key_values: are two names"):
            call(row, **both)


def test_caches_of_other_models_are_refused() -> None:
    filled = DynamicCache()
    filled.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    for cache in (filled, DynamicCache(offloading=True), ((torch.zeros(1), torch.zeros(1)),)):
        with pytest.raises(ConfigError, match=f"{CACHE_NAME}:"):
            read("gqa", [[1]], cache)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes no keys and values"):
        HeddleCache().update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    read("gqa", [[1]], used := HeddleCache())
    with pytest.raises(ConfigError, match="belongs to another design"):
        read("mla", [[1]], used)


def test_gradients_and_a_cache_do_not_meet() -> None:
    row = torch.tensor(prompts([4]))
    assert model("gqa")(row).past_key_values is None
    with pytest.raises(ConfigError, match="carries no gradient"):
        model("gqa")(row, use_cache=True)
