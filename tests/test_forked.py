"""A forked process is what a fresh one would be; what it cannot be is started as ever."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from heddle.signals import masked_stop_signals
from tests import forked

# What a process is told, and what it inherits.
REPORT = """
import json, os, signal, sys
descriptors = [f"/proc/self/fd/{number}" for number in range(500)]
facts = {
    "arguments": sys.argv, "folder": os.getcwd(), "path": sys.path[0], "environment": dict(os.environ),
    "held": [os.readlink(path) for path in descriptors if os.path.exists(path) or os.path.islink(path)],
    "masked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid(), "read": sys.stdin.read(), "main": __name__,
    "ignored": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "terminal": sys.stdout.isatty(),
    "encodings": [sys.stdin.encoding, sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors],
}
json.dump(facts, open(sys.argv[1], "w"))
print("said")
print("told", file=sys.stderr)
sys.exit(7)
"""


def reported(folder: Path, **options: Any) -> dict[str, Any]:
    """What a script says of its process, with its exit code, what it printed, and whether it was forked."""
    (folder / "report.py").write_text(REPORT)
    command = [sys.executable, str(folder / "report.py"), str(folder / "facts.json"), "--word"]
    ended = subprocess.run(command, input="asked", capture_output=True, text=True, check=False, **options)
    assert (folder / "facts.json").is_file(), ended
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts | {"code": ended.returncode, "out": ended.stdout, "err": ended.stderr}


def test_a_forked_process_has_what_a_fresh_one_has(tmp_path: Path) -> None:
    if sys.platform != "linux":
        return  # where nothing is forked
    with (tmp_path / "held.txt").open("w") as held:
        options: dict[str, Any] = {"cwd": tmp_path, "env": os.environ | {"HEDDLE_WORD": "1"}, "start_new_session": True}
        options |= {"pass_fds": (held.fileno(),)}
        with masked_stop_signals():
            forked_facts = reported(tmp_path, **options)
            with forked.real_starts():
                fresh_facts = reported(tmp_path, **options)
    pipes = [facts.pop("held") for facts in (forked_facts, fresh_facts)]
    assert [[name.split(":")[0] for name in names] for names in pipes] == [["pipe"] * 3 + [str(held.name)]] * 2
    assert forked_facts == fresh_facts
    assert (fresh_facts["code"], fresh_facts["out"], fresh_facts["err"]) == (7, "said\n", "told\n")
    assert (fresh_facts["parent"], fresh_facts["read"], fresh_facts["leads"]) == (os.getpid(), "asked", True)
    assert fresh_facts["masked"] != []


def test_a_forked_process_is_killed_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, str(tmp_path / "waits.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM


def test_what_is_forked() -> None:
    python = forked.PYTHON
    assert forked.words_of([python, "-m", "heddle", "show"]) == ["-m", "heddle", "show"]
    assert forked.words_of([python, "-u", "train.py"]) == ["train.py"]
    assert forked.words_of([python, "-c", f"plant{forked.COMMAND}"]) is not None
    for fresh in (["-c", "import torch"], ["-W", "error", "-m", "heddle"], ["-m", "heddle", "train", "--compile"]):
        assert forked.words_of([python, *fresh]) is None
    assert forked.words_of(["env", python, "-m", "heddle"]) is None
    assert forked.read_at_import({"OMP_NUM_THREADS": "2", "HOME": "/"}) == {"OMP_NUM_THREADS": "2"}
