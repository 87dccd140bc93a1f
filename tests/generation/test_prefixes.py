"""Tokens that all prompts begin with are read once, and the texts equal those of prompts read whole."""

from pathlib import Path
from typing import Any

import pytest
import torch

import heddle
from heddle.errors import ConfigError
from heddle.generation import decode as prefill_module
from heddle.model.decoder import Decoder, build
from heddle.parts.layout import EncoderOutput
from heddle.tokenization.tokenizer import Tokenizer
from tests import small
from tests.cases import in_turn
from tests.generation.loops import amplify_layers, designs, greedy_loop

DESIGNS = {name: config for name, config in designs().items() if build(config, device="meta").encoder_width is None}
SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
SUFFIXES = [[8, 4], [], [6, 2, 6, 4]]
STEPS = 9


def build_model(kind: str, seed: int = 1) -> Decoder:
    return amplify_layers(build(DESIGNS[kind].replace(vocab_size=61), dtype=torch.float64, seed=seed))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every call."""
    shapes: list[tuple[int, ...]] = []
    original = Decoder.forward

    def forward(self: Decoder, tokens: torch.Tensor, *args: Any) -> Any:
        shapes.append(tuple(tokens.shape))
        return original(self, tokens, *args)

    monkeypatch.setattr(Decoder, "forward", forward)
    return shapes


@pytest.mark.parametrize("kind", in_turn(DESIGNS, 0))
def test_a_prefix_over_several_calls(kind: str) -> None:
    model = build_model(kind)
    before = heddle.prefix(model, SHARED)
    alone = [greedy_loop(model, SHARED + end, STEPS) for end in SUFFIXES]
    for _ in range(2):
        assert heddle.generate(model, SUFFIXES, max_new_tokens=STEPS, prefix=before) == alone
        assert [heddle.generate(model, [end], max_new_tokens=STEPS, prefix=before)[0] for end in SUFFIXES] == alone
    whole: dict[str, Any] = {"max_new_tokens": STEPS, "num_beams": 3}
    texts = [SHARED + end for end in SUFFIXES]
    assert heddle.generate(model, SUFFIXES, prefix=before, **whole) == heddle.generate(model, texts, **whole)
    draft = build_model("mqa", seed=2)
    assert heddle.generate(model, SUFFIXES, max_new_tokens=STEPS, prefix=before, draft_model=draft) == alone
    assert heddle.generate(model, [[9]], max_new_tokens=70, prefix=before)[0] == greedy_loop(model, [*SHARED, 9], 70)


@pytest.mark.parametrize("kind", in_turn(DESIGNS, 1, 2))
def test_tokens_shared_by_all_prompts_are_read_once(kind: str, calls: list[tuple[int, ...]]) -> None:
    model = build_model(kind)
    texts = heddle.generate(model, [SHARED + end for end in SUFFIXES], max_new_tokens=STEPS)
    assert calls[:2] == [(1, 17), (3, 5)]  # the last shared token is the last of the second prompt
    assert texts == [greedy_loop(model, SHARED + end, STEPS) for end in SUFFIXES]


def test_copies_of_one_prompt_and_prompts_that_share_little(calls: list[tuple[int, ...]]) -> None:
    model = build_model("gqa")
    settings: dict[str, Any] = {"max_new_tokens": 2, "temperature": 1.0, "seed": 4}
    texts = heddle.generate(model, [SHARED] * 4, **settings)
    assert calls == [(1, 17), (4, 1), (4, 1)]
    assert len({tuple(text) for text in texts}) > 1
    assert texts[0] == heddle.generate(model, [SHARED], **settings)[0]
    calls.clear()
    heddle.generate(model, [SHARED[: prefill_module.MIN_SHARED_TOKENS], SHARED[:3]], max_new_tokens=1)
    assert calls == [(2, 16)]


def test_a_prefix_of_one_token_and_its_text() -> None:
    model = build_model("gqa")
    assert heddle.generate(model, [[], [5]], max_new_tokens=3, prefix=heddle.prefix(model, [7])) == [
        greedy_loop(model, [7], 3),
        greedy_loop(model, [7, 5], 3),
    ]
    tokenizer = Tokenizer.train([small.text(4000)], small.VOCABULARY)
    writer = amplify_layers(
        build(small.config(small.design(vocab_size=tokenizer.vocab_size)), dtype=torch.float64, seed=2)
    )
    before = heddle.prefix(writer, "The weaver lifts", tokenizer)
    assert before.tokens == (tokenizer.eod_id, *tokenizer.encode("The weaver lifts"))
    texts = heddle.generate(writer, [" a thread", ""], tokenizer, max_new_tokens=8, prefix=before)
    rows = [[*before.tokens, *tokenizer.encode(text)] for text in (" a thread", "")]
    for text, row in zip(texts, rows, strict=True):
        written = heddle.generate(writer, [row], max_new_tokens=8)[0]
        end = written.index(tokenizer.eod_id) if tokenizer.eod_id in written else len(written)
        assert text == tokenizer.decode(written[:end])


def test_a_prefix_leaves_the_model_as_it_was_and_can_be_saved(tmp_path: Path) -> None:
    model = build_model("local_global").train()
    before = heddle.prefix(model, SHARED)
    assert model.training
    heddle.save_state(before.state, tmp_path / "prefix")
    loaded = prefill_module.Prefix(model, before.tokens, heddle.load_state(model, tmp_path / "prefix"))
    assert heddle.generate(model, SUFFIXES, max_new_tokens=STEPS, prefix=loaded) == heddle.generate(
        model, SUFFIXES, max_new_tokens=STEPS, prefix=before
    )


def test_invalid_prefixes_are_refused() -> None:
    model = build_model("gqa")
    encoder_output = EncoderOutput(torch.zeros(1, 2, 3))
    for call, says in (
        (lambda: heddle.prefix(model, []), "prompts:"),
        (lambda: heddle.prefix(model, [61]), "prompts: each needs"),
        (lambda: heddle.prefix(model, "text"), "prefix:"),
        (
            lambda: heddle.generate(build_model("gqa"), [[1]], prefix=heddle.prefix(model, [1])),
            "prefix:",
        ),
        (
            lambda: heddle.generate(model, [[1]], prefix=heddle.prefix(model, [1]), encoder_output=encoder_output),
            "encoder_output:",
        ),
        (
            lambda: heddle.generate(model, [[1]], encoder_output=encoder_output),
            "encoder_output:",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value).startswith(says)
