"""Draw docs/images/parts: what each kind of part reads, measured on models with random weights.

    python -m tools.part_pictures [KIND ...]

A cell is dark where an output changes much with an input, in proportion to the darkest of its row, and white where it
does not change at all. Rows and columns are tokens, or the branches of a stack, or its layers.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heddle.config import parse_config
from heddle.laws.harness import model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.layout import Layout
from tests.cases import Data, attention, compressed, design, differential, indexer, latent, layer, rwkv7

FOLDER = Path(__file__).resolve().parents[1] / "docs/images/parts"
TOKENS, LAYERS, PROBES = 24, 6, 3
STEP = 1e-5
SIDE, GAP, CAPTION, PANELS_IN_A_ROW = 132, 18, 34, 3  # pixels; three are readable on a phone
SHADES = ("#e3ecf7", "#bdd3ec", "#8fb4dd", "#5f92c9", "#3b6fae", "#1f4e8c", "#0f3263")
MLP: Data = {"kind": "mlp", "hidden": 24}


OF_TOKENS = "Row t and column s of a picture: the darker, the more output t changes with token s, on random weights"
CELLS = {  # what pages say of their pictures
    "mixers": f"{OF_TOKENS}; white: not at all. In pictures of layers: mixer t with the input of mixer s.",
    "feedforwards": f"{OF_TOKENS}; white: not at all.",
    "residuals": "Row i and column j of a picture: the darker, the more the input of branch i changes with the output "
    "of branch j, on random weights; white: not at all. Column 0 is the embedding, the last row the end of the stack.",
    "model": f"{OF_TOKENS}; white: not at all. In row t, the module of depth d reads token t + d.",
}


class Panel(NamedTuple):
    """A design, and what of it is drawn: `tokens`, `words`, `layers` or `branches`."""

    label: str
    data: Data
    what: str = "tokens"


def one(**fields: Any) -> Data:
    return design(layer(attention(**fields)))


def alone(kind: str, **fields: Any) -> Data:
    return design(layer({"kind": kind, **fields}))


def stack(kind: str, **fields: Any) -> Data:
    return design(layer(attention(), MLP, repeat=LAYERS), residual={"kind": kind, **fields})


def last(number: int, fields: Data, **own: Any) -> Data:
    """Layers of which the last `number` have these fields, too."""
    first = layer(attention(kv_heads=2, **own), repeat=LAYERS - number)
    return design(first, layer(attention(kv_heads=2, **own, **fields), repeat=number))


MOBA: Data = {"top_k": 2, "block": 4, "block_score": "mean", "local": 1}
PANELS: dict[str, list[Panel]] = {
    "mixers-attention": [
        Panel("causal", one()), Panel("window 6", one(window=6)), Panel("chunks of 6", one(window=6, chunked=True)),
        Panel("causal: false", one(causal=False)), Panel("forget", one(forget=True)),
        Panel("relative logits of 5 keys", one(position=None, relative_dim=3, relative_extent=5)),
        Panel("indexer: 4 keys", one(indexer=indexer(4))),
        Panel("indexer: 2 blocks of 4", one(indexer=indexer(2, block=4, local=1))), Panel("MoBA", one(indexer=MOBA)),
        Panel("convolved k and v", one(window=6, short_convolution={"of": ["k", "v"]})),
        Panel("shared_kv, 3 layers", last(3, {"shared_kv": True}), "layers"),
        Panel("value_residual", last(5, {"value_residual": [0.5, 0.5]}), "layers"),
    ],
    "mixers-latent_attention": [
        Panel("latent", design(layer(latent()))),
        Panel("indexer: 4 keys", design(layer(latent(query_rank=6, indexer=indexer(4))))),
        Panel("pooled keys", design(layer(latent(query_rank=6, indexer=indexer(2, block=4, pool="gated"))))),
    ],
    "mixers-compressed_attention": [
        Panel("blocks of 4", design(layer(compressed(compress_ratio=4)))),
        Panel("overlapping", design(layer(compressed(compress_ratio=3, overlap=True)))),
        Panel(
            "index: 2 blocks of 3",
            design(layer(compressed(query_rank=9, compress_ratio=3, top_k=2, index_heads=2, index_head_dim=6))),
        ),
        Panel("window alone", design(layer(compressed()))),
    ],
    "mixers-native_sparse_attention": [
        Panel(
            "3 blocks of 3",
            alone("native_sparse_attention", heads=4, kv_heads=2, block=3, top_k=3, local=1, first=1, window=4),
        ),
    ],
    "mixers-path_attention": [
        Panel("PaTH", alone("path_attention", heads=4)), Panel("forget", alone("path_attention", heads=4, forget=True)),
    ],
    "mixers-differential_attention": [
        Panel("causal", design(layer(differential()))), Panel("window 6", design(layer(differential(window=6)))),
    ],
    "mixers-linear_attention": [
        Panel("causal", alone("linear_attention", heads=3)),
        Panel("causal: false", alone("linear_attention", heads=3, causal=False)),
    ],
    "mixers-retention": [
        Panel("retention", alone("retention", heads=3)), Panel("learned", alone("retention", heads=3, decay="learned")),
    ],
    "mixers-gated_delta": [
        Panel("delta rule", alone("gated_delta", heads=4)), Panel("2 steps", alone("gated_delta", heads=4, steps=2)),
        Panel("β up to 2", alone("gated_delta", heads=4, negative_eigenvalues=True)),
        Panel("preconditioned", alone("gated_delta", heads=4, preconditioned=True)),
    ],
    "mixers-kda": [
        Panel("KDA", alone("kda", heads=3)), Panel("decay_bound", alone("kda", heads=3, decay_bound=1.5)),
        Panel("channel_gates", alone("kda", heads=3, channel_gates=True)),
    ],
    "mixers-mamba": [Panel("S6", alone("mamba", state_size=5))],
    "mixers-mamba2": [Panel("SSD", alone("mamba2", heads=6, state_size=5))],
    "mixers-rwkv7": [Panel("RWKV-7", design(layer(rwkv7())))],
    "mixers-rg_lru": [Panel("RG-LRU", alone("rg_lru", heads=3))],
    "mixers-short_conv": [Panel("kernel 4", alone("short_conv"))],
    "mixers-pair": [
        Panel(
            "window 4 beside SSD",
            alone("pair", first=attention(window=4), second={"kind": "mamba2", "heads": 6, "state_size": 5}),
        ),
    ],
    "feedforwards-ngram_memory": [
        Panel("two and three tokens", design(layer(None, {"kind": "ngram_memory", "dim": 3, "slots": 20})), "words"),
        Panel(
            "no convolution",
            design(layer(None, {"kind": "ngram_memory", "dim": 3, "slots": 20, "conv_kernel": 1})), "words",
        ),
    ],
    "model-MultiTokenConfig": [
        Panel(label, design(layer(attention()), multi_token={"depth": 3, "loss_weight": 0.5}), what)
        for label, what in (("next token", "words"), ("2nd", "ahead 1"), ("3rd", "ahead 2"), ("4th", "ahead 3"))
    ],
    "residuals-pre_norm": [
        Panel("pre-norm", stack("pre_norm"), "branches"), Panel("gated", stack("pre_norm", gate_rank=3), "branches"),
    ],
    "residuals-post_norm": [
        Panel("post-norm", stack("post_norm"), "branches"),
        Panel("outer sum", stack("post_norm", outer_sum=True), "branches"),
    ],
    "residuals-deep_norm": [Panel("DeepNorm", stack("deep_norm"), "branches")],
    "residuals-sandwich": [
        Panel("sandwich", stack("sandwich"), "branches"),
        Panel("LAuReL", stack("sandwich", laurel_rank=4), "branches"),
        Panel("AltUp", stack("sandwich", altup_streams=3), "branches"),
    ],
    "residuals-parallel": [
        Panel("parallel", stack("parallel"), "branches"), Panel("two norms", stack("parallel", norms=2), "branches"),
    ],
    "residuals-reordered": [Panel("reordered", stack("reordered"), "branches")],
    "residuals-residual_dual": [Panel("ResiDual", stack("residual_dual"), "branches")],
    "residuals-hyper_connections": [
        Panel("3 streams", stack("hyper_connections", streams=3), "branches"),
        Panel("weighted collapse", stack("hyper_connections", streams=3, collapse="weighted"), "branches"),
        Panel("mixing: false", stack("hyper_connections", streams=3, mixing=False), "branches"),
        Panel("gates", stack("hyper_connections", streams=3, mixing=False, gate_rank=5), "branches"),
    ],
    "residuals-attention_residuals": [
        Panel("full", stack("attention_residuals"), "branches"),
        Panel("blocks of 2 layers", stack("attention_residuals", block_size=2), "branches"),
        Panel("norms of values", stack("attention_residuals", value_norm=True), "branches"),
    ],
}  # fmt: skip


def layers_of(model: Decoder) -> Any:
    """The layers, whose modules have the types of their kinds."""
    return model.layers


def map_of_tokens(model: Decoder) -> Tensor:
    """How much output t of the first mixer changes with its input s, [T, T]."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, model.config.width, dtype=torch.float64)
    moved = x.repeat(TOKENS, PROBES, 1, 1)
    moved[range(TOKENS), :, range(TOKENS)] += STEP * torch.randn(TOKENS, PROBES, x.shape[1], dtype=torch.float64)
    with torch.no_grad():
        y = layers_of(model)[0].mixer(
            torch.cat((x[None], moved.flatten(0, 1))), Layout.causal(1 + len(moved) * PROBES, TOKENS)
        )[0]
    return ((y[1:] - y[0]) / STEP).unflatten(0, (TOKENS, PROBES)).square().sum((1, 3)).sqrt().T


