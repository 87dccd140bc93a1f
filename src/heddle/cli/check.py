"""`heddle check`: run the correctness tests (laws) on a user's design; the test suite runs the same ones."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import click

from heddle.progress import printable
from heddle.session import open_session
from heddle.settings import Device, Json, Option, PartFile, SessionSettings, Threads, VerbSettings, shared
from heddle.tokenization import DEFAULT_VOCAB_SIZE
from heddle.training.settings import Design, Overrides

if TYPE_CHECKING:
    from heddle.laws import Result


@dataclass(frozen=True, kw_only=True)
class CheckSettings(VerbSettings):
    """Settings of `heddle check`."""

    design: Design
    overrides: Overrides = ()
    law: Annotated[tuple[str, ...], Option("NAME", "Check this law; repeatable. [all of docs/laws.md]")] = ()
    device: Device = "cpu"
    threads: Threads = None
    part: PartFile = ()
    json: Json = False


def check(settings: CheckSettings) -> None:
    """Run correctness tests on a small version of a design, and print each result as soon as it is known.

    They cover chunked decoding, padding, packed documents, causality, NaN propagation, kernels and more. Laws that
    say nothing about the design are marked –. With --json the results are one list, printed at the end.
    Exit code: 0 if every law holds, 1 if one is broken, 2 if the design
    or an option is invalid.
    """
    with ExitStack() as stack:
        runtime = open_session(stack, SessionSettings(**shared(settings, SessionSettings)))
        from heddle.laws import LAWS, run, shrink
        from heddle.model.load_config import load_config, with_vocab_size

        config = with_vocab_size(load_config(settings.design, settings.overrides), DEFAULT_VOCAB_SIZE)
        results = []
        for result in run(shrink(config), dict.fromkeys(settings.law) if settings.law else None, runtime.device):
            results.append(result)
            if not settings.json:
                _print_result(result, LAWS[result.name].statement)
    violations = [result for result in results if not result.passed]
    if settings.json:
        print(json.dumps([result._asdict() for result in results], indent=2))
    else:
        count = sum(not result.not_applicable for result in results)
        others = len(results) - count
        apart = f"; {others} {'does' if others == 1 else 'do'} not apply to this design" if others else ""
        print(f"{count - len(violations)} of {count} laws hold{apart}")
        for result in violations:  # again, as they are far above
            _print_result(result, "")
    if violations:
        raise click.exceptions.Exit(1)


def _print_result(result: "Result", statement: str) -> None:
    if result.not_applicable:
        word, message = "–     ", f"does not apply: {result.not_applicable}"
    else:
        word, message = ("holds ", statement) if result.passed else ("BROKEN", result.message)
    print(f"{word}  {result.name}: {printable(message)}", flush=True)
