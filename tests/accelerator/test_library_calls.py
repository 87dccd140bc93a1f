"""Libraries within compiled graphs: one operator a call, with the values and gradients of the eager kernels.

Kernels are chosen as on CUDA, tensors are on the CPU, and stand-ins of the libraries compute in float64.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.optests.generate_tests import OpCheckError

from heddle.laws.harness import model_under_test, random_tokens
from heddle.numerics import dispatch
from heddle.numerics.recurrent import causal_sums, convolution, fla, library_calls, recurrence
from heddle.numerics.recurrent.gated_delta import DeltaInputs, gated_delta_rule
from heddle.numerics.recurrent.library_calls import LIBRARY_CALLS, LibraryCall, library_operator
from tests.accelerator import graphs
from tests.cases import case
from tests.laws.planting import condition

pytestmark = [  # of the compiler itself, which instantiates autograd functions and reads .grad of any tensor
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
BATCH, HEADS, LENGTH, D_K, D_V = 2, 4, 7, 6, 5
BOUNDS = torch.tensor([0, 3, 4, 14])  # of documents
MIXERS = {  # the case, and the functions in its graph
    "gated delta": ("delta", {"chunk_gated_delta_rule", "causal_conv1d_fn"}),
    "KDA": ("kda", {"chunk_kda", "causal_conv1d_fn"}),
    "Mamba-2": ("mamba2", {"chunk_simple_gla"}),  # its 58 channels are no multiple of 8
    "retention": ("retention-rope-gate", {"chunk_simple_gla"}),
    "linear attention": ("linear-attention-elu", {"chunk_simple_gla"}),
}
LIBRARIES = dict(LIBRARY_CALLS)  # what planted bugs are compared with


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries are found in the folder of stand-ins, and take float64 as well."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))
    for name in fla.FUNCTIONS.values():
        states = import_module(name).checked.__globals__["STATES"]
        monkeypatch.setitem(states, torch.float64, torch.float64)
    for module in (fla, convolution):
        monkeypatch.setattr(module, "DTYPES", (*module.DTYPES, torch.float64))
    torch._dynamo.reset()


def call(name: str, documents: bool, has_state: bool, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The tensors of one call: q, k and v in `dtype`, decays, gates and states in at least float32."""
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    if name == "causal_conv1d_fn":
        tensors = {"x": torch.randn(BATCH, LENGTH, 16, dtype=dtype), "weight": torch.randn(16, 3, dtype=wide)}
        if documents:
            return tensors | {"seq_idx": torch.tensor([0, 0, 1, 1, 1, 2, 2]).int().expand(BATCH, -1).contiguous()}
        return tensors | ({"initial_states": torch.randn(BATCH, 2, 16, dtype=dtype)} if has_state else {})
    rows, length = (1, BATCH * LENGTH) if documents else (BATCH, LENGTH)
    widths = {"q": D_K, "k": D_K, "v": D_V}
    tensors = {x: torch.randn(rows, length, HEADS, width, dtype=dtype) for x, width in widths.items()}
    decay_shape = (rows, length, HEADS, D_K) if name == "chunk_kda" else (rows, length, HEADS)
    tensors["g"] = -torch.randn(decay_shape, dtype=wide).square()
    if name != "chunk_simple_gla":
        tensors["beta"] = torch.rand(rows, length, HEADS, dtype=wide)
    if has_state:
        tensors["initial_state"] = torch.randn(len(BOUNDS) - 1 if documents else rows, HEADS, D_K, D_V, dtype=wide)
    return tensors | ({"cu_seqlens": BOUNDS, "cu_seqlens_cpu": BOUNDS.clone()} if documents else {})


def opcheck(name: str, documents: bool, has_state: bool, dtype: torch.dtype = torch.float64) -> None:
    """torch's own checks of an operator, and its results and gradients against the function itself."""
    tensors = call(name, documents, has_state, dtype)
    leaves = {key: x.requires_grad_() if x.is_floating_point() else x for key, x in tensors.items()}
    arguments: tuple[Any, ...] = (name, ",".join(leaves), list(leaves.values()))
    torch.library.opcheck(library_operator, arguments)
    sources = [x for x in leaves.values() if x.requires_grad]
    got, want = library_operator(*arguments), list(LIBRARIES[name].run(leaves))
    for probed in (got, want):
        probe = torch.stack([x.double().sin().sum() for x in probed]).sum()
        probed.extend(torch.autograd.grad(probe, sources))
    assert [x.dtype for x in got] == [x.dtype for x in want]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


CALLS = [(False, False), (True, False), (False, True)]


@pytest.mark.parametrize(("documents", "has_state"), CALLS)
@pytest.mark.parametrize("name", [*fla.FUNCTIONS, convolution.FUNCTION])
def test_each_operator_passes_the_checks_of_torch(name: str, documents: bool, has_state: bool) -> None:
    opcheck(name, documents, has_state)


@pytest.mark.parametrize("name", [*fla.FUNCTIONS, convolution.FUNCTION])
def test_half_precision_with_decays_in_float32(name: str) -> None:
    opcheck(name, False, True, torch.bfloat16)


