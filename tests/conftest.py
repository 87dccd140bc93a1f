"""What holds for every test: one thread, a fixed seed, the same globals, NaN in memory nobody has written."""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes tests start; this one is set below

# A deadline or a slow-input check would judge the machine's load, not the code.
settings.register_profile(
    "heddle", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("heddle")


@pytest.fixture(autouse=True)
def same_start() -> None:
    """Give each test the same globals, whatever ran before it in this process.

    PyTorch fills `empty` with NaN (integers with their largest value) only in deterministic mode. On a CPU
    that mode costs no time and refuses hardly more than `put_`; on a GPU it refuses kernels that heddle uses,
    so there it stays off.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")  # the command line may have chosen another
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(not torch.cuda.is_available())
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokenizers and token files that tests make are kept apart from the user's."""
    os.environ["HEDDLE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
