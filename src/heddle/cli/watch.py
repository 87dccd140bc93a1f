"""`heddle watch`: follow runs on a live page, from their logs."""

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from heddle.cli.live_page import open_live_page
from heddle.errors import ConfigError
from heddle.progress import print_status, print_text
from heddle.signals import Interrupted

if TYPE_CHECKING:
    from heddle.lab.live import LivePage
    from heddle.lab.runs import FolderFollower, WatchedRun

POLL_SECONDS = 1.0
MAX_READ_SHARE = 0.1  # of the time is spent on reading logs, however long they are
SAMPLE_TOKENS = 96


def watch(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Runs, or folders of runs. [runs]")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="Port of the page on 127.0.0.1. [any free one]")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="Also show how each new checkpoint goes on from it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the page as it is now, and end.")
    ] = None,
) -> None:
    """Follow runs on a live page: loss, rate, gradient norm, speed, memory, experts, samples.

    Runs that begin later below a folder are followed too. Ctrl-C ends the page,
    not the runs. Nothing is written into them.
    """
    from heddle.lab.pages.runs import watch_page
    from heddle.lab.runs import FolderFollower, write_sample
    from heddle.storage.file_io import write_file

    if out is not None and (port is not None or open_page):
        raise ConfigError(f"--out {out}: a file needs no server; leave --port and --open out")
    write = None if prompt is None else write_sample(prompt, SAMPLE_TOKENS)
    follower = FolderFollower(paths or [Path("runs")], write)
    if out is not None:
        write_file(out, watch_page(follower.follow()), "choose another file, or free space")
        print_text(str(out))
        return
    with ExitStack() as stack:
        live = open_live_page(stack, port, open_page)
        assert live is not None  # or an error said why
        print_text(live.address)
        print_status("watch: Ctrl-C ends the page; the runs go on")
        try:
            _follow(follower, live)
        except Interrupted as interrupted:
            raise Interrupted(interrupted.exit_code - 128, "the page has ended; the runs go on") from None


def _follow(follower: "FolderFollower", live: "LivePage") -> NoReturn:
    from heddle.lab.pages.runs import watch_page

    shown: list[WatchedRun] | None = None
    while True:
        started = time.monotonic()
        runs = follower.follow()
        if runs != shown:
            shown = runs
            live.publish(partial(watch_page, runs), str, {"is_complete": False})
        time.sleep(max(POLL_SECONDS, (time.monotonic() - started) / MAX_READ_SHARE))
