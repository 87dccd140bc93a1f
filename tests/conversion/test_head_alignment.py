"""What may be done to one head leaves the layer as it was; alignment and least squares find the best of it."""

import ast
import cmath
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.conversion.head_parameters import (
    HeadFreedom,
    _equal_columns,
    build_mixer,
    head_maps,
    key_freedom,
    output_maps,
    rotary_pairs,
    set_head_maps,
    set_output_maps,
    value_freedom,
)
from heddle.conversion.merge_heads import SharedHead, align, aligned_head, least_squares_head, mean_head, similarity
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers.attention import AttentionConfig
from tests.conversion.exactness import design, source_model
from tests.conversion.test_kv_heads import ATTENTION, MIXERS
from tests.laws.planting import assigned, calls, condition, operator, result, wrapped

LAYER_NORM = {"norm": {"kind": "layer"}}
DESIGNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {name: (mixer, {}) for name, mixer in MIXERS.items()}
DESIGNS |= {"layer-norm-of-keys": (ATTENTION | {"qk_norm": "head"}, LAYER_NORM)}


def random_map(freedom: HeadFreedom, generator: torch.Generator) -> Tensor:
    """Any map that the freedom allows."""
    result = torch.eye(freedom.dim, dtype=torch.float64)
    for (a, b), turns in zip(freedom.pairs.tolist(), freedom.phases.tolist(), strict=True):
        angle, size = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        number = (0.5 + size if freedom.scales else 1.0) * cmath.exp(6.28j * angle)
        number = number if turns else complex(1 if angle < 0.5 else -1)
        real, imag = number.real, number.imag
        result[a, a] = result[b, b] = real
        result[a, b], result[b, a] = -imag, imag
    for group in freedom.groups:
        block = torch.randn(len(group), len(group), generator=generator, dtype=torch.float64)
        result[group[:, None], group] = block if freedom.scales else torch.linalg.qr(block).Q
    return result


def change_of_a_free_map(name: str) -> float:
    """How much a layer's output changes if each head is mapped, and its readers by the inverse."""
    fields, others = DESIGNS[name]
    model, generator = source_model(design(fields, **others)), torch.Generator().manual_seed(3)
    config, norm = model.config.resolved().layers[0].mixer, model.config.norm
    assert isinstance(config, AttentionConfig)
    assert config.kv_heads is not None
    layer = {key: value.detach() for key, value in model.layers[0].named_parameters()}
    if config.qk_norm is not None:  # some gains are equal, so that some of the maps are not trivial
        for key in ("mixer.q_norm.weight", "mixer.k_norm.weight"):
            layer[key] = layer[key].clone()
            layer[key].view(-1, 6)[:, [0, 2, 3, 4]] = layer[key].view(-1, 6)[:, :1].clone()
    keys = torch.stack([random_map(key_freedom(config, layer, norm), generator) for _ in range(config.kv_heads)])
    values = torch.stack([random_map(value_freedom(config), generator) for _ in range(config.kv_heads)])
    size, new = config.heads // config.kv_heads, dict(layer)
    set_head_maps(new, "mixer.k", keys @ head_maps(layer, "mixer.k", config.kv_heads))
    set_head_maps(new, "mixer.v", values @ head_maps(layer, "mixer.v", config.kv_heads))
    back = torch.linalg.inv(keys).mT.repeat_interleave(size, 0)
    set_head_maps(new, "mixer.q", back @ head_maps(layer, "mixer.q", config.heads))
    set_output_maps(new, output_maps(layer, config.heads) @ torch.linalg.inv(values).repeat_interleave(size, 0))
    x = torch.randn(2, 9, 16, generator=generator, dtype=torch.float64)
    context, layout = BuildContext(16, norm), Layout.causal(2, 9)
    before, after = (build_mixer(config, context, each)(x, layout)[0] for each in (layer, new))
    return float((before - after).abs().max())


@pytest.mark.parametrize("name", [name for name in DESIGNS if name != "axial"])
def test_maps_that_are_free_change_nothing(name: str) -> None:
    assert change_of_a_free_map(name) < 1e-10


