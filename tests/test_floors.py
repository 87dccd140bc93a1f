"""Imports only go down: the floors, read from the syntax trees, and the imports that have one home."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.source import Source, package_sources

# What each unit (a module or folder directly under heddle) may import besides itself.
BASE = {"errors", "progress", "config", "torch_private"}
FLOOR_2 = BASE | {"numerics"}
FLOOR_3 = FLOOR_2 | {"parts"}
FLOOR_4 = FLOOR_3 | {"model"}
LAB = FLOOR_4 | {
    "conversion", "data", "distributed", "exchange", "generation", "machine", "notebook", "runtime",
    "session", "settings", "signals", "storage", "tokenization", "training",
}  # fmt: skip
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "progress": {"errors"},
    "notebook": set(),
    "torch_private": set(),
    "signals": set(),  # what loops and the command line answer
    "config": {"errors", "progress"},
    "settings": {"errors"},
    "session": {"config", "data", "errors", "machine", "numerics", "progress", "runtime", "settings"},  # for programs
    "extensions": {"data", "errors", "numerics", "progress", "storage"},  # builds numerics.native, decision 147
    "runtime": {
        "errors",
        "extensions",
        "numerics",
    },  # settings of the whole process: for programs that own it, decision 2
    "machine": {
        "data",
        "errors",
        "extensions",
        "numerics",
        "progress",
        "runtime",
        "session",
        "storage",
        "torch_private",
    },
    "numerics": {"errors", "torch_private"},
    "parts": FLOOR_2,
    "model": FLOOR_3 | {"notebook"},
    "laws": FLOOR_4,
    "tokenization": BASE,
    "storage": FLOOR_4 | {"distributed", "tokenization"},  # decisions 32, 76
    "data": FLOOR_4 | {"storage", "tokenization"},
    "distributed": FLOOR_4 | {"runtime"},
    "generation": FLOOR_4 | {"distributed", "settings"},
    "exchange": FLOOR_4 | {"data", "storage", "tokenization"},  # decisions 24, 114
    "exchange.transformers": FLOOR_4 | {"data", "exchange", "generation", "storage", "tokenization"},  # decision 24
    # decision 105
    "training": FLOOR_4
    | {
        "data",
        "distributed",
        "generation",
        "machine",
        "notebook",
        "runtime",
        "session",
        "settings",
        "signals",
        "storage",
    }
    | {"tokenization"},
    "conversion": FLOOR_4 | {"data", "exchange", "settings", "storage", "tokenization", "training"},  # decision 52
    "lab": LAB | {"lab.bench"},  # decision 106: what studies models; no other room imports it
    "lab.bench": LAB | {"exchange.transformers", "lab"},  # the peer
    "lab.conformance": LAB | {"exchange.transformers", "lab", "laws"},  # an engine; a page; other values of options
    "lab.judge": LAB | {"lab", "laws"},  # refuses what breaks a law; decision 148
    "lab.plan": LAB | {"lab", "lab.bench"},  # a rank of a process group that is not there; the limits of a CPU
    "serving": FLOOR_4 | {"data", "generation", "settings", "signals", "tokenization"},
}
TOP = {"", "__main__", "cli"}  # heddle itself, `python -m heddle` and the command line may import everything

# Folders of parts that are no slots: what every part may import.
SHARED_BY_PARTS = {"modules"}

# Imports that have a home: only these units may hold them.
HOMES = {
    "transformers": {"exchange.transformers"},
    "pyarrow": {"data"},
    "torch.distributed": {"distributed", "lab.plan", "storage", "torch_private"},
}
# Modules outside cli/ that may read or set environment variables: where the cache lies, what the terminal is, what
# torch reads when it starts, what torchrun and Slurm say, and what a process that is started later would find.
READS_ENVIRONMENT = {
    "heddle.lab.compare.compare",
    "heddle.lab.show",
    "heddle.lab.workers",
    "heddle.data.cache",
    "heddle.distributed",
    "heddle.extensions",
    "heddle.machine",
    "heddle.progress",
    "heddle.session",
}
ENVIRONMENT = {"os.environ", "os.getenv", "os.putenv"}
# Functions that import the module their first argument names.
IMPORTING = {"import_module", "__import__"}
# What numerics may import from outside the package and the standard library. Numpy draws weights: decision 149.
NUMERICS_MAY_USE = {"torch"}
DRAWS_MAY_USE = {"heddle.numerics.random": {"numpy"}}


def unit(name: str) -> str:
    """`heddle.parts.mixers` -> `parts`; `heddle` -> ``; a folder with rules of its own is a unit of its own."""
    inner = f"{name}.".split(".")[1:3]
    return ".".join(inner) if ".".join(inner) in ALLOWED else inner[0]


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of attributes on a name, otherwise ``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def mentions(source: Source, modules: set[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every module imported and of every chain such as `torch.distributed.barrier`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                longer = f"{node.module}.{alias.name}"
                if longer == "heddle.__version__":  # a constant; every other name of the root leads upwards
                    continue
                inside = is_within(longer, "heddle") and longer not in modules
                yield node.lineno, (node.module or "") if inside else longer
        elif isinstance(node, ast.Attribute) and (chain := dotted(node)):
            if not is_within(chain, "heddle"):
                yield node.lineno, chain
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in IMPORTING:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def kind_of(name: str) -> str:
    """The kind's module that `name` is or lies in, or ``; a file with a leading underscore is no kind."""
    pieces = name.split(".")
    is_kind = pieces[:2] == ["heddle", "parts"] and len(pieces) > 3 and not pieces[3].startswith("_")
    if pieces[2:3] and pieces[2] in SHARED_BY_PARTS:
        return ""
    return ".".join(pieces[:4]) if is_kind else ""


