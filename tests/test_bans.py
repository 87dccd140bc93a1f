"""Banned calls: the package never unpickles, evaluates text, starts shells or uses the network."""

import ast
from collections.abc import Iterator

import pytest

from tests.source import package_sources

# Modules that may not be imported, with all below them.
MODULES = {
    "pickle": "unpickling runs code",
    "_pickle": "unpickling runs code",
    "pickletools": "pickles are not inspected either",
    "cloudpickle": "unpickling runs code",
    "dill": "unpickling runs code",
    "joblib": "its files are pickles",
    "marshal": "it loads code",
    "shelve": "its values are pickles",
    "code": "it runs text",
    "torch.package": "its archives hold code",
    "torch.hub": "it fetches and runs code",
    "requests": "nothing is fetched",
    "httpx": "nothing is fetched",
    "aiohttp": "nothing is fetched",
    "urllib.request": "nothing is fetched",
    "urllib3": "nothing is fetched",
    "http.client": "nothing is fetched",
    "ftplib": "nothing is fetched",
    "xmlrpc": "nothing is fetched",
}
# Functions that may not be named, whatever the module was imported as.
FUNCTIONS = {
    "torch.load": "it unpickles",
    "torch.save": "it pickles",
    "torch.jit.load": "it loads code",
    "torch.serialization.load": "it unpickles",
    "torch.utils.model_zoo.load_url": "it fetches and unpickles",
    "torch.utils.cpp_extension.load": "it compiles and loads code",
    "pandas.read_pickle": "it unpickles",
    "yaml.load": "its loader may run code; use a safe loader's get_single_data",
    "yaml.load_all": "its loader may run code",
    "yaml.unsafe_load": "it runs code",
    "yaml.full_load": "it has run code",
    "os.system": "it starts a shell",
    "os.popen": "it starts a shell",
    "subprocess.getoutput": "it starts a shell",
    "subprocess.getstatusoutput": "it starts a shell",
    "builtins.eval": "it runs text",
    "builtins.exec": "it runs text",
    "builtins.compile": "it turns text into code",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
SWITCH = "trust_remote" + "_code"


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Map each local name to the dotted name that it was imported from."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """The dotted name of an expression, or an empty string."""
    if isinstance(node, ast.Attribute):
        value = full_name(node.value, names)
        return f"{value}.{node.attr}" if value else ""
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def is_below(name: str, modules: dict[str, str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in modules for length in range(1, len(parts) + 1))


def faults(text: str) -> Iterator[str]:
    """Yield each banned name in a module's source, with its line."""
    tree = ast.parse(text)
    names = imported_names(tree)
    for node in ast.walk(tree):
        banned = ""
        if isinstance(node, ast.Import):
            banned = ", ".join(alias.name for alias in node.names if is_below(alias.name, MODULES))
        elif isinstance(node, ast.ImportFrom):
            full_names = [f"{node.module}.{alias.name}" for alias in node.names]
            banned = ", ".join(name for name in full_names if is_below(name, MODULES) or name in FUNCTIONS)
        elif isinstance(node, ast.Attribute):
            name = full_name(node, names)
            banned = name if name in FUNCTIONS or is_below(name, MODULES) or node.attr == SWITCH else ""
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in names:
            banned = node.id if node.id in BUILTINS or node.id == SWITCH else ""
        elif isinstance(node, ast.Constant) and node.value == SWITCH:
            banned = SWITCH
        elif isinstance(node, ast.keyword):
            banned = keyword_fault(node)
        if banned:
            yield f"line {getattr(node, 'lineno', 0)}: {banned}"


def keyword_fault(node: ast.keyword) -> str:
    """The name of a keyword that makes a safe call unsafe, unless its value is the constant False."""
    if node.arg == SWITCH:
        return SWITCH
    off = isinstance(node.value, ast.Constant) and node.value.value is False
    return node.arg if node.arg in {"shell", "allow_pickle"} and not off else ""


# What compiles this package's own sources (decision 147), and what asks a server that was started on this machine.
ALLOWED = {("heddle.extensions", "torch.utils.cpp_extension.load")} | {
    ("heddle.lab.conformance.run", f"urllib.request{name}") for name in ("", ".urlopen", ".Request")
}


def test_the_package_contains_no_banned_call() -> None:
    banned = [
        f"{source.name}, {fault}"
        for source in package_sources()
        for fault in faults(source.text)
        if (source.name, fault.partition(": ")[2]) not in ALLOWED
    ]
    assert banned == []


PLANTED = [
    *(f"import {module}" for module in MODULES),
    *(f"def late():\n    from {module} import anything" for module in MODULES),
    *(f"import {name.rpartition('.')[0]} as other\nother.{name.rpartition('.')[2]}('x')" for name in sorted(FUNCTIONS)),
    *(f"from {name.rpartition('.')[0]} import {name.rpartition('.')[2]} as innocent" for name in sorted(FUNCTIONS)),
    *(f"import {name.split('.')[0]}\nread = {name}" for name in sorted(FUNCTIONS)),
    *(f"{name}('x')" for name in sorted(BUILTINS)),
    "run = eval",
    "import torch\ntorch.load('x', weights_only=True)",
    "import numpy as np\nnp.load('x', allow_pickle=True)",
    "import numpy as np\nnp.load('x', allow_pickle=flag)",
    "import subprocess\nsubprocess.run('ls', shell=True)",
    f"load('x', {SWITCH}=True)",
    f"load('x', {SWITCH}=False)",
    f"options = {{'{SWITCH}': True}}",
    f"config.{SWITCH} = 1",
]


@pytest.mark.parametrize("text", PLANTED)
def test_each_planted_call_is_detected(text: str) -> None:
    assert list(faults(text)) != []


@pytest.mark.parametrize(
    "text",
    [
        "import re\nre.compile('x')",
        "import torch\ntorch.compile(model)",
        "model.eval()",
        "from heddle.folder import load\nload('x')",
        "import json\njson.load(file)",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "from torch import compile\ncompile(model)",
        "from urllib.parse import urlsplit",
        "import zipfile",
        "import torch.distributed.checkpoint",
        "class Settings:\n    compile: bool = False\nprint(Settings().compile)",
        f"'a model that needs {SWITCH} is refused'",
    ],
)
def test_similar_allowed_code_passes(text: str) -> None:
    assert list(faults(text)) == []
