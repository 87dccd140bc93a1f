"""Kernels: each equals its reference in values and gradients, in bfloat16 within its error bound."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.laws.harness import (
    PADDING_TOKEN,
    DoesNotApply,
    Gradients,
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
from heddle.numerics.cross_entropy import loss_sum
from heddle.numerics.dispatch import Kernel, KernelCall, record_calls, record_choices
from heddle.numerics.kernels import OPERATIONS, kernels
from heddle.parts.layout import Layout
from heddle.torch_private import tree_leaves, tree_map

REFERENCE = {name: operation.kernels[-1].name for name, operation in OPERATIONS.items()}
OF_TOKENS = {"linear", "rms_norm", "layer_norm", "swiglu"}  # compute each token alone
LAYOUTS = ("padded rows", "packed documents")

Run = Callable[[], tuple[Tensor, Gradients]]


def kernel_equivalence(config: ModelConfig) -> None:
    """Every kernel of every operation gives the values and gradients of the reference implementation."""
    model = model_under_test(config)
    for name, run in _runs(config, model):
        with record_choices(model.embed.weight.device.type) as choices:
            got = run()
            chosen = {(choice.operation, choice.kernel) for choice in choices}
            with kernels(**REFERENCE), record_calls() as calls:
                want = run()
        _compare(got, want, f"{name}, chosen kernels")
        # Kernels of operations outside these calls would only repeat the reference; one that was chosen in every call
        # of its operation is compared already, and one that sees each token alone does not depend on the layout.
        left_out = OF_TOKENS if name in LAYOUTS else set()
        for forced in _forced_kernels([call for call in calls if call.operation not in left_out], chosen):
            _check_forced(run, want, name, forced)


def _forced_kernels(calls: list[KernelCall], chosen: set[tuple[str, str]]) -> Iterator[dict[str, str]]:
    """Kernels but the reference that can serve all these calls: of each operation its first one, its second one, ..."""
    serving: dict[str, list[str]] = {}
    for name in sorted({call.operation for call in calls}):
        facts = {call.facts for call in calls if call.operation == name}
        in_every_call = {kernel for operation, kernel in chosen if operation == name}
        serving[name] = [
            kernel.name
            for kernel in OPERATIONS[name].kernels[:-1]
            if in_every_call != {kernel.name} and all(kernel.rejected(each) is None for each in facts)
        ]
    for turn in range(max(map(len, serving.values()), default=0)):
        yield {name: names[turn] for name, names in serving.items() if turn < len(names)}


def _check_forced(run: Run, want: tuple[Tensor, Gradients], what: str, forced: dict[str, str]) -> None:
    """Compare a run with these kernels: all at once, and each alone where they differ."""
    try:
        with kernels(**(REFERENCE | forced)):
            got = run()
        _compare(got, want, ", ".join([what, *(f"{name}={kernel}" for name, kernel in forced.items())]))
    except (ConfigError, LawViolation) as error:
        if len(forced) > 1:
            for name, kernel in forced.items():
                _check_forced(run, want, what, {name: kernel})
        elif "cannot serve here, because" not in str(error):
            raise


def _compare(got: tuple[Tensor, Gradients], want: tuple[Tensor, Gradients], what: str) -> None:
    assert_close(got[0], want[0], what)
    assert_gradients_close(got[1], want[1], what)


def _runs(config: ModelConfig, model: Decoder) -> Iterator[tuple[str, Run]]:
    """Calls of every shape that kernels distinguish."""
    length = max([2 * w + 3 for w in windows(model)] + [12])
    tokens = random_tokens(config, 2, length)
    half = length // 2
    layouts = {
        "even rows": None,
        "padded rows": Layout.padded([length, half]),
        "packed documents": Layout.packed([[half, length - half], [1, length - 1]]),
    }
    for name, layout in layouts.items():
        yield name, _training_run(model, tokens, layout)
    yield "the loss", _loss_run(model, tokens)
    if model.causal:

        def decode() -> tuple[Tensor, Gradients]:
            sizes = [half, 1, 1, length - half - 2]
            return forward_in_chunks(model, tokens, sizes, cache_length=length)[0], {}

        yield "chunks with a state", decode


def _training_run(model: Decoder, tokens: Tensor, layout: Layout | None) -> Run:
    def run() -> tuple[Tensor, Gradients]:
        hidden = forward(model, tokens, layout)
        real = None if layout is None else layout.positions >= 0
        values = hidden.detach() if real is None else hidden.detach() * real[..., None]
        return values, gradients(model, probe_loss(hidden, real))

    return run


def _loss_run(model: Decoder, tokens: Tensor) -> Run:
    """The loss of fixed hidden states; their gradient serves as the values, the loss is among the gradients."""
    shape, head = (*tokens.shape, model.embed.weight.shape[1]), model.head.output_head
    states = torch.randn(shape, dtype=head.weight.dtype, generator=torch.Generator().manual_seed(0), device="cpu")
    hidden = states.to(head.weight.device).requires_grad_()
    tensors = {"states": hidden, "weight": head.weight, "bias": head.bias}
    learned = {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad}

    def run() -> tuple[Tensor, Gradients]:
        loss = loss_sum(hidden.flatten(0, 1), head, tokens.flatten())
        grads = dict(zip(learned, torch.autograd.grad(loss, list(learned.values())), strict=True))
        return grads.pop("states"), grads | {"loss": loss.detach()}

    return run


HUGE = 1e4  # factor of the embeddings


def _exceeds_float32(config: ModelConfig, tokens: Tensor, factor: float) -> bool:
    """Whether every number of the design is finite in float64, and the square of one is not in float32."""
    model = model_under_test(config, torch.float64)
    largest: list[float] = []

    def record(module: Any, arguments: Any, output: Any) -> None:
        largest.extend(
            float(each.abs().max()) for each in tree_leaves(output) if isinstance(each, Tensor) and each.numel()
        )

    for module in model.modules():
        module.register_forward_hook(record)
    with torch.no_grad():
        model.embed.weight.mul_(factor)
        hidden = forward(model, tokens)
    return bool(hidden.isfinite().all()) and max(largest) > torch.finfo(torch.float32).max ** 0.5


def _not_finite(config: ModelConfig, tokens: Tensor, dtype: torch.dtype, factor: float) -> str | None:
    """What is not finite with embeddings times a factor, or None."""
    model = model_under_test(config, dtype)
    with torch.no_grad():
        model.embed.weight.mul_(factor)
    hidden = forward(model, tokens)
    grads = gradients(model, probe_loss(hidden.float()))
    named = {"the output": hidden} | {f"the gradient of {name}": grad for name, grad in grads.items()}
    return next((name for name, tensor in named.items() if not bool(tensor.isfinite().all())), None)


def extreme_inputs(config: ModelConfig) -> None:
    """Zero, equal and huge embeddings give finite outputs and gradients in float32 and bfloat16.

    Where a module's output, in float64, is above the root of float32's largest number, embeddings are a tenth as large.
    """
    tokens = random_tokens(config, 2, 9)
    tokens[1] = tokens[1, 0]
    for dtype in (torch.float32, torch.bfloat16):
        for factor in (0.0, 1.0, HUGE):
            while what := _not_finite(config, tokens, dtype, factor):
                if factor <= 1 or not _exceeds_float32(config, tokens, factor):
                    raise LawViolation(f"{dtype} with embeddings times {factor:g}: {what} is not finite")
                factor /= 10


# bfloat16: no kernel has a much larger error than the reference, and what must not affect a token changes no bit of it.
#
# The other laws run in float64, for which most kernels of a GPU do not exist. These laws run the kernels that train and
# generate there. A bound on values is twice the reference's error, as in FlashAttention's own tests.


NARROW = torch.bfloat16
# A kernel's error may be this many times the larger one of the reference's error and the rounding error of the exact
# result. For gradients it is that of the largest in the call: terms are rounded before they cancel in a smaller one.
VALUE_FACTOR, GRADIENT_FACTOR = 2.0, 8.0
QUERY_SCALE = 16.0  # of the queries of softmax attention: the error of a kernel that rounds scores grows with them
NOISE = 1e-5  # the error that is allowed where the exact result is zero
MIN_LENGTH = 13  # tokens of a row; no other dimension of a small design has this size

Results = dict[str, Tensor]
NarrowRun = Callable[[], object]


def bfloat16_kernels(config: ModelConfig) -> None:
    """In bfloat16, a kernel's error is at most twice the reference's, and eight times in gradients."""
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
            _compare_narrow(what, call, supported, layout, scale)
    if not checked:
        raise DoesNotApply("in bfloat16 only reference kernels run here")


def _compare_narrow(
    what: str, call: KernelCall, supported: list[Kernel[Any]], layout: Layout | None, scale: float
) -> None:
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
            least = largest if name.startswith("gradient") else rounding[name]
            bound = NOISE + factor * max(float((rounded[name].double() - want).norm()), least)
            error = float((got[name].double() - want).norm())
            if not error <= bound:
                raise LawViolation(
                    f"{what}, {call.operation}={kernel.name}, {name}: the error is {error:.1e}, more than {factor:g} "
                    f"times the error of the reference or of rounding ({bound:.1e})"
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


def _recorded(run: NarrowRun) -> list[KernelCall]:
    with record_calls() as calls:
        run()
    return calls


def _copied(call: KernelCall, dtype: torch.dtype | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with tensors copied to new leaves, floating ones in `dtype` if it is given."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        floating = leaf.is_floating_point()
        values = leaf.detach().to(dtype if floating and dtype is not None else leaf.dtype, copy=True)
        return values.requires_grad_(leaf.requires_grad and call.gradients)

    arguments: tuple[Any, ...]
    arguments, options = tree_map(copy, (call.arguments, dict(call.options)))
    return arguments, options


def _results(call: KernelCall, kernel: Kernel[Any], layout: Layout | None, dtype: torch.dtype | None = None) -> Results:
    """What a kernel returns for the tokens of a call, and the gradients of a random projection of its output."""
    arguments, options = _copied(call, dtype)
    inputs = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
    trained = [leaf for leaf in inputs if leaf.requires_grad]
    with torch.set_grad_enabled(bool(trained)):
        outputs = [leaf for leaf in tree_leaves(kernel.run(*arguments, **options)) if isinstance(leaf, Tensor)]
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
    """An output [B, …, T, …] with zeros at padding, where kernels may return anything."""
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
