"""How long do `heddle --help` and `import heddle` take?"""

import statistics
import subprocess
import sys

from benchmarks.harness import alternate, bounded, show, write

QUESTION = "How long does the command line take to answer --help?"
COMMANDS = {
    "heddle --help": ["-m", "heddle", "--help"],
    "import heddle": ["-c", "import heddle"],
    "python alone": ["-c", "pass"],
}


def run_python(arguments: list[str]) -> None:
    """A fresh interpreter."""
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    calls = {name: (lambda arguments=arguments: run_python(arguments)) for name, arguments in COMMANDS.items()}
    taken = {name: statistics.median(seconds) for name, seconds in alternate(calls, rounds=15).items()}
    rows = [bounded("heddle --help", taken["heddle --help"], 0.3, "seconds")]
    rows += [
        {"case": name, "value": round(value, 3), "unit": "seconds"}
        for name, value in taken.items()
        if "help" not in name
    ]
    show(rows)
    write("benchmarks.startup", QUESTION, rows)
