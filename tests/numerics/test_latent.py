"""Latent attention: every form against plain loops, values and gradients; tiles, tails, padding, packing and cost."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from heddle.numerics.attention import latent
from heddle.numerics.attention.latent import LATENT, facts_of
from heddle.numerics.attention.visibility import Visibility, ordered
from heddle.numerics.dispatch.flop_counter import counting
from heddle.numerics.kernels import kernels
from heddle.parts.context.layout import Layout
from tests.numerics.oracle import attend

FORMS = {form.name: form.run for form in LATENT.forms}
HEADS, NOPE, ROPE, RANK, VALUE = 3, 7, 4, 6, 5
SCALE = 0.3


def tail(queries: int, keys: int, batch: int = 2) -> Visibility:
    """Queries that are the last of consecutive keys."""
    q, k = ordered(batch, queries, keys, torch.device("cpu"))
    return Visibility(q, k, ordered=True, everything=queries == 1)


def ragged(queries: int) -> Visibility:
    """The last of rows of 9 and 4 tokens in slots of which some are unused, and a query that sees nothing."""
    k = torch.stack((torch.arange(9), torch.where(torch.arange(9) < 4, torch.arange(9), -1)))
    q = torch.stack((torch.arange(9 - queries, 9), torch.arange(4 - queries, 4)))
    return Visibility(q, k, ragged=True)


CASES = {
    "full": lambda: tail(9, 9),
    "tail": lambda: tail(4, 9),
    "one query": lambda: tail(1, 9),
    "no query": lambda: tail(0, 9),
    "padded": lambda: Layout.padded([9, 4]).seen(None, True),
    "ragged": lambda: ragged(5),
    "packed": lambda: Layout.packed([[4, 5], [1, 8]]).seen(None, True),
}


def draw(seen: Visibility, rope: int = ROPE, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    (batch, queries), keys = seen.q_positions.shape, seen.k_positions.shape[1]
    shapes = [
        (batch, HEADS, queries, NOPE),
        (batch, HEADS, queries, rope),
        (batch, 1, keys, RANK + rope),
        (HEADS * NOPE, RANK),
        (HEADS * VALUE, RANK),
    ]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def by_loops(inputs: list[Tensor], seen: Visibility) -> Tensor:
    """The paper's equations: keys and values of each head and token, then plain attention."""
    q_nope, q_rope, latents, k_up, v_up = inputs
    batch, _, keys, _ = latents.shape
    k = torch.zeros(batch, HEADS, keys, NOPE + q_rope.shape[3], dtype=torch.float64)
    v = torch.zeros(batch, HEADS, keys, VALUE, dtype=torch.float64)
    for b in range(batch):
        for h in range(HEADS):
            for s in range(keys):
                c, turned = latents[b, 0, s, :RANK], latents[b, 0, s, RANK:]
                k[b, h, s] = torch.cat((k_up[h * NOPE : (h + 1) * NOPE] @ c, turned))
                v[b, h, s] = v_up[h * VALUE : (h + 1) * VALUE] @ c
    return attend(torch.cat((q_nope, q_rope), dim=-1), k, v, seen, SCALE)


