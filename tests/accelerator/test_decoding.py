"""Decoding on the simulated GPU: the host waits once for each block of tokens, and the text is the CPU's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.generation import decode
from heddle.generation import decode as decode_module
from heddle.generation.decode import padded_length
from heddle.generation.generate import generate
from heddle.generation.speculative import SpeculativeRound
from heddle.laws.harness import model_under_test
from heddle.model.decoder import Decoder
from heddle.numerics.dispatch import DeviceSize
from tests.accelerator.pretend import moved, pretending
from tests.accelerator.waits import Wait
from tests.cases import case

PROMPTS = [[5, 3, 8, 13, 21, 34, 55, 1], [2], [7, 7, 7, 9]]
TOKENS, BLOCK, READS = 9, 4, 3
COVERING = ["latent-hybrid", "moe"]
SOAK = [
    "attention-gqa",
    "attention-window-7",
    "delta-hybrid",
    "learned",
    "alibi",
    "retention-rope-gate",
    "mamba2",
    "kda",
    "attention-value-residual",
    "rwkv7-value-residual",
]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 3}


@pytest.fixture(autouse=True)
def refuse_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph can be recorded on the pretended device: each step runs, and its waits are seen. Short blocks."""

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("the pretended device records no graphs")

    monkeypatch.setattr(decode, "capture", capture)
    monkeypatch.setattr(decode_module, "STEPS_PER_READ", DeviceSize(cpu=1, accelerator=BLOCK))


def decoded(name: str, prompts: list[list[int]]) -> tuple[list[list[int]], list[Wait]]:
    """The text, and the waits from the prompts to the end."""
    with pretending() as log:
        model = moved(model_under_test(case(name), torch.float32))
        log.clear()
        assert isinstance(model, Decoder)
        return generate(model, prompts, max_new_tokens=TOKENS, **SAMPLED), list(log.waits)


@pytest.mark.parametrize("name", [*COVERING, *(pytest.param(name, marks=pytest.mark.soak) for name in SOAK)])
def test_the_host_waits_for_blocks_alone(name: str) -> None:
    text, waits = decoded(name, PROMPTS)
    assert text == generate(model_under_test(case(name), torch.float32), PROMPTS, max_new_tokens=TOKENS, **SAMPLED)
    assert [wait.what for wait in waits] == ["tolist"] * READS, waits
    assert all(wait.lines.startswith("generation/decode.py") for wait in waits)


def test_a_value_read_in_a_step_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Decoder.forward

    def forward(self: Decoder, tokens: Tensor, *rest: Any) -> Any:
        tokens.sum().item()
        return original(self, tokens, *rest)

    monkeypatch.setattr(Decoder, "forward", forward)
    _, waits = decoded("attention-window-7", PROMPTS)
    assert len(waits) == READS + TOKENS  # the prompts, and every token but the last


def test_drafts_and_beams_wait_a_few_times_a_step() -> None:
    """A round reads its tokens, rolls back two states and counts near ties; a step of beams reads scores and counts."""
    rounds: list[SpeculativeRound] = []
    with pretending() as log:
        model, draft = (moved(model_under_test(case("attention-gqa"), torch.float32)) for _ in range(2))
        assert isinstance(model, Decoder)
        assert isinstance(draft, Decoder)
        with torch.no_grad():
            draft.layers[0].mixer.out.weight.mul_(-1.0)  # type: ignore[union-attr, operator]
        log.clear()
        generate(model, PROMPTS, max_new_tokens=TOKENS, draft_model=draft, on_speculative_round=rounds.append)
        assert sum(counts.accepted < counts.proposed for counts in rounds) > 0
        assert len(log.waits) <= 1 + 4 * len(rounds) + 2 * len(PROMPTS), log.report  # rows that end are left out
        log.clear()
        generate(model, PROMPTS, max_new_tokens=3, num_beams=2)
        assert len(log.waits) <= 2 * 3, log.report


def test_uneven_prompts_have_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    original, shapes = Decoder.forward, set()

    def forward(self: Decoder, tokens: Tensor, *rest: Any) -> Any:
        shapes.add(tuple(tokens.shape))
        return original(self, tokens, *rest)

    monkeypatch.setattr(Decoder, "forward", forward)
    for longest in (8, 23):
        decoded("attention-window-7", [[5] * longest, [2], [7, 9]])
    assert shapes == {(3, 64), (3, 1)}


def test_lengths_are_padded_by_a_quarter_at_most() -> None:
    lengths = [padded_length(longest, 64) for longest in range(257, 20_000)]
    assert all(length <= 1.25 * longest + 1 for longest, length in zip(range(257, 20_000), lengths, strict=True))
    assert len(set(lengths)) < 30
    assert padded_length(57, 1) == 57
