"""Shared by the parity tests of recurrent mixers: random inputs and weights, calls piece by piece, plain loops."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer
from tests.cases import Data
from tests.parity.reference import close
from tests.parts.loops import in_pieces, sigmoid

WIDTH = 24
EPS = 1e-4  # of the norm of a head's output
PIECES = [40, 1, 1, 3, 1, 29]
DOCUMENTS = [31, 2, 1, 41]
LENGTH = sum(PIECES)


def inputs(rows: int, length: int = LENGTH) -> Tensor:
    """Random inputs [rows, length, WIDTH]."""
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(11), dtype=torch.float64)


def randomize(module: torch.nn.Module) -> None:
    """Parameters far from their start, where mistakes would hide. Decays are moderate."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * (0.35 if parameter.dim() in (2, 3) else 0.7))
            if name.endswith(("A_log", "decay.rate")):
                parameter.sub_(1.5)


def compare_with_loop(mixer: Mixer, loop: Callable[[Mixer, Tensor], Tensor]) -> None:
    """The loop, which reads one document [T, WIDTH], against one call, pieces with a state, and packed documents."""
    x = inputs(1)
    want = loop(mixer, x[0])[None]
    close(mixer(x, Layout.causal(1, LENGTH))[0], want)
    close(in_pieces(mixer, x, PIECES), want)
    documents = torch.cat([loop(mixer, piece) for piece in x[0].split(DOCUMENTS)])
    close(mixer(x, Layout.packed([DOCUMENTS]))[0], documents[None])


def projected(mixer: Mixer, name: str, x: Tensor) -> Tensor:
    """x [T, n] times the weight of one of the mixer's projections, plus its bias."""
    y = x @ mixer.get_parameter(f"{name}.weight").T
    return y + mixer.get_parameter(f"{name}.bias") if f"{name}.bias" in dict(mixer.named_parameters()) else y


def loop_convolution(mixer: Mixer, x: Tensor) -> Tensor:
    """SiLU(b + Σ_s w_s x_{t−s}) of x [T, channels], one token at a time."""
    parameters = dict(mixer.named_parameters())
    weight, rows = parameters["convolution.weight"], []
    bias = parameters.get("convolution.bias", torch.zeros(len(weight), dtype=x.dtype))
    for t in range(len(x)):
        y = bias + sum(weight[:, -1 - back] * x[t - back] for back in range(min(t + 1, weight.shape[1])))
        rows.append(y / (1 + torch.exp(-y)))
    return torch.stack(rows)


def loop_delta_rule(fields: Data, mixer: Any, x: Tensor) -> Tensor:
    """One document x [T, WIDTH] by a mixer of the delta rule with these fields, one head and one token at a time."""
    is_kda, heads, factor = fields["kind"] == "kda", fields["heads"], 1 + fields.get("negative_eigenvalues", False)
    widths = [len(mixer.get_parameter(f"{name}.weight")) for name in "qkv"]
    qs, ks, vs = loop_convolution(mixer, torch.cat([projected(mixer, name, x) for name in "qkv"], 1)).split(widths, 1)
    key_heads, steps = fields.get("key_heads") or heads, fields.get("steps", 1)
    d_k, d_v, betas = (
        widths[0] // key_heads,
        widths[2] // (steps * heads),
        factor * sigmoid(projected(mixer, "beta", x)),
    )
    if is_kda:
        down = {
            name: x if fields.get("full_gates") else projected(mixer, name, x) for name in ("decay_down", "gate_down")
        }
        decays = projected(mixer, "decay_up", down["decay_down"]).unflatten(1, (heads, d_k))
        gates = sigmoid(projected(mixer, "gate_up", down["gate_down"]))
    else:
        decays, gates = projected(mixer, "a", x)[:, :, None], projected(mixer, "gate", x)
        gates = sigmoid(gates) * (1 if fields.get("gate") == "sigmoid" else gates)
    rows = []
    for head in range(heads):
        group = head // (heads // key_heads)
        curvature = torch.zeros(d_k, dtype=x.dtype)
        keys, values = slice(group * d_k, (group + 1) * d_k), slice(head * d_v, (head + 1) * d_v)
        state, bias = torch.zeros(d_k, d_v, dtype=x.dtype), mixer.decay.bias.unflatten(0, (heads, -1))[head]
        outputs = []
        for t in range(len(x)):
            rate, step = torch.exp(mixer.decay.rate[head]), decays[t, head] + bias
            bound = fields.get("decay_bound")
            log_decay = -bound * sigmoid(rate * step) if bound else -rate * torch.log1p(torch.exp(step))
            state = torch.exp(log_decay)[:, None] * state
            for step in range(steps):
                k = ks[t].view(steps, key_heads, d_k)[step, group]
                v = vs[t].view(steps, heads, d_v)[step, head]
                k = k / (k @ k + 1e-6).sqrt()
                written = k
                if fields.get("preconditioned"):
                    scale, curvature = loop_preconditioner(mixer, x[t], k, group, curvature)
                    written = scale * k
                if fields.get("channel_gates"):
                    erase, write = betas[t, keys], betas[t, heads * d_k :][values] / factor
                    state = state + torch.outer(written, write * v - (erase * k) @ state)
                else:
                    beta = betas[t].view(steps, heads)[step, head]
                    state = state + beta * torch.outer(written, v - k @ state)
            q = qs[t, keys]
            o = q / (q @ q + 1e-6).sqrt() / d_k**0.5 @ state
            outputs.append(mixer.norm.weight * o / (o.pow(2).mean() + EPS).sqrt() * gates[t, values])
        rows.append(torch.stack(outputs))
    return projected(mixer, "out", torch.cat(rows, dim=1))


def loop_preconditioner(mixer: Any, x: Tensor, k: Tensor, head: int, before: Tensor) -> tuple[Tensor, Tensor]:
    """M, and the curvature after a token x [WIDTH] with the normalized key k [d_k] of a head."""
    module = mixer.preconditioner
    step = torch.log1p(torch.exp(module.a.weight[head] @ x + module.decay.bias[head]))
    decay = torch.exp(-torch.exp(module.decay.rate[head]) * step)
    curvature = decay * before + sigmoid(module.beta.weight[head] @ x) * k**2
    distance = torch.log(curvature + 1e-6) - module.center[head]
    return torch.exp(-torch.log(torch.tensor(1.5, dtype=x.dtype)) * distance / (1 + distance.abs())), curvature
