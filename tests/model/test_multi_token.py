"""Multi-token modules against a plain loop of DeepSeek-V3's formula, a document and a token at a time."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.laws.harness import model_under_test
from heddle.model.load_config import load_config
from heddle.model.multi_token import MultiTokenModule
from heddle.parts.layout import Layout
from tests.cases import by_day
from tests.parts.loops import DecoderLoop, Errors, assert_none, normalized
from tests.random_layouts import random_layout

DESIGNS = 48
VOCABULARY = 29


def random_design(draw: random.Random) -> dict[str, Any]:
    """Attention of one of many shapes in two layers; the modules have that of the last."""
    heads, head_dim = draw.choice(((2, 4), (4, 6), (3, 2), (6, 4)))
    position = draw.choice(({"kind": "rope", "base": draw.choice((10.0, 1000.0))}, None))
    window = draw.choice((None, None, 1, 3))
    feedforward = draw.choice(
        (None, {"kind": "gated", "hidden": draw.choice((5, 16))}, {"kind": "mlp", "hidden": 7, "activation": "relu"})
    )

    def layer(kv_heads: int, hidden: dict[str, Any] | None) -> dict[str, Any]:
        mixer = {"kind": "attention", "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "position": position}
        return {"mixer": mixer | ({} if window is None else {"window": window}), "feedforward": hidden}

    kv_heads = draw.choice([each for each in range(1, heads + 1) if heads % each == 0])
    return {
        "vocab_size": VOCABULARY,
        "width": draw.choice((8, 12, 24)),
        "layers": [layer(heads, {"kind": "mlp", "hidden": 6}), layer(kv_heads, feedforward)],
        "norm": {"kind": "rms", "eps": 1e-5},
        "head": {"tied": draw.random() < 0.5},
        "multi_token": {"depth": draw.choice((1, 2, 3)), "loss_weight": 0.3},
    }


class Loop(DecoderLoop):
    """The modules: a projection of two normed vectors, and a layer like the last one."""

    def predict(self, hidden: list[Tensor], embedding: list[Tensor]) -> list[Tensor]:
        """The states of one document: hidden[t] with embedding[t], which is that of the token ahead."""
        gains = self.parameters["embedding_norm.weight"], self.parameters["hidden_norm.weight"]
        pairs = [(normalized(e, gains[0]), normalized(h, gains[1])) for h, e in zip(hidden, embedding, strict=True)]
        stream = [self.parameters["projection.weight"] @ torch.cat(pair) for pair in pairs]
        stream = self.layer(self.layers[-1], "layer", stream)
        return [normalized(x, self.parameters["final_norm.norm.weight"]) for x in stream]


def documents(layout: Layout) -> list[tuple[int, list[int]]]:
    """Row and columns of each document, in order."""
    ids = layout.dense_segment_ids.tolist()
    found: dict[tuple[int, int], list[int]] = {}
    for row, positions in enumerate(layout.positions.tolist()):
        for column, position in enumerate(positions):
            if position >= 0:
                found.setdefault((row, ids[row][column]), []).append(column)
    return [(row, columns) for (row, _), columns in found.items()]


def largest_errors(number: int) -> Errors:
    """Of the modules' states, and of the gradients of hidden states, embeddings and the modules' weights."""
    draw = random.Random(number)
    config = load_config(random_design(draw))
    model, depth = model_under_test(config), config.multi_token.depth  # type: ignore[union-attr]
    rows, length = draw.choice(((1, 7), (2, 9), (3, 5)))
    layout = Layout.causal(rows, length) if number % 4 == 0 else random_layout(draw, rows, length)
    tokens = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(number))
    hidden = model(tokens, layout)[0].detach().requires_grad_()
    predicted = model.predict_ahead(hidden, tokens, layout)
    assert len(predicted) == min(depth, length - 1)
    texts = documents(layout)
    by_token = {(row, column): hidden[row, column] for row, columns in texts for column in columns}
    wanted_sum = got_sum = torch.zeros((), dtype=torch.float64)
    probe = torch.linspace(-1.0, 2.0, config.width, dtype=torch.float64)
    worst = 0.0
    for ahead, (got, ahead_layout) in enumerate(predicted, start=1):
        module = model.multi_token[ahead - 1]
        assert isinstance(module, MultiTokenModule)
        loop = Loop(module, config)
        next_states: dict[tuple[int, int], Tensor] = {}
        for row, columns in texts:
            first, later = columns[: max(0, len(columns) - ahead)], columns[ahead:]
            embedded = [model.embed.weight[tokens[row, column]] for column in later]
            states = loop.predict([by_token[row, column] for column in first], embedded)
            next_states |= {(row, column): state for column, state in zip(first, states, strict=True)}
        by_token = next_states
        is_token = ahead_layout.positions >= 0
        assert {(row, column) for row, column in is_token.nonzero().tolist()} == by_token.keys()
        if not by_token:
            continue
        wanted = torch.stack(list(by_token.values()))
        kept = torch.stack([got[place] for place in by_token])
        worst = max(worst, float((kept - wanted).detach().abs().max()))
        wanted_sum, got_sum = wanted_sum + (wanted @ probe).sin().sum(), got_sum + (kept @ probe).sin().sum()
    trained = [hidden, model.embed.weight, *model.multi_token.parameters()]
    if not got_sum.requires_grad:
        return worst, 0.0
    found, expected = (
        torch.autograd.grad(each, trained, allow_unused=True, materialize_grads=True, retain_graph=True)
        for each in (got_sum, wanted_sum)
    )
    return worst, max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("number", by_day(12, DESIGNS))
def test_modules_are_those_of_a_plain_loop(number: int) -> None:
    assert_none(largest_errors(number))
