"""An encoder-decoder that learns to sort digits, in about a minute on a CPU.

    python examples/sort_digits.py

The encoder reads the digits; the decoder generates them in order, one at a time. The decoder's `cross_attention`
attends to the encoder's hidden states, whose keys and values are computed once per sequence.
"""

import argparse
import time

import numpy as np
import torch

import heddle
from heddle.data.samples import Batch
from heddle.model.decoder import Decoder
from heddle.training.optimizer import build_optimizer
from heddle.training.settings import Settings, scheduled_learning_rate
from heddle.training.step import accumulate_gradients, apply_gradients, run_encoder

START, END, MAX_DIGITS = 10, 11, 10  # tokens 0 to 9 are the digits
BATCH_SIZE = 128  # rows
MLP = {"kind": "gated", "hidden": 128}
DESIGN = {
    "vocab_size": 12,
    "width": 64,
    "encoder": {
        "width": 64,
        "embedding": {"scale": True, "position": {"kind": "sinusoidal"}},
        "layers": [
            {"repeat": 2, "mixer": {"kind": "attention", "heads": 4, "causal": False}, "feedforward": MLP},
        ],
    },
    "layers": [
        {
            "repeat": 2,
            "layers": [
                {"mixer": {"kind": "attention", "heads": 4, "position": {"kind": "rope"}}},
                {"mixer": {"kind": "cross_attention", "heads": 4}, "feedforward": MLP},
            ],
        }
    ],
}


def random_batch(rows: int, seed: int, max_digits: int = MAX_DIGITS) -> Batch:
    """Encoder tokens: 1 to `max_digits` digits per row, padded with −1. Tokens: the same digits sorted, then END."""
    generator = np.random.default_rng(seed)
    digits = generator.integers(0, 10, (rows, max_digits))
    is_digit = np.arange(max_digits) < generator.integers(1, max_digits + 1, (rows, 1))
    sorted_digits = np.sort(np.where(is_digit, digits, END), axis=1)
    tokens = np.concatenate((np.full((rows, 1), START), sorted_digits, np.full((rows, 1), END)), axis=1)
    return Batch(tokens, ((max_digits + 1,),) * rows, np.arange(rows), np.where(is_digit, digits, -1))


def train(steps: int, seed: int = 0, max_digits: int = MAX_DIGITS) -> Decoder:
    """Train a model for `steps` batches of 128 rows."""
    model = heddle.build(heddle.load_config(DESIGN), seed=seed).train()
    settings = Settings(steps=steps, learning_rate=2e-3, weight_decay=0.01)
    optimizer = build_optimizer(model, settings.weight_decay)
    for step in range(steps):
        gradients = accumulate_gradients(model, random_batch(BATCH_SIZE, 1 + step, max_digits), (seed, step))
        result = apply_gradients(
            model, optimizer, gradients, scheduled_learning_rate(settings, step), settings.max_gradient_norm
        )
        if step % 200 == 0:
            print(f"step {step}: loss {result.loss:.4f}", flush=True)
    return model.eval()


def exact_match(model: Decoder, batch: Batch) -> float:
    """The fraction of rows that greedy decoding sorts without a mistake."""
    assert batch.encoder_tokens is not None
    rows, steps = len(batch.tokens), batch.tokens.shape[1] - 1
    with torch.no_grad():
        encoder_output = run_encoder(model, batch.encoder_tokens)
    generated = heddle.generate(model, [[START]] * rows, encoder_output=encoder_output, max_new_tokens=steps)
    return float((np.array(generated) == batch.tokens[:, 1:]).all(1).mean())


def main() -> None:
    """Train, then sort 1,000 unseen rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    start_time = time.perf_counter()
    model = train(steps)
    accuracy = exact_match(model, random_batch(1000, 0))
    print(
        f"{accuracy:.1%} of 1,000 unseen rows sorted without a mistake, after {time.perf_counter() - start_time:.0f} s"
    )


if __name__ == "__main__":
    main()