def test_the_table_has_each_function_of_the_libraries() -> None:
    assert set(LIBRARY_CALLS) == {*fla.FUNCTIONS, convolution.FUNCTION}


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recurrence, causal_sums, convolution):
        monkeypatch.setattr(module, "device_type", lambda tensor: "cuda")
    monkeypatch.setattr(dispatch, "is_deterministic", lambda: False)  # in which mode the tests run


def called_functions(counter: CompileCounterWithBackend) -> set[str]:
    """The functions of libraries in the graphs."""
    nodes = [node for graph in counter.graphs for node in graph.graph.nodes if node.op == "call_function"]
    return {node.args[0] for node in nodes if "library_call" in str(node.target)}


@pytest.mark.parametrize("channels", [1, D_K])
def test_a_delta_rule_in_a_graph_is_the_library_and_gives_what_chunks_give(
    channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = (torch.randn(BATCH, 2, LENGTH, D_K, dtype=torch.float64) / 4 for _ in range(2))
    v = torch.randn(BATCH, HEADS, LENGTH, D_V, dtype=torch.float64)
    log_decay = -torch.randn(BATCH, HEADS, LENGTH, channels, dtype=torch.float64).square()
    sources = [q, k, v, log_decay, torch.rand(BATCH, HEADS, LENGTH, dtype=torch.float64)]

    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        return gated_delta_rule(DeltaInputs(q, k, v, log_decay, beta, None, None, None), None)

    for x in sources:
        x.requires_grad_()
    want = run(*sources)
    on_cuda(monkeypatch)
    counter = CompileCounterWithBackend("aot_eager")
    got = torch.compile(run, backend=counter, fullgraph=True)(*sources)
    assert counter.frame_count == 1
    assert called_functions(counter) == {"chunk_gated_delta_rule" if channels == 1 else "chunk_kda"}
    gradients = [torch.autograd.grad(y.sin().sum() + last.sin().sum(), sources) for y, last in (got, want)]
    for a, b in zip((*got, *gradients[0]), (*want, *gradients[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def compile_mixer(name: str, kind: str, functions: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and all gradients of a whole graph with the libraries are those of eager chunks, one graph for both."""
    model = model_under_test(case(name)).train()
    tokens, targets = (random_tokens(model.config, graphs.ROWS, graphs.LENGTH, seed) for seed in (0, 1))
    want = graphs._gradients(model, 0, graphs._loss, tokens, graphs.layouts(kind, 1)[0], targets)
    counter = CompileCounterWithBackend("aot_eager")
    with monkeypatch.context() as patch:
        on_cuda(patch)
        compiled = torch.compile(graphs._loss, backend=counter, fullgraph=True)
        layout = graphs.layouts(kind, 1)[0]
        got = graphs._gradients(model, 0, compiled, tokens, layout, targets)
    assert counter.frame_count == 1
    assert called_functions(counter) == functions
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.soak
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_training_step_is_one_graph_with_the_library_in_it(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, functions = MIXERS[mixer]
    compile_mixer(name, "causal", functions, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "function"), [("padded", "chunk_gated_delta_rule"), ("packed", "causal_conv1d_fn")])
def test_which_libraries_are_in_the_graph_of_a_layout(
    kind: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_mixer("delta", kind, {function}, monkeypatch)


def test_shapes_that_differ_from_the_results_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the state has the shape [N, H, d_v, d_k]."""
    original = LIBRARY_CALLS["chunk_kda"]

    def shapes(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        y, last = original.shapes(tensors)
        return y, last.mT.contiguous()

    monkeypatch.setitem(LIBRARY_CALLS, "chunk_kda", LibraryCall(original.run, shapes))
    with pytest.raises(OpCheckError):
        opcheck("chunk_kda", False, False)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_backward_pass_that_drops_a_gradient_is_caught(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the values are right, and the decay gets none, or half, of its gradient."""
    original = LIBRARY_CALLS["chunk_kda"]

    def run(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        g = tensors["g"]
        partly = g.detach() if not share else share * g + (1 - share) * g.detach()
        return original.run({**tensors, "g": partly})

    monkeypatch.setitem(LIBRARY_CALLS, "chunk_kda", LibraryCall(run, original.shapes))
    error, words = (AssertionError, "not close") if share else (OpCheckError, "not have been used")
    with pytest.raises(error, match=words):
        opcheck("chunk_kda", False, False)


@pytest.mark.parametrize("compiling", [False, True])
def test_outside_of_graphs_no_operator_is_called(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the operator is called in eager code as well, which costs its dispatch and a second forward."""
    calls: list[str] = []

    def record(name: str, *_: object) -> list[Tensor]:
        calls.append(name)
        return [torch.zeros(())]

    monkeypatch.setattr(library_calls, "library_operator", record)
    if compiling:
        condition(library_calls.call_library, "is_compiling", True)(monkeypatch)
    library_calls.call_library("chunk_kda", call("chunk_kda", False, False))
    assert calls == ["chunk_kda"] * compiling
