"""Pages without plotly, and a run to give commands."""

import shutil
from pathlib import Path

import pytest

from heddle.cli.main import run_command
from tests import small
from tests.light_pages import light_pages

__all__ = ["light_pages"]


@pytest.fixture(scope="session")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A design, a text, a run that trained on it, and its export."""
    root = tmp_path_factory.mktemp("trained")
    small.folder(root / "text")
    small.design_file(root / "good.yaml")
    sizes = ["--sequence-length", "16", "--batch-size", "4", "--steps", "2", "--device", "cpu", "--quiet"]
    assert run_command(["train", f"{root}/good.yaml", "--data", f"{root}/text", "--out", f"{root}/run", *sizes]) == 0
    assert run_command(["export", f"{root}/run", f"{root}/exported"]) == 0
    return root


@pytest.fixture(scope="module")
def workspace(_trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of it for the tests of a file. Its name is short, since that of a socket in it may not be long."""
    return Path(shutil.copytree(_trained, tmp_path_factory.mktemp("w"), dirs_exist_ok=True))