@pytest.fixture(params=["whole", "tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that hold everything, or a few keys and queries only."""
    if request.param == "tiles":
        for name, value in {"LEAST": 2, "WEIGHTS": 72}.items():
            monkeypatch.setattr(latent, name, value)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("rope", [ROPE, 0])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_what_plain_loops_say(form: str, case: str, rope: int) -> None:
    seen = CASES[case]()
    inputs = [x.detach() for x in draw(seen, rope)]
    got = FORMS[form](*inputs, seen, SCALE)
    torch.testing.assert_close(got, by_loops(inputs, seen), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", list(FORMS)[:-1])
def test_gradients_are_those_of_the_reference(form: str, case: str) -> None:
    seen = CASES[case]()
    inputs = draw(seen)
    want = FORMS["reference"](*inputs, seen, SCALE)
    probe = torch.randn_like(want)
    found = torch.autograd.grad((FORMS[form](*inputs, seen, SCALE) * probe).sum(), inputs)
    for one, other in zip(found, torch.autograd.grad((want * probe).sum(), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("queries", range(1, 10))
def test_absorbed_equals_expanded_at_every_split(queries: int) -> None:
    seen = tail(queries, 9)
    inputs = draw(seen)
    with torch.no_grad():
        got, want = (FORMS[form](*inputs, seen, SCALE) for form in ("absorbed", "expanded"))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["full", "tail", "one query", "ragged"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-12), (torch.bfloat16, 1e-3)])
def test_forms_in_lower_precision(form: str, case: str, dtype: torch.dtype, bound: float) -> None:
    seen = CASES[case]()
    inputs = [x.detach() for x in draw(seen, dtype=dtype)]
    want = FORMS["reference"](*(x.double() for x in inputs), seen, SCALE)
    got = FORMS[form](*inputs, seen, SCALE)
    assert got.dtype == dtype
    assert float((got.double() - want).square().mean() / want.square().mean()) <= bound


@pytest.mark.parametrize("form", list(FORMS)[:-1])
def test_forms_under_autocast(form: str) -> None:
    seen = tail(4, 9)
    inputs = draw(seen, dtype=torch.float32)
    inputs[0], inputs[1], inputs[2] = (x.bfloat16() for x in inputs[:3])  # as projections under autocast give them
    want = FORMS["reference"](*(x.detach().double() for x in inputs), seen, SCALE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = FORMS[form](*inputs, seen, SCALE)
    assert got.dtype == torch.bfloat16
    assert float((got.detach().double() - want).square().mean() / want.square().mean()) <= 1e-3
    assert bool(torch.autograd.grad(got.float().sum(), inputs[3])[0].isfinite().all())


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("form", FORMS)
def test_unused_slots_reach_nothing_and_a_blind_query_gives_zeros(form: str) -> None:
    seen = ragged(5)
    inputs = [x.detach() for x in draw(seen)]
    clean = FORMS[form](*inputs, seen, SCALE)
    inputs[2] = inputs[2].masked_fill((seen.k_positions < 0)[:, None, :, None], float("nan"))
    assert torch.equal(FORMS[form](*inputs, seen, SCALE), clean)
    blind = (seen.q_positions < 0)[:, None, :, None].expand_as(clean)
    assert bool(blind.any())
    assert clean[blind].abs().max() == 0


@pytest.mark.parametrize("form", FORMS)
def test_flops_are_those_that_torch_counts(form: str) -> None:
    """With one query no pair is hidden, so what torch multiplies is what is counted."""
    seen = tail(1, 40)
    inputs = [x.detach() for x in draw(seen)]
    with counting() as tally, kernels(attention="reference"), FlopCounterMode(display=False) as counter:
        FORMS[form](*inputs, seen, SCALE)
    assert counter.get_total_flops() == tally[0]


def chosen(queries: int, keys: int, heads: int = 12) -> str:
    """The form for a latent of 256 + 32 and heads of 64."""
    shapes = [(1, heads, queries, 64), (1, heads, queries, 32), (1, 1, keys, 288), (heads * 64, 256), (heads * 64, 256)]
    inputs = [torch.empty(shape, device="meta") for shape in shapes]
    return LATENT.first(facts_of(*inputs)).name


@pytest.mark.parametrize(
    ("queries", "keys", "form"),
    [
        (1, 1, "expanded"),
        (512, 512, "expanded"),
        (100_000, 100_000, "expanded"),  # a call's own tokens are expanded as other mixers project them
        (1, 2, "absorbed"),
        (1, 32_768, "absorbed"),
        (64, 32_768, "absorbed"),
        (512, 1024, "expanded"),
        (512, 32_768, "tiled"),
    ],
)
def test_the_form_is_a_rule_of_shapes(queries: int, keys: int, form: str) -> None:
    assert chosen(queries, keys) == form


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes (views make none)."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def test_a_chunk_after_a_long_state_never_expands_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LEAST": 16, "WEIGHTS": 2**13, "EXPANDED": 2**13}.items():
        monkeypatch.setattr(latent, name, value)
    found = {}
    for keys in (1024, 4096):
        seen = tail(256, keys, batch=1)
        shapes = [(1, 3, 256, 8), (1, 3, 256, 4), (1, 1, keys, 36), (3 * 8, 32), (3 * 8, 32)]
        inputs = [torch.randn(shape) for shape in shapes]
        assert LATENT.first(facts_of(*inputs)).name == "tiled"
        with Largest() as largest:
            LATENT.first(facts_of(*inputs)).run(*inputs, seen, SCALE)
        found[keys] = largest.elements
    assert found[4096] == found[1024] <= 2**13 + 256 * 3 * 12  # queries and answers are whole
    with Largest() as largest:
        FORMS["expanded"](*inputs, seen, SCALE)
    assert largest.elements >= 4096 * 3 * 12
