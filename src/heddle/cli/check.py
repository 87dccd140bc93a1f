"""`heddle check`: the laws on a design of the user's, the same that the tests run."""

import json
from contextlib import ExitStack

import typer

from heddle.cli.options import (
    DEFAULT_VOCABULARY,
    DesignArgument,
    Device,
    Json,
    Overrides,
    PartFile,
    open_session,
    read_config,
    with_vocabulary,
)


def check(
    design: DesignArgument,
    overrides: Overrides = None,
    device: Device = "cpu",
    part: PartFile = None,
    as_json: Json = False,
) -> None:
    """Hold a design, made small, to every law: cutting, padding, packing, causality, poison, kernels, …"""
    with ExitStack() as stack:
        runtime = open_session(stack, device=device, parts=part)
        from heddle.laws import LAWS, run, shrink

        config = with_vocabulary(read_config(design, overrides), DEFAULT_VOCABULARY)
        results = run(shrink(config), device=runtime.device)
    broken = [result for result in results if not result.passed]
    if as_json:
        print(json.dumps([result._asdict() for result in results], indent=2))
    else:
        for result in results:
            said = LAWS[result.name].statement if result.passed else result.message
            print(f"{'holds ' if result.passed else 'BROKEN'}  {result.name}: {said}")
        print(f"{len(results) - len(broken)} of {len(results)} laws hold")
    if broken:
        raise typer.Exit(1)
