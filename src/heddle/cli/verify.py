"""`heddle verify`: whether every byte of a folder that heddle wrote is as it was written."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from heddle import progress
from heddle.errors import CheckpointError
from heddle.progress import print_text, printable
from heddle.settings import Argument, Json, Quiet, VerbSettings


@dataclass(frozen=True, kw_only=True)
class VerifySettings(VerbSettings):
    """Settings of `heddle verify`."""

    folder: Annotated[Path, Argument("FOLDER", "A run, model, comparison, ladder, conversion, the cache; or one file.")]
    quiet: Quiet = False
    json: Json = False


def verify(settings: VerifySettings) -> None:
    """Read every file below a folder that heddle wrote, or one: is it as it was written, damaged, or without a hash?

    Nothing is written, and a training may go on meanwhile. Exit code: 0 if no file is damaged, 1 if one is, 2 if no
    file there has a hash of heddle's.
    """
    from heddle.lab.verify import DAMAGED, NOT_COVERED, verify_files

    folder, results = settings.folder, []
    with (
        progress.quiet() if settings.quiet else nullcontext(),
        progress.progress_bar("verifying", None, "files") as bar,
    ):
        for result in verify_files(folder):
            results.append(result)
            bar.advance(1)
            if not settings.json:
                reason = f": {printable(result.reason)}" if result.reason else ""
                print_text(f"{result.status:<11}  {printable(result.path)}{reason}")
    damaged = sum(result.status == DAMAGED for result in results)
    uncovered = sum(result.status == NOT_COVERED for result in results)
    if uncovered == len(results):
        raise CheckpointError(f"{folder}: holds no file with a hash of heddle's; name a folder that heddle wrote")
    if settings.json:
        print(json.dumps({"folder": str(folder), "files": [result._asdict() for result in results]}, indent=1))
    else:
        print_text(f"{len(results)} files: {damaged} damaged, {uncovered} not covered")
    if damaged:
        raise click.exceptions.Exit(1)
