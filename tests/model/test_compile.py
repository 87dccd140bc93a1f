"""Compiled layers: the same values, and no recompilation for another layout."""

import fcntl
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from heddle import extensions
from heddle.config import parse_config
from heddle.laws.harness import model_under_test, random_tokens
from heddle.model import copies as compiled_module
from heddle.model.config import ModelConfig
from heddle.model.copies import compiled, whole_graph_refusal
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.numerics.random import RandomKey, use_random_key
from heddle.parts.feedforwards import mlp
from heddle.parts.feedforwards.gated import Gated
from heddle.parts.layout import Layout
from heddle.parts.modules.eager import eager_methods
from heddle.parts.modules.router_statistics import record_router_statistics
from tests.cases import CASES, MLP, attention, case, design, layer

CUDA_CASES = ["delta", "kda", "dropout-everywhere", "moe-capacity", "attention-indexer"]
LAYOUTS = [[[12, 4], [16]], [[3, 13], [16]], [[1, 2, 13], [8, 8]]]


def model() -> Decoder:
    overrides = ["vocab_size=61", "width=16", "layers.0.repeat=2", "layers.0.mixer.heads=2", "residual.drop_path=0.5"]
    return build(load_config("preset:gqa-tiny", overrides), dtype=torch.float64)


def compilations() -> tuple[int, int, float]:
    """Compiled frames after the first layout and after all layouts; the largest difference from the eager model."""
    torch._dynamo.reset()
    plain, counter = model(), CompileCounter()
    compiled_model = compiled(plain, backend=counter)
    tokens = torch.arange(32).view(2, 16)
    first, max_difference = 0, 0.0
    for lengths in LAYOUTS:
        with use_random_key(RandomKey(0, 0, torch.arange(2))):
            difference = compiled_model(tokens, Layout.packed(lengths))[0] - plain(tokens, Layout.packed(lengths))[0]
        max_difference = max(max_difference, difference.abs().max().item())
        first = first or counter.frame_count
    return first, counter.frame_count, max_difference


def test_another_layout_does_not_recompile() -> None:
    first, after, max_difference = compilations()
    assert first > 0
    assert after == first
    assert max_difference < 1e-10


# What killed processes leave in the compiler's cache.


def check_damaged_libraries(folder: Path) -> None:
    """Libraries that are cut or empty are removed, unless a process builds them."""
    # A header of 64 bytes, which says that two sections of 64 bytes are described from byte 64 on.
    library = (b"\x7fELF\x02".ljust(40, b"\0") + bytes([64, *[0] * 17, 64, 0, 2, 0, 0, 0])).ljust(192, b"\0")
    contents = {"whole": library, "cut": library[:-1], "empty": b"", "zeros": bytes(len(library)), "built": b""}
    (folder / "locks").mkdir()
    for name, code in contents.items():
        (folder / name[:2]).mkdir()
        (folder / name[:2] / f"{name}.main.so").write_bytes(code)
    with (folder / "locks" / "built.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        compiled(model())
    assert sorted(path.name for path in folder.glob("*/*.so")) == ["built.main.so", "whole.main.so"]


def test_damaged_libraries_of_the_compiler_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    check_damaged_libraries(tmp_path)


def test_a_library_of_which_only_the_beginning_is_read_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled_module, "_is_whole", lambda path: path.read_bytes()[:4] == b"\x7fELF")
    with pytest.raises(AssertionError, match="cut"):
        check_damaged_libraries(tmp_path)


@pytest.mark.soak
def test_a_compilation_follows_a_killed_one(tmp_path: Path) -> None:
    """The first process compiles; what it built is cut; the second one compiles again."""
    program = f"""
from tests.model.test_compile import compiled, model
import torch
from pathlib import Path
compiled(model())(torch.arange(32).view(2, 16))
for path in Path({str(tmp_path)!r}).glob("*/*.so"):
    path.write_bytes(path.read_bytes()[:-1] if path.stat().st_ino % 2 else b"")
"""
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", program], check=True, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        )


# All layers as one graph.


FIVE_LAYOUTS = [[[16], [16]], [[12, 4], [16]], [[3, 13], [16]], [[16], [16]], [[1, 2, 13], [8, 8]]]
WHOLE = {
    "attention": lambda: model_under_test(parse_config(ModelConfig, design(layer(attention(2, kv_heads=1)), width=8))),
    "latent attention": lambda: model_under_test(case("latent-low-rank-query")),
}


def check_whole_graph(plain: Decoder, layouts: list[list[list[int]]] = FIVE_LAYOUTS, backend: str = "eager") -> None:
    """All layouts take two graphs; outputs and gradients are the eager model's."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled_model = compiled(plain.train(), counter, whole=True)
    tokens = random_tokens(plain.config, 2, 16)
    for step, lengths in enumerate(layouts):
        want, got = (_step(each, tokens, Layout.packed(lengths), step) for each in (plain, compiled_model))
        assert (want[0] - got[0]).abs().max() < 1e-10
        assert all((a - b).abs().max() < 1e-9 for a, b in zip(want[1:], got[1:], strict=True))
    assert counter.frame_count == 2


@pytest.mark.parametrize("name", WHOLE)
def test_all_layouts_take_two_graphs(name: str) -> None:
    check_whole_graph(WHOLE[name]())


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_design_without_a_refusal_is_two_graphs(name: str) -> None:
    plain = model_under_test(case(name))
    if whole_graph_refusal(plain) is None:
        check_whole_graph(plain)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["attention-gqa", "latent-low-rank-query", "differential", "dropout-everywhere"])
def test_a_compiled_graph_has_the_same_values(name: str) -> None:
    check_whole_graph(model_under_test(case(name)), backend="inductor")


def test_a_graph_that_forgets_documents_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the graph of packed rows reads them as one document."""
    monkeypatch.setattr(
        compiled_module, "replace", lambda layout, **fields: replace(layout, **fields, segment_ids=None)
    )
    with pytest.raises(AssertionError, match="1e-10"):
        check_whole_graph(WHOLE["attention"](), FIVE_LAYOUTS[1:2])


