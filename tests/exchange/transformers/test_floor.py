"""The oldest transformers that pyproject.toml allows, under the tests of the classes and of what is exchanged."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source import ROOT


@pytest.mark.soak
def test_the_oldest_transformers_serves_too(tmp_path: Path) -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (oldest,) = set(re.findall(r'"transformers>=([\d.]+),<', project))
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(tmp_path / "old")]
    subprocess.run([*install, f"transformers=={oldest}.*"], check=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path / "old", ROOT / "src", ROOT)))}
    ask = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    result = subprocess.run(ask, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert result.startswith(f"{oldest}."), "another transformers came first"
    tests = ["tests/exchange", "tests/docs/test_huggingface.py"]
    command = [sys.executable, "-m", "pytest", "-q", f"--basetemp={tmp_path / 'tests'}", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
