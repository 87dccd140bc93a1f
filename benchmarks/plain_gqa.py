"""Plain PyTorch, by hand: grouped-query attention, RoPE, SwiGLU, tied head. The peer of small designs.

What a careful user writes without a library: torch's fused causal attention, one product for all of q, k and v, one for
gate and up, torch's RMS norm, its cross-entropy, its fused AdamW; and to decode, a static cache, as in gpt-fast. `load`
takes heddle's weights, so that both compute the same.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from heddle.model.decoder import Decoder


class Layer(nn.Module):
    """One layer. rotation: cosines and sines, [T, head_dim / 2]."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.mixer_norm, self.feedforward_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, attend: "Attend") -> Tensor:
        """x [B, T, width] -> the same shape."""
        sizes = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
        parts = self.qkv(self.mixer_norm(x)).split(sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.dim)).transpose(1, 2) for part in parts)
        q, k = rotate(q, cosines, sines), rotate(k, cosines, sines)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.feedforward_norm(x)).chunk(2, dim=-1)
        z: Tensor = x + self.down(functional.silu(gate) * up)
        return z


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k and v [B, heads, T, dim] -> the shape of q


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention within a whole text."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """RoPE of x [B, heads, T, dim], whose pairs are (i, i + dim / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cosines - b * sines, b * cosines + a * sines], dim=-1)


class PlainModel(nn.Module):
    """A decoder with a tied head."""

    def __init__(self, ours: Decoder, length: int) -> None:
        super().__init__()
        config = ours.config
        mixer, feedforward = config.layers[0].mixer.dump(), config.layers[0].feedforward.dump()  # type: ignore[union-attr]
        eps, dtype = config.norm.dump()["eps"], ours.embed.weight.dtype
        self.embed = nn.Embedding(config.vocab_size or 0, config.width)
        self.layers = nn.ModuleList(
            Layer(config.width, mixer["heads"], mixer["kv_heads"], feedforward["hidden"], eps) for _ in ours.layers
        )
        self.norm = nn.RMSNorm(config.width, eps)
        dim = config.width // mixer["heads"]
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        self.to(dtype).load(ours)

    @torch.no_grad()
    def load(self, ours: Decoder) -> None:
        """Copy heddle's weights."""
        self.embed.weight.copy_(ours.embed.weight)
        weights = dict(ours.named_parameters())
        self.norm.weight.copy_(weights["final_norm.norm.weight"])
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)

            def stacked(*names: str, prefix: str = f"layers.{index}.") -> Tensor:
                return torch.cat([weights[prefix + name] for name in names])

            layer.mixer_norm.weight.copy_(stacked("residual.norms.mixer.weight"))
            layer.feedforward_norm.weight.copy_(stacked("residual.norms.feedforward.weight"))
            layer.qkv.weight.copy_(stacked("mixer.q.weight", "mixer.k.weight", "mixer.v.weight"))
            layer.out.weight.copy_(stacked("mixer.out.weight"))
            layer.gate_up.weight.copy_(stacked("feedforward.gate.weight", "feedforward.up.weight"))
            layer.down.weight.copy_(stacked("feedforward.down.weight"))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of targets int64 [B, T] after tokens [B, T]."""
        x = self.embed(tokens)
        length = tokens.shape[1]
        cosines, sines = self.get_buffer("cosines")[:length], self.get_buffer("sines")[:length]
        for layer in self.layers:
            x = layer(x, cosines, sines, causal)
        logits = self.norm(x) @ self.embed.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PlainDecoder(nn.Module):
    """A plain model over a static cache of some slots, token by token."""

    def __init__(self, model: PlainModel, batch: int, slots: int) -> None:
        super().__init__()
        self.model = model
        layers: list[Layer] = list(model.layers)  # type: ignore[arg-type]
        shape = (len(layers), 2, batch, layers[0].kv_heads, slots, layers[0].dim)
        self.register_buffer("cache", model.embed.weight.new_zeros(shape), persistent=False)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Logits [B, vocabulary] after tokens [B, 1] at `position` int64 [1], whose keys and values are written."""
        cache = self.get_buffer("cache")
        mask = (torch.arange(cache.shape[-2], device=tokens.device) <= position)[None, None, None]
        x = self.model.embed(tokens)
        rotation = [self.model.get_buffer(name)[position] for name in ("cosines", "sines")]
        for layer, (keys, values) in zip(self.model.layers, cache.unbind(), strict=True):

            def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor = keys, values: Tensor = values) -> Tensor:
                keys.index_copy_(2, position, k)
                values.index_copy_(2, position, v)
                return functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

            x = layer(x, *rotation, attend)
        logits: Tensor = (self.model.norm(x) @ self.model.embed.weight.T)[:, -1]
        return logits
