"""What an indexer refuses: fields that do nothing or contradict, and selections that there are not."""

import pytest

import heddle
from heddle.errors import ConfigError
from tests.cases import MOBA, Data, attention, design, indexer, latent, layer


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        (attention(window=3, indexer=indexer()), r"layers\[0\].mixer.indexer.top_k: 3 selects all of the 3 keys"),
        (
            attention(window=3, causal=False, indexer=indexer(top_k=7)),
            r"layers\[0\].mixer.indexer.top_k: 7 selects all of the 7 keys",
        ),
        (
            attention(position=None, indexer=indexer(rope_layout="half")),
            r"layers\[0\].mixer.indexer.rope_layout: does nothing without a position of kind rope",
        ),
        (attention(indexer=indexer(head_dim=4)), r"layers\[0\].mixer.indexer.head_dim"),
        (attention(indexer=indexer(loss=0.0)), r"layers\[0\].mixer.indexer.loss"),
        (attention(indexer={"top_k": 2, "heads": 2}), r"layers\[0\].mixer.indexer.head_dim: is missing"),
        (attention(indexer={"top_k": 2, "head_dim": 2}), r"layers\[0\].mixer.indexer.heads: is missing"),
        (attention(indexer={"top_k": 2, "loss_keys": "selected"}), r"layers\[0\].mixer.indexer.loss_keys: is about"),
        (attention(indexer={"top_k": 2, "query_norm": True}), r"layers\[0\].mixer.indexer.query_norm: is about"),
        (attention(indexer=MOBA | {"block": 1}), r"layers\[0\].mixer.indexer.block_score: does nothing for single"),
        (attention(indexer=MOBA | {"local": 2}), r"layers\[0\].mixer.indexer.local: 2 leaves none of the 2"),
        (
            attention(causal=False, indexer=MOBA | {"top_k": 3, "local": 2}),
            r"layers\[0\].mixer.indexer.local: 2 leaves",
        ),
        (attention(indexer=indexer(heads=3, per_head=True)), r"layers\[0\].mixer.indexer.heads: 3 does not divide"),
        (attention(window=4, indexer=MOBA), r"layers\[0\].mixer.indexer.top_k: 2 selects all of the 2 blocks"),
        (
            attention(indexer=indexer(block=2, block_score="attention")),
            r"layers\[0\].mixer.indexer.block_score: attention uses the attention's own",
        ),
        (attention(indexer=MOBA | {"first": 1}), r"layers\[0\].mixer.indexer.local: 1 leaves none of the 2"),
        (attention(indexer={"top_k": 2, "first": 2}), r"layers\[0\].mixer.indexer.first: 2 leaves none of the 2"),
        (
            attention(indexer=indexer(block=2, pool="mean", first=1)),
            r"layers\[0\].mixer.indexer.first: needs several keys",
        ),
        (attention(indexer=indexer(pool="mean")), r"layers\[0\].mixer.indexer.pool: does nothing for single keys"),
        (
            attention(indexer=indexer(block=2, pool="mean", local=1)),
            r"layers\[0\].mixer.indexer.local: needs several keys",
        ),
        (
            attention(indexer=indexer(block=2, pool="mean", block_score="mean")),
            r"layers\[0\].mixer.indexer.block_score: needs several keys per block, but pool leaves one",
        ),
        (attention(indexer={"top_k": 2, "block": 2, "pool": "mean"}), r"layers\[0\].mixer.indexer.pool: is about the"),
        (
            attention(indexer={"top_k": 2, "head_weights": False}),
            r"layers\[0\].mixer.indexer.head_weights: is about the indexer's own",
        ),
        (
            attention(indexer=indexer(per_head=True, head_weights=False)),
            r"layers\[0\].mixer.indexer.head_weights: does nothing with per_head",
        ),
        (
            attention(window=7, indexer=indexer(block=2, pool="gated")),
            r"layers\[0\].mixer.indexer.pool: needs finished, whole blocks, but a window hides parts",
        ),
        (
            attention(causal=False, indexer=indexer(block=2, pool="gated")),
            r"layers\[0\].mixer.indexer.pool: needs finished, whole blocks, but causal is false",
        ),
        (
            attention(position={"kind": "axial_rope"}, head_dim=8, indexer=indexer(block=2, pool="mean")),
            r"layers\[0\].mixer.indexer.pool: gives a block one position",
        ),
        (latent(indexer=MOBA | {"local": 2}), r"layers\[0\].mixer.indexer.local: 2 leaves none"),
    ],
)
def test_what_does_not_fit_is_refused(mixer: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        heddle.build(heddle.load_config(design(layer(mixer))))


def test_shared_keys_have_no_index() -> None:
    with pytest.raises(ConfigError, match=r"layers\[1\].mixer.indexer: selects keys of its own layer"):
        heddle.load_config(design(layer(attention()), layer(attention(shared_kv=True, indexer=indexer()))))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([latent(shared_index=True)], r"layers\[0\].mixer.shared_index: no earlier layer has an indexer"),
        ([latent(), latent(shared_index=True)], r"layers\[1\].mixer.shared_index: no earlier layer has an indexer"),
        (
            [latent(indexer=indexer(heads=3, per_head=True)), latent(shared_index=True)],
            r"layers\[1\].mixer.shared_index: no earlier layer has an indexer for all heads",
        ),
        ([latent(shared_index=True, indexer=indexer())], r"layers\[0\].mixer.shared_index: .* keep one"),
    ],
)
def test_a_selection_that_there_is_not_is_refused(layers: list[Data], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        heddle.load_config(design(*map(layer, layers)))
