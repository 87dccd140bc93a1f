"""`heddle check`: run the correctness tests (laws) on a user's design; the test suite runs the same ones."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

import click

from heddle.progress import printable
from heddle.session import open_session
from heddle.settings import Device, Json, Option, PartFile, SessionSettings, Threads, VerbSettings, shared
from heddle.tokenization import DEFAULT_VOCAB_SIZE
from heddle.training.settings import Design, Overrides


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

    They cover chunked decoding, padding, packed documents, causality, NaN propagation, kernels and more. With --json
    the results are one list, printed at the end. Exit code: 0 if every law holds, 1 if one is broken, 2 if the design
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
                message = LAWS[result.name].statement if result.passed else result.message
                print(f"{'holds ' if result.passed else 'BROKEN'}  {result.name}: {printable(message)}", flush=True)
    violations = [result for result in results if not result.passed]
    if settings.json:
        print(json.dumps([result._asdict() for result in results], indent=2))
    else:
        print(f"{len(results) - len(violations)} of {len(results)} laws hold")
    if violations:
        raise click.exceptions.Exit(1)
