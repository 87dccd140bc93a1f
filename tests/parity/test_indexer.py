"""Indexers against DeepSeek-V3.2, GLM-5, MiniMax M3 and pooled ones in transformers: random layers in float64."""

import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from heddle.config import parse_config
from heddle.numerics.attention.indexer import index_scores
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig
from heddle.parts.mixers.latent_attention import LatentAttention
from heddle.parts.modules.blocks import block_tokens
from heddle.parts.norms.rms import RMSConfig
from tests.cases import by_day
from tests.laws.planting import calls, reads
from tests.parity.recurrence import randomize
from tests.parity.reference import compute_in_float64, latent_weights
from tests.parts.loops import Errors, assert_none, errors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers.models.deepseek_v32 import configuration_deepseek_v32, modeling_deepseek_v32
    from transformers.models.glm5_next import configuration_glm5_next, modeling_glm5_next
    from transformers.models.glm_moe_dsa import configuration_glm_moe_dsa, modeling_glm_moe_dsa
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl
    from transformers.models.qwen4_exp import configuration_qwen4_exp, modeling_qwen4_exp

FAMILIES: dict[str, tuple[Any, type, type, str]] = {
    "deepseek_v32": (
        modeling_deepseek_v32,
        configuration_deepseek_v32.DeepseekV32Config,
        modeling_deepseek_v32.DeepseekV32Attention,
        "half",
    ),
    "glm_moe_dsa": (
        modeling_glm_moe_dsa,
        configuration_glm_moe_dsa.GlmMoeDsaConfig,
        modeling_glm_moe_dsa.GlmMoeDsaAttention,
        "interleaved",
    ),
}
BASE = 100.0
GAP = 1e-4  # between the last score that is selected and the next one


class Sizes(NamedTuple):
    """Of a layer, its indexer and a text."""

    width: int
    heads: int
    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    top_k: int
    index_heads: int
    index_dim: int
    length: int

    @staticmethod
    def of(seed: int) -> "Sizes":
        draw = random.Random(seed)
        width, rope, length = draw.randint(20, 30), 2 * draw.randint(1, 4), draw.randint(8, 20)
        ranks = draw.randint(5, 16), draw.randint(5, 16)
        nope, value = draw.randint(2, 8), draw.randint(2, 8)
        index_dim = rope + draw.randint(1, 6)
        return Sizes(
            width, draw.randint(1, 4), *ranks, nope, rope, value, draw.randint(1, length - 2), draw.randint(6, 9),
            index_dim, length,
        )  # fmt: skip


def their_layer(family: str, sizes: Sizes) -> Any:
    _, config_class, attention, _ = FAMILIES[family]
    config = config_class(
        hidden_size=sizes.width,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        q_lora_rank=sizes.query_rank,
        kv_lora_rank=sizes.kv_rank,
        qk_nope_head_dim=sizes.nope,
        qk_rope_head_dim=sizes.rope,
        v_head_dim=sizes.value,
        index_topk=sizes.top_k,
        index_n_heads=sizes.index_heads,
        index_head_dim=sizes.index_dim,
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )
    config._attn_implementation = "eager"
    layer = attention(config, layer_idx=0).double().eval()
    randomize(layer)
    return layer


def our_layer(family: str, sizes: Sizes, layer: Any) -> LatentAttention:
    indexer = {
        "top_k": sizes.top_k,
        "heads": sizes.index_heads,
        "head_dim": sizes.index_dim,
        "rope_layout": FAMILIES[family][3],
    }
    data = {
        "kind": "latent_attention",
        "heads": sizes.heads,
        "query_rank": sizes.query_rank,
        "kv_rank": sizes.kv_rank,
        "nope_dim": sizes.nope,
        "rope_dim": sizes.rope,
        "value_dim": sizes.value,
        "position": {"kind": "rope", "base": BASE, "layout": "interleaved"},
        "indexer": indexer,
    }
    config: Any = parse_config(MixerConfig, data)  # type: ignore[type-abstract]
    mixer = config.build(BuildContext(sizes.width, RMSConfig())).double().eval()
    theirs = layer.state_dict()
    weights = latent_weights(theirs, sizes.heads, sizes.nope, sizes.rope) | {
        "indexer.q.weight": theirs["indexer.wq_b.weight"],
        "indexer.k.weight": theirs["indexer.wk.weight"],
        "indexer.k_norm.weight": theirs["indexer.k_norm.weight"],
        "indexer.k_norm.bias": theirs["indexer.k_norm.bias"],
        "indexer.weights.weight": theirs["indexer.weights_proj.weight"],
    }
    mixer.load_state_dict(weights)
    return mixer