def map_of_words(model: Decoder, depth: int = 0) -> Tensor:
    """How much hidden state t, or the output t of the module of this depth, changes with token s, [T, T]."""
    tokens = random_tokens(model.config, 1, TOKENS).repeat(1 + TOKENS, 1)
    tokens[range(1, 1 + TOKENS), range(TOKENS)] += 1
    tokens %= model.embed.weight.shape[0]
    layout = Layout.causal(1 + TOKENS, TOKENS)
    with torch.no_grad():
        y = model(tokens, layout)[0]
        if depth:
            read = model.predict_ahead(y, tokens, layout)[depth - 1][0]
            y = torch.cat((read, y.new_zeros(y.shape)), 1)[:, :TOKENS]
    return (y[1:] - y[0]).norm(dim=-1).T


def map_of_layers(model: Decoder) -> Tensor:
    """|∂ output of mixer i / ∂ input of mixer j| where no layer reads the stream, [layers, layers]."""
    inputs, outputs = list[Tensor](), list[Tensor]()

    def own_input(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs.append(torch.randn_like(arguments[0]).requires_grad_())
        return (inputs[-1], *arguments[1:])

    for each in layers_of(model):
        each.mixer.register_forward_pre_hook(own_input)
        each.mixer.register_forward_hook(lambda _m, _a, result: outputs.append(result[0]))
    model(random_tokens(model.config, 1, TOKENS))
    return slopes_of(outputs, inputs)


def map_of_branches(model: Decoder) -> Tensor:
    """|∂ input of branch i / ∂ output of branch j|, [branches and the end, embedding and branches]."""
    inputs, outputs = list[Tensor](), list[Tensor]()

    def own_output(_module: nn.Module, arguments: tuple[Any, ...], result: Any) -> Any:
        inputs.append(arguments[0])
        y = result[0] if isinstance(result, tuple) else result
        outputs.append(torch.randn_like(y).requires_grad_())
        return (outputs[-1], *result[1:]) if isinstance(result, tuple) else outputs[-1]

    for each in layers_of(model):
        each.mixer.register_forward_hook(own_output)
        each.feedforward.register_forward_hook(own_output)
    embedded = torch.randn(1, 4, model.config.width, dtype=torch.float64, requires_grad=True)
    end = model(embedded)[0]
    return slopes_of([*inputs, end], [embedded, *outputs])


def slopes_of(results: list[Tensor], leaves: list[Tensor]) -> Tensor:
    rows = []
    for y in results:
        found = torch.zeros(len(leaves), dtype=torch.float64)
        for _ in range(PROBES):
            gradients = torch.autograd.grad((y * torch.randn_like(y)).sum(), leaves, retain_graph=True,
                                            materialize_grads=True)  # fmt: skip
            found += torch.stack([each.square().sum() for each in gradients])
        rows.append(found.sqrt())
    return torch.stack(rows)


MAPS: dict[str, Callable[[Decoder], Tensor]] = {
    "tokens": map_of_tokens, "words": map_of_words, "layers": map_of_layers, "branches": map_of_branches,
    **{f"ahead {depth}": partial(map_of_words, depth=depth) for depth in (1, 2, 3)},
}  # fmt: skip


def cells(values: Tensor, size: float) -> Iterator[str]:
    """A path for each shade."""
    share = (values / values.amax(1, keepdim=True).clamp(min=1e-300)).sqrt()
    levels = torch.where(values > 1e-9, (share * (len(SHADES) - 1)).round(), -1).int().tolist()
    for shade, color in enumerate(SHADES):
        path = ""
        for row, line in enumerate(levels):
            column = 0
            while column < len(line):
                run = column
                while run < len(line) and line[run] == shade:
                    run += 1
                if run > column:
                    path += f"M{column} {row}h{run - column}v1h{column - run}z"
                column = max(run, column + 1)
        if path:
            yield f'<path transform="scale({size:.4g})" fill="{color}" d="{path}"/>'


def picture(kind: str, panels: list[Panel]) -> str:
    """The SVG."""
    columns = min(len(panels), PANELS_IN_A_ROW)
    width = columns * (SIDE + GAP) + GAP
    height = -(-len(panels) // columns) * (SIDE + CAPTION) + GAP
    names = ", ".join(panel.label for panel in panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'font-family="sans-serif" font-size="12" aria-label="{escape(f"What {kind} reads: {names}")}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        values = MAPS[panel.what](model_under_test(parse_config(ModelConfig, panel.data)))
        x = GAP + number % columns * (SIDE + GAP)
        y = number // columns * (SIDE + CAPTION) + CAPTION - 10
        lines += [
            f'<g transform="translate({x} {y})"><text y="-6" fill="#222">{escape(panel.label)}</text>',
            *cells(values, SIDE / max(values.shape)),
            f'<rect width="{SIDE}" height="{SIDE}" fill="none" stroke="#999"/></g>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    """Draw them all, or these."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", metavar="KIND", nargs="*")
    asked = parser.parse_args().kinds
    FOLDER.mkdir(exist_ok=True)
    for kind, panels in PANELS.items():
        if not asked or kind in asked:
            (FOLDER / f"{kind}.svg").write_text(picture(kind, panels), encoding="utf-8")


if __name__ == "__main__":
    main()
