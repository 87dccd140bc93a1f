"""Facts for the pages of parts: measured states and costs."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from heddle.model.config import ModelConfig
from heddle.model.decoder import Layer, build
from heddle.numerics.dispatch import count_flops
from heddle.parts.build import ResidualContext
from heddle.parts.layout import EncoderOutput, HandedOver, Layout
from tests.cases import case
from tools.markdown import table

ELEMENT = 4  # bytes of a float32
SHORT, LONG = 64, 1024  # sequence lengths that costs are measured at
ENCODER_LENGTH = 64  # tokens of the encoder output that cross-attention reads
COSTS = f"""Costs are counted on small designs of `tests/cases.py` (width 24), for one layer and one sequence. FLOPs are
those of matrix products; a multiply-add counts as two, and only causal pairs count. The state is in elements, of 4
bytes each in float32: those that a token adds, and all after {SHORT} tokens; a bidirectional mixer has none. A mixer's
FLOPs per token are averages over a sequence of {SHORT} and of {LONG:,} tokens. An encoder output has {ENCODER_LENGTH}
tokens."""


def state_of(config: ModelConfig) -> tuple[int, int]:
    """Elements of one layer's state for one row: those that one more token adds, and those after `SHORT` tokens."""
    model = build(config, device="meta")
    if not model.causal:
        return 0, 0
    encoder_output = encoder_output_for(model.encoder_width)
    states = [model.init_state(1, tokens, encoder_output) for tokens in (SHORT, SHORT + 1)]
    elements, next_elements = (sum(state.layer_bytes) // (ELEMENT * config.depth) for state in states)
    return next_elements - elements, elements


def encoder_output_for(width: int | None) -> EncoderOutput | None:
    """What cross-attention reads; None without cross-attention."""
    return None if width is None else EncoderOutput(torch.zeros(1, ENCODER_LENGTH, width, device="meta"))


def layer_of(config: ModelConfig) -> Layer:
    """The first layer of a design, on the meta device."""
    layer = build(config, device="meta").layers[0]
    assert isinstance(layer, Layer)
    return layer


def flops_per_token(tokens: int, run: Callable[[Tensor, Layout], object], width: int) -> int:
    """FLOPs per token of the matrix products of one call on the meta device (a multiply-add is two)."""
    handed_over = HandedOver()
    handed_over.tokens = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    layout = replace(Layout.causal(1, tokens, device="meta"), handed_over=handed_over)
    with torch.no_grad(), count_flops() as total:
        run(torch.zeros(1, tokens, width, device="meta"), layout)
    return round(total[0] / tokens)


def mixer_costs(config: ModelConfig) -> tuple[int, int]:
    """FLOPs per token of the first layer's mixer, in texts of `SHORT` and of `LONG` tokens."""
    mixer = layer_of(config).mixer
    assert mixer is not None

    def run(x: Tensor, layout: Layout) -> object:
        encoder_output = encoder_output_for(mixer.encoder_width)
        return mixer(x, layout if encoder_output is None else layout.with_encoder_output(encoder_output))

    return flops_per_token(SHORT, run, config.width), flops_per_token(LONG, run, config.width)


def feedforward_costs(config: ModelConfig) -> tuple[int, int, int]:
    """Parameters of the first layer's feed-forward, its active parameters per token, and its FLOPs per token."""
    feedforward = layer_of(config).feedforward
    assert feedforward is not None
    parameters = sum(parameter.numel() for parameter in feedforward.parameters())
    active = parameters - feedforward.inactive_parameters
    part = config.layers[0].feedforward

    def run(x: Tensor, layout: Layout) -> object:
        return feedforward(config.residual.expand(x) if part is not None and part.reads_streams else x, layout)

    return parameters, active, flops_per_token(SHORT, run, config.width)


def residual_costs(config: ModelConfig) -> tuple[int, int]:
    """Parameters of the residual block of one layer with two branches, and FLOPs per token of its matrix products."""
    context = ResidualContext(("mixer", "feedforward"), config.width, config.norm, 0.0)
    with torch.device("meta"):
        block = config.residual.build(context)
        expand = config.residual.build_expansion(config.width) or config.residual.expand
        stream = expand(torch.zeros(1, SHORT, config.width))
    branches = {name: nn.Identity() for name in context.branches}
    cost = flops_per_token(SHORT, lambda _, layout: block(stream, branches), config.width)
    return sum(parameter.numel() for parameter in block.parameters()), cost


EXAMPLES = 2  # rows of a table of costs


def mixer_table(kind: str, cases: list[str]) -> str:
    """State and cost of a mixer alone, once for each set of sizes that a case gives."""
    rows: dict[tuple[str, ...], tuple[str, ...]] = {}
    for name in cases:
        config = case(name)
        mixer = config.layers[0].mixer
        if len(config.layers) > 1 or mixer is None or mixer.kind != kind:
            continue
        sizes = {key: value for key, value in mixer.dump().items() if key == "causal" or type(value) is int}
        shown = {key: str(value).lower() for key, value in sizes.items() if value is not True}
        if tuple(shown) in rows:
            continue
        cost = tuple(f"{flops:,}" for flops in mixer_costs(config))
        added, elements = state_of(config)
        state = ("none", "none") if elements == 0 else (f"{added:,}", f"{elements:,}")
        rows[tuple(shown)] = (", ".join(f"{key} {value}" for key, value in shown.items()), *state, *cost)
    if not rows:
        return ""
    head = ("sizes", "state per token", f"after {SHORT}", f"FLOPs per token of {SHORT}", f"of {LONG:,}")
    return table(head, list(rows.values())[:EXAMPLES])


def feedforward_table(kind: str, cases: list[str]) -> str:
    """Parameters and cost of each case whose first layer has the feed-forward."""
    rows: dict[tuple[str, ...], str] = {}
    for name in cases:
        config = case(name)
        feedforward = config.layers[0].feedforward
        if feedforward is not None and feedforward.kind == kind:
            rows.setdefault(tuple(f"{number:,}" for number in feedforward_costs(config)), name)
    head = ("case", "parameters", "active parameters per token", "FLOPs per token")
    return table(head, [(f"`{name}`", *cells) for cells, name in list(rows.items())[:EXAMPLES]])


def residual_table(kind: str, cases: list[str]) -> str:
    """Parameters and cost of the residual block in each case that has it."""
    rows: dict[tuple[str, ...], str] = {}
    for name in cases:
        rows.setdefault(tuple(f"{number:,}" for number in residual_costs(case(name))), name)
    head = ("case", "parameters of one layer's block", "FLOPs per token of the block itself")
    return table(head, [(f"`{name}`", *cells) for cells, name in list(rows.items())[:EXAMPLES]])


COSTED = {"mixers": mixer_table, "feedforwards": feedforward_table, "residuals": residual_table}
