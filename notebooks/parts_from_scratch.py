# %% [markdown]
# # Parts from scratch, beside heddle's
#
# The parts of a layer in a few lines each, and the check that they are what a real model computes: to ten digits, in
# float64.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("heddle") is None:  # on Colab
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "heddle-lm"], check=True)

# %%
import torch
from torch import Tensor

import heddle

design = {
    "vocab_size": 64,
    "width": 32,
    "layers": [
        {
            "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2, "position": {"kind": "rope"}},
            "feedforward": {"kind": "gated", "hidden": 48},
        }
    ],
}
model = heddle.build(heddle.load_config(design), dtype=torch.float64, seed=0)
weights = dict(model.named_parameters())
{name: tuple(weight.shape) for name, weight in weights.items()}

# %% [markdown]
# ## Norm
#
# RMSNorm divides by the root of the mean square: $y = g\,x / \sqrt{\mathrm{mean}(x^2) + \epsilon}$.


# %%
def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-5) -> Tensor:
    return gain * x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


# %% [markdown]
# ## Rotary positions
#
# Pair $i$ of a head's dims turns by $m\,\theta_i$ at position $m$. In the layout of Llama's files, dim $i$ pairs with
# dim $i + d/2$. A common mistake is to pair neighbors: then the model runs, and is wrong.


# %%
def rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    length, dim = x.shape[-2:]
    frequency = torch.tensor([base ** (-2 * i / dim) for i in range(dim // 2)]).double()  # rounded to float32, as usual
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1)


# %% [markdown]
# ## Grouped-query attention
#
# Two query heads share a key and a value head. Query head $h$ reads key head $\lfloor h / 2 \rfloor$: neighbors share.


# %%
def heads_of(x: Tensor, weight: Tensor, heads: int) -> Tensor:
    return (x @ weight.T).unflatten(-1, (heads, -1)).transpose(1, 2)


def attention(x: Tensor) -> Tensor:
    q = rotate(heads_of(x, weights["layers.0.mixer.q.weight"], 4))
    k = rotate(heads_of(x, weights["layers.0.mixer.k.weight"], 2)).repeat_interleave(2, dim=1)
    v = heads_of(x, weights["layers.0.mixer.v.weight"], 2).repeat_interleave(2, dim=1)
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, float("-inf"))
    return (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2) @ weights["layers.0.mixer.out.weight"].T


# %% [markdown]
# ## Gated feed-forward, and the whole model
#
# SwiGLU: one projection gates another. Each branch reads a norm of the stream and is added to it.


# %%
def feedforward(x: Tensor) -> Tensor:
    gate, up, down = (weights[f"layers.0.feedforward.{name}.weight"] for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def forward(tokens: Tensor) -> Tensor:
    stream = weights["embed.weight"][tokens]
    stream = stream + attention(rms_norm(stream, weights["layers.0.residual.norms.mixer.weight"]))
    stream = stream + feedforward(rms_norm(stream, weights["layers.0.residual.norms.feedforward.weight"]))
    return rms_norm(stream, weights["final_norm.norm.weight"])


# %% [markdown]
# ## The same numbers

# %%
tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    by_hand, (hidden, _) = forward(tokens), model(tokens)
difference = (by_hand - hidden).abs().max().item()
print(f"largest difference: {difference:.1e}")
assert difference < 1e-10

# %% [markdown]
# The mistake from above, pairs of neighbors, on purpose. Nothing fails, and every number is another.


# %%
def rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    length, dim = x.shape[-2:]
    frequency = torch.tensor([base ** (-2 * i / dim) for i in range(dim // 2)]).double()
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    first, second = x[..., ::2], x[..., 1::2]
    turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    return torch.stack(turned, dim=-1).flatten(-2)


with torch.no_grad():
    wrong = (forward(tokens) - hidden).abs().max().item()
print(f"largest difference: {wrong:.1e}")
assert wrong > 1e-6
