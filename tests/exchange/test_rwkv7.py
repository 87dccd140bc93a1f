"""RWKV-7's files against a plain loop of flash-linear-attention's model, whose own kernels need a GPU."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import heddle
from heddle.errors import ConfigError
from heddle.exchange.export import export
from heddle.exchange.family import families
from heddle.exchange.family_match import best_match, design_from_config
from heddle.exchange.load import load
from heddle.laws.harness import forward_in_chunks
from tests.cases import Data, by_day

LENGTH = 11
BASE: Data = {
    "architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "vocab_size": 31, "hidden_size": 12, "head_dim": 4,
    "num_hidden_layers": 3, "decay_low_rank_dim": 5, "a_low_rank_dim": 3, "gate_low_rank_dim": 6, "v_low_rank_dim": 2,
    "intermediate_size": 17, "hidden_act": "sqrelu", "norm_eps": 1e-3, "attn": None, "fuse_norm": False,
}  # fmt: skip


def random_config(draw: random.Random) -> Data:
    dim = draw.choice([2, 3, 4, 6])
    depth = draw.choice([1, 2, 3])
    return BASE | {
        "head_dim": dim, "num_hidden_layers": depth, "norm_first": draw.random() < 0.7,
        "norm_bias": draw.random() < 0.7, "tie_word_embeddings": draw.random() < 0.3,
        "value_dim": draw.choice([None, 12, [24] * depth]),
    }  # fmt: skip


def shapes_of(config: Data) -> dict[str, tuple[int, ...]]:
    """The tensors of the class, by name."""
    width, depth, hidden = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    values = config["value_dim"] or width
    values = values[0] if isinstance(values, list) else values
    kinds = ["weight", "bias"] if config["norm_bias"] else ["weight"]
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (config["vocab_size"], width)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = shapes["model.embeddings.weight"]
    norms = ["model.norm"] + (["model.layers.0.pre_norm"] if config["norm_first"] else [])
    for layer in range(depth):
        prefix = f"model.layers.{layer}"
        norms += [f"{prefix}.attn_norm", f"{prefix}.ffn_norm"]
        shapes |= {f"{prefix}.attn.x_{name}": (1, 1, width) for name in "rwkvag"}
        shapes |= {f"{prefix}.attn.{name}": (width,) for name in ("k_k", "k_a")}
        shapes |= {f"{prefix}.attn.r_k": (width // config["head_dim"], config["head_dim"])}
        shapes |= {f"{prefix}.attn.g_norm.{kind}": (values,) for kind in ("weight", "bias")}
        for name, inputs, outputs in (("r", width, width), ("k", width, width), ("v", width, values)):
            shapes[f"{prefix}.attn.{name}_proj.weight"] = (outputs, inputs)
        shapes[f"{prefix}.attn.o_proj.weight"] = (width, values)
        for name, field, outputs in (
            ("w", "decay", width),
            ("a", "a", width),
            ("v", "v", values),
            ("g", "gate", values),
        ):
            if name != "v" or layer:
                rank = config[f"{field}_low_rank_dim"]
                shapes[f"{prefix}.attn.{name}_lora.lora.0.weight"] = (rank, width)
                shapes[f"{prefix}.attn.{name}_lora.lora.2.weight"] = (outputs, rank)
                if name != "g":
                    shapes[f"{prefix}.attn.{name}_lora.lora.2.bias"] = (outputs,)
        shapes |= {f"{prefix}.ffn.x_k": (width,), f"{prefix}.ffn.key.weight": (hidden, width)}
        shapes[f"{prefix}.ffn.value.weight"] = (width, hidden)
    return shapes | {f"{norm}.{kind}": (width,) for norm in norms for kind in kinds}


def folder_of(config: Data, folder: Path) -> dict[str, Tensor]:
    """A folder of random weights; its tensors."""
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * (0.4 if len(shape) == 2 else 0.7)
        for name, shape in shapes_of(config).items()
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


class Loop:
    """The logits of one document, one token and one head at a time."""

    def __init__(self, config: Data, tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors, self.eps = config, tensors, config["norm_eps"]

    def norm(self, x: Tensor, name: str, eps: float, part: slice = slice(None)) -> Tensor:
        y = (x - x.mean()) / (x.var(correction=0) + eps).sqrt() * self.tensors[f"{name}.weight"][part]
        return y + self.tensors[f"{name}.bias"][part] if f"{name}.bias" in self.tensors else y

    def logits(self, tokens: list[int]) -> Tensor:
        xs = [self.tensors["model.embeddings.weight"][token] for token in tokens]
        if self.config["norm_first"]:
            xs = [self.norm(x, "model.layers.0.pre_norm", self.eps) for x in xs]
        first: list[Tensor] = []
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            mixed = self.time_mixing(prefix, [self.norm(x, f"{prefix}.attn_norm", self.eps) for x in xs], first)
            xs = [x + y for x, y in zip(xs, mixed, strict=True)]
            inputs = [self.norm(x, f"{prefix}.ffn_norm", self.eps) for x in xs]
            xs = [x + y for x, y in zip(xs, self.channel_mixing(f"{prefix}.ffn", inputs), strict=True)]
        head = self.tensors.get("lm_head.weight", self.tensors["model.embeddings.weight"])
        return torch.stack([head @ self.norm(x, "model.norm", self.eps) for x in xs])

    def channel_mixing(self, name: str, xs: list[Tensor]) -> list[Tensor]:
        outputs, before = [], torch.zeros_like(xs[0])
        for x in xs:
            hidden = self.tensors[f"{name}.key.weight"] @ (x + (before - x) * self.tensors[f"{name}.x_k"])
            outputs.append(self.tensors[f"{name}.value.weight"] @ hidden.clamp(min=0) ** 2)
            before = x
        return outputs

    def time_mixing(self, prefix: str, xs: list[Tensor], first: list[Tensor]) -> list[Tensor]:
        get: Any = lambda name: self.tensors[f"{prefix}.attn.{name}"]  # noqa: E731
        lora: Any = lambda name, x, act: get(f"{name}_lora.lora.2.weight") @ act(get(f"{name}_lora.lora.0.weight") @ x)  # noqa: E731
        dim, outputs, before = self.config["head_dim"], [], torch.zeros_like(xs[0])
        heads, is_first = len(xs[0]) // dim, not first
        d_v = len(get("v_proj.weight")) // heads
        states = [torch.zeros(dim, d_v, dtype=torch.float64) for _ in range(heads)]
        for t, x in enumerate(xs):
            r, w, k, v, a, g = (x + (before - x) * get(f"x_{name}")[0, 0] for name in "rwkvag")
            before, x_v = x, v
            r, k, v = get("r_proj.weight") @ r, get("k_proj.weight") @ k, get("v_proj.weight") @ v
            w = torch.exp(-math.exp(-0.5) * sigmoid(lora("w", w, torch.tanh) + get("w_lora.lora.2.bias")))
            a = sigmoid(lora("a", a, lambda y: y) + get("a_lora.lora.2.bias"))
            if is_first:
                first.append(v)
            else:
                v = v + (first[t] - v) * sigmoid(lora("v", x_v, lambda y: y) + get("v_lora.lora.2.bias"))
            removal, k = k * get("k_k"), k + k * (a - 1) * get("k_a")
            parts = []
            for head in range(heads):
                keys, values = slice(head * dim, (head + 1) * dim), slice(head * d_v, (head + 1) * d_v)
                kk = removal[keys] / removal[keys].norm()
                read = kk @ states[head]
                state = w[keys, None] * states[head] - torch.outer(a[keys] * kk, read) + torch.outer(k[keys], v[values])
                states[head] = state
                o = self.norm(r[keys] @ state, f"{prefix}.attn.g_norm", dim * self.eps, values)
                parts.append(o + (r[keys] * k[keys] * get("r_k")[head]).sum() * v[values])
            outputs.append(get("o_proj.weight") @ (torch.cat(parts) * lora("g", g, sigmoid)))
        return outputs


@torch.no_grad()
@pytest.mark.parametrize("number", by_day(8, 40))
def test_files_are_read_and_written_as_flas_class_computes_them(number: int, tmp_path: Path) -> None:
    """Logits in float64 at once, padded, packed and in pieces; an export has the same names and bytes."""
    draw = random.Random(number)
    config = random_config(draw)
    tensors = folder_of(config, tmp_path / "theirs")
    model = load(tmp_path / "theirs", dtype=torch.float64).model.eval()
    tokens = torch.randint(0, 31, (2, LENGTH), generator=torch.Generator().manual_seed(number))
    loop = Loop(config, tensors)
    want = [loop.logits(row.tolist()) for row in tokens]
    assert float(want[0].std()) > 0.3
    got = model.head(model(tokens)[0])
    torch.testing.assert_close(got, torch.stack(want), rtol=0, atol=1e-10)
    pieces = model.head(forward_in_chunks(model, tokens, [4, 1, 1, LENGTH - 6])[0])
    torch.testing.assert_close(pieces, got, rtol=0, atol=1e-10)
    layout = heddle.Layout.padded([LENGTH, 5], side="left")
    padded = torch.stack((tokens[0], torch.cat((tokens[1, :6], tokens[1, :5]))))
    torch.testing.assert_close(model.head(model(padded, layout)[0])[1, 6:], want[1][:5], rtol=0, atol=1e-10)
    packed = model.head(model(tokens[:1], heddle.Layout.packed([[4, LENGTH - 4]]))[0])[0]
    apart = torch.cat([loop.logits(piece.tolist()) for piece in tokens[0].split([4, LENGTH - 4])])
    torch.testing.assert_close(packed, apart, rtol=0, atol=1e-10)
    assert best_match(model.config, "rwkv7").family.model_type == "rwkv7"
    export(model, tmp_path / "ours")
    written = load_file(tmp_path / "ours/model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert (
        design_from_config(json.loads((tmp_path / "ours/config.json").read_text()), families()["rwkv7"]) == model.config
    )


def test_the_six_shifts_of_the_first_files_are_one_tensor(tmp_path: Path) -> None:
    config = BASE | {"norm_first": True, "norm_bias": True, "value_dim": None, "tie_word_embeddings": False}
    tensors = folder_of(config, tmp_path / "new")
    want = load(tmp_path / "new").model.state_dict()
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.attn"
        tensors[f"{prefix}.x_x"] = torch.cat([tensors.pop(f"{prefix}.x_{name}")[0] for name in "rwkvag"])
    save_file(tensors, tmp_path / "new/model.safetensors")
    got = load(tmp_path / "new").model.state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_ranks_that_are_null_follow_from_the_width() -> None:
    wide: Data = {"hidden_size": 1024, "head_dim": 128, "decay_low_rank_dim": None, "gate_low_rank_dim": None}
    wide |= {"v_low_rank_dim": None, "intermediate_size": None, "hidden_ratio": 3.3}
    layer = design_from_config(BASE | wide, families()["rwkv7"]).dump()["layers"][1]
    ranks = [layer["mixer"][name] for name in ("decay_rank", "rate_rank", "gate_rank", "value_rank")]
    assert ranks == [160, 3, 160, 96]
    assert (layer["mixer"]["heads"], layer["feedforward"]["hidden"]) == (8, 3392)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn": {"layers": [0], "num_heads": 3}}, "'attn' is .*heddle builds None only"),
        ({"hidden_act": "relu"}, "'hidden_act' is 'relu'; heddle builds 'sqrelu' only"),
        ({"head_dim": 5}, "'head_dim' is 5; should divide hidden_size = 12"),
        ({"value_dim": [12, 24, 24]}, "'value_dim' is .*heddle builds one number for all layers"),
        ({"value_dim": 18}, "'value_dim' is 18; should be a multiple of hidden_size = 12"),
    ],
)
def test_what_is_refused(fields: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        design_from_config(BASE | fields, families()["rwkv7"])


@torch.no_grad()
@pytest.mark.parametrize("name", ["x_k", "k_a", "r_k", "v_lora.lora.2.bias", "w_lora.lora.0.weight"])
def test_the_loop_sees_every_number(name: str, tmp_path: Path) -> None:
    config = BASE | {"norm_first": True, "norm_bias": True, "value_dim": None, "tie_word_embeddings": False}
    tensors = folder_of(config, tmp_path / "theirs")
    model = load(tmp_path / "theirs", dtype=torch.float64).model.eval()
    tokens = torch.arange(LENGTH)
    tensors[f"model.layers.1.attn.{name}"] = tensors[f"model.layers.1.attn.{name}"] + 0.5
    changed = Loop(config, tensors).logits(tokens.tolist())
    assert float((model.head(model(tokens[None])[0])[0] - changed).abs().max()) > 1e-3
