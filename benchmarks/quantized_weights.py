"""How much faster is a token with weights of 8 and 4 bits, and how many bits per byte do they add?

The token: `preset:gqa-medium` in bfloat16 after 128 tokens, ours against ours. The loss: `preset:gqa-small` trained on
the text of the standard library for 200 steps, on its held-out part. `--run FOLDER` measures another run's loss alone.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers
from benchmarks.decode import compiled_loop
from benchmarks.harness import Case, Measured, Step, limit_row, main, show
from heddle.data.corpus import Corpus, prepare_corpus
from heddle.data.samples import evaluation_windows
from heddle.machine import measured_choices
from heddle.model.copies import quantize_weights
from heddle.model.decoder import Decoder
from heddle.runtime import set_up_runtime
from heddle.storage.model import load
from heddle.training.evaluation.scores import bits_and_bytes
from heddle.training.run import train

CONTEXT, LENGTH, BATCHES = 128, 256, 16  # batches of 8 windows
QUESTION = "How much faster is a token with weights of 8 and 4 bits, and how many bits per byte do they add?"


def decoding(bits: int | None, context: int) -> Measured:
    """heddle's greedy steps after `context` tokens, compiled."""
    model = peers.ours(dtype=torch.bfloat16).eval()
    return compiled_loop(model if bits is None else quantize_weights(model, bits).model, context, 1)


def side(bits: int | None, _: dict[str, Any]) -> Step:
    """Without the values, which differ; the loss says by how much."""
    return decoding(bits, CONTEXT).step


def bits_per_byte(model: Decoder, corpus: Corpus) -> float:
    """Of windows that are spread over the corpus' validation text."""
    windows = list(evaluation_windows(corpus.validation, LENGTH))
    spread = windows[:: max(1, len(windows) // BATCHES)]
    scores = bits_and_bytes(model, spread, corpus.tokenizer.byte_lengths)
    return sum(bits for bits, _ in scores) / sum(size for _, size in scores)


def loss_rows(run: Path) -> list[dict[str, Any]]:
    """Percent of bits per byte that 8 and 4 bits add to a run's model."""
    model, tokenizer = load(run)
    corpus = prepare_corpus(["stdlib"], vocab_size=None, max_train_tokens=None, tokenizer=tokenizer)
    plain = bits_per_byte(model, corpus)
    added = {bits: 100 * (bits_per_byte(quantize_weights(model, bits).model, corpus) / plain - 1) for bits in (8, 4)}
    rows = [limit_row("bits per byte that int8 adds", added[8], 0.3, "%") | {"figure": "loss int8"}]
    return [*rows, {"case": "bits per byte that int4 adds", "value": round(added[4], 3), "unit": "%"}]


def trained_rows() -> list[dict[str, Any]]:
    """The loss of a run that is trained here."""
    set_up_runtime("cpu", choices=measured_choices())
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"steps": 200, "batch_size": 8, "sequence_length": LENGTH, "quiet": True}
        return loss_rows(train("preset:gqa-small", data=["stdlib"], out=Path(folder, "run"), **options).folder)


if __name__ == "__main__":
    if "--run" in sys.argv:
        show(loss_rows(Path(sys.argv[sys.argv.index("--run") + 1])))
    else:
        main(
            "benchmarks.quantized_weights",
            QUESTION,
            {"int8": partial(side, 8), "bf16": partial(side, None), "int4": partial(side, 4)},
            [Case("token after 128, gqa-medium", {}, None, figure="token int8", against=("bf16",))],
            trained_rows,
        )