def import_fault(source: Source, target: str) -> str:
    """Why `source` may not import `target`, a module of heddle; empty if it may."""
    here, there = unit(source.name), unit(target)
    if here in TOP:
        return ""
    if here not in ALLOWED:
        return f"{here} stands on no floor; give it one in tests/test_floors.py"
    if there != here and there not in ALLOWED[here]:
        return f"{here} may not import {target}"
    kind = kind_of(target)
    if here == "parts" and kind and kind != kind_of(source.name):
        return f"a part may not import another kind ({target}); import its slot"
    if here == "model" and kind and not is_within(source.name, "heddle.model.presets"):
        return f"only presets name a kind, not {target}; import its slot"
    return ""


def use_fault(source: Source, name: str) -> str:
    """Why `source` may not use `name`, something from outside heddle; empty if it may."""
    here = unit(source.name)
    for package, homes in HOMES.items():
        if is_within(name, package) and here not in homes:
            return f"{package} belongs to {' and '.join(sorted(homes))}"
    is_private = any(piece.startswith("_") and not piece.startswith("__") for piece in name.split("."))
    if is_private and is_within(name, "torch") and here != "torch_private":
        return "private names of torch belong to torch_private"
    reads = any(is_within(name, variable) for variable in ENVIRONMENT)
    if reads and here != "cli" and source.name not in READS_ENVIRONMENT:
        return "environment variables are read in cli"
    return ""


def faults(sources: list[Source]) -> list[str]:
    """One line for every rule broken, with the module and the line number."""
    modules = {source.name for source in sources}
    found = set()
    for source in sources:
        for line, name in mentions(source, modules):
            fault = import_fault(source, name) if is_within(name, "heddle") else use_fault(source, name)
            if fault:
                found.add(f"{source.name}:{line}: {fault}")
        if unit(source.name) == "numerics":
            found.update(foreign_imports(source))
    return sorted(found)


