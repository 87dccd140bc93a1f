"""A draft changes how fast text comes, never which: greedy texts equal, sampled ones as likely as without it."""

from collections import Counter
from typing import Any

import pytest
import torch

import heddle
from heddle.errors import ConfigError
from heddle.generation import speculative as drafts
from heddle.generation.generate import generate
from heddle.generation.speculative import Round
from heddle.laws.subject import memory
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.state import State
from heddle.tokenization.tokenizer import Tokenizer
from tests import small
from tests.cases import case
from tests.generation.loops import designs, greedy, lively, log_p

DESIGNS = designs()
PROMPTS = [[5, 3, 8, 13, 21, 34, 55, 1], [2], [7, 7, 7, 9]]
STEPS = 17


def made(config: ModelConfig, seed: int = 1, vocab_size: int = 61) -> Decoder:
    return lively(build(config.replace(vocab_size=vocab_size), dtype=torch.float64, seed=seed))


def blurred(model: Decoder, amount: float) -> Decoder:
    """A draft that is often right: the model with noise in its weights."""
    draft = build(model.config, dtype=torch.float64)
    draft.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in draft.layers.parameters():
            parameter.mul_(1 + amount * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return draft


def told(model: Decoder, prompts: list[list[int]], **settings: Any) -> tuple[list[list[int]], list[Round]]:
    rounds: list[Round] = []
    return written(model, prompts, on_round=rounds.append, **settings), rounds


def written(model: Decoder, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    """Texts, beside the memory of the laws where the design reads one."""
    return generate(model, prompts, memory=memory(model, len(prompts)), **settings)


@pytest.mark.parametrize("kind", DESIGNS)
@pytest.mark.parametrize("lookahead", [1, 4])
def test_greedy_text_is_that_without_a_draft(kind: str, lookahead: int) -> None:
    model = made(DESIGNS[kind])
    plain = [greedy(model, prompt, STEPS) for prompt in PROMPTS]
    shares = []
    for draft in (blurred(model, 0.02), made(DESIGNS["mqa"], seed=3), model):
        texts, rounds = told(model, PROMPTS, max_new_tokens=STEPS, draft=draft, lookahead=lookahead)
        assert texts == plain
        assert [
            written(model, [p], max_new_tokens=STEPS, draft=draft, lookahead=lookahead)[0] for p in PROMPTS
        ] == plain
        shares.append(sum(one.kept for one in rounds) / sum(one.guessed for one in rounds))
        assert all(one.near_ties == 0 for one in rounds)
        assert sum(one.written for one in rounds) == len(PROMPTS) * (STEPS - 1)
    assert shares[2] == 1.0  # the model agrees with itself
    assert shares[1] < shares[0]


@pytest.mark.parametrize("kind", DESIGNS)
def test_what_cannot_go_back_reads_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(DESIGNS[kind])
    plain = [greedy(model, prompt, STEPS) for prompt in PROMPTS]
    monkeypatch.setattr(State, "keeps", lambda state, tokens: False)
    monkeypatch.setattr(State, "rewind", None)
    assert written(model, PROMPTS, max_new_tokens=STEPS, draft=blurred(model, 0.02)) == plain
    assert written(model, PROMPTS[:1], max_new_tokens=STEPS, draft=blurred(model, 0.02)) == plain[:1]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_few_tokens(steps: int) -> None:
    model = made(DESIGNS["local_global"])
    plain = [greedy(model, prompt, steps) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=steps, draft=blurred(model, 0.02), lookahead=9) == plain


def test_learned_positions_are_not_passed_by_guesses() -> None:
    model = lively(build(case("learned"), dtype=torch.float64, seed=1))
    prompts = [[1] * 80, [2, 3]]  # 90 positions
    texts = generate(model, prompts, max_new_tokens=11, draft=blurred(model, 0.02), lookahead=6)
    assert texts == [greedy(model, prompt, 11) for prompt in prompts]


def test_a_row_that_has_ended_leaves_the_others_as_they_are() -> None:
    tokenizer = Tokenizer.train([small.text(4000)], small.VOCABULARY)
    model = made(small.config(), vocab_size=tokenizer.vocab_size)
    prompts = ["The weaver", "", "機", "a thread and"]
    plain = generate(model, prompts, tokenizer, max_new_tokens=30, stop=["e"])
    assert len({len(text) for text in plain}) > 2
    pieces = [""] * 4

    def hear(row: int, piece: str) -> None:
        pieces[row] += piece

    assert generate(
        model, prompts, tokenizer, max_new_tokens=30, stop=["e"], draft=blurred(model, 0.05), on_text=hear
    ) == plain == pieces  # fmt: skip


def test_bits_that_rounding_may_change_are_told() -> None:
    model = made(DESIGNS["gqa"]).float()
    with torch.no_grad():
        model.embed.weight[40:] = model.embed.weight[:21]  # tokens that are as likely as others
    texts, rounds = told(model, PROMPTS, max_new_tokens=STEPS, draft=model)
    ties = sum(one.near_ties for one in rounds)
    assert ties > 0
    late = [token for text in texts for token in text[1:]]
    assert ties <= len(late)


ROWS = 6000
WORDS, LENGTH = 3, 4


def opinionated(kind: str, seed: int) -> Decoder:
    """A model of three tokens that is far from even about the next one."""
    model = made(DESIGNS[kind], seed, WORDS).eval()
    with torch.no_grad():
        model.embed.weight.mul_(5.0)
    return model


def exact(model: Decoder, temperature: float) -> dict[tuple[int, ...], float]:
    """The probability of every text."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, p in found.items():
            next_p = (log_p(model, [1, 2, *text]) / temperature).softmax(-1).tolist()
            longer |= {(*text, token): p * more for token, more in enumerate(next_p)}
        found = longer
    return found


def distance(model: Decoder, draft: Decoder | None, wanted: dict[tuple[int, ...], float], temperature: float) -> float:
    """How far sampled texts are from the probabilities, in standard deviations of chi-square from its mean."""
    settings: dict[str, Any] = {} if draft is None else {"draft": draft, "lookahead": 2}
    texts = generate(model, [[1, 2]] * ROWS, max_new_tokens=LENGTH, temperature=temperature, seed=3, **settings)
    counts = Counter(map(tuple, texts))
    total, cells, rare, rare_p = 0.0, 0, 0, 0.0
    for text, p in wanted.items():
        if p * ROWS < 5:
            rare, rare_p = rare + counts[text], rare_p + p
        else:
            total, cells = total + (counts[text] - p * ROWS) ** 2 / (p * ROWS), cells + 1
    total += (rare - rare_p * ROWS) ** 2 / (rare_p * ROWS) if rare_p else 0.0
    return (total - cells) / (2 * cells) ** 0.5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_texts_come_as_often_as_they_should(temperature: float) -> None:
    model, draft = opinionated("gqa", 1), opinionated("mqa", 5)
    wanted = exact(model, temperature)
    assert distance(model, draft, wanted, temperature) < 4
    assert distance(model, None, wanted, temperature) < 4
    assert distance(draft, None, wanted, temperature) > 40  # the draft alone writes otherwise


@pytest.mark.parametrize("lenience", [0.3, -0.3])
def test_a_draft_that_is_believed_too_much_or_little_is_caught(
    lenience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = drafts._judge

    def wrong(p: torch.Tensor, q: torch.Tensor, *given: Any) -> Any:
        return right(torch.cat((p[:, :-1].lerp(q, lenience).clamp(min=0.0), p[:, -1:]), dim=1), q, *given)

    monkeypatch.setattr(drafts, "_judge", wrong)
    model, draft = opinionated("gqa", 1), opinionated("mqa", 5)
    assert distance(model, draft, exact(model, 1.0), 1.0) > 6


def test_top_k_and_top_p_hold_with_a_draft() -> None:
    model, draft = made(DESIGNS["gqa"], 1, 9), made(DESIGNS["mqa"], 5, 9)
    texts = generate(model, [[1, 2]] * 500, max_new_tokens=4, temperature=1.0, top_k=2, draft=draft)
    for text in texts[:60]:
        for number, token in enumerate(text):
            assert token in log_p(model, [1, 2, *text[:number]]).topk(2).indices
    assert texts == generate(model, [[1, 2]] * 500, max_new_tokens=4, temperature=1.0, top_k=2, draft=draft)
    narrow = generate(model, [[1, 2]], max_new_tokens=4, temperature=1.0, top_p=1e-9, draft=draft)
    assert narrow == [greedy(model, [1, 2], 4)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lookahead": 0}, "lookahead 0: must be at least 1"),
        ({"beams": 2}, "beams 2: follow their own guesses; leave out the draft, or the beams"),
        ({"vocab_size": 60}, "draft: has a vocabulary of 60 tokens, the model 61; they must be the same"),
    ],
)
def test_what_does_not_go_with_a_draft(settings: dict[str, int], says: str) -> None:
    draft = made(DESIGNS["mqa"], vocab_size=settings.pop("vocab_size", 61))
    with pytest.raises(ConfigError) as caught:
        heddle.generate(made(DESIGNS["mha"]), [[1]], draft=draft, **settings)  # type: ignore[call-overload]
    assert str(caught.value) == says
