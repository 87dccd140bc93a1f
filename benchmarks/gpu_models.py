"""The sections of `benchmarks.gpu` on whole models: training and decoding, beside transformers and a plain loop."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_setup import Call, Comparison, Setup
from benchmarks.harness import EQUAL, EQUAL_IN_FLOAT32, largest_difference
from benchmarks.plain_gqa import PlainDecoder, PlainModel
from heddle.exchange.transformers.peer import transformers_model
from heddle.generation.decode import DECODING, DecodingFacts, GenerationRequest, ModelRunner, Sampler
from heddle.model.config import ModelConfig
from heddle.model.copies import compiled
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.model.size import flops_per_token
from heddle.model.state import State
from heddle.numerics.cross_entropy import OutputHead, loss_sum
from heddle.parts.layout import Layout

PEAK = 989e12  # FLOP/s of bfloat16 products of an H100 or H200 by its data sheet
VOCABULARY = 32000
# width, layers, heads, kv_heads, hidden
SIZES = {"0.2 B": (1024, 12, 16, 4, 2816), "1 B": (2048, 16, 32, 8, 5632)}
TOY_SIZE = (32, 2, 2, 1, 64)
ROPE = {"kind": "rope"}
CONTEXTS = (1024, 8192, 32768)
NEW_TOKENS = 256


def design(mixer: str, size: tuple[int, int, int, int, int], vocab_size: int) -> dict[str, Any]:
    """A design with one kind of mixer."""
    width, layers, heads, kv_heads, hidden = size
    head_dim = width // heads
    mixers: dict[str, dict[str, Any]] = {
        "gqa": {"kind": "attention", "heads": heads, "kv_heads": kv_heads, "position": ROPE},
        "window": {"kind": "attention", "heads": heads, "kv_heads": kv_heads, "window": 1024, "position": ROPE},
        "soft cap": {"kind": "attention", "heads": heads, "kv_heads": kv_heads, "softcap": 50.0, "position": ROPE},
        "alibi": {"kind": "attention", "heads": heads, "kv_heads": heads, "position": {"kind": "alibi"}},
        "mla": {
            "kind": "latent_attention", "heads": heads // 2, "kv_rank": width // 4, "nope_dim": 2 * head_dim,
            "rope_dim": head_dim, "value_dim": 2 * head_dim, "position": ROPE,
        },
        "linear": {"kind": "linear_attention", "heads": heads},
        "retention": {"kind": "retention", "heads": heads, "gate": "silu", "position": ROPE},
        "gated_delta": {"kind": "gated_delta", "heads": heads // 2, "key_heads": heads // 2},
        "kda": {"kind": "kda", "heads": heads // 2},
        "mamba2": {"kind": "mamba2", "heads": heads, "state_size": 2 * head_dim},
        "moe": {"kind": "attention", "heads": heads, "kv_heads": kv_heads, "position": ROPE},
    }  # fmt: skip
    dense = {"kind": "gated", "hidden": hidden}
    feedforward = {"kind": "moe", "experts": 8, "top_k": 2, "hidden": hidden // 2} if mixer == "moe" else dense
    layer = {"repeat": layers, "mixer": mixers[mixer], "feedforward": feedforward}
    return {"vocab_size": vocab_size, "width": width, "layers": [layer], "head": {"tied": True}}


MIXERS = ("gqa", "window", "soft cap", "alibi", "mla", "linear", "retention", "gated_delta", "kda", "mamba2", "moe")


def train(setup: Setup) -> Iterator[Comparison]:
    """Training steps in bfloat16: forward, loss, backward, fused AdamW. transformers' Llama beside gqa.

    Raises ValueError where both compute something else.
    """
    largest_difference("training", transformers_losses(setup), EQUAL_IN_FLOAT32)
    for name, size in {"toy": TOY_SIZE}.items() if setup.toy else SIZES.items():
        for mixer in MIXERS:
            batch, length = (2, 16) if setup.toy else (8 if name == "1 B" else 16, 4096)
            config = load_config(design(mixer, size, 64 if setup.toy else VOCABULARY))
            work = 3 * flops_per_token(_on_meta(config), length) * batch * length
            yield Comparison(
                f"training, {mixer}, {name}",
                partial(_training, setup, config, (batch, length), mixer == "gqa"),
                goal=1.0 if mixer == "gqa" else None,
                work=("MFU", work / PEAK),
            )


def _on_meta(config: Any) -> Decoder:
    return build(config, dtype=torch.bfloat16, device="meta")


def _training(setup: Setup, config: ModelConfig, shape: tuple[int, int], with_peers: bool) -> dict[str, Call]:
    model = build(config, dtype=setup.dtype, device=setup.device).train()
    tokens = torch.randint(model.embed.weight.shape[0], (shape[0], shape[1] + 1), device=setup.device)
    forward_model = model if setup.toy else compiled(model)
    calls = {"heddle": _step(model, partial(_loss, forward_model, model.head.output_head, tokens))}
    if with_peers:
        for side, tuned in (("transformers compiled", True), ("transformers", False)):
            peer = transformers_model(config).to(setup.device, setup.dtype)
            forward = setup.compiled(peer) if tuned else peer
            calls[side] = _step(peer, partial(_peer_loss, forward, tokens))
    return calls


def _loss(forward: Callable[..., Any], head: OutputHead, tokens: Tensor) -> Tensor:
    """The mean loss of tokens int64 [B, T + 1]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    hidden, _ = forward(inputs, Layout.causal(inputs.shape[0], inputs.shape[1], device=tokens.device))
    return loss_sum(hidden.flatten(0, 1), head, targets.flatten()) / targets.numel()