def foreign_imports(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for root in (name.split(".")[0] for name in names):
            allowed = NUMERICS_MAY_USE | DRAWS_MAY_USE.get(source.name, set()) | {"heddle"}
            if root not in allowed | sys.stdlib_module_names:
                yield f"{source.name}:{node.lineno}: numerics may not import {root}"


def test_imports_only_go_down() -> None:
    assert faults(package_sources()) == []


KNOWN = [
    "heddle.parts.mixers",
    "heddle.parts.mixers.attention",
    "heddle.parts.mixers.pair",
    "heddle.model.decoder",
]


def faults_of(name: str, text: str) -> list[str]:
    return faults([Source(name, text), *(Source(known, "") for known in KNOWN if known != name)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("heddle.numerics.attention.softmax", "import numpy"),
        ("heddle.numerics.attention.softmax", "from heddle.config import Config"),
        ("heddle.numerics.attention.softmax", "from heddle.parts.mixers import Mixer"),
        ("heddle.errors", "from heddle.config import Config"),
        ("heddle.parts.mixers.pair", "from heddle.model.decoder import Decoder"),
        ("heddle.parts.mixers.pair", "from heddle.parts.mixers.attention import Attention"),
        ("heddle.parts.mixers.pair", "from heddle.parts.mixers import attention"),
        ("heddle.parts.mixers.pair", "def build():\n    import heddle.parts.mixers.attention"),
        ("heddle.parts.mixers", "from heddle.parts.mixers.attention import Attention"),
        ("heddle.model.decoder", "from heddle.parts.mixers.attention import Attention"),
        (
            "heddle.model.decoder",
            "import importlib\nimportlib.import_module('heddle.parts.mixers.attention')",
        ),
        ("heddle.model.decoder", "import heddle"),
        ("heddle.model.decoder", "from heddle import training"),
        ("heddle.model.decoder", "from heddle import build"),
        ("heddle.data.corpus", "from heddle.training import loop"),
        ("heddle.generation.loop", "import heddle.serving"),
        ("heddle.training.loop", "from heddle.cli.main import main"),
        ("heddle.training.loop", "from heddle.laws import mixers"),
        ("heddle.training.loop", "from heddle.lab import workers"),
        ("heddle.serving.app", "from heddle.lab.pages import render"),
        ("heddle.generation.loop", "from heddle.runtime import Runtime"),
        ("heddle.nowhere", "from heddle.errors import HeddleError"),
        ("heddle.cli.show", "from transformers import AutoModel"),
        ("heddle.model.decoder", "from torch import distributed"),
        ("heddle.training.loop", "import torch\n\ntorch.distributed.barrier()"),
        ("heddle.training.optimizer", "import torch\n\ntorch._foreach_mul_([], 1.0)"),
        ("heddle.laws.kernels", "from torch.utils import _pytree"),
        ("heddle.numerics.linear", "from torch._C import _nn"),
        ("heddle.training.loop", "import os\n\nos.environ['OMP_NUM_THREADS'] = '1'"),
        ("heddle.data.tokens", "from os import getenv"),
    ],
)
def test_planted_imports_are_caught(name: str, text: str) -> None:
    assert len(faults_of(name, text)) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "heddle.numerics.attention.softmax",
            "import math\n\nfrom torch import nn\n\nfrom heddle.errors import HeddleError",
        ),
        (
            "heddle.parts.mixers.pair",
            "from heddle.parts.mixers import Mixer\nfrom heddle.config import Config",
        ),
        ("heddle.model.presets", "from heddle.parts.mixers.attention import Attention"),
        ("heddle.model.presets.small", "from heddle.parts.mixers.attention import Attention"),
        ("heddle.exchange.transformers.export", "import transformers"),
        ("heddle.storage.save", "import torch.distributed.checkpoint"),
        ("heddle.cli.train", "import os\n\nos.environ.get('NO_COLOR')\nfrom heddle.laws import mixers"),
        ("heddle.data.cache", "import os\n\nos.environ.get('XDG_CACHE_HOME')"),
        ("heddle.lab.compare.run", "from heddle.data import corpus"),
        ("heddle.storage.save", "from heddle import __version__"),
    ],
)
def test_allowed_imports_pass(name: str, text: str) -> None:
    assert faults_of(name, text) == []


HELP = """
try:
    from heddle.cli.main import main
    main(["--help"])
except SystemExit as exit:
    assert not exit.code, exit.code
"""


def loaded_by(code: str) -> set[str]:
    """The top-level modules a fresh interpreter holds after running `code`."""
    report = "\nimport sys\nprint('\\n' + ' '.join({name.split('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", code + report]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("code", ["import heddle", HELP], ids=["import", "help"])
def test_nothing_heavy_is_loaded_before_it_is_needed(code: str) -> None:
    loaded = loaded_by(code)
    assert "heddle" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "plotly", "scipy", "jinja2"}


def test_the_probe_sees_a_heavy_import() -> None:
    assert "numpy" in loaded_by("import heddle\nimport numpy.linalg")
