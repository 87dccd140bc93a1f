"""A model's own multi-token module as the draft: the text of plain decoding, and proposals of the whole text."""

from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import DesignError
from heddle.errors import ConfigError
from heddle.generation.generate import generate
from heddle.generation.speculative import MultiTokenDraft, SpeculativeRound
from heddle.laws.harness import encoder_output_for, layout_for
from heddle.model.config import ModelConfig, MultiTokenConfig
from heddle.model.decoder import Decoder, build
from heddle.model.state import State
from tests.cases import case, in_turn
from tests.generation.loops import amplify_layers, designs, greedy_loop
from tests.generation.test_speculative import WORDS, distance, exact_probabilities
from tests.laws.planting import Plant, calls, replaced

PROMPTS = [[5, 3, 8, 13, 21, 34, 55, 1], [2], [7, 7, 7, 9]]
STEPS = 11


def with_modules(config: ModelConfig, depth: int = 1) -> ModelConfig | None:
    """The design with modules; None where it is refused."""
    try:
        changed = config.replace(multi_token=MultiTokenConfig(depth=depth))
        build(changed, device="meta")
    except DesignError:
        return None
    return changed


DESIGNS = {name: config for name, each in designs().items() if (config := with_modules(each)) is not None}


def build_model(config: ModelConfig, seed: int = 1, vocab_size: int = 61) -> Decoder:
    """A model whose texts vary, and whose module has weights of its own that are not small."""
    model = amplify_layers(build(config.replace(vocab_size=vocab_size), dtype=torch.float64, seed=seed)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.multi_token.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return model


def texts_and_rounds(
    model: Decoder, prompts: list[list[int]], **settings: Any
) -> tuple[list[list[int]], list[SpeculativeRound]]:
    rounds: list[SpeculativeRound] = []
    output = encoder_output_for(model, len(prompts))
    texts = generate(
        model, prompts, encoder_output=output, multi_token_draft=True, on_speculative_round=rounds.append, **settings
    )
    return texts, rounds


@pytest.mark.parametrize(
    ("kind", "speculative_tokens"),
    [each for turn, tokens in enumerate((1, 4)) for each in in_turn([(kind, tokens) for kind in DESIGNS], turn)],
)
def test_greedy_text_equals_plain_decoding(kind: str, speculative_tokens: int) -> None:
    model = build_model(DESIGNS[kind])
    plain = [greedy_loop(model, prompt, STEPS) for prompt in PROMPTS]
    settings = {"max_new_tokens": STEPS, "speculative_tokens": speculative_tokens}
    texts, rounds = texts_and_rounds(model, PROMPTS, **settings)
    assert texts == plain
    assert [texts_and_rounds(model, [prompt], **settings)[0][0] for prompt in PROMPTS] == plain
    assert sum(each.emitted for each in rounds) == len(PROMPTS) * (STEPS - 1)
    assert sum(each.near_ties for each in rounds) == 0


def first_proposals(model: Decoder, text: list[int]) -> list[int]:
    """What the module proposes after each token of a text, from one call on the whole text."""
    tokens = torch.tensor([text])
    layout = layout_for(model, 1, len(text))
    with torch.no_grad():
        hidden, _ = model(tokens, layout)
        ahead = model.predict_ahead(hidden, tokens, layout)
        return [] if not ahead else model.head(ahead[0].hidden)[0].argmax(-1).tolist()  # of token t + 2 at t


def proposals_of(model: Decoder, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[tuple[list[int], int]]:
    """Each text at the beginning of a round, and the first token that was proposed; the texts are plain decoding's."""
    plain = [prompt + greedy_loop(model, prompt, STEPS) for prompt in PROMPTS]
    seen: list[tuple[list[int], int]] = []
    original = MultiTokenDraft.propose

    def record(draft: MultiTokenDraft, drawn_for: tuple[Tensor, Tensor], last_tokens: Tensor, count: int) -> Any:
        proposal = original(draft, drawn_for, last_tokens, count)
        for index, (row, emitted) in enumerate(zip(*(each.tolist() for each in drawn_for), strict=True)):
            if count:
                seen.append((plain[row][: len(PROMPTS[row]) + emitted], int(proposal.tokens[index, 1])))
        return proposal

    with monkeypatch.context() as patch:
        patch.setattr(MultiTokenDraft, "propose", record)
        texts, _ = texts_and_rounds(model, PROMPTS, max_new_tokens=STEPS, **settings)
    assert [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)] == plain
    return seen


def check_proposals(kind: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    model = build_model(DESIGNS[kind])
    seen = proposals_of(model, monkeypatch, **settings)
    assert len({len(text) for text, _ in seen}) > 3
    for text, proposed in seen:
        assert first_proposals(model, text)[-1] == proposed


@pytest.mark.parametrize("kind", in_turn(DESIGNS, 2))
def test_a_round_begins_with_what_the_module_predicts_on_the_whole_text(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_proposals(kind, monkeypatch, speculative_tokens=3)


@pytest.mark.parametrize("kind", ["gqa", "local_global"])
def test_a_state_that_cannot_roll_back_is_forked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "can_always_roll_back", lambda state, tokens: False)
    monkeypatch.setattr(State, "rollback", None)
    check_proposals(kind, monkeypatch, speculative_tokens=3)


PLANTED: dict[str, Plant] = {
    "the module keeps what it read of its own states": calls(
        MultiTokenDraft.propose, "rollback", lambda state, tokens: state
    ),
    "the accepted tokens are read with the states before them": calls(
        MultiTokenDraft._read_accepted, "draft", lambda runner, hidden, *rest: runner.draft(hidden.roll(1, 1), *rest)
    ),
    "the prompts are not read": replaced(
        MultiTokenDraft.read_prompts,
        lambda draft, tokens, layout, hidden: draft._keep(
            hidden[:, -1:], tokens[:, :0], torch.zeros_like(tokens[:, 0]), [0] * len(tokens)
        ),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_proposes_otherwise_and_changes_no_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    with pytest.raises((AssertionError, ConfigError)):
        check_proposals("gqa", monkeypatch, speculative_tokens=3)
    if "keeps" not in name:  # which needs more room than there is
        test_greedy_text_equals_plain_decoding("gqa", 1)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_few_tokens(steps: int) -> None:
    model = build_model(DESIGNS["local_global"])
    plain = [greedy_loop(model, prompt, steps) for prompt in PROMPTS]
    assert texts_and_rounds(model, PROMPTS, max_new_tokens=steps, speculative_tokens=9)[0] == plain


def test_proposals_do_not_exceed_learned_positions() -> None:
    config = with_modules(case("learned"), depth=2)
    assert config is not None
    model = build_model(config)
    prompts = [[1] * 80, [2, 3]]  # 90 positions
    texts, _ = texts_and_rounds(model, prompts, max_new_tokens=11, speculative_tokens=6)
    assert texts == [greedy_loop(model, prompt, 11) for prompt in prompts]


def peaked_model() -> Decoder:
    """A model of three tokens whose next-token distribution is far from uniform."""
    model = build_model(DESIGNS["gqa"], 1, WORDS)
    with torch.no_grad():
        model.embed.weight.mul_(5.0)
    return model


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_texts_follow_the_models_distribution(temperature: float) -> None:
    model = peaked_model()
    assert distance(model, None, exact_probabilities(model, temperature), temperature, multi_token_draft=True) < 4


def test_a_trained_module_is_often_right() -> None:
    """Texts of one repeated sentence, which model and module learn."""
    torch.manual_seed(0)
    config = DESIGNS["gqa"].replace(vocab_size=23)
    model = build(config, seed=1).train()
    sentence = torch.randperm(23)[:9].repeat(4)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(60):
        hidden, _ = model(sentence[:, :-1])
        [ahead] = model.predict_ahead(hidden, sentence[:, :-1])
        losses = [(hidden, sentence[0, 1:]), (ahead.hidden, sentence[0, 2:])]
        loss = sum(torch.nn.functional.cross_entropy(model.head(state)[0], target) for state, target in losses)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    prompt = sentence[0, :12].tolist()
    texts, rounds = texts_and_rounds(model, [prompt], max_new_tokens=19, speculative_tokens=3)
    assert texts == [sentence[0, 12:31].tolist()]
    assert sum(each.accepted for each in rounds) >= 0.6 * sum(each.proposed for each in rounds)
    assert len(rounds) < 12  # of 18 without a draft


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_beams": 2}, "num_beams 2: beam search takes no multi_token_draft; leave out one of the two"),
        ({"streams": 2}, "streams, batch_invariant: beams and drafts run all prompts in one batch; leave them out"),
        ({"speculative_tokens": 0}, "speculative_tokens 0: must be at least 1"),
    ],
)
def test_settings_that_conflict_are_refused(settings: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        heddle.generate(build_model(DESIGNS["gqa"]), [[1]], multi_token_draft=True, **settings)  # type: ignore[call-overload]
    assert str(caught.value) == says


def test_a_draft_needs_modules_and_no_other_draft_or_prefix() -> None:
    model, plain = build_model(DESIGNS["gqa"]), build(DESIGNS["gqa"].replace(multi_token=None))
    with pytest.raises(ConfigError, match="this design has no multi-token modules"):
        heddle.generate(plain, [[1]], multi_token_draft=True)
    with pytest.raises(ConfigError, match="the draft_model proposes tokens already"):
        heddle.generate(model, [[1]], multi_token_draft=True, draft_model=plain)
    with pytest.raises(ConfigError, match="a prefix has no state of the multi-token modules"):
        heddle.generate(model, [[1]], multi_token_draft=True, prefix=heddle.prefix(model, [1, 2, 3]))
    with pytest.raises(ConfigError, match="this design has no modules"):
        plain.init_draft_state(1)
