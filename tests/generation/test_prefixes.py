"""What prompts begin with alike is read once, and the texts are those of prompts read whole."""

from pathlib import Path
from typing import Any

import pytest
import torch

import heddle
from heddle.errors import ConfigError
from heddle.generation import prefill as reading
from heddle.model.decoder import Decoder, build
from heddle.parts.context.layout import Memory
from heddle.tokenization.tokenizer import Tokenizer
from tests import small
from tests.generation.loops import designs, greedy, lively

DESIGNS = {name: config for name, config in designs().items() if build(config, device="meta").memory_width is None}
SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
ENDS = [[8, 4], [], [6, 2, 6, 4]]
STEPS = 9


def made(kind: str, seed: int = 1) -> Decoder:
    return lively(build(DESIGNS[kind].replace(vocab_size=61), dtype=torch.float64, seed=seed))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every call."""
    shapes: list[tuple[int, ...]] = []
    right = Decoder.forward

    def forward(self: Decoder, tokens: torch.Tensor, *given: Any) -> Any:
        shapes.append(tuple(tokens.shape))
        return right(self, tokens, *given)

    monkeypatch.setattr(Decoder, "forward", forward)
    return shapes


@pytest.mark.parametrize("kind", DESIGNS)
def test_a_prefix_over_several_calls(kind: str) -> None:
    model = made(kind)
    before = heddle.prefix(model, SHARED)
    alone = [greedy(model, SHARED + end, STEPS) for end in ENDS]
    for _ in range(2):
        assert heddle.generate(model, ENDS, max_new_tokens=STEPS, prefix=before) == alone
        assert [heddle.generate(model, [end], max_new_tokens=STEPS, prefix=before)[0] for end in ENDS] == alone
    whole: dict[str, Any] = {"max_new_tokens": STEPS, "beams": 3}
    texts = [SHARED + end for end in ENDS]
    assert heddle.generate(model, ENDS, prefix=before, **whole) == heddle.generate(model, texts, **whole)
    draft = made("mqa", seed=2)
    assert heddle.generate(model, ENDS, max_new_tokens=STEPS, prefix=before, draft=draft) == alone
    assert heddle.generate(model, [[9]], max_new_tokens=70, prefix=before)[0] == greedy(model, [*SHARED, 9], 70)


@pytest.mark.parametrize("kind", DESIGNS)
def test_what_prompts_of_one_call_share_is_read_once(kind: str, read: list[tuple[int, ...]]) -> None:
    model = made(kind)
    texts = heddle.generate(model, [SHARED + end for end in ENDS], max_new_tokens=STEPS)
    assert read[:2] == [(1, 17), (3, 5)]  # the last shared token is the last of the second prompt
    assert texts == [greedy(model, SHARED + end, STEPS) for end in ENDS]


def test_copies_of_one_prompt_and_prompts_that_share_little(read: list[tuple[int, ...]]) -> None:
    model = made("gqa")
    settings: dict[str, Any] = {"max_new_tokens": 2, "temperature": 1.0, "seed": 4}
    texts = heddle.generate(model, [SHARED] * 4, **settings)
    assert read == [(1, 17), (4, 1), (4, 1)]
    assert len({tuple(text) for text in texts}) > 1
    assert texts[0] == heddle.generate(model, [SHARED], **settings)[0]
    read.clear()
    heddle.generate(model, [SHARED[: reading.SHARED], SHARED[:3]], max_new_tokens=1)
    assert read == [(2, 16)]


def test_a_prefix_of_one_token_and_its_text() -> None:
    model = made("gqa")
    assert heddle.generate(model, [[], [5]], max_new_tokens=3, prefix=heddle.prefix(model, [7])) == [
        greedy(model, [7], 3),
        greedy(model, [7, 5], 3),
    ]
    tokenizer = Tokenizer.train([small.text(4000)], small.VOCABULARY)
    writer = lively(build(small.config(small.design(vocab_size=tokenizer.vocab_size)), dtype=torch.float64, seed=2))
    before = heddle.prefix(writer, "The weaver lifts", tokenizer)
    assert before.tokens == (tokenizer.end, *tokenizer.encode("The weaver lifts"))
    texts = heddle.generate(writer, [" a thread", ""], tokenizer, max_new_tokens=8, prefix=before)
    rows = [[*before.tokens, *tokenizer.encode(text)] for text in (" a thread", "")]
    for text, row in zip(texts, rows, strict=True):
        written = heddle.generate(writer, [row], max_new_tokens=8)[0]
        end = written.index(tokenizer.end) if tokenizer.end in written else len(written)
        assert text == tokenizer.decode(written[:end])


def test_a_prefix_leaves_the_model_as_it_was_and_can_be_kept(tmp_path: Path) -> None:
    model = made("local_global").train()
    before = heddle.prefix(model, SHARED)
    assert model.training
    heddle.save_state(before.state, tmp_path / "prefix")
    kept = reading.Prefix(model, before.tokens, heddle.load_state(model, tmp_path / "prefix"))
    assert heddle.generate(model, ENDS, max_new_tokens=STEPS, prefix=kept) == heddle.generate(
        model, ENDS, max_new_tokens=STEPS, prefix=before
    )


def test_what_is_no_prefix() -> None:
    model = made("gqa")
    beside = Memory(torch.zeros(1, 2, 3))
    for give, says in (
        (lambda: heddle.prefix(model, []), "prompts: each needs at least one token, all from 0 to 60"),
        (lambda: heddle.prefix(model, [61]), "prompts: each needs"),
        (lambda: heddle.prefix(model, "text"), "prefix: give a string and its tokenizer"),
        (
            lambda: heddle.generate(made("gqa"), [[1]], prefix=heddle.prefix(model, [1])),
            "prefix: was read by another model; read it with this one",
        ),
        (
            lambda: heddle.generate(model, [[1]], prefix=heddle.prefix(model, [1]), memory=beside),
            "memory: the prefix was read beside its own",
        ),
        (lambda: heddle.generate(model, [[1]], memory=beside), "memory: no layer of this design"),
    ):
        with pytest.raises(ConfigError) as caught:
            give()
        assert str(caught.value).startswith(says)
