"""Settings of verbs: what is written is read again, from the command line, a file and Python; all verbs hold to it."""

import ast
import dataclasses
import inspect
import json
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import heddle
from heddle.cli.main import COMMANDS, VerbCommand, app, run_command
from heddle.errors import ConfigError
from heddle.serving.limits import ServerLimits
from heddle.settings import Argument, SessionSettings, Setting, VerbSettings, settings_of
from heddle.training.settings import TrainSettings
from tests import small

VALUES = {int: 700, float: 2.5, str: "a word, 'quoted'", Path: Path("a folder/file")}


def command(words: list[str]) -> tuple[VerbCommand, click.Context]:
    """The command of a line, and its values, without running it."""
    root = click.Context(app, info_name="heddle")
    name, verb, rest = app.resolve_command(root, words)
    assert isinstance(verb, VerbCommand)
    return verb, verb.make_context(name, rest, parent=root)


def other_value(setting: Setting) -> Any:
    """A value that is not the default."""
    if setting.type is bool:
        return not setting.default
    value = VALUES.get(setting.type, "preset:gqa-tiny")
    return (value, value) if setting.repeats else value


def changed(cls: type[VerbSettings]) -> VerbSettings:
    """Settings in which every field has another value than its default."""
    fields = {setting.field: other_value(setting) for setting in settings_of(cls).values()}
    return cls(**fields)


@pytest.mark.parametrize("verb", COMMANDS)
def test_settings_are_read_as_they_are_written(verb: str, tmp_path: Path) -> None:
    cls = command([verb])[0].settings
    settings = changed(cls)
    words = shlex.split(settings.command_line(verb))
    assert words[:2] == ["heddle", verb]
    read, context = command(words[1:])
    assert read.read_settings(context) == settings
    plain = yaml.safe_load(yaml.safe_dump(settings.dump()))
    assert cls.read(plain) == settings
    assert cls.read(json.loads(json.dumps(plain))) == settings


@pytest.mark.parametrize("verb", COMMANDS)
def test_defaults_are_of_the_types_that_are_declared(verb: str) -> None:
    cls = command([verb])[0].settings
    settings = settings_of(cls)
    assert set(cls.SHOWN) <= {setting.field for setting in settings.values()}
    assert len(settings) <= 14 or 8 <= len(cls.SHOWN) <= 12
    for setting in settings.values():
        assert setting.option.help.endswith((".", "]", "…"))
        if setting.is_required or setting.default is None:
            continue
        assert setting.default == () if setting.repeats else isinstance(setting.default, setting.type)


def test_help_of_no_verb_imports_anything_heavy() -> None:
    code = (
        "import sys; from heddle.cli.main import COMMANDS, run_command\n"
        "for verb in COMMANDS: run_command([verb, '--help'])\n"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'yaml', 'rich', 'jinja2') if name in sys.modules],"
        " file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == "[]\n"


def test_a_verb_is_a_subcommand_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["compare", "ladder"], ["show", "presets"], ["runs", "verify"]):
        assert run_command([*words, "--help"]) == 0
        as_subcommand = capsys.readouterr().out
        assert run_command([words[1], "--help"]) == 0
        assert as_subcommand.replace(" ".join(words), words[1]) == capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"stpes": 3}, "options: stpes: unknown option; did you mean 'steps'"),
        ({"steps": "3.5"}, "--steps 3.5: "),
        ({"steps": True}, "steps: "),
        ({"lr": "fast"}, "--lr fast: "),
        ({"fp8": "maybe"}, "--fp8 maybe: "),
        ({"tokens": "many"}, "--tokens many: "),
        ({"out": ["a", "b"]}, "out: takes one value"),
        ({"steps": "9" * 100}, None),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], says: str | None) -> None:
    if says is None:
        TrainSettings.read(values)
        return
    with pytest.raises(ConfigError) as caught:
        TrainSettings.read(values)
    assert str(caught.value).startswith(says)


def test_arguments_come_first_and_hidden_ones_are_read() -> None:
    settings = settings_of(TrainSettings)
    kinds = [isinstance(setting.option, Argument) for setting in settings.values()]
    assert kinds == sorted(kinds, reverse=True)
    assert TrainSettings.read({"tensor_parallel_degree": 2}).tensor_parallel_degree == 2
    assert TrainSettings.read({"from_": "a", "compile": None}) == TrainSettings(from_=Path("a"))


def test_a_run_of_settings_names_a_command_that_continues_it(tmp_path: Path) -> None:
    texts = str(small.folder(tmp_path / "texts"))
    settings = TrainSettings(
        design=small.design(), data=(texts,), vocab_size=300, steps=2, batch_size=2, sequence_length=16, threads=1,
        out=tmp_path / "a run", quiet=True, json=True,
    )  # fmt: skip
    report = heddle.train(settings).report
    saved = json.loads((tmp_path / "a run" / "run.json").read_text(encoding="utf-8"))
    assert saved["options"] == settings.dump()
    words = shlex.split(saved["command"])
    assert words == ["heddle", "train", "--config", str(tmp_path / "a run")]
    assert heddle.train(config=words[-1]).report == report
    assert run_command(words[1:]) == 0


PACKAGE = Path(heddle.__file__).parent
READERS = ("settings", "self", "limits")  # what settings are called where they are read


def read_fields(cls: type[VerbSettings]) -> set[str]:
    """The fields of a verb's settings that some file reads, or hands on to a parameter of that name."""
    found = set[str]()
    for file in PACKAGE.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        if cls.__name__ not in source and not (issubclass(cls, ServerLimits) and "limits." in source):
            continue
        tree = ast.parse(source)
        origins = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in READERS:
                found.add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "shared":
                target = node.args[1]
                assert isinstance(target, ast.Name)
                module, name = origins.get(target.id, (module_name(file), target.id))
                found |= set(inspect.signature(getattr(import_module(module), name)).parameters)
    return found


def module_name(file: Path) -> str:
    return ".".join(("heddle", *file.relative_to(PACKAGE).with_suffix("").parts))


SESSION = {field.name for field in dataclasses.fields(SessionSettings)}  # what `open_session` reads


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_option_of_a_verb_is_read(verb: str) -> None:
    """One that a function takes by its name would be lost silently if the parameter were renamed."""
    command = app.get_command(click.Context(app), verb)
    assert isinstance(command, VerbCommand)
    cls = command.settings
    assert {field.name for field in dataclasses.fields(cls)} - SESSION - read_fields(cls) == set()


@pytest.mark.parametrize(("text", "length"), [("4096", 4096), ("32k", 32768), ("32K", 32768), ("-1", -1)])
def test_a_length_in_thousands_is_that_of_context_lengths(text: str, length: int) -> None:
    assert TrainSettings.read({"sequence_length": text}).sequence_length == length


@pytest.mark.parametrize("text", ["32kb", "1.5k", "k", "", "²"])
def test_a_length_that_is_not_one_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--sequence-length"):
        TrainSettings.read({"sequence_length": text})
