"""The example trains on processes of torchrun, and its losses do not depend on how many there are."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source import ROOT


def losses(text: Path, ranks: int) -> list[float]:
    command = ["examples/train_on_ranks.py", str(text), "--steps", "2", "--design", "preset:mqa-tiny"]
    environment = dict(os.environ)
    if ranks > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*torchrun, *command]
    else:  # what torchrun would set
        command = [sys.executable, *command]
        environment |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return [float(loss) for loss in re.findall(r"loss (\S+)", result.stdout)]


def test_losses_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    alone, together = losses(text, 1), losses(text, 2)
    assert len(alone) == len(together) == 2
    assert together == pytest.approx(alone, abs=5e-6)  # float32
