"""bfloat16: no kernel errs much more than the reference, and what must not influence a token changes no bit of it.

The other laws run in float64, for which most kernels of a GPU do not exist. These laws run the kernels that train and
generate there. A bound on values is twice the reference's error, as in FlashAttention's own tests.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from heddle.laws.harness import (
    PADDING_TOKEN,
    LawViolation,
    assert_bitwise_equal,
    assert_close,
    assert_gradients_close,
    feedforwards,
    forward,
    forward_in_chunks,
    forward_no_grad,
    gradients,
    model_under_test,
    probe_loss,
    random_tokens,
    windows,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.numerics.dispatch.operation import Kernel, KernelCall, record_calls
from heddle.numerics.kernels import OPERATIONS
from heddle.parts.context.layout import Layout

NARROW = torch.bfloat16
# A kernel's error may be so many times the reference's, or that of rounding the exact result if that is more. Of
# gradients the largest of the call is rounded: terms are rounded before they cancel in a smaller one.
VALUE_FACTOR, GRADIENT_FACTOR = 2.0, 8.0
LATENT_FACTOR = 1.5  # times more: absorbed queries and outputs are rounded in the latent space too
QUERY_SCALE = 16.0  # of the queries of softmax attention: a kernel that rounds scores errs in proportion to them
NOISE = 1e-5  # the error that is allowed where the exact result is zero
MIN_LENGTH = 13  # tokens of a row; no other dimension of a small design has this size

Results = dict[str, Tensor]
Run = Callable[[], object]


def bfloat16_kernels(config: ModelConfig) -> None:
    """In bfloat16 a kernel errs at most twice as much as the reference, in gradients eight times as much."""
    model = model_under_test(config, NARROW)
    checked = set()
    for what, layout, call in _calls(config, model):
        supported = [
            kernel for kernel in OPERATIONS[call.operation].kernels[:-1] if kernel.unsupported(call.facts) is None
        ]
        if not supported or (call.operation, call.facts, what) in checked:
            continue
        checked.add((call.operation, call.facts, what))
        for scale in (1.0, QUERY_SCALE) if call.operation == "attention" else (1.0,):
            _compare(what, call, supported, layout, scale)


def _compare(what: str, call: KernelCall, supported: list[Kernel[Any]], layout: Layout | None, scale: float) -> None:
    """Compare kernels with the reference, with queries times `scale`; gradients only without it."""
    reference = OPERATIONS[call.operation].kernels[-1]
    scaled = call if scale == 1.0 else _with_scaled_queries(call, scale)
    exact, rounded = _results(scaled, reference, layout, torch.float64), _results(scaled, reference, layout)
    rounding = {name: float((want.to(NARROW).double() - want).norm()) for name, want in exact.items()}
    largest = max((error for name, error in rounding.items() if name.startswith("gradient")), default=0.0)
    for kernel in supported:
        got = _results(scaled, kernel, layout)
        for name, want in exact.items():
            factor = GRADIENT_FACTOR if name.startswith("gradient") else VALUE_FACTOR
            factor *= LATENT_FACTOR if call.operation == "latent" else 1.0
            least = largest if name.startswith("gradient") else rounding[name]
            bound = NOISE + factor * max(float((rounded[name].double() - want).norm()), least)
            error = float((got[name].double() - want).norm())
            if not error <= bound:
                raise LawViolation(
                    f"{what}, {call.operation}={kernel.name}, {name}: the error is {error:.1e}, more than {factor:g} "
                    f"times that of the reference or of rounding (together {bound:.1e})"
                )


def _with_scaled_queries(call: KernelCall, scale: float) -> KernelCall:
    return call._replace(arguments=(call.arguments[0].detach() * scale, *call.arguments[1:]), gradients=False)


def _calls(config: ModelConfig, model: Decoder) -> Iterator[tuple[str, Layout | None, KernelCall]]:
    """The calls of kernels in a training pass for each kind of layout, and in decoding."""
    length = max([2 * w + 3 for w in windows(model)] + [MIN_LENGTH])
    tokens = random_tokens(config, 2, length)
    layouts = {
        "even rows": None,
        "padded rows": Layout.padded([length, length - 5]),
        "packed documents": Layout.packed([[5, length - 5], [1, length - 1]]),
    }
    for name, layout in layouts.items():
        for call in _recorded(partial(forward, model, tokens, layout)):
            yield name, layout, call
    if model.causal:
        for call in _recorded(lambda: forward_in_chunks(model, tokens[:, :6], [4, 1, 1], 6)):
            yield "chunks with a state", None, call


def _recorded(run: Run) -> list[KernelCall]:
    with record_calls() as calls:
        run()
    return calls


def _copied(call: KernelCall, dtype: torch.dtype | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, whose tensors are leaves: copies, in `dtype` if they are floating and it is given."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        floating = leaf.is_floating_point()
        values = leaf.detach().to(dtype if floating and dtype is not None else leaf.dtype, copy=True)
        return values.requires_grad_(leaf.requires_grad and call.gradients)

    arguments: tuple[Any, ...]
    arguments, options = pytree.tree_map(copy, (call.arguments, dict(call.options)))
    return arguments, options


def _results(call: KernelCall, kernel: Kernel[Any], layout: Layout | None, dtype: torch.dtype | None = None) -> Results:
    """What a kernel returns for the tokens of a call, and the gradients of a random projection of its output."""
    arguments, options = _copied(call, dtype)
    inputs = [leaf for leaf in pytree.tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
    trained = [leaf for leaf in inputs if leaf.requires_grad]
    with torch.set_grad_enabled(bool(trained)):
        outputs = [leaf for leaf in pytree.tree_leaves(kernel.run(*arguments, **options)) if isinstance(leaf, Tensor)]
        outputs[0] = _without_padding(outputs[0], layout)
    results = {f"result {number}": output.detach() for number, output in enumerate(outputs)}
    if trained and outputs[0].requires_grad:  # further results are states, which no gradient reaches
        generator = torch.Generator().manual_seed(3)
        drawn = torch.randn(outputs[0].shape, generator=generator, dtype=torch.float64, device="cpu")
        grads = torch.autograd.grad(
            outputs[0], trained, drawn.to(outputs[0]), allow_unused=True, materialize_grads=True
        )
        results |= {f"gradient {number}": gradient for number, gradient in enumerate(grads)}
    return results


def _without_padding(y: Tensor, layout: Layout | None) -> Tensor:
    """An output with zeros at padding, where each kernel may return what it wants: [B, …, T, …]."""
    if layout is None or layout.padding is None or y.dim() < 3 or y.shape[0] != layout.batch:
        return y
    dims = [dim for dim in range(1, y.dim() - 1) if y.shape[dim] == layout.length]
    if len(dims) != 1:
        return y
    shape = [layout.batch] + [1] * (y.dim() - 1)
    shape[dims[0]] = layout.length
    return y.masked_fill(layout.padding.view(shape), 0.0)


def bfloat16_isolation(config: ModelConfig) -> None:
    """In bfloat16 later tokens, other documents and NaN in padding change no bit of a token, nor NaN a gradient."""
    model = model_under_test(config, NARROW)
    has_experts = any(part.expert_info is not None for part in feedforwards(model))
    tolerance = 4 * torch.finfo(NARROW).eps if has_experts else 0.0  # other rows change the shape of their products
    tokens, others = random_tokens(config, 2, MIN_LENGTH), random_tokens(config, 2, MIN_LENGTH, seed=1)
    layout = Layout.packed([[5, 8], [12, 1]])
    before = forward_no_grad(model, tokens, layout)
    scale = max(1.0, float(before.abs().max()))
    starts = (9, 5) if model.causal else (5,)
    for start in starts:
        after = forward_no_grad(model, torch.cat((tokens[:, :start], others[:, start:]), dim=1), layout)
        what = f"tokens from {start} on were changed"
        assert_close(after[:1, :start], before[:1, :start], what, tolerance * scale)
    padded = Layout.padded([MIN_LENGTH, 6])
    is_token = padded.positions >= 0
    tokens = torch.where(is_token, tokens, PADDING_TOKEN)
    clean = _values_and_gradients(model, tokens, padded)
    with torch.no_grad():
        model.embed.weight[PADDING_TOKEN] = float("nan")
    values, grads = _values_and_gradients(model, tokens, padded)
    assert_bitwise_equal(values, clean[0], "NaN in the padding")
    assert_gradients_close(grads, clean[1], "NaN in the padding", tolerance=0.0)


def _values_and_gradients(model: Decoder, tokens: Tensor, layout: Layout) -> tuple[Tensor, Results]:
    is_token = layout.positions >= 0
    hidden = forward(model, tokens, layout)
    return torch.where(is_token[..., None], hidden.detach(), 0.0), gradients(model, probe_loss(hidden, is_token))
