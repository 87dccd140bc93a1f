"""Where deterministic algorithms are wanted, kernels whose bits vary are not chosen, and the choice says why."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle.errors import ConfigError
from heddle.model.load_config import load_config
from heddle.model.size import build_distinct_layers, measure_kernel_choices
from heddle.numerics.attention import sdpa
from heddle.numerics.dispatch import (
    Kernel,
    KernelChoice,
    Operation,
    choose_deterministic,
    force_kernels,
    is_deterministic,
    record_choices,
)
from heddle.numerics.kernels import OPERATIONS
from tests.accelerator.pretend import pretending

FOLLOW_NO_FLAG = {"fla", "causal_conv1d", "flex"}


def never(facts: Any) -> None:
    """It supports every call."""


def operation(reason: Callable[[Any], str | None] | None) -> Operation[None]:
    """Two kernels, the first of which may vary."""
    return Operation("planted", (Kernel("fast", max, never, nondeterministic=reason), Kernel("reference", max, never)))


def test_a_kernel_that_says_its_bits_vary_is_not_chosen() -> None:
    planted = operation(lambda facts: "threads race")
    assert planted.choose(None).name == "fast"
    with choose_deterministic(), record_choices("cuda") as choices:
        assert planted.choose(None).name == planted.first_supported(None).name == "reference"
        assert not planted.can_use("fast", None)
        with force_kernels({"planted": "fast"}, {"planted": planted}), pytest.raises(ConfigError) as refused:
            planted.choose(None)
    reason = "deterministic algorithms are required, but threads race"
    assert choices == [KernelChoice("planted", "reference", (("fast", reason),))]
    assert str(refused.value) == f"kernel planted=fast: cannot serve here, because {reason}"


def test_a_kernel_that_follows_the_flag_is_chosen() -> None:
    """The planted bug: a kernel that varies and does not say so is taken."""
    with choose_deterministic():
        assert operation(None).choose(None).name == operation(never).choose(None).name == "fast"


def test_the_flag_of_torch_is_read_and_warnings_are_not_it() -> None:
    assert torch.is_deterministic_algorithms_warn_only_enabled()  # so are tests run
    assert not is_deterministic()
    torch.use_deterministic_algorithms(True)
    assert is_deterministic()
    assert operation(lambda facts: "threads race").choose(None).name == "reference"
    torch.use_deterministic_algorithms(False)
    assert not is_deterministic()


def test_a_graph_is_made_anew_when_the_flag_changes() -> None:
    planted = operation(lambda facts: "threads race")

    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if planted.choose(None).name == "fast" else 2)

    torch._dynamo.reset()
    compiled = torch.compile(chosen, backend="eager", fullgraph=True)
    torch.use_deterministic_algorithms(False)
    assert compiled(torch.zeros(())) == 1
    torch.use_deterministic_algorithms(True)
    assert compiled(torch.zeros(())) == 2


def chosen_on_cuda(design: str, *overrides: str) -> dict[str, set[str]]:
    """The kernels of each operation of a design, in training and decoding."""
    model = build_distinct_layers(load_config(design, ["vocab_size=256", *overrides]), torch.bfloat16)
    kernels: dict[str, set[str]] = {}
    for queries, cached in ((8, -1), (1, 8)):
        for choice in measure_kernel_choices(model, queries, cached, "cuda"):
            kernels.setdefault(choice.operation, set()).add(choice.kernel)
    return kernels


@pytest.mark.parametrize("design", ["preset:gated_delta-tiny", "preset:retention-tiny"])
def test_no_library_computes_a_design(design: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))
    plain = chosen_on_cuda(design)
    with choose_deterministic():
        deterministic = chosen_on_cuda(design)
    assert any(FOLLOW_NO_FLAG & names for names in plain.values())
    assert not any(FOLLOW_NO_FLAG & names for names in deterministic.values())


def test_a_learned_score_bias_is_not_for_flex() -> None:
    learned = ("layers.*.mixer.position={kind: relative_bias}",)
    assert chosen_on_cuda("preset:gqa-tiny", *learned)["attention"] >= {"flex"}
    with choose_deterministic():
        assert "flex" not in chosen_on_cuda("preset:gqa-tiny", *learned)["attention"]
        assert "flex" in chosen_on_cuda("preset:gqa-tiny", "layers.*.mixer.window=4")["attention"]


def test_every_kernel_of_a_library_says_that_it_follows_no_flag() -> None:
    saying = {
        kernel.name for operation in OPERATIONS.values() for kernel in operation.kernels if kernel.nondeterministic
    }
    assert saying == FOLLOW_NO_FLAG


def test_values_are_padded_instead_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretending():
        q, v = torch.zeros(1, 1, 8, 16, dtype=torch.bfloat16), torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16)
        assert sdpa._cudnn_serves(q, v)
        with choose_deterministic():
            assert not sdpa._cudnn_serves(q, v)
