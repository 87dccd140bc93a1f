"""`heddle check`: the correctness tests (laws) on a design of the user's; the test suite runs the same ones."""

import json
from contextlib import ExitStack

import typer

from heddle.cli.options import DesignArgument, Device, Json, Overrides, PartFile, open_session, with_vocab_size
from heddle.tokenization import DEFAULT_VOCAB_SIZE


def check(
    design: DesignArgument,
    overrides: Overrides = None,
    device: Device = "cpu",
    part: PartFile = None,
    as_json: Json = False,
) -> None:
    """Run every correctness test on a small version of a design.

    They cover chunked decoding, padding, packed documents, causality, NaN propagation, kernels and more.
    """
    with ExitStack() as stack:
        runtime = open_session(stack, device=device, parts=part)
        from heddle.laws import LAWS, run, shrink
        from heddle.model.load_config import load_config

        config = with_vocab_size(load_config(design, overrides or []), DEFAULT_VOCAB_SIZE)
        results = run(shrink(config), device=runtime.device)
    violations = [result for result in results if not result.passed]
    if as_json:
        print(json.dumps([result._asdict() for result in results], indent=2))
    else:
        for result in results:
            message = LAWS[result.name].statement if result.passed else result.message
            print(f"{'holds ' if result.passed else 'BROKEN'}  {result.name}: {message}")
        print(f"{len(results) - len(violations)} of {len(results)} laws hold")
    if violations:
        raise typer.Exit(1)
