"""Latent attention as on an accelerator: few launches, FlashMLA where it serves, and one graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.numerics.attention import flash_mla
from heddle.numerics.attention.latent import LATENT, latent_attention, latent_attention_facts
from heddle.numerics.attention.mask import AttentionMask, contiguous_positions
from heddle.numerics.dispatch.operation import record_choices
from heddle.numerics.kernels import kernels
from tests.accelerator.flash_mla_stand_in import install_flash_mla
from tests.laws.planting import Plant, calls

HEADS, RANK, ROPE, NOPE = 3, 512, 64, 16

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def mask_of(queries: int, keys: int, batch: int = 2) -> AttentionMask:
    q_positions, k_positions = contiguous_positions(batch, queries, keys, torch.device("cpu"))
    return AttentionMask(q_positions, k_positions, contiguous=True, all_visible=queries == 1)


def inputs(queries: int, keys: int, slots: int, batch: int = 2) -> Inputs:
    """Inputs in bfloat16 whose latents are the first of a cache's slots. The other slots are NaN."""
    cache = torch.full((batch, 1, slots, RANK + ROPE), float("nan")).bfloat16()
    cache[:, :, :keys] = torch.randn(batch, 1, keys, RANK + ROPE).bfloat16()
    q_nope, q_rope = (torch.randn(batch, HEADS, queries, width).bfloat16() for width in (NOPE, ROPE))
    k_up, v_up = ((torch.randn(HEADS * NOPE, RANK) * RANK**-0.5).bfloat16() for _ in range(2))
    return q_nope, q_rope, cache[:, :, :keys], k_up, v_up


def in_float64(tensors: Inputs) -> Inputs:
    q_nope, q_rope, latents, k_up, v_up = (x.double() for x in tensors)
    return q_nope, q_rope, latents, k_up, v_up


def flash_error(queries: int, keys: int, slots: int, batch: int = 2) -> float:
    """Mean square error of FlashMLA's stand-in, over that of the answer in float64."""
    tensors, mask = inputs(queries, keys, slots, batch), mask_of(queries, keys, batch)
    with torch.no_grad(), record_choices("cuda"), kernels(latent="flash_mla"):
        actual = latent_attention(*tensors, mask, 0.1)
    with kernels(latent="reference"):
        exact = latent_attention(*in_float64(tensors), mask, 0.1)
    return float((actual.double() - exact).square().mean() / exact.square().mean())


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("queries", "keys", "slots"), [(1, 70, 128), (1, 128, 128), (3, 100, 192), (1, 1, 64)])
def test_flash_mla_reads_the_cache_in_place(
    queries: int, keys: int, slots: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_flash_mla(monkeypatch)
    latents = inputs(queries, keys, slots, batch)[2]
    assert flash_mla.has_pages(latents)
    assert flash_mla.pages(latents).data_ptr() == latents.data_ptr()
    assert flash_error(queries, keys, slots, batch) < 1e-3


def arguments_with(change: Callable[..., tuple[Tensor, ...]], **changed: Any) -> Plant:
    """Other pages, table and lengths, or other options, of a call of the library."""

    def call(module: Any, q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, *rest: Any, **options: Any) -> Any:
        return module.flash_mla_with_kvcache(q, *change(pages, table, lengths), *rest, **options | changed)

    return calls(flash_mla.attend, "flash_mla_with_kvcache", call)


@pytest.mark.parametrize(
    "plant",
    [
        arguments_with(lambda *tensors: tensors, softmax_scale=576**-0.5),
        arguments_with(lambda *tensors: tensors, causal=False),
        arguments_with(lambda pages, table, lengths: (pages.roll(1, 0), table, lengths)),
        arguments_with(lambda pages, table, lengths: (pages, table, lengths + 1)),
        arguments_with(lambda pages, table, lengths: (pages, lengths, table)),
    ],
    ids=["scale", "causal", "pages", "lengths", "exchanged"],
)
def test_a_wrong_argument_of_flash_mla_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    install_flash_mla(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        assert flash_error(3, 100, 192) < 1e-3


def test_flash_mla_says_why_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="flash_mla is not installed"):
        flash_error(1, 70, 128)
    install_flash_mla(monkeypatch)
    with pytest.raises(ConfigError, match="not a multiple of its page"):
        flash_error(1, 70, 100)
    tensors, ragged = inputs(1, 70, 128), mask_of(1, 70)
    ragged = AttentionMask(ragged.q_positions, ragged.k_positions, may_have_padding=True)
    facts = latent_attention_facts(*tensors, ragged)._replace(device="cuda", paged=True)
    kernel = next(kernel for kernel in LATENT.kernels if kernel.name == "flash_mla")
    for change, words in (
        ({}, "different lengths"),
        ({"in_order": True}, None),
        ({"dtype": torch.float32}, "bfloat16 latents"),
        ({"latent_rank": 256}, "512 \\+ 64|512 + 64"),
        ({"gradients": True}, "gradients"),
        ({"device": "cpu"}, "for CUDA"),
    ):
        reason = kernel.unsupported(facts._replace(**change))
        assert (reason is None) == (words is None)
        assert words is None or any(word in str(reason) for word in words.split("|"))


@pytest.mark.parametrize(
    ("queries", "keys", "kernel"),
    [
        (1, 8192, "absorbed_untiled"),
        (64, 32_768, "absorbed_untiled"),
        (256, 8448, "expanded"),  # a chunk of a prompt
        (512, 32_768, "expanded"),
        (4096, 4096, "expanded"),
        (512, 1_000_000, "tiled"),
        (64, 100_000, "absorbed"),  # more scores than are computed at one time
    ],
)
def test_the_kernel_of_an_accelerator(queries: int, keys: int, kernel: str) -> None:
    heads = 12 if kernel != "absorbed" else 128
    shapes = [(1, heads, queries, 64), (1, heads, queries, 32), (1, 1, keys, 288), (heads * 64, 256), (heads * 64, 256)]
    q_nope, q_rope, latents, k_up, v_up = (torch.empty(shape, device="meta") for shape in shapes)
    with record_choices("cuda"):
        assert LATENT.first_supported(latent_attention_facts(q_nope, q_rope, latents, k_up, v_up)).name == kernel


@pytest.mark.parametrize("kernel", ["expanded", "tiled", "absorbed", "absorbed_untiled"])
def test_no_kernel_breaks_a_graph(kernel: str) -> None:
    run = next(candidate.run for candidate in LATENT.kernels if candidate.name == kernel)
    tensors, mask = in_float64(inputs(3, 70, 128)), mask_of(3, 70)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*tensors, mask, 0.1), run(*tensors, mask, 0.1), rtol=0, atol=1e-12)
