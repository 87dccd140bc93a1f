"""The reasons for which a kernel rejects a call, read from the source of its `unsupported` function."""

import ast
import inspect
import re
import textwrap
import types
from typing import Any


def reasons(function: Any) -> list[str]:
    """Every reason that an `unsupported` function can return. Numbers of the call are written as `n`."""
    if function.__name__ == "<lambda>":
        return []
    texts: list[str] = []
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Return) and node.value is not None:
            texts += strings(node.value, function)
    for cell in function.__closure__ or ():
        if isinstance(cell.cell_contents, types.FunctionType):
            texts += reasons(cell.cell_contents)
    for called in re.findall(r"return (_\w+|\w+_unsupported)\(facts\)", inspect.getsource(function)):
        texts += reasons(function.__globals__[called])
    return list(dict.fromkeys(texts))


def strings(node: ast.AST, function: Any) -> list[str]:
    """The strings that an expression may evaluate to."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.Name) and isinstance(function.__globals__.get(node.id), str):
        return [function.__globals__[node.id]]
    if isinstance(node, ast.IfExp):
        return strings(node.body, function) + strings(node.orelse, function)
    if not isinstance(node, ast.JoinedStr):
        return []
    text = ""
    for piece in node.values:
        if isinstance(piece, ast.Constant):
            text += str(piece.value)
        elif isinstance(piece, ast.FormattedValue):
            source = ast.unparse(piece.value)
            number = str(function.__globals__.get(source, "n"))
            text += "this dtype" if "dtype" in source else number
    return [text]
