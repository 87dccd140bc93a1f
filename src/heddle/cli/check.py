"""`heddle check`: the correctness tests (laws) on a design of the user's; the test suite runs the same ones."""

import json
from contextlib import ExitStack
from typing import Annotated

import typer

from heddle.cli.options import DesignArgument, Device, Json, Overrides, PartFile, Threads, open_session, with_vocab_size
from heddle.progress import printable
from heddle.tokenization import DEFAULT_VOCAB_SIZE

LawNames = Annotated[
    list[str] | None, typer.Option("--law", metavar="NAME", help="Check this law; repeatable. [all of docs/laws.md]")
]


def check(
    design: DesignArgument,
    overrides: Overrides = None,
    law: LawNames = None,
    device: Device = "cpu",
    threads: Threads = None,
    part: PartFile = None,
    as_json: Json = False,
) -> None:
    """Run correctness tests on a small version of a design, and print each result as soon as it is known.

    They cover chunked decoding, padding, packed documents, causality, NaN propagation, kernels and more. With --json
    the results are one list, printed at the end. Exit code: 0 if every law holds, 1 if one is broken, 2 if the design
    or an option cannot be used.
    """
    with ExitStack() as stack:
        runtime = open_session(stack, device=device, threads=threads, parts=part)
        from heddle.laws import LAWS, run, shrink
        from heddle.model.load_config import load_config

        config = with_vocab_size(load_config(design, overrides or []), DEFAULT_VOCAB_SIZE)
        results = []
        for result in run(shrink(config), dict.fromkeys(law) if law else None, runtime.device):
            results.append(result)
            if not as_json:
                message = LAWS[result.name].statement if result.passed else result.message
                print(f"{'holds ' if result.passed else 'BROKEN'}  {result.name}: {printable(message)}", flush=True)
    violations = [result for result in results if not result.passed]
    if as_json:
        print(json.dumps([result._asdict() for result in results], indent=2))
    else:
        print(f"{len(results) - len(violations)} of {len(results)} laws hold")
    if violations:
        raise typer.Exit(1)
