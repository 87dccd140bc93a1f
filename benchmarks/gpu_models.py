"""The sections of `benchmarks.gpu` on whole models: training and decoding, beside transformers and a plain loop."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu_setup import Call, Comparison, Setup
from heddle.generation.decode import DECODING, DecodingFacts
from heddle.generation.model_runner import GenerationRequest, ModelRunner
from heddle.generation.sampling import Sampler
from heddle.model.copies import compiled
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.model.size import flops_per_token
from heddle.model.state import State
from heddle.numerics.cross_entropy import loss_sum
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
    """Training steps in bfloat16: forward, loss, backward, fused AdamW. transformers' Llama beside gqa."""
    for name, size in {"toy": TOY_SIZE}.items() if setup.toy else SIZES.items():
        for mixer in MIXERS:
            batch, length = (2, 16) if setup.toy else (8 if name == "1 B" else 16, 4096)
            config = load_config(design(mixer, size, 64 if setup.toy else VOCABULARY))
            work = 3 * flops_per_token(_on_meta(config), length) * batch * length
            yield Comparison(
                f"training, {mixer}, {name}",
                partial(_training, setup, config, (batch, length), mixer == "gqa", size),
                goal=1.0 if mixer == "gqa" else None,
                work=("MFU", work / PEAK),
            )


def _on_meta(config: Any) -> Decoder:
    return build(config, dtype=torch.bfloat16, device="meta")


def _training(
    setup: Setup, config: Any, shape: tuple[int, int], with_peers: bool, size: tuple[int, ...]
) -> dict[str, Call]:
    model = build(config, dtype=setup.dtype, device=setup.device).train()
    tokens = torch.randint(config.vocab_size, (shape[0], shape[1] + 1), device=setup.device)
    layout = Layout.causal(*shape, device=setup.device)
    forward_model = model if setup.toy else compiled(model)

    def loss() -> Tensor:
        hidden, _ = forward_model(tokens[:, :-1], replace(layout, cache={}))
        return loss_sum(hidden.flatten(0, 1), model.head.output_head, tokens[:, 1:].flatten()) / tokens[:, 1:].numel()

    calls = {"heddle": _step(model, loss)}
    if with_peers:
        for side, tuned in (("transformers compiled", True), ("transformers", False)):
            peer = llama(size, config.vocab_size, setup)
            forward = setup.compiled(peer) if tuned else peer
            calls[side] = _step(peer, partial(_peer_loss, forward, tokens[:, :-1]))
    return calls


def _peer_loss(forward: Callable[..., Any], tokens: Tensor) -> Tensor:
    loss: Tensor = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def _step(model: nn.Module, loss: Callable[[], Tensor]) -> Call:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def llama(size: tuple[int, ...], vocab_size: int, setup: Setup) -> Any:
    """transformers' Llama of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads, kv_heads, hidden = size
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=hidden, max_position_embeddings=65536,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return model.to(setup.device, setup.dtype)


def decode(setup: Setup) -> Iterator[Comparison]:
    """A decoded token after a context, by heddle's own loop, and by a plain compiled loop with a static cache."""
    size, vocab_size = (TOY_SIZE, 64) if setup.toy else (SIZES["1 B"], VOCABULARY)
    for mixer in ("gqa", "mla", "gated_delta"):
        for batch in (1, 32):
            for context in (32,) if setup.toy else CONTEXTS:
                yield Comparison(
                    f"decoding, {mixer}, batch {batch}, after {context:,}",
                    partial(_decoding, setup, (design(mixer, size, vocab_size), size), batch, context, mixer == "gqa"),
                    goal=0.9 if mixer == "gqa" else None,
                    work=("tokens per second", batch * (4 if setup.toy else NEW_TOKENS)),
                )


def _decoding(
    setup: Setup, designed: tuple[dict[str, Any], tuple[int, ...]], batch: int, context: int, with_peer: bool
) -> dict[str, Call]:
    model = build(load_config(designed[0]), dtype=setup.dtype, device=setup.device).eval()
    new_tokens = 4 if setup.toy else NEW_TOKENS
    runner, request = ModelRunner(model), GenerationRequest([[1]] * batch, new_tokens, Sampler())
    hidden = torch.randn(batch, model.config.width, device=setup.device).to(setup.dtype)
    steps = DECODING.choose(DecodingFacts(setup.device, new_tokens))

    def call() -> None:
        state = _filled(model, batch, context, new_tokens)
        torch.stack(list(islice(steps.run(runner, request, hidden, state), new_tokens))).tolist()

    calls: dict[str, Call] = {"heddle": call}
    if with_peer:
        calls["plain loop"] = plain_loop(setup, designed[1], model.embed.weight.shape[0], (batch, context, new_tokens))
    return calls


@torch.no_grad()
def _filled(model: Decoder, batch: int, context: int, new_tokens: int) -> State:
    """A state after `context` tokens whose keys and values were never computed."""
    state = model.init_state(batch, context + new_tokens)
    layout = Layout.causal(batch, context, device=model.embed.weight.device)
    table, _ = state.table.extend(layout)
    return State(table, state.layers, state.fingerprint)


class PlainLayer(nn.Module):
    """Pre-norm GQA with a static cache and SwiGLU, without positions: what one token of a plain loop computes."""

    def __init__(self, size: tuple[int, ...], cache: tuple[int, int]) -> None:
        super().__init__()
        width, _, self.heads, self.groups, hidden = size
        self.head_dim = width // self.heads
        (batch, slots), kv_width = cache, self.groups * self.head_dim
        self.qkv, self.out = nn.Linear(width, width + 2 * kv_width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.keys: Tensor
        self.values: Tensor
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, self.groups, slots, self.head_dim))

    def forward(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        """x [B, 1, width] -> the same shape; writes the cache at `position`."""
        width, kv_width = x.shape[-1], self.groups * self.head_dim
        projected = self.qkv(self.norms[0](x)).split([width, kv_width, kv_width], dim=-1)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in projected)
        keys, values = self.keys.index_copy_(2, position, k), self.values.index_copy_(2, position, v)
        y = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        down: Tensor = self.down(functional.silu(gate) * up)
        return x + down


class PlainModel(nn.Module):
    """Layers, a tied head, and the greedy next token."""

    def __init__(self, size: tuple[int, ...], vocab_size: int, cache: tuple[int, int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, size[0])
        self.layers = nn.ModuleList(PlainLayer(size, cache) for _ in range(size[1]))
        self.norm = nn.RMSNorm(size[0])

    def forward(self, tokens: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        """tokens [B, 1] -> the next ones."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, position, mask)
        return (self.norm(x) @ self.embed.weight.T).argmax(-1)


def plain_loop(setup: Setup, size: tuple[int, ...], vocab_size: int, shape: tuple[int, int, int]) -> Call:
    """A loop as gpt-fast's: one compiled step with CUDA graphs over a static cache."""
    batch, context, new_tokens = shape
    slots = context + new_tokens
    model = PlainModel(size, vocab_size, (batch, slots)).to(setup.device, setup.dtype).eval()
    step = setup.compiled(model, mode="reduce-overhead", fullgraph=True)
    slot = torch.arange(slots, device=setup.device)

    @torch.no_grad()
    def loop() -> None:
        tokens = torch.ones(batch, 1, dtype=torch.int64, device=setup.device)
        for index in range(new_tokens):
            position = torch.tensor([context + index], device=setup.device)
            tokens = step(tokens, position, (slot <= position)[None, None, None]).clone()
        tokens.tolist()

    return loop
