"""How long do `heddle --help` and `import heddle` take?"""

import statistics
import subprocess
import sys

from benchmarks.harness import alternate, limit_row, show, write

QUESTION = "How long does `heddle --help` take?"
COMMANDS = {
    "heddle --help": ["-m", "heddle", "--help"],
    "import heddle": ["-c", "import heddle"],
    "python alone": ["-c", "pass"],
}


def run_python(arguments: list[str]) -> None:
    """Run a new Python process."""
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    calls = {name: (lambda arguments=arguments: run_python(arguments)) for name, arguments in COMMANDS.items()}
    medians = {name: statistics.median(seconds) for name, seconds in alternate(calls, rounds=15).items()}
    rows = [limit_row("heddle --help", medians["heddle --help"], 0.3, "seconds")]
    rows += [
        {"case": name, "value": round(value, 3), "unit": "seconds"}
        for name, value in medians.items()
        if "help" not in name
    ]
    show(rows)
    write("benchmarks.startup", QUESTION, rows)
