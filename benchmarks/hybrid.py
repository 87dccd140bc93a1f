"""How much state and time per token does a hybrid of recurrent layers and full attention save after 32,768 tokens?

`preset:hybrid-medium` (three recurrent layers per layer of full attention) compared with `preset:gqa-medium`: bytes of
state, and the time of decoding a token, float32, one row. There is no prefill: states are filled with random numbers.
"""

from collections.abc import Callable

import torch

from benchmarks import peers
from benchmarks.harness import alternate, limit_row, ratio_row, show, write
from benchmarks.machine import THREADS
from heddle.machine import measured_choices
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.model.size import state_bytes
from heddle.model.state import State
from heddle.numerics.linear import packed_weights
from heddle.runtime import set_up_runtime

QUESTION = "How much state and time per token does a hybrid save after 32,768 tokens?"
CONTEXT, STEPS, ROUNDS = 32768, 4, 9


def steps(design: str) -> Callable[[], None]:
    """Decode a few greedy tokens after the context, each time from the same state."""
    model = build(load_config(design)).eval()
    start = peers.filled(model, CONTEXT, STEPS)

    @torch.no_grad()
    def work() -> None:
        state, token = State(start.table, list(start.layers), start.fingerprint), torch.tensor([[1]])
        for _ in range(STEPS):
            hidden, after = model(token, None, state)
            assert after is not None
            state, token = after, model.head(hidden[:, -1:]).argmax(-1)

    return work


def main() -> None:
    """Sizes, then alternated steps."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    small, large = (state_bytes(load_config(f"preset:{name}-medium"), CONTEXT) for name in ("hybrid", "gqa"))
    rows = [limit_row(f"state after {CONTEXT} over that of full attention", small / large, 0.27, "times")]
    with packed_weights():
        seconds = alternate({name: steps(f"preset:{name}-medium") for name in ("hybrid", "gqa")}, ROUNDS)
    ratios = [full / hybrid for hybrid, full in zip(seconds["hybrid"], seconds["gqa"], strict=True)]
    rows.append({"case": f"one token after {CONTEXT}, against full attention"} | ratio_row(ratios, 2.0))
    show(rows)
    write("benchmarks.hybrid", QUESTION, rows)


if __name__ == "__main__":
    main()
