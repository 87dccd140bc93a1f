"""llama.cpp from its npm build, for tests and documentation: put beside this file once, and run on GGUF files.

    python -m tools.llama_cpp.runner                              installs it, if it is not there
    python -m tools.llama_cpp.runner FILE.gguf PROMPT TOKENS      goes on with a prompt, greedily

No package of a graphics card is taken, no script of a package is run, and nothing is compiled.
"""

import fcntl
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAME = "node-llama-cpp"
SYSTEMS = {"Linux": "linux", "Darwin": "mac"}
MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


class LlamaCppMissing(RuntimeError):
    """It is not there and cannot be installed; the message says what to do."""


def install() -> None:
    """Put llama.cpp into node_modules of this folder, once. Raises LlamaCppMissing."""
    wanted = f"{NAME}@{version()} {_machine()}\n"
    receipt = HERE / "node_modules" / "receipt"
    if receipt.is_file() and receipt.read_text(encoding="utf-8") == wanted:
        return
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise LlamaCppMissing(f"{program} is missing, so llama.cpp cannot be run; install Node.js 20 or newer")
    with (HERE / "package.json").open() as lock:  # several test processes may come here at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if receipt.is_file() and receipt.read_text(encoding="utf-8") == wanted:
            return
        command = ["npm", "install", "--ignore-scripts", "--omit=optional", "--no-package-lock", "--no-save",
                   "--no-audit", "--no-fund", f"@{NAME}/{_machine()}@{version()}"]  # fmt: skip
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LlamaCppMissing(f"npm could not install {NAME} {version()}: {done.stderr.strip()}")
        receipt.write_text(wanted, encoding="utf-8")


def version() -> str:
    """The version of the npm build."""
    found: str = json.loads((HERE / "package.json").read_text(encoding="utf-8"))["dependencies"][NAME]
    return found


def run(model: Path, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What llama.cpp answers; see generate.mjs for the fields. Raises LlamaCppMissing, or RuntimeError as it says."""
    install()
    request = json.dumps({"model": str(Path(model).resolve()), "runs": runs})
    command = ["node", str(HERE / "generate.mjs")]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout:
        raise RuntimeError(f"llama.cpp failed on {model}: {done.stderr.strip()[-2000:]}")
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


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
