"""A plugin of pytest that writes down which functions of floors 1 to 3 each passing test calls, for tools/mutants.py.

python -m pytest -p tools.reached_functions --reached runs/mutants.tests.json tests/numerics tests/parts
"""

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = f"{Path(__file__).resolve().parents[1] / 'src/heddle'}/"
FLOORS = ("numerics", "parts", "model")


def key_of(code: types.CodeType) -> str | None:
    """What names the function of a code object, such as `numerics.norms:reference`; None outside of the floors."""
    path = code.co_filename.removeprefix(SOURCE)
    if path == code.co_filename or path.split("/")[0] not in FLOORS:
        return None
    module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return f"{module}:{code.co_qualname.split('.<locals>')[0]}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write."""
    parser.addoption("--reached", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Write down calls from here on."""
    config.pluginmanager.register(Recorder(config.getoption("--reached")))


class Recorder:
    """Collects the code that is called during a test, by Python's own hook for profilers."""

    def __init__(self, file: Path) -> None:
        self.file, self.codes = file, set[types.CodeType]()
        self.tests: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else {}

    def note(self, frame: types.FrameType, event: str, _: object) -> None:
        """Note the code of a call."""
        if event == "call":
            self.codes.add(frame.f_code)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """A test with its fixtures."""
        self.codes.clear()
        sys.setprofile(self.note)
        try:
            return (yield)
        finally:
            sys.setprofile(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a test that passed."""
        if report.when == "call" and report.passed:
            functions = sorted({key for code in list(self.codes) if (key := key_of(code))})
            if functions:
                self.tests[report.nodeid] = {"seconds": round(report.duration, 3), "functions": functions}

    def pytest_sessionfinish(self) -> None:
        """Write."""
        self.file.write_text(json.dumps(self.tests))