def away_from_ties(mixer: LatentAttention, x: Tensor) -> bool:
    """Whether the selection of no query depends on rounding, or on the order of equal scores."""
    assert mixer.indexer is not None
    found: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, index: Any) -> None:
        found.append(index_scores(*index))

    handle = mixer.indexer.register_forward_hook(keep)
    mixer(x, Layout.causal(*x.shape[:2]))
    handle.remove()
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    ranked = found[0][:, 0].masked_fill(hidden, float("-inf")).sort(-1, descending=True).values
    gaps = ranked[..., mixer.indexer.selector.choice.top_k - 1] - ranked[..., mixer.indexer.selector.choice.top_k]
    return bool((gaps.nan_to_num(nan=float("inf")) > GAP).all())  # a query that sees too few keys has -inf twice


def their_output(layer: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    table = rotation(layer.qk_rope_head_dim, x.shape[0], length)
    mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1).expand(x.shape[0], 1, -1, -1)
    output: Tensor = layer(x, table, mask)[0]
    return output


def compare(family: str, seed: int, patch: pytest.MonkeyPatch) -> Errors:
    compute_in_float64(patch, FAMILIES[family][0])
    sizes = Sizes.of(seed)
    layer = their_layer(family, sizes)
    mixer = our_layer(family, sizes, layer)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, sizes.length, sizes.width, generator=generator, dtype=torch.float64)
    while not away_from_ties(mixer, x):
        x = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    return errors_of(mixer(x, Layout.causal(2, sizes.length))[0], their_output(layer, x), x)


@pytest.mark.parametrize("seed", by_day(8, 24))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_attention_is_theirs(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_none(compare(family, seed, monkeypatch))


def minimax_errors(seed: int, patch: pytest.MonkeyPatch, local: int | None = None) -> Errors:
    """The whole attention of MiniMax M3, in which each group of heads has blocks of its own. local: ours."""
    compute_in_float64(patch, modeling_minimax_m3_vl)
    patch.setattr(Tensor, "topk", stable_topk)
    draw = random.Random(seed)
    heads, dim, index_dim, rotary = draw.choice((1, 2, 3)), draw.randint(4, 7), draw.randint(4, 8), draw.choice((2, 4))
    blocks = {"index_block_size": draw.randint(2, 5), "index_topk_blocks": draw.randint(2, 4),
              "index_local_blocks": draw.choice((0, 1))}  # fmt: skip
    config: Any = SimpleNamespace(
        hidden_size=12, rms_norm_eps=1e-6, index_head_dim=index_dim, index_n_heads=heads, num_attention_heads=2 * heads,
        num_key_value_heads=heads, head_dim=dim, attention_dropout=0.0, layer_types=["minimax_m3_sparse"],
        _attn_implementation="eager", **blocks,
    )  # fmt: skip
    theirs = modeling_minimax_m3_vl.MiniMaxM3VLAttention(config, 0).double().eval()
    randomize(theirs)
    norm = {"kind": "rms", "offset": 1.0, "eps": 1e-6}
    own = {"top_k": blocks["index_topk_blocks"], "heads": heads, "head_dim": index_dim, "per_head": True, "norm": norm,
           "block": blocks["index_block_size"], "local": blocks["index_local_blocks"] if local is None else local,
           "query_norm": True}  # fmt: skip
    fields = {"heads": 2 * heads, "kv_heads": heads, "head_dim": dim, "qk_norm": "head", "indexer": own}
    mixer = attention_of(fields, 12, rotary)
    weights = theirs.state_dict()
    mixer.load_state_dict({f"{name}.weight": weights[f"{their}.weight"] for name, their in M3_NAMES.items()})
    x = normal((2, draw.randint(9, 25), 12), seed).requires_grad_()
    got = mixer(x, Layout.causal(*x.shape[:2]))[0]
    return errors_of(got, theirs(x, rotation(rotary, *x.shape[:2]), None)[0], x)


M3_NAMES = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm",
    "indexer.q": "indexer.q_proj", "indexer.k": "indexer.k_proj", "indexer.q_norm": "indexer.q_norm",
    "indexer.k_norm": "indexer.k_norm",
}  # fmt: skip


