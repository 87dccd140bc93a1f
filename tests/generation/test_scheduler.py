"""Requests that share a batch have the text of each alone; batch-invariant ones have its bits."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.errors import ConfigError, MachineError
from heddle.generation.decode import GenerationRequest, ModelRunner, Sampler
from heddle.generation.generate import generate, prefix
from heddle.generation.scheduler import BatchScheduler, Scheduler, SeparateScheduler
from heddle.model.decoder import Decoder
from tests.generation.loops import amplify_layers
from tests.generation.test_generate import build_double
from tests.laws.planting import calls

MIXED = ["attention-gqa", "attention-window-7", "rope-ntk-dynamic", "latent-low-rank-query", "delta-hybrid", "moe"]
PROMPTS = [[5, 3, 8, 13, 21, 34, 55, 1], [2], [7, 7, 7, 9], [11, 12, 13, 14, 15, 16, 17, 18, 19], [4, 4]]
TOKENS = [12, 9, 3, 8, 10]  # of each request
LEAVES = {1: 4}  # the request that is given up, and after how many tokens


@dataclass(frozen=True)
class Recorder(Sampler):
    """A sampler that keeps the logits it chose from."""

    logits: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    @property
    def can_share(self) -> bool:
        return False

    def choose(self, logits: Tensor, position: Tensor) -> Tensor:
        self.logits.append(logits[0].clone())
        return super().choose(logits, position)


def run(scheduler: Scheduler, prompts: list[list[int]], join_every: int = 2) -> list[Tensor]:
    """The logits [tokens, vocab] of each request; one joins every few steps, and one is given up."""
    samplers = [Recorder() for _ in prompts]
    counts = [0] * len(prompts)
    step = 0
    while step < join_every * len(prompts) or len(scheduler):
        key, rest = divmod(step, join_every)
        if not rest and key < len(prompts):
            scheduler.join(key, GenerationRequest([prompts[key]], TOKENS[key], samplers[key]))
        for result in scheduler.step():
            assert result.error is None
            counts[result.key] += 1
            if counts[result.key] == LEAVES.get(result.key):
                scheduler.leave(result.key)
        step += 1
    assert counts == [min(count, LEAVES.get(key, count)) for key, count in enumerate(TOKENS)]
    return [torch.stack(sampler.logits[:count]) for sampler, count in zip(samplers, counts, strict=True)]


def largest_difference(model: Decoder) -> float:
    """Between the logits of each request in a changing batch and alone."""
    model.eval()
    alone = run(SeparateScheduler(ModelRunner(model)), PROMPTS)
    batch = run(BatchScheduler(ModelRunner(model), prefill_tokens=3), PROMPTS)
    return max(float((own - shared).abs().max()) for own, shared in zip(alone, batch, strict=True))


@pytest.mark.parametrize("name", MIXED)
def test_logits_in_a_changing_batch_are_those_alone(name: str) -> None:
    model = build_double(name)
    amplify_layers(model)
    assert largest_difference(model) <= 1e-10


def test_short_prompts_pass_long_ones_which_take_turns() -> None:
    scheduler = BatchScheduler(ModelRunner(build_double("attention-gqa").eval()), prefill_tokens=4)
    for key, length in enumerate((12, 8, 3)):
        scheduler.join(key, GenerationRequest([[5] * length], 1, Sampler()))
    first_tokens = []
    while len(scheduler):
        first_tokens += [result.key for result in scheduler.step()]
    assert first_tokens == [2, 1, 0]


def test_long_prompts_take_a_third_of_the_time_while_others_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that counts tokens: a piece of 4 takes as long as four steps of the one request that is decoded."""
    now, pieces, forward = [0.0], [], BatchScheduler._forward

    def timed(self: BatchScheduler, tokens: Any, state: Any) -> Any:
        pieces.append(len(tokens[0]))
        now[0] += len(tokens[0])
        return forward(self, tokens, state)

    monkeypatch.setattr(BatchScheduler, "_forward", timed)
    monkeypatch.setattr("heddle.generation.scheduler.time.perf_counter", lambda: now[0])
    scheduler = BatchScheduler(ModelRunner(build_double("attention-gqa").eval()), prefill_tokens=4)
    scheduler.join(0, GenerationRequest([[5]], 33, Sampler()))
    scheduler.step()
    scheduler.join(1, GenerationRequest([[5] * 99], 1, Sampler()))
    while 0 in [row.key for row in scheduler._all_rows()]:
        scheduler.step()
    assert (pieces.count(1), pieces.count(4)) == (33, 5)  # one each 8 of 32 steps, and one after the last
    while len(scheduler):
        scheduler.step()
    assert sum(pieces) == 33 + 99


