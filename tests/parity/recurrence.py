"""Shared by the parity tests of recurrent mixers: random inputs, calls piece by piece, transformers in float64."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer
from heddle.parts.position_table import PositionTable
from heddle.parts.states import StateSpec

WIDTH = 24
PIECES = [40, 1, 1, 3, 1, 29]
DOCUMENTS = [31, 2, 1, 41]
LENGTH = sum(PIECES)


class _Torch:
    """torch, whose float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def compute_in_float64(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """What a module of transformers computes in float32 is computed in float64."""
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
    patch.setattr(module, "torch", _Torch())


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


def close(got: Tensor, want: Tensor) -> None:
    """Equal to 1e-10, where the outputs are not small."""
    assert float(want.std()) > 0.1, "outputs this small would agree whatever the module does"
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def in_pieces(mixer: Mixer, x: Tensor, sizes: list[int]) -> Tensor:
    """The outputs of calls with these numbers of tokens, one after the other with a state."""
    table, out = PositionTable.empty(len(x), 0, None, "cpu"), []
    state = mixer.init_state(StateSpec(len(x), None, torch.float64, "cpu"))
    for piece in x.split(sizes, dim=1):
        table, layout = table.extend(table.next_layout(piece.shape[1]))
        y, state = mixer(piece, layout, state)
        out.append(y)
    return torch.cat(out, dim=1)


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
