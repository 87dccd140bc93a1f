"""`heddle verify`: check that no byte of a folder that heddle wrote has changed."""

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
    """Check whether every file below a folder that heddle wrote, or one file, is intact, damaged or without a hash.

    Nothing is written, so a run may keep training meanwhile. Exit code: 0 if no file is damaged, 1 if one is, 2 if no
    file has a hash that heddle wrote.
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
        raise CheckpointError(f"{folder}: holds no file with a hash that heddle wrote; name a folder that heddle wrote")
    if settings.json:
        print(json.dumps({"folder": str(folder), "files": [result._asdict() for result in results]}, indent=1))
    else:
        print_text(f"{len(results)} files: {damaged} damaged, {uncovered} not covered")
    if damaged:
        raise click.exceptions.Exit(1)
