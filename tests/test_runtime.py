"""Settings of the process: devices, threads, and float32 precision checked on this machine."""

import platform
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from heddle.errors import ConfigError, is_out_of_memory, nondeterministic_operation
from heddle.runtime import Choices, Runtime, hardware, resolve_device, set_up_runtime, versions
from tests.conftest import reset_globals


def test_threads_are_set_and_reported() -> None:
    assert set_up_runtime("cpu", 1).threads == torch.get_num_threads() == 1
    assert set_up_runtime("cpu").describe().keys() == {
        "device", "threads", "matmul", "keeps_memory", "deterministic", "choices", "cpu", "cores", "memory_bytes", "gpu"
    }  # fmt: skip


def test_the_kernels_of_workers_are_described_as_theirs() -> None:
    own = Runtime("cpu", 2, "highest", False, worker_choices={1: Choices(matmul="medium")})
    assert [own.describe()["matmul"], own.describe_workers(2)["matmul"]] == ["highest", "highest"]
    described = own.describe_workers(1)
    assert (described["matmul"], described["choices"]["matmul"]) == ("medium", "medium")
    assert replace(own, device="cuda:0", matmul="high").describe_workers(1)["matmul"] == "high"


@pytest.mark.parametrize("threads", [0, -3])
def test_too_few_threads_are_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match=f"^threads {threads}: must be at least 1"):
        set_up_runtime("cpu", threads)


def test_devices() -> None:
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") in ("cpu", "cuda", "mps")
    with pytest.raises(ConfigError, match=r"^device tpu: unknown device; choices: auto, cpu, cuda, cuda:N, mps"):
        resolve_device("tpu")
    for wrong in ("cuda:", "cuda:x", "cuda:-1", "mps:0", "cpu:0"):
        with pytest.raises(ConfigError, match=f"^device {wrong}: unknown device"):
            resolve_device(wrong)


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


def test_the_tests_find_uninitialized_memory_where_there_is_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # as a command leaves it
    reset_globals()
    assert torch.empty(3).isnan().all()


def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Pretend that torch finds two GPUs; return the devices that are made the current one."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_a_gpu_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    current = two_gpus(monkeypatch)
    assert resolve_device("cuda:1") == "cuda:1"
    with pytest.raises(ConfigError, match=r"^device cuda:2: torch finds none on this machine; use device cuda$"):
        resolve_device("cuda:2")
    assert set_up_runtime("cuda:1").device == "cuda:1"
    assert set_up_runtime("cuda").device == "cuda"
    assert current == [torch.device("cuda", 1), torch.device("cuda", 0)]


def test_tf32_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    for tf32, name in ((False, "highest"), (True, "high")):
        assert set_up_runtime("cuda", tf32=tf32).matmul == torch.get_float32_matmul_precision() == name
        assert torch.backends.cudnn.allow_tf32 is tf32
    with pytest.raises(ConfigError, match=r"^tf32: is a format of NVIDIA GPUs, and the device is cpu; leave tf32 out"):
        set_up_runtime("cpu", tf32=True)


def test_deterministic_algorithms_are_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(False)
    assert not set_up_runtime("cpu").deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    assert set_up_runtime("cpu", deterministic=True).describe()["deterministic"]
    assert torch.are_deterministic_algorithms_enabled()


def test_what_torch_refuses_is_named() -> None:
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert nondeterministic_operation(caught.value) == "put_"
    assert nondeterministic_operation(RuntimeError("shapes do not fit")) is None
    assert nondeterministic_operation(ValueError(str(caught.value))) is None


def test_products_stay_as_exact_as_float32() -> None:
    precision = set_up_runtime("cpu", choices=Choices(matmul="medium")).matmul
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
    assert set_up_runtime("cpu", choices=Choices(matmul="medium")).matmul == "highest"
    assert precisions == ["medium", "highest", "highest"]


def test_importing_changes_no_global() -> None:
    code = (
        "import torch; before = (torch.get_num_threads(), torch.get_float32_matmul_precision(), "
        "torch.get_default_dtype(), torch.initial_seed())\n"
        "import heddle.cli.main, heddle.training.loop, heddle.lab.compare.run, heddle.generation.generate\n"
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
