"""Memory of one rank at its peak, by component.

Weights and AdamW's moments are float32, products bfloat16 (FSDP2's mixed precision): 16 bytes a parameter over the
ranks of a shard group. At any time one layer computes, the next one is gathered, and the root group (embedding, last
norm, head) stays gathered.
"""

from heddle.distributed.planning.costs import BF16_BYTES, ModelCost
from heddle.distributed.planning.ranks import RankLayout
from heddle.numerics.cross_entropy import CHUNK_ELEMENTS

FP32_BYTES = 4
GATHERED_LAYERS = 2  # the layer that computes, and the next one
LOGIT_BYTES = 10  # of a logit in a loss without chunks: log-probability and two gradients, one of them in bfloat16
CHUNK_LOGIT_BYTES = 2 * BF16_BYTES  # of a logit in heddle's loss on a GPU: itself and its gradient


def rank_memory(cost: ModelCost, layout: RankLayout) -> dict[str, int]:
    """Bytes of each component on the rank that holds most."""
    parameters, tokens = cost.parameters, layout.rows * cost.sequence_length
    shard = -(-parameters // layout.shard)
    gathered = cost.root_parameters + GATHERED_LAYERS * cost.largest_layer
    in_reduction = cost.largest_layer * (BF16_BYTES + layout.reduce_bytes) + cost.root_parameters * BF16_BYTES
    if layout.reduce_once and layout.accumulation > 1:
        in_reduction += parameters * layout.reduce_bytes
    return {
        "parameters": shard * FP32_BYTES,
        "gradients": shard * FP32_BYTES,
        "moments": 2 * shard * FP32_BYTES,
        "gathered weights": gathered * BF16_BYTES,
        "gradients in reduction": in_reduction,
        "activations": layout.rows * saved_for_backward(cost, layout),
        "loss": _loss(cost, layout, tokens),
    }


def saved_for_backward(cost: ModelCost, layout: RankLayout) -> int:
    """Bytes of the activations of one row that exist when the backward pass begins, at its largest layer."""
    if layout.recompute == "none":
        return sum(layer.count * layer.saved_bytes for layer in cost.layers)
    by_layer = ((x.input_bytes if layout.recompute == "layers" else x.product_bytes) * x.count for x in cost.layers)
    return sum(by_layer) + max((layer.saved_bytes for layer in cost.layers), default=0)


def _loss(cost: ModelCost, layout: RankLayout, tokens: int) -> int:
    hidden = BF16_BYTES * tokens * cost.width
    if layout.whole_logits:
        return tokens * cost.vocab_size * LOGIT_BYTES + hidden
    chunk = min(CHUNK_ELEMENTS.accelerator, tokens * cost.vocab_size)
    return chunk * CHUNK_LOGIT_BYTES + FP32_BYTES * cost.vocab_size * cost.width + hidden