def test_rows_mixed_up_when_one_leaves_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls(BatchScheduler._rearrange, "select", lambda state, rows: state.select(rows[::-1]))(monkeypatch)
    model = build_double("attention-gqa")
    amplify_layers(model)
    assert largest_difference(model) > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streams_give_the_tokens_of_one_batch(temperature: float) -> None:
    model = build_double("attention-gqa")
    amplify_layers(model)
    want = generate(model, PROMPTS, max_new_tokens=6, temperature=temperature, seed=3)
    ways: list[dict[str, Any]] = [{"streams": 2}, {"streams": 9}, {"batch_invariant": True}]
    for settings in ways:
        assert generate(model, PROMPTS, max_new_tokens=6, temperature=temperature, seed=3, **settings) == want
    shared = prefix(model, [9, 8, 7])
    want = generate(model, PROMPTS, max_new_tokens=4, prefix=shared)
    assert generate(model, PROMPTS, max_new_tokens=4, prefix=shared, streams=2) == want


def test_no_bit_of_a_needle_depends_on_the_batch() -> None:
    model = build_double("attention-gqa").float().eval()
    needle, bits = PROMPTS[0], {False: list[Tensor](), True: list[Tensor]()}
    for neighbors in ([], [[2]], [[3] * 40], PROMPTS[1:], [[7, 1]] * 4):
        for is_invariant in bits:
            runner = ModelRunner(model)
            scheduler: Scheduler = SeparateScheduler(runner) if is_invariant else BatchScheduler(runner)
            sampler = Recorder(temperature=1.0, seed=5)
            for key, prompt in enumerate([*neighbors, needle]):
                own = sampler if key == len(neighbors) else Sampler()
                scheduler.join(key, GenerationRequest([prompt], 12, own))
            while len(scheduler):
                scheduler.step()
            bits[is_invariant].append(torch.stack(sampler.logits))
    for logits in bits[True]:
        assert torch.equal(logits, bits[True][0])
    assert not all(torch.equal(logits, bits[False][0]) for logits in bits[False])  # a batch rounds otherwise
    assert all(torch.allclose(logits, bits[False][0], atol=1e-4) for logits in bits[False])


def test_a_damaged_request_ends_alone() -> None:
    model = build_double("attention-gqa").eval()
    with torch.no_grad():
        model.embed.weight[60] = torch.nan
    schedulers: list[Scheduler] = [BatchScheduler(ModelRunner(model)), SeparateScheduler(ModelRunner(model))]
    for scheduler in schedulers:
        request = GenerationRequest([[1, 2]], 4, Sampler(), vocab_limit=60)
        for key, prompt in enumerate([[1, 2], [60, 1], [3]]):
            scheduler.join(key, replace(request, prompt_ids=[prompt]))
        results = [result for _ in range(6) for result in scheduler.step()]
        assert [type(result.error) for result in results if result.error is not None] == [MachineError]
        assert [sum(result.key == key for result in results) for key in range(3)] == [4, 1, 4]
        assert len(scheduler) == 0


def test_settings_that_need_one_batch_are_refused() -> None:
    model = build_double("attention-gqa")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"streams": 0}, "streams 0: must be at least 1"),
        ({"streams": 2, "num_beams": 2}, "beams and drafts"),
        ({"batch_invariant": True, "num_beams": 2}, "beams and drafts"),
        ({"streams": 2, "compile_decoding": True}, "compile_decoding"),
    ]
    for settings, words in cases:
        with pytest.raises(ConfigError, match=words):
            generate(model, PROMPTS, **settings)
    reads = build_double("cross-alone")
    with pytest.raises(ConfigError, match="encoder_output"):
        BatchScheduler(ModelRunner(reads)).join(0, GenerationRequest([[1]], 2, Sampler()))
