"""Setup of every test: one thread, a fixed seed, the same globals, NaN in uninitialized memory."""

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from heddle.runtime import DEFAULT_CHOICES, install
from heddle.training import loop
from tests import forked

# Compiled files are kept whatever the shell says: else each test process compiles the tests, each command the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start; this process is set below
os.environ["HEDDLE_MACHINE"] = "default"  # ways of products and attention, which depend on the machine
# A shell ignores SIGINT for what it runs in the background, and processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until tests are collected: nothing of it is garbage, and looking for some took a sixth of its time

# A deadline or a slow-input check would measure the load of the machine, not the code.
settings.register_profile(
    "heddle", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("heddle")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000)  # models of tests make many objects and little garbage


@pytest.fixture(autouse=True, scope="session")
def _forked_starts() -> Iterator[None]:
    """Processes are forked, and nobody waits for a disk: what `fsync` is for, stand-ins of storage's calls test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forked.Popen)
        patch.setattr(os, "fsync", os.fstat)
        forked.ENVIRONMENT |= os.environ
        yield
        forked.close()


@pytest.fixture
def real_starts() -> Iterator[None]:
    """Every process is started anew, as by a user."""
    with forked.real_starts():
        yield


@pytest.fixture(autouse=True)
def _reset_globals(request: pytest.FixtureRequest) -> Iterator[None]:
    """Globals as before each test. At night every process is started anew."""
    if any(request.node.get_closest_marker(name) for name in ("nightly", "soak")):
        request.getfixturevalue("real_starts")
    reset_globals()
    yield
    reset_globals()  # fixtures of a wider scope run before those of the next test


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each evaluation of a training, as they are asked for."""
    read: list[int] = []
    right = loop.evaluate

    def evaluate(model: Any, job: Any, tokens: int, *others: Any) -> Any:
        read.append(tokens)
        return right(model, job, tokens, *others)

    monkeypatch.setattr(loop, "evaluate", evaluate)
    return read


def reset_globals() -> None:
    """Reset global state, as before each test.

    PyTorch fills `empty` with NaN (integers with their largest value) only in deterministic mode. On a CPU that mode
    costs no time and warns of few operations, such as `put_`, and warnings are errors. As it only warns, kernels are
    chosen as without it. It is on whether or not the machine has a GPU: the tests run on the CPU. What runs on a GPU
    (`benchmarks/gpu.py`) is no test.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    install(DEFAULT_CHOICES)  # a command may have changed them
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # a command may clear it
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed also writes down the stack, 3 ms, for each GPU library


BUILT = Path(__file__).parent.parent / "build/operators"  # of earlier runs; `make clean` removes it


@pytest.fixture(autouse=True, scope="session")
def separate_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cache tokenizers, token files and built operators outside the user's cache, once for all test processes.

    Built operators are kept for the next run: compiling them takes a minute, and their names are hashes of the sources,
    the flags, the compiler and torch.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    cache = folder / "heddle-cache"
    os.environ["HEDDLE_CACHE"] = str(cache)
    copy_operators(BUILT, cache)
    yield
    copy_operators(cache, BUILT)


def copy_operators(source: Path, target: Path) -> None:
    """Copy the operators that are not there yet, each file whole or not at all."""
    for file in (*source.glob("*.so"), *source.glob("*.so.json")):
        if not (target / file.name).exists():
            target.mkdir(parents=True, exist_ok=True)
            part = target / f".{file.name}.{os.getpid()}"
            shutil.copyfile(file, part)
            part.replace(target / file.name)
