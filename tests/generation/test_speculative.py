"""A draft model does not change the text: greedy texts are equal, sampled texts follow the same distribution."""

from collections import Counter
from typing import Any

import pytest
import torch

import heddle
from heddle.errors import ConfigError
from heddle.generation import speculative
from heddle.generation.generate import generate
from heddle.generation.speculative import SpeculativeRound
from heddle.laws.harness import encoder_output_for
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.state import State
from heddle.tokenization.tokenizer import Tokenizer
from tests import small
from tests.cases import case, in_turn
from tests.generation.loops import amplify_layers, designs, greedy_loop, next_log_probs

DESIGNS = designs()
PROMPTS = [[5, 3, 8, 13, 21, 34, 55, 1], [2], [7, 7, 7, 9]]
STEPS = 11


def build_model(config: ModelConfig, seed: int = 1, vocab_size: int = 61) -> Decoder:
    return amplify_layers(build(config.replace(vocab_size=vocab_size), dtype=torch.float64, seed=seed))


def noisy_copy(model: Decoder, amount: float) -> Decoder:
    """A draft model that is often right: the model with noise in its weights."""
    draft = build(model.config, dtype=torch.float64)
    draft.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in draft.layers.parameters():
            parameter.mul_(1 + amount * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return draft


def generate_with_rounds(
    model: Decoder, prompts: list[list[int]], **settings: Any
) -> tuple[list[list[int]], list[SpeculativeRound]]:
    rounds: list[SpeculativeRound] = []
    return generate_texts(model, prompts, on_speculative_round=rounds.append, **settings), rounds


def generate_texts(model: Decoder, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    """Generated texts, with an encoder output where the config reads one."""
    return generate(model, prompts, encoder_output=encoder_output_for(model, len(prompts)), **settings)


@pytest.mark.parametrize(
    ("kind", "speculative_tokens"),
    [each for turn, tokens in ((0, 4), (2, 1)) for each in in_turn([(kind, tokens) for kind in DESIGNS], turn)],
)
def test_greedy_text_equals_decoding_without_a_draft(kind: str, speculative_tokens: int) -> None:
    model = build_model(DESIGNS[kind])
    plain = [greedy_loop(model, prompt, STEPS) for prompt in PROMPTS]
    acceptance_rates: list[float] = []
    for draft in (noisy_copy(model, 0.02), build_model(DESIGNS["mqa"], seed=3), model):
        settings = {"max_new_tokens": STEPS, "draft_model": draft, "speculative_tokens": speculative_tokens}
        texts, rounds = generate_with_rounds(model, PROMPTS, **settings)
        assert texts == plain
        if not acceptance_rates:
            assert [generate_texts(model, [prompt], **settings)[0] for prompt in PROMPTS[:2]] == plain[:2]
        proposed, accepted, emitted, near_ties = (sum(counts) for counts in zip(*rounds, strict=True))
        acceptance_rates.append(accepted / proposed)
        assert near_ties == 0
        assert emitted == len(PROMPTS) * (STEPS - 1)
    assert acceptance_rates[2] == 1.0  # the model agrees with itself
    assert acceptance_rates[1] < acceptance_rates[0]


@pytest.mark.parametrize("kind", in_turn(DESIGNS, 1, 2))
def test_a_state_that_cannot_roll_back_reads_the_accepted_tokens_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(DESIGNS[kind])
    plain = [greedy_loop(model, prompt, STEPS) for prompt in PROMPTS]
    monkeypatch.setattr(State, "can_always_roll_back", lambda state, tokens: False)
    monkeypatch.setattr(State, "rollback", None)
    assert generate_texts(model, PROMPTS, max_new_tokens=STEPS, draft_model=noisy_copy(model, 0.02)) == plain
    assert generate_texts(model, PROMPTS[:1], max_new_tokens=STEPS, draft_model=noisy_copy(model, 0.02)) == plain[:1]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_few_tokens(steps: int) -> None:
    model = build_model(DESIGNS["local_global"])
    plain = [greedy_loop(model, prompt, steps) for prompt in PROMPTS]
    assert (
        generate(model, PROMPTS, max_new_tokens=steps, draft_model=noisy_copy(model, 0.02), speculative_tokens=9)
        == plain
    )


def test_proposed_tokens_do_not_exceed_learned_positions() -> None:
    model = amplify_layers(build(case("learned"), dtype=torch.float64, seed=1))
    prompts = [[1] * 80, [2, 3]]  # 90 positions
    texts = generate(model, prompts, max_new_tokens=11, draft_model=noisy_copy(model, 0.02), speculative_tokens=6)
    assert texts == [greedy_loop(model, prompt, 11) for prompt in prompts]


def test_a_finished_row_does_not_change_the_others() -> None:
    tokenizer = Tokenizer.train([small.text(4000)], small.VOCABULARY)
    model = build_model(small.config(), vocab_size=tokenizer.vocab_size)
    prompts = ["The weaver", "", "機", "a thread and"]
    plain = generate(model, prompts, tokenizer, max_new_tokens=30, stop=["e"])
    assert len({len(text) for text in plain}) > 2
    pieces = [""] * 4

    def hear(row: int, piece: str) -> None:
        pieces[row] += piece

    assert generate(
        model, prompts, tokenizer, max_new_tokens=30, stop=["e"], draft_model=noisy_copy(model, 0.05), on_text=hear
    ) == plain == pieces  # fmt: skip


def test_near_ties_are_counted() -> None:
    model = build_model(DESIGNS["gqa"]).float()
    with torch.no_grad():
        model.embed.weight[40:] = model.embed.weight[:21]  # tokens that are as likely as others
    texts, rounds = generate_with_rounds(model, PROMPTS, max_new_tokens=STEPS, draft_model=model)
    ties = sum(counts.near_ties for counts in rounds)
    assert ties > 0
    late = [token for text in texts for token in text[1:]]
    assert ties <= len(late)


ROWS = 6000
WORDS, LENGTH = 3, 4


def peaked_model(kind: str, seed: int) -> Decoder:
    """A model of three tokens whose next-token distribution is far from uniform."""
    model = build_model(DESIGNS[kind], seed, WORDS).eval()
    with torch.no_grad():
        model.embed.weight.mul_(5.0)
    return model


def exact_probabilities(model: Decoder, temperature: float) -> dict[tuple[int, ...], float]:
    """The probability of every text."""
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, p in probabilities.items():
            next_p = (next_log_probs(model, [1, 2, *text]) / temperature).softmax(-1).tolist()
            longer |= {(*text, token): p * token_p for token, token_p in enumerate(next_p)}
        probabilities = longer
    return probabilities


def distance(
    model: Decoder,
    draft: Decoder | None,
    probabilities: dict[tuple[int, ...], float],
    temperature: float,
    multi_token_draft: bool = False,
) -> float:
    """How far sampled texts are from the probabilities, in standard deviations of chi-square from its mean."""
    settings: dict[str, Any] = {"draft_model": draft, "multi_token_draft": multi_token_draft, "speculative_tokens": 2}
    texts = generate(model, [[1, 2]] * ROWS, max_new_tokens=LENGTH, temperature=temperature, seed=3, **settings)
    counts = Counter(map(tuple, texts))
    total, cells, rare, rare_p = 0.0, 0, 0, 0.0
    for text, p in probabilities.items():
        if p * ROWS < 5:
            rare, rare_p = rare + counts[text], rare_p + p
        else:
            total, cells = total + (counts[text] - p * ROWS) ** 2 / (p * ROWS), cells + 1
    total += (rare - rare_p * ROWS) ** 2 / (rare_p * ROWS) if rare_p else 0.0
    return (total - cells) / (2 * cells) ** 0.5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_texts_follow_the_models_distribution(temperature: float) -> None:
    model, draft = peaked_model("gqa", 1), peaked_model("mqa", 5)
    probabilities = exact_probabilities(model, temperature)
    assert distance(model, draft, probabilities, temperature) < 4
    assert distance(model, None, probabilities, temperature) < 4
    assert distance(draft, None, probabilities, temperature) > 40  # the draft alone writes otherwise


@pytest.mark.parametrize("lenience", [0.3, -0.3])
def test_a_wrong_acceptance_rule_is_caught(lenience: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = speculative._verify

    def wrong(p: torch.Tensor, q: torch.Tensor, *args: Any) -> Any:
        return right(torch.cat((p[:, :-1].lerp(q, lenience).clamp(min=0.0), p[:, -1:]), dim=1), q, *args)

    monkeypatch.setattr(speculative, "_verify", wrong)
    model, draft = peaked_model("gqa", 1), peaked_model("mqa", 5)
    assert distance(model, draft, exact_probabilities(model, 1.0), 1.0) > 6


def test_top_k_and_top_p_hold_with_a_draft() -> None:
    model, draft = build_model(DESIGNS["gqa"], 1, 9), build_model(DESIGNS["mqa"], 5, 9)
    texts = generate(model, [[1, 2]] * 500, max_new_tokens=4, temperature=1.0, top_k=2, draft_model=draft)
    for text in texts[:60]:
        for number, token in enumerate(text):
            assert token in next_log_probs(model, [1, 2, *text[:number]]).topk(2).indices
    assert texts == generate(model, [[1, 2]] * 500, max_new_tokens=4, temperature=1.0, top_k=2, draft_model=draft)
    narrow = generate(model, [[1, 2]], max_new_tokens=4, temperature=1.0, top_p=1e-9, draft_model=draft)
    assert narrow == [greedy_loop(model, [1, 2], 4)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"speculative_tokens": 0}, "speculative_tokens 0: must be at least 1"),
        ({"num_beams": 2}, "num_beams 2: beam search takes no draft_model; leave out one of the two"),
        ({"vocab_size": 60}, "draft_model: has a vocabulary of 60 tokens, the model 61; they must be the same"),
    ],
)
def test_settings_that_conflict_with_a_draft_model_are_refused(settings: dict[str, int], says: str) -> None:
    draft = build_model(DESIGNS["mqa"], vocab_size=settings.pop("vocab_size", 61))
    with pytest.raises(ConfigError) as caught:
        heddle.generate(build_model(DESIGNS["mha"]), [[1]], draft_model=draft, **settings)  # type: ignore[call-overload]
    assert str(caught.value) == says
