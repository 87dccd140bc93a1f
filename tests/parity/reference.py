"""Shared by the parity tests: what transformers computes in float32, in float64; scalings; weights of latent mixers."""

import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class ExactRMS(nn.Module):
    """Their RMSNorm in the dtype of its input: theirs is float32 whatever the model's."""

    def __init__(self, norm: Any, offset: float, eps: float) -> None:
        super().__init__()
        self.weight, self.offset, self.eps = norm.weight, offset, eps

    def forward(self, x: Tensor) -> Tensor:
        return (self.offset + self.weight) * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


class _Torch:
    """torch, whose float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def compute_in_float64(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """What a module of transformers computes in float32 is computed in float64."""
    stand_in, original = _Torch(), Tensor.type
    patch.setattr(Tensor, "float", Tensor.double)
    patch.setattr(module, "torch", stand_in)
    patch.setattr(
        Tensor, "type", lambda x, dtype=None: original(x, torch.float64 if dtype is stand_in.float32 else dtype)
    )


def close(got: Tensor, want: Tensor) -> None:
    """Equal to 1e-10, where the outputs are not small."""
    assert float(want.detach().std()) > 0.1, "outputs this small would agree whatever the module does"
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def scaling_options(kind: str, base: float, fields: dict[str, Any]) -> dict[str, Any]:
    """Our fields of a scaling as their `rope_parameters`."""
    renamed = {"original_length": "original_max_position_embeddings"}
    return {"rope_type": kind, "rope_theta": base} | {renamed.get(key, key): fields[key] for key in fields}


def scaled(
    kind: str, sizes: tuple[int, float], fields: dict[str, Any], length: int | None = None, part: float = 1.0
) -> tuple[Tensor, float]:
    """Their frequencies and the factor of their cosines for heads of (width, base), a `part` of whose dims turn."""
    dim, base = sizes
    options = scaling_options(kind, base, fields) | {"partial_rotary_factor": part}
    longest = fields.get("original_length", 2**20) if kind == "dynamic" else 2**20
    config = LlamaConfig(head_dim=dim, max_position_embeddings=longest, rope_parameters=options)
    result: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
    return result


def latent_weights(theirs: dict[str, Tensor], heads: int, nope_dim: int, rope_dim: int) -> dict[str, Tensor]:
    """DeepSeek's names and tensors as those of a latent mixer: theirs join two projections twice."""
    down = theirs["kv_a_proj_with_mqa.weight"]
    up = theirs["kv_b_proj.weight"].unflatten(0, (heads, -1))
    down, k_rope = down.split((len(down) - rope_dim, rope_dim))
    return ({"k_rope.weight": k_rope} if rope_dim else {}) | {
        "q_down.weight": theirs["q_a_proj.weight"],
        "q_norm.weight": theirs["q_a_layernorm.weight"],
        "q_up.weight": theirs["q_b_proj.weight"],
        "kv_norm.weight": theirs["kv_a_layernorm.weight"],
        "kv_down.weight": down,
        "k_up.weight": up[:, :nope_dim].flatten(0, 1),
        "v_up.weight": up[:, nope_dim:].flatten(0, 1),
        "out.weight": theirs["o_proj.weight"],
    }