def test_a_number_that_changes_with_each_call_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the graph reads a Python number."""
    calls, forward = [0], mlp.MLP.forward

    def counting(self: mlp.MLP, x: torch.Tensor, layout: Layout, state: None = None) -> Any:
        calls[0] += 1
        return forward(self, x * calls[0] / calls[0], layout, state)

    monkeypatch.setattr(mlp.MLP, "forward", counting)
    with pytest.raises(AssertionError, match="== 2"):
        check_whole_graph(WHOLE["attention"](), FIVE_LAYOUTS[:3])


def test_a_graph_calls_the_operator_of_attention() -> None:
    """Of rows of one document and of packed rows, forward and backward, with the values of the plain way."""
    plain = WHOLE["attention"]().train()
    want = [_step(plain, random_tokens(plain.config, 2, 16), Layout.packed(lengths), 0) for lengths in FIVE_LAYOUTS[:2]]
    assert extensions.install(["causal_attention"]) == ("causal_attention",)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled_model = compiled(plain, counter, whole=True)
    for results, lengths in zip(want, FIVE_LAYOUTS[:2], strict=True):
        got = _step(compiled_model, random_tokens(plain.config, 2, 16), Layout.packed(lengths), 0)
        assert all((a - b).abs().max() < 1e-10 for a, b in zip(results, got, strict=True))
    for graph in counter.graphs:
        assert sum("causal_attention" in str(node.target) for node in graph.graph.nodes) == len(plain.layers)
    assert len(counter.graphs) == 2


def test_what_has_no_fast_graph_is_refused() -> None:
    for name in ("moe", "delta", "attention-indexer", "attention-relative", "relative-bias", "rope-ntk-dynamic"):
        assert whole_graph_refusal(model_under_test(case(name))) is not None, name
    assert whole_graph_refusal(WHOLE["attention"]()) is None


def test_lengths_read_by_a_compiled_layer_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: what a layer computes depends on the documents' lengths, which differ from call to call."""
    forward = Gated.forward

    def reads_lengths(self: Gated, x: torch.Tensor, layout: Layout, state: None) -> tuple[torch.Tensor, None]:
        documents = len(layout.doc_lengths[0]) if layout.doc_lengths else 0
        return forward(self, x, layout)[0] * documents / documents, None

    monkeypatch.setattr(Gated, "forward", reads_lengths)
    with pytest.raises(AssertionError):
        test_another_layout_does_not_recompile()


def _compiled_for_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Train with layers compiled as for CUDA: experts and delta rules are traced. The frames after each layout."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiled_module, "eager_methods", lambda module, device: eager_methods(module, "cuda"))
    plain, counter, frames = model_under_test(case(name)).train(), CompileCounter(), []
    compiled_model = compiled(plain, backend=counter)
    tokens = random_tokens(plain.config, 2, 16)
    for step, lengths in enumerate(LAYOUTS):
        want, got = (_step(model, tokens, Layout.packed(lengths), step) for model in (plain, compiled_model))
        assert all((a - b).abs().max() < 1e-10 for a, b in zip(want, got, strict=True))
        frames.append(counter.frame_count)
    return frames


def _step(model: Decoder, tokens: torch.Tensor, layout: Layout, step: int) -> list[torch.Tensor]:
    """The output, the gradients of all parameters, and how often each expert was chosen."""
    with use_random_key(RandomKey(0, step, torch.arange(2))), record_router_statistics() as recorder:
        hidden, _ = model(tokens, layout)
    sum(recorder.losses, hidden.square().sum()).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return [hidden.detach(), *gradients, *(entry.expert_counts for entry in recorder.entries)]


@pytest.mark.parametrize("name", ["moe-sigmoid", *(pytest.param(x, marks=pytest.mark.soak) for x in CUDA_CASES)])
def test_layers_compiled_for_cuda_give_the_same_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = _compiled_for_cuda(name, monkeypatch)
    assert frames[-1] <= frames[0] + 1, "the number of documents becomes a variable once"


def test_the_compiled_model_shares_every_parameter() -> None:
    plain = model()
    compiled_model = compiled(plain, backend="eager")
    assert dict(compiled_model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert all(own is compiled_model.get_parameter(name) for name, own in plain.named_parameters())
    assert compiled_model.head.weight is plain.embed.weight


def test_building_a_model_does_not_import_the_compiler() -> None:
    program = f"import sys, {Decoder.__module__}; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_layers_of_a_stream_that_grows_are_all_compiled() -> None:
    """Each layer has a graph of its own: torch's limit of recompilations is for the graphs of one layer."""
    data = design(layer(None, MLP, repeat=5), residual={"kind": "attention_residuals"})
    plain, counter, frames = build(load_config(data), dtype=torch.float64), CompileCounter(), []
    tokens = torch.arange(32).view(2, 16)
    with torch._dynamo.config.patch(recompile_limit=2):
        for depth in (4, 5):
            torch._dynamo.reset()
            model = compiled(build(load_config(data | {"layers": [data["layers"][0] | {"repeat": depth}]})), counter)
            before = counter.frame_count
            model(tokens)
            frames.append(counter.frame_count - before)
    assert frames[1] * 4 == frames[0] * 5
    torch.testing.assert_close(compiled(plain, counter)(tokens)[0], plain(tokens)[0], rtol=0, atol=1e-10)
