"""What a run of a comparison is evaluated on its way: never more than a tenth of what it trains on."""

import itertools

import pytest

from heddle.lab.compare import probes
from heddle.lab.compare.probes import RECALL_PROBES, interim_tokens, plan_evaluations
from heddle.training.loop import INTERIM_EVALUATION_TOKENS
from heddle.training.settings import Settings

TEXTS = (5, 478, 9_999, 401_483, 401_484, 10_000_000)  # tokens


def batches_read(settings: Settings, text_tokens: int) -> int:
    """How many batches the training loop reads at one evaluation, as `TextData.validation_batches` chooses them."""
    batches = -(-text_tokens // settings.tokens_per_step)
    step = max(1, batches * settings.tokens_per_step // interim_tokens(settings, text_tokens))
    return len(range(0, batches, step))


def check_share(batch_size: int, length: int) -> None:
    for steps in [*range(1, 300), 1000, 12_345]:
        settings = Settings(steps=steps, batch_size=batch_size, sequence_length=length)
        interval, batches = plan_evaluations(steps, settings.tokens_per_step)
        if interval is None:
            assert (steps < 10, batches) == (True, 0)
            continue
        points = sum(1 for step in range(1, steps + 1) if step % interval == 0 or step == steps)
        assert 1 <= points <= probes.MAX_POINTS
        assert points * batches <= steps / 10
        assert batches == 1 or batches * settings.tokens_per_step <= INTERIM_EVALUATION_TOKENS
        for text_tokens in TEXTS:
            assert batches_read(settings, text_tokens) <= batches


@pytest.mark.parametrize(("batch_size", "length"), list(itertools.product((1, 4, 32), (16, 256))))
def test_evaluations_read_at_most_a_tenth_of_what_is_trained(batch_size: int, length: int) -> None:
    check_share(batch_size, length)


@pytest.mark.parametrize(("name", "value"), [("MAX_SHARE", 0.2), ("INTERIM_EVALUATION_TOKENS", 2**15)])
def test_a_larger_share_would_be_noticed(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, name, value)
    with pytest.raises(AssertionError):
        check_share(4, 256)


def test_the_default_budget_has_a_curve() -> None:
    steps = 100_000 // (4 * 256)
    interval, batches = plan_evaluations(steps, 4 * 256)
    assert (interval, batches) == (11, 1)


def test_probes_are_evaluated_alike() -> None:
    for probe in RECALL_PROBES.values():
        settings, evaluation = probe.settings(), probe.evaluation()
        assert settings.evaluate_every == 45
        assert evaluation.interim_tokens is not None
        assert 10 * evaluation.interim_tokens <= settings.steps * settings.tokens_per_step / 10
        assert evaluation.solved_accuracy == 0.995
