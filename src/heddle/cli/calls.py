"""Commands called from Python, with the options of the command line: `heddle.train`, `heddle.compare`, `heddle.show`.

Each runs the command itself, so names, defaults and refusals have one source.
"""

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from heddle.cli.run_config import defaults_of, option_names
from heddle.errors import ConfigError
from heddle.notebook import html_table

if TYPE_CHECKING:
    from heddle.model.config import ModelConfig
    from heddle.model.decoder import Decoder
    from heddle.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class TrainedRun:
    """A finished training. folder: the run's. report: what `heddle train --json` prints, as plain values.

    tokenizer: of its text; None where a task made the tokens.
    """

    folder: Path
    model: "Decoder" = field(repr=False)
    report: dict[str, Any] = field(repr=False)
    tokenizer: "Tokenizer | None" = field(default=None, repr=False)

    def generate(self, prompts: str | Sequence[str], **options: Any) -> Any:
        """Continue a text or several: `heddle.generate` with the model and the tokenizer of this run.

        options: those of `heddle.generate`, such as `max_new_tokens=100` or `temperature=0.8`. Returns what is new, a
        string or a list of strings. Raises ConfigError for a wrong option, and where the run has no tokenizer.
        """
        from heddle.generation.generate import generate

        if self.tokenizer is None:
            raise ConfigError(f"{self.folder}: was trained on tokens without text; call heddle.generate with tokens")
        texts: Any = prompts
        return generate(self.model, texts, self.tokenizer, **options)

    def _repr_html_(self) -> str:
        plain = [(name, value) for name, value in self.report.items() if isinstance(value, int | float | str)]
        return html_table(("training", ""), plain, str(self.folder))


@dataclass(frozen=True)
class ComparedDesigns:
    """A finished comparison. folder: its own, with report.html. report: what report.json holds."""

    folder: Path
    report: dict[str, Any]

    def _repr_html_(self) -> str:
        header = ("design", "parameters", "bits per byte")
        rows = [
            (design["name"], design["parameters"], design["bits_per_byte"]["mean"]) for design in self.report["designs"]
        ]
        return html_table(header, rows, " ".join(self.report["verdict"]))


@dataclass(frozen=True)
class ShownDesign:
    """What a design costs. facts: what `heddle show --json` prints, as plain values."""

    facts: dict[str, Any]

    def _repr_html_(self) -> str:
        rows = [
            (context["context_length"], context["flops_per_token"], context["state_bytes"])
            for context in self.facts["contexts"]
        ]
        caption = f"{self.facts['parameters']:,} parameters, {self.facts['active_parameters']:,} of them active"
        return html_table(("context, tokens", "FLOPs per token", "state, bytes"), rows, caption)


def train(
    design: "ModelConfig | str | Path | Mapping[str, Any] | None" = None,
    overrides: Sequence[str] = (),
    *,
    config: str | Path | None = None,
    **options: Any,
) -> TrainedRun:
    """Train a design as `heddle train` does, with its options, defaults and output.

    design: a config, plain data, a file, preset:NAME or a folder. config: a file of options, or the folder of a run.
    options: those of the command line, such as `steps=200`; `from` is `from_` here. Raises what the command reports:
    ConfigError for an option that does not exist or cannot be, CheckpointError and MachineError.
    """
    for name in ("nproc", "print_config"):
        if name in options:
            raise ConfigError(f"{name}: is an option of the command line alone; use heddle train in a terminal")
    arguments = {"design": _plain_design(design), "overrides": list(overrides) or None, "config": config}
    run: TrainedRun = _call("train", arguments | options)
    return run


def compare(*designs: str | Path, **options: Any) -> ComparedDesigns:
    """Compare designs as `heddle compare` does, with its options, defaults and output.

    designs: files, preset:NAME or folders, of which the first is the baseline, and overrides such as "width=64", which
    apply to all. options: those of the command line, such as `tokens=100_000` or `seeds=3`. Raises ConfigError for an
    option that does not exist or cannot be, and what the command reports.
    """
    if not designs:
        raise ConfigError("designs: are missing; give at least one file, preset:NAME or folder")
    result: ComparedDesigns = _call("compare", {"designs": [str(design) for design in designs], **options})
    return result


def show(
    design: "ModelConfig | str | Path | Mapping[str, Any]", overrides: Sequence[str] = (), **options: Any
) -> ShownDesign:
    """Return what `heddle show` prints of a design, and print nothing.

    design: a config, plain data, a file, preset:NAME or a folder. options: those of the command line, such as
    `context_length=[2048]`. Raises ConfigError for a design that cannot be built.
    """
    arguments = {"design": _plain_design(design), "overrides": list(overrides) or None}
    with redirect_stdout(io.StringIO()):
        facts: dict[str, Any] = _call("show", arguments | options)
    return ShownDesign(facts)


def _call(name: str, options: Mapping[str, Any]) -> Any:
    """Run a command with options by their names; returns what its function returns."""
    from heddle.cli.main import app

    commands: Any = typer.main.get_command(app)
    command = commands.commands[name]
    defaults = defaults_of(command, option_names(command), options, "options")
    try:
        with command.make_context(f"heddle {name}", [], obj=[name], default_map=defaults) as context:
            ranks = context.params.get("nproc") or 1
            if ranks > 1:  # of a file: the ranks run a command line, and here is none
                hint = f"start heddle {name} in a terminal, or leave nproc out"
                raise ConfigError(f"nproc: {ranks} ranks are an option of the command line alone; {hint}")
            return command.invoke(context)
    except Exception as error:
        message = getattr(error, "format_message", None)
        if not callable(message):
            raise
        raise ConfigError(message().rstrip(".").replace("\n", " ")) from error


def _plain_design(design: Any) -> Any:
    from heddle.model.config import ModelConfig

    return design.dump() if isinstance(design, ModelConfig) else design
