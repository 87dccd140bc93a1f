"""llama.cpp from its npm build, for tests and documentation: installed next to this file once, and run on GGUF files.

    python -m tools.llama_cpp.runner                              install it if necessary
    python -m tools.llama_cpp.runner FILE.gguf PROMPT TOKENS      continue a prompt greedily

No GPU packages are installed, no scripts of packages are run, and nothing is compiled.
"""

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAME = "node-llama-cpp"
SYSTEMS = {"Linux": "linux", "Darwin": "mac"}
MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


class LlamaCppMissing(RuntimeError):
    """llama.cpp is not installed and cannot be. The message says what to do."""


def install() -> None:
    """Install llama.cpp into node_modules of this folder if it is not there. Raises LlamaCppMissing."""
    package = f"{NAME}@{version()} {_machine()}\n"
    receipt = HERE / "node_modules" / "receipt"
    if receipt.is_file() and receipt.read_text(encoding="utf-8") == package:
        return
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise LlamaCppMissing(f"{program} is missing, so llama.cpp cannot be run; install Node.js 20 or newer")
    with (HERE / "package.json").open() as lock:  # several test processes may install at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if receipt.is_file() and receipt.read_text(encoding="utf-8") == package:
            return
        command = ["npm", "install", "--ignore-scripts", "--omit=optional", "--no-package-lock", "--no-save",
                   "--no-audit", "--no-fund", f"@{NAME}/{_machine()}@{version()}"]  # fmt: skip
        process = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
        if process.returncode:
            raise LlamaCppMissing(f"npm could not install {NAME} {version()}: {process.stderr.strip()}")
        receipt.write_text(package, encoding="utf-8")


def version() -> str:
    """The version of the npm build."""
    dependency_version: str = json.loads((HERE / "package.json").read_text(encoding="utf-8"))["dependencies"][NAME]
    return dependency_version


def run(model: Path, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of llama.cpp; generate.mjs lists the fields. Raises LlamaCppMissing, or RuntimeError if it fails."""
    results: list[dict[str, Any]] = _answer(model, {"runs": runs})
    return results


def context_log(model: Path, **options: int) -> list[str]:
    """What llama.cpp logs while it makes a context; generate.mjs lists the options. Raises as `run`."""
    lines: list[str] = _answer(model, {"context": options})
    return lines


def _answer(model: Path, fields: dict[str, Any]) -> Any:
    process = _process(os.getpid())
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"model": str(Path(model).resolve()), **fields}) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:  # it died
        _process.cache_clear()
    answer = json.loads(line) if line else {"error": f"it ended with code {process.wait()}"}
    if isinstance(answer, dict):
        raise RuntimeError(f"llama.cpp failed on {model}: {answer['error']}")
    return answer


@cache
def _process(pid: int) -> subprocess.Popen[str]:
    """One for all requests of this process, as its start takes most of a request's time. It ends with its input."""
    install()
    command = ["node", str(HERE / "generate.mjs")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _machine() -> str:
    """The package of this machine, such as linux-x64."""
    system, machine = SYSTEMS.get(platform.system()), MACHINES.get(platform.machine().lower())
    if system is None or machine is None:
        raise LlamaCppMissing(
            f"llama.cpp has no build for {platform.system()} {platform.machine()}; use Linux or macOS"
        )
    return f"{system}-{machine}" + ("-metal" if (system, machine) == ("mac", "arm64") else "")


if __name__ == "__main__":
    try:
        install()
        if len(sys.argv) == 4:
            print(run(Path(sys.argv[1]), [{"text": sys.argv[2], "n": int(sys.argv[3])}])[0]["text"])
    except LlamaCppMissing as error:
        sys.exit(f"heddle: {error}")
