"""How parts are commonly written wrong: what docs/commonly-wrong.md measures, and which kinds it concerns."""

from dataclasses import dataclass

ATTENTION = ("attention", "differential_attention", "latent_attention")
ALL_BLOCKS = (
    "deep_norm", "hyper_connections", "parallel", "post_norm", "pre_norm", "reordered", "residual_dual", "sandwich",
)  # fmt: skip


@dataclass(frozen=True)
class Mistake:
    """A mistake. title: its heading in docs/commonly-wrong.md. law: what fails here if somebody makes it."""

    slot: str
    kinds: tuple[str, ...]
    title: str
    text: str
    law: str


MISTAKES = (
    Mistake(
        "positions", ("rope", "axial_rope"), "RoPE with a table and pairs of different layouts",
        "The table has one order of the pairs, the rotation another. All shapes fit, but norms change and scores no "
        "longer depend on the distance alone.", "rotary_invariants",
    ),
    Mistake(
        "mixers", ("latent_attention",), "A latent rotated before its up-projection",
        "The rotation is then on the wrong side of the up-projection, so scores depend on absolute positions. Rotated "
        "dims need a projection of their own.", "position_shift_invariance",
    ),
    Mistake(
        "scalings", ("linear",), "Positions divided in whole numbers",
        "A division of integers that rounds down gives neighboring tokens the same position.",
        "tests/parts/test_scalings.py",
    ),
    Mistake(
        "scalings", ("ntk",), "NTK's base multiplied by the factor alone",
        "Without the exponent d / (d − 2), the slowest pair rotates less than s times slower.",
        "tests/parts/test_scalings.py",
    ),
    Mistake(
        "scalings", ("ntk", "longrope"), "Keys in the cache rotated for a shorter text",
        "While a text grows, cached keys keep the angles of the length at which they were written.",
        "chunked_decoding",
    ),
    Mistake(
        "scalings", ("yarn",), "YaRN's ramp turned around",
        "Fast pairs are slowed down, so neighbors are squeezed together, and slow pairs reach untrained angles.",
        "tests/parts/test_scalings.py",
    ),
    Mistake(
        "scalings", ("yarn", "longrope"), "YaRN without its attention factor",
        "Cosines and sines are not multiplied by m, so the softmax over a long text is too flat.",
        "tests/parts/test_scalings.py",
    ),
    Mistake(
        "scalings", ("llama3", "yarn", "longrope"), "The new length given as the original one",
        "Pairs that saw only a part of a turn in training are left as they were, and reach untrained angles.",
        "tests/exchange/test_families.py",
    ),
    Mistake(
        "mixers", ("attention", "differential_attention"), "Grouped-query attention with a full-size cache",
        "Keys and values are repeated for every query head before they are stored, so nothing is saved.",
        "size_matches_model",
    ),
    Mistake(
        "mixers", ("attention", "differential_attention", "gated_delta"),
        "The number of groups confused with the size of a group",
        "H heads in G groups have G key and value heads, not H / G. A test with H = G² heads does not notice.",
        "tests/parts/test_attention.py",
    ),
    Mistake(
        "mixers", ATTENTION, "Heads split from the wrong dimension",
        "A view without a transpose mixes tokens with heads. The loss falls fast, because later tokens are visible.",
        "causality",
    ),
    Mistake(
        "mixers", ATTENTION, "A causal mask made by multiplication",
        "A mask times −∞ is NaN wherever the mask is 0, since 0 · ∞ is NaN: no visible token is left.", "causality",
    ),
    Mistake(
        "mixers", ATTENTION, "A causal mask aligned to the top left, with a cache",
        "With a cache the queries are the last tokens. Aligned to the first, they see almost nothing.",
        "chunked_decoding",
    ),
    Mistake(
        "mixers", ("attention", "differential_attention"), "A window that is one key too wide",
        "The query itself is one of the w tokens. Written as ≤ w instead of < w, one more is seen.", "receptive_field",
    ),
    Mistake(
        "mixers", (*ATTENTION, "cross_attention"), "A softmax over padding",
        "Padding gets weight, so an answer depends on how long the other rows of the batch are.", "padding_invariance",
    ),
    Mistake(
        "mixers", (*ATTENTION, "linear_attention", "retention", "gated_delta", "kda", "mamba2"),
        "A cache reused for the next prompt",
        "What the last text left in the state is read by the next one.", "call_isolation",
    ),
    Mistake(
        "mixers", ("latent_attention",), "A latent cache that holds full keys and values",
        "The latents are expanded before they are stored: correct answers, and none of the savings.",
        "size_matches_model",
    ),
    Mistake(
        "norms", ("rms",), "RMSNorm that multiplies by the root, or adds ε outside it",
        "Multiplying by the root instead of dividing squares the scale. ε outside it shows only in small inputs.",
        "kernel_equivalence",
    ),
    Mistake(
        "residuals", ALL_BLOCKS, "The input added twice",
        "The block adds its input, and so does the layer around it: the stream doubles with every layer.",
        "residual_identity",
    ),
    Mistake(
        "residuals", ("residual_dual",), "ResiDual with one stream",
        "Without the second stream it is post-norm: each norm shrinks what earlier layers added.", "residual_identity",
    ),
    Mistake(
        "mixers", ("attention",), "Dropout that stays on",
        "A dropout called as a function stays on in evaluation unless it is told, and answers vary.",
        "dropout_off_in_eval",
    ),
    Mistake(
        "feedforwards", ("moe",), "Every expert on every token",
        "All experts run and most results are multiplied by 0: right answers at many times the cost.", "idle_experts",
    ),
    Mistake(
        "feedforwards", ("moe",), "Gates renormalized by the wrong convention",
        "Mixtral divides the chosen gates by their sum, Qwen2-MoE does not. Both train, but weights trained with one "
        "do not work with the other.", "parity with the Mixtral",
    ),
    Mistake(
        "feedforwards", ("moe",), "A balancing loss that counts padding",
        "Padding is routed and counted, so the loss balances tokens that nobody reads.", "router_statistics",
    ),
)  # fmt: skip
