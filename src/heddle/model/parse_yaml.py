"""Parse YAML by its 1.2 core rules: `1e-4` is a number, `off` and `1:30` are text, `010` is ten.

A repeated key is an error.
"""

import re
from typing import Any

import yaml

from heddle.errors import ConfigError, parse_error_reason

MAX_YAML_VALUES = 20_000  # the parser reads about 50,000 a second, and half as many on a busy machine


class _Yaml(yaml.SafeLoader):
    """YAML 1.2 core: no sexagesimals, no octal by a leading zero, no yes/no/on/off, no dates, no duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(None, None, f"the key {key!r:.60} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key '{key:.60}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.values += 1
        if self.values > MAX_YAML_VALUES:
            problem = f"more than {MAX_YAML_VALUES} keys and values; write fewer layers, with repeat"
            raise yaml.MarkedYAMLError(None, None, problem, self.peek_event().start_mark)
        event, mark = self.peek_event(), self.peek_event().start_mark
        if isinstance(event, yaml.AliasEvent):
            problem = "an alias (*name) is not read; write it out, or use repeat"
            raise yaml.MarkedYAMLError(None, None, problem, mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(None, None, "a tag (!name) is not read", mark)
        return super().compose_node(parent, index)


def _integer(loader: _Yaml, node: yaml.ScalarNode) -> int:
    text = node.value
    return int(text[2:], 16) if text.startswith("0x") else int(text)


_Yaml.yaml_implicit_resolvers = {}
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Yaml.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^(?:[-+]?[0-9]{1,4000}|0x[0-9a-fA-F]{1,4000})$"),
    list("-+0123456789"),
)
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)
_Yaml.add_constructor("tag:yaml.org,2002:int", _integer)


def parse_yaml(text: str, name: str) -> Any:
    """Return the plain data of a YAML text. Raises ConfigError with the line."""
    try:
        return _Yaml(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}, line {line}: {error.problem}; fix the YAML") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if isinstance(error, yaml.YAMLError) else parse_error_reason(error)
        raise ConfigError(f"{name}: cannot be read as YAML ({reason}); fix the file") from None


def parse_values(text: str, name: str) -> list[tuple[str, Any]]:
    """Parse comma-separated values, a YAML list without brackets. Returns (text, value) for each.

    Raises ConfigError if there is no value, or none between two commas.
    """
    written = f"[{text}]"
    data = parse_yaml(written, name) if text.strip() else []
    if not isinstance(data, list) or not data or text.rstrip().endswith(","):
        raise ConfigError(f"{name}: a value is empty; give values between commas, null for a field that is off")
    node = _Yaml(written).get_single_node()
    assert isinstance(node, yaml.SequenceNode)
    pieces = [written[item.start_mark.index : item.end_mark.index] for item in node.value]
    return list(zip(pieces, data, strict=True))