def _peer_loss(forward: Callable[..., Any], tokens: Tensor) -> Tensor:
    shifted = tokens[:, 1:].contiguous()  # the same targets as heddle's
    loss: Tensor = forward(input_ids=tokens[:, :-1], shift_labels=shifted, labels=tokens, use_cache=False).loss
    return loss


def _step(model: nn.Module, loss: Callable[[], Tensor]) -> Call:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def decode(setup: Setup) -> Iterator[Comparison]:
    """A decoded token after a context, by heddle's own loop, and by a plain compiled loop with a static cache.

    Raises ValueError where both compute something else.
    """
    largest_difference("decoding", plain_logits(setup), EQUAL)
    size, vocab_size = (TOY_SIZE, 64) if setup.toy else (SIZES["1 B"], VOCABULARY)
    for mixer in ("gqa", "mla", "gated_delta"):
        for batch in (1, 32):
            for context in (32,) if setup.toy else CONTEXTS:
                yield Comparison(
                    f"decoding, {mixer}, batch {batch}, after {context:,}",
                    partial(_decoding, setup, design(mixer, size, vocab_size), batch, context, mixer == "gqa"),
                    goal=0.9 if mixer == "gqa" else None,
                    work=("tokens per second", batch * (4 if setup.toy else NEW_TOKENS)),
                )


def _decoding(setup: Setup, designed: dict[str, Any], batch: int, context: int, with_peer: bool) -> dict[str, Call]:
    model = build(load_config(designed), dtype=setup.dtype, device=setup.device).eval()
    new_tokens = 4 if setup.toy else NEW_TOKENS
    runner, request = ModelRunner(model), GenerationRequest([[1]] * batch, new_tokens, Sampler())
    hidden = torch.randn(batch, model.config.width, device=setup.device).to(setup.dtype)
    steps = DECODING.choose(DecodingFacts(setup.device, new_tokens))

    def call() -> None:
        state = _filled(model, batch, context, new_tokens)
        torch.stack(list(islice(steps.run(runner, request, hidden, state), new_tokens))).tolist()

    calls: dict[str, Call] = {"heddle": call}
    if with_peer:
        calls["plain loop"] = plain_loop(setup, model, batch, context, new_tokens)
    return calls


@torch.no_grad()
def _filled(model: Decoder, batch: int, context: int, new_tokens: int) -> State:
    """A state after `context` tokens whose keys and values were never computed."""
    state = model.init_state(batch, context + new_tokens)
    layout = Layout.causal(batch, context, device=model.embed.weight.device)
    table, _ = state.table.extend(layout)
    return State(table, state.layers, state.fingerprint)


def plain_loop(setup: Setup, model: Decoder, batch: int, context: int, new_tokens: int) -> Call:
    """A loop as gpt-fast's: one compiled step with CUDA graphs over a static cache, from the model's weights."""
    plain = plain_decoder(model, batch, context + new_tokens)
    step = setup.compiled(lambda *token: plain(*token).argmax(-1, keepdim=True), mode="reduce-overhead", fullgraph=True)

    @torch.no_grad()
    def loop() -> None:
        tokens = torch.ones(batch, 1, dtype=torch.int64, device=setup.device)
        for index in range(new_tokens):
            tokens = step(tokens, torch.tensor([context + index], device=setup.device)).clone()
        tokens.tolist()

    return loop


def plain_decoder(model: Decoder, batch: int, slots: int) -> PlainDecoder:
    """The plain model with the weights, dtype and device of heddle's."""
    return PlainDecoder(PlainModel(model, slots).to(model.embed.weight.device), batch, slots)


@torch.no_grad()
def plain_logits(setup: Setup) -> dict[str, list[float]]:
    """Logits of the last of a few tokens in float64: of a tiny model, and of the plain loop with its weights."""
    model = build(load_config(design("gqa", TOY_SIZE, 64)), dtype=torch.float64, device=setup.device).eval()
    tokens = torch.arange(1, 13, device=setup.device).view(2, 6)
    plain = plain_decoder(model, *tokens.shape)
    for position, token in enumerate(tokens.split(1, dim=1)):
        logits = plain(token, torch.tensor([position], device=setup.device))
    ours = model.head(model(tokens)[0][:, -1])
    return {"heddle": ours.flatten().tolist(), "plain loop": logits.flatten().tolist()}


@torch.no_grad()
def transformers_losses(setup: Setup) -> dict[str, list[float]]:
    """The loss of a tiny model in float32, and of transformers' with its weights, whose norms have no float64."""
    config = load_config(design("gqa", TOY_SIZE, 64))
    tokens = torch.arange(1, 15, device=setup.device).view(2, 7)
    model, peer = build(config, device=setup.device), transformers_model(config).to(setup.device)
    ours = _loss(model, model.head.output_head, tokens)
    return {"heddle": [float(ours)], "transformers": [float(_peer_loss(peer, tokens))]}
