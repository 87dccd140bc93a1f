"""Latent attention as on an accelerator: few launches, and one graph."""

import pytest
import torch

from heddle.numerics.attention.latent import LATENT, latent_attention_facts
from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.dispatch import record_choices
from tests.numerics.oracle import contiguous_positions

HEADS, RANK, ROPE, NOPE = 3, 512, 64, 16


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
    shapes = [(2, HEADS, 3, NOPE), (2, HEADS, 3, ROPE), (2, 1, 70, RANK + ROPE), *[(HEADS * NOPE, RANK)] * 2]
    tensors = [torch.randn(shape, dtype=torch.float64) * shape[-1] ** -0.5 for shape in shapes]
    mask = AttentionMask(*contiguous_positions(2, 3, 70), contiguous=True)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*tensors, mask, 0.1), run(*tensors, mask, 0.1), rtol=0, atol=1e-12)