def attention_of(fields: dict[str, Any], width: int, rotary: int) -> Any:
    """Attention in float64 with Gemma's norms, of which `rotary` dims are rotated."""
    fields |= {"kind": "attention", "position": {"kind": "rope", "base": BASE, "rotary_dim": rotary}}
    config: Any = parse_config(MixerConfig, fields)  # type: ignore[type-abstract]
    return config.build(BuildContext(width, RMSConfig(offset=1.0, eps=1e-6))).double().eval()


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(rotary: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions, [rows, length, rotary]."""
    theta = BASE ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angles = torch.cat((theta, theta))[None] * torch.arange(length, dtype=torch.float64)[:, None]
    return angles.cos().expand(rows, -1, -1), angles.sin().expand(rows, -1, -1)


def errors_of(got: Tensor, want: Tensor, x: Tensor) -> Errors:
    """The largest difference of outputs, and of the gradient of x."""
    assert float(want.detach().std()) > 0.1, "outputs this small would agree whatever the module does"
    return errors(got, want, [x])


@pytest.mark.parametrize("seed", by_day(16, 48))
def test_blocks_are_those_of_minimax_m3(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_none(minimax_errors(seed, monkeypatch))


def test_another_number_of_local_blocks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(minimax_errors(seed, monkeypatch, local=2)[0] for seed in range(4)) > 1e-3


def stable_topk(x: Tensor, k: int, dim: int = -1, **_: Any) -> Any:
    """Of equal numbers the first ones, which torch does not promise."""
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def of_glm(draw: random.Random) -> tuple[Any, Any, Sizes]:
    """Their layer of GLM-5.3-Flash, our fields, and the sizes."""
    sizes, block = Sizes.of(draw.randrange(1000))._replace(rope=0), draw.randint(2, 4)  # without rotation
    top_k = draw.randint(1, 2)
    config = configuration_glm5_next.Glm5NextTextConfig(
        hidden_size=sizes.width, num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads,
        q_lora_rank=sizes.query_rank, kv_lora_rank=sizes.kv_rank, qk_nope_head_dim=sizes.nope,
        qk_rope_head_dim=sizes.rope, v_head_dim=sizes.value, index_n_heads=sizes.index_heads,
        index_head_dim=sizes.index_dim, index_topk=top_k * block, index_kpool=block, num_hidden_layers=1,
        layer_types=["full_attention"], mlp_layer_types=["dense"], indexer_types=["full"], rms_norm_eps=1e-6,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = modeling_glm5_next.Glm5NextTextAttention(config, layer_idx=0)
    fields = {
        "kind": "latent_attention", "heads": sizes.heads, "query_rank": sizes.query_rank, "kv_rank": sizes.kv_rank,
        "nope_dim": sizes.nope, "value_dim": sizes.value,
        "indexer": {"top_k": top_k, "heads": sizes.index_heads, "head_dim": sizes.index_dim, "block": block,
                    "pool": "gated"},
    }  # fmt: skip
    return theirs, fields, sizes


def glm_errors(seed: int, patch: pytest.MonkeyPatch) -> Errors:
    compute_in_float64(patch, modeling_glm5_next)
    patch.setattr(Tensor, "topk", stable_topk)
    draw = random.Random(seed)
    theirs, fields, sizes = of_glm(draw)
    randomize(theirs.double().eval())
    config: Any = parse_config(MixerConfig, fields)  # type: ignore[type-abstract]
    mixer = config.build(BuildContext(sizes.width, RMSConfig())).double().eval()
    weights = theirs.state_dict()
    own = {"q": "wq_b", "k": "wk", "k_norm": "k_norm", "weights": "weights_proj"}
    renamed = {f"indexer.{name}.weight": weights[f"indexer.{their}.weight"] for name, their in own.items()}
    renamed["indexer.k_norm.bias"] = weights["indexer.k_norm.bias"]
    renamed["indexer.pool_gates.weight"] = weights["indexer.index_kpool_compress_gate"]
    renamed["indexer.pool_bias"] = weights["indexer.index_kpool_compress_ape"]
    mixer.load_state_dict(latent_weights(weights, sizes.heads, sizes.nope, sizes.rope) | renamed)
    generator, length = torch.Generator().manual_seed(seed), draw.randint(9, 20)
    x = torch.randn(2, length, sizes.width, generator=generator, dtype=torch.float64).requires_grad_()
    tokens = torch.ones(2, length, dtype=torch.bool)
    tokens[1, : draw.randint(0, 3)] = False
    layout = Layout.padded(tokens.sum(1).tolist(), length, side="left")
    got, want = (y[tokens] for y in (mixer(x, layout)[0], theirs(x, tokens)[0]))
    return errors_of(got, want, x)


@pytest.mark.parametrize("seed", by_day(8, 40))
def test_gated_pools_are_those_of_glm(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_none(glm_errors(seed, monkeypatch))


def qwen4_errors(seed: int, patch: pytest.MonkeyPatch) -> Errors:
    """The whole attention, with queries and output gates in one matrix there."""
    compute_in_float64(patch, modeling_qwen4_exp)
    patch.setattr(Tensor, "topk", stable_topk)
    draw = random.Random(seed)
    dim, block, top_k, kv_heads, index_heads = 4, draw.randint(2, 4), draw.randint(1, 2), draw.choice((1, 2)), 3
    rotary = draw.choice((2, 4))
    config = configuration_qwen4_exp.Qwen4ExpTextConfig(
        hidden_size=14, num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=dim, indexer_head_dim=6,
        indexer_n_heads=index_heads, indexer_kv_heads=1, indexer_budget=top_k * block,
        indexer_compress_ratio=block, rms_norm_eps=1e-6, num_hidden_layers=1, layer_types=["indexed_attention"],
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = modeling_qwen4_exp.Qwen4ExpTextAttention(config, layer_idx=0).double().eval()
    randomize(theirs)
    norm = {"kind": "rms", "offset": 1.0, "eps": 1e-6}
    fields = {
        "heads": 4, "kv_heads": kv_heads, "head_dim": dim, "qk_norm": "head", "gate": "channel",
        "indexer": {"top_k": top_k, "heads": index_heads, "head_dim": 6, "block": block, "pool": "mean",
                    "head_weights": False, "norm": norm, "query_norm": True},
    }  # fmt: skip
    mixer = attention_of(fields, 14, rotary)
    weights = theirs.state_dict()
    q, gate = weights["q_proj.weight"].view(4, 2, dim, 14).unbind(1)
    index_q, index_k = weights["indexer.index_qk_proj.weight"].split((index_heads * 6, 6))
    names = {"k": "k_proj", "v": "v_proj", "out": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm",
             "indexer.q_norm": "indexer.q_layernorm", "indexer.k_norm": "indexer.k_layernorm"}  # fmt: skip
    renamed = {f"{name}.weight": weights[f"{their}.weight"] for name, their in names.items()}
    renamed |= {"q.weight": q.flatten(0, 1), "gate.weight": gate.flatten(0, 1)}
    mixer.load_state_dict(renamed | {"indexer.q.weight": index_q, "indexer.k.weight": index_k})
    length = draw.randint(8, 14)
    x = normal((2, length, 14), seed).requires_grad_()
    mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1).expand(2, 1, -1, -1)
    got, want = mixer(x, Layout.causal(2, length))[0], theirs(x, rotation(rotary, 2, length), mask)[0]
    return errors_of(got, want, x)


@pytest.mark.parametrize("seed", by_day(4, 40))
def test_mean_pools_are_those_of_qwen4_exp(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_none(qwen4_errors(seed, monkeypatch))


FAULTS: dict[str, Callable[[], Any]] = {
    "relu": lambda: calls(index_scores, "relu", lambda scores: scores),
    "weights": lambda: calls(index_scores, "einsum", lambda torch, _, weights, scores: scores.sum(1)),
}


@pytest.mark.parametrize("compare", [glm_errors, qwen4_errors])
def test_the_comparisons_see_other_pools(compare: Callable[..., Errors], monkeypatch: pytest.MonkeyPatch) -> None:
    reads(block_tokens, "places", lambda places: places - 1)(monkeypatch)
    assert compare(1, monkeypatch)[0] > 1e-3


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_the_comparison_sees(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault]()(monkeypatch)
    with pytest.raises(AssertionError):
        test_attention_is_theirs("deepseek_v32", 0, monkeypatch)
