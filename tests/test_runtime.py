"""Settings of the process: devices, threads, and float32 precision checked on this machine."""

import platform
import subprocess
import sys

import pytest
import torch

from heddle import runtime
from heddle.errors import ConfigError, is_out_of_memory
from heddle.runtime import hardware, resolve_device, set_up_runtime, versions


def test_threads_are_set_and_reported() -> None:
    assert set_up_runtime("cpu", 1).threads == torch.get_num_threads() == 1
    assert set_up_runtime("cpu").describe().keys() == {
        "device", "threads", "matmul", "keeps_memory", "cpu", "cores", "memory_bytes", "gpu"
    }  # fmt: skip


@pytest.mark.parametrize("threads", [0, -3])
def test_too_few_threads_are_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match=f"^threads {threads}: must be at least 1"):
        set_up_runtime("cpu", threads)


def test_devices() -> None:
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") in ("cpu", "cuda", "mps")
    with pytest.raises(ConfigError, match=r"^device tpu: unknown device; choices: auto, cpu, cuda, mps"):
        resolve_device("tpu")


def test_a_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for device in ("cuda", "mps"):
        with pytest.raises(ConfigError, match=f"^device {device}: torch finds none on this machine; use device cpu"):
            resolve_device(device)
    assert resolve_device("auto") == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("auto") == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == "cuda"


def test_products_stay_as_exact_as_float32() -> None:
    precision = set_up_runtime("cpu").matmul
    assert precision == torch.get_float32_matmul_precision()
    a, b = torch.randn(64, 700), torch.randn(700, 64)
    exact = a.double() @ b.double()
    assert float(((a @ b).double() - exact).norm() / exact.norm()) < 2e-6


def test_a_matmul_precision_that_loses_digits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose faster matmul rounds to bfloat16 keeps the exact one."""
    precisions: list[str] = []
    original = torch.set_float32_matmul_precision

    def note(name: str) -> None:
        precisions.append(name)
        original(name)

    monkeypatch.setattr(torch, "set_float32_matmul_precision", note)
    plain = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor,
        "__matmul__",
        lambda a, b: plain(a, b) if a.dtype == torch.float64 else plain(a.bfloat16(), b.bfloat16()).float(),
    )
    assert runtime._choose_matmul_precision() == "highest"
    assert precisions == ["medium", "highest"]


def test_importing_changes_no_global() -> None:
    code = (
        "import torch; before = (torch.get_num_threads(), torch.get_float32_matmul_precision(), "
        "torch.get_default_dtype(), torch.initial_seed())\n"
        "import heddle.cli.main, heddle.training.loop, heddle.analysis.comparison.run, heddle.generation.generate\n"
        "assert before == (torch.get_num_threads(), torch.get_float32_matmul_precision(), "
        "torch.get_default_dtype(), torch.initial_seed())"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_versions_and_hardware() -> None:
    assert versions()["torch"] == torch.__version__
    assert versions()["python"] == platform.python_version()
    machine = hardware()
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 2**28
    assert machine["cpu"]


def test_out_of_memory_is_distinguished_from_bugs() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    assert not is_out_of_memory(ValueError("allocate memory"))