PLANTED = {
    "gains-do-not-commute": (assigned(key_freedom, "phases", torch.ones_like, nth=1), "head-norm"),
    "lengths-under-a-norm": (result(key_freedom, lambda freedom: replace(freedom, scales=True)), "head-norm"),
    "unequal-gains-together": (
        wrapped(_equal_columns, lambda columns, gains, dims: columns(torch.zeros_like(gains), dims)), "head-norm",
    ),
    "mean-of-layer-norm": (condition(key_freedom, "RMSConfig", False), "layer-norm-of-keys"),
    "channel-gate": (condition(value_freedom, "gate", False), "channel-gate"),
    "lengths-of-exclusive-values": (
        result(value_freedom, lambda freedom: replace(freedom, scales=True)), "exclusive",
    ),
    "other-pairs": (operator(rotary_pairs, ast.Eq, ast.NotEq), "plain"),
    "rotated-dims-are-free": (
        calls(key_freedom, "rotary_pairs", lambda *_: torch.zeros(0, 2, dtype=torch.int64)), "plain",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistakes_are_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name = PLANTED[mistake]
    plant(monkeypatch)
    assert change_of_a_free_map(name) > 1e-3


FREE = HeadFreedom(4, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.bool), (torch.arange(4),), True)
PAIRS = HeadFreedom(4, torch.tensor([[0, 2], [1, 3]]), torch.ones(2, dtype=torch.bool), (), True)
SIGNS = HeadFreedom(4, torch.tensor([[0, 2], [1, 3]]), torch.zeros(2, dtype=torch.bool), (), False)


def random_gram(heads: int, seed: int = 0) -> Tensor:
    maps = torch.randn(heads * 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (maps @ maps.T).view(heads, 4, heads, 4).transpose(1, 2)


def alignment(gram: Tensor, rotations: Tensor) -> float:
    """Σ_uv tr(R_u gram_uv R_vᵀ)."""
    return float(torch.einsum("uab,uvbc,vac->", rotations, gram, rotations))


@pytest.mark.parametrize("freedom", [FREE, PAIRS, SIGNS], ids=["free", "pairs", "signs"])
@pytest.mark.parametrize("heads", [2, 4])
def test_no_other_rotation_aligns_better(freedom: HeadFreedom, heads: int) -> None:
    gram, generator = random_gram(heads), torch.Generator().manual_seed(1)
    rotations = align(gram, freedom)
    assert torch.allclose(rotations @ rotations.mT, torch.eye(4, dtype=torch.float64).expand(heads, 4, 4))
    best = alignment(gram, rotations)
    others = HeadFreedom(4, freedom.pairs, freedom.phases, freedom.groups, scales=False)
    tries = [torch.stack([random_map(others, generator) for _ in range(heads)]) for _ in range(300)]
    assert max(alignment(gram, each) for each in tries) <= best + 1e-9
    if heads == 2:  # two heads: as large as the similarity says
        expected = 2 * similarity(gram, others)[0, 1] + gram[0, 0].trace() + gram[1, 1].trace()
        assert best == pytest.approx(float(expected), rel=1e-9)


def error(gram: Tensor, metrics: Tensor, shared: SharedHead) -> float:
    """Σ_u E (k_u − U_u k̂)ᵀ M_u (k_u − U_u k̂)."""
    heads = len(gram)
    eye = torch.eye(heads, dtype=torch.float64)
    residual = eye[:, :, None, None] * torch.eye(4, dtype=torch.float64) - torch.einsum(
        "uab,vbc->uvac", shared.up, shared.down
    )
    return float(
        torch.einsum(
            "uab,ubc,uxad,xydz,uycz->",
            metrics,
            torch.eye(4, dtype=torch.float64).expand(heads, 4, 4),
            residual,
            gram,
            residual,
        )
    )


@pytest.mark.parametrize("freedom", [FREE, PAIRS], ids=["free", "pairs"])
def test_least_squares_loses_least(freedom: HeadFreedom) -> None:
    gram, generator = random_gram(3), torch.Generator().manual_seed(2)
    roots = torch.randn(3, 4, 4, dtype=torch.float64, generator=generator)
    metrics = roots @ roots.mT
    if freedom is PAIRS:  # of both dims of a pair alike
        sizes = torch.rand(3, 2, dtype=torch.float64, generator=generator)
        metrics = torch.diag_embed(sizes.repeat(1, 2))
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)
    best = least_squares_head(gram, freedom, metrics)
    loss = error(gram, metrics, best)
    assert (
        loss < error(gram, metrics, aligned_head(gram, freedom, weights)) < error(gram, metrics, mean_head(weights, 4))
    )
    for _ in range(100):
        for changed in neighbors(best, freedom, generator):
            assert error(gram, metrics, changed) >= loss - 1e-9


def neighbors(shared: SharedHead, freedom: HeadFreedom, generator: torch.Generator) -> list[SharedHead]:
    """The maps with a small change that the freedom allows."""
    change: Callable[[], Tensor] = lambda: torch.stack(  # noqa: E731
        [torch.eye(4, dtype=torch.float64) + 0.05 * random_map(freedom, generator) for _ in range(len(shared.up))]
    )
    return [SharedHead(shared.down @ change(), shared.up), SharedHead(shared.down, shared.up @ change())]
