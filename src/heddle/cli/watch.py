"""`heddle watch`: follow runs on a live page, from their logs."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from heddle.errors import ConfigError
from heddle.progress import print_status, print_text
from heddle.settings import Argument, Option, VerbSettings, parse_port, parse_text
from heddle.signals import Interrupted

if TYPE_CHECKING:
    from heddle.lab.live import LivePage
    from heddle.lab.runs import FolderFollower, WatchedRun

POLL_SECONDS = 1.0
MAX_READ_SHARE = 0.1  # of the time is spent on reading logs, however long they are
SAMPLE_TOKENS = 96


@dataclass(frozen=True, kw_only=True)
class WatchSettings(VerbSettings):
    """Settings of `heddle watch`."""

    paths: Annotated[tuple[Path, ...], Argument("RUN", "Runs, or folders of runs. [runs]")] = ()
    port: Annotated[int | None, Option("N", "Port of the page on 127.0.0.1. [any free one]", parse_port)] = None
    open: Annotated[bool, Option("", "Open the page in the browser.")] = False
    prompt: Annotated[str | None, Option("TEXT", "Also show how each new checkpoint continues TEXT.", parse_text)] = (
        None
    )
    out: Annotated[Path | None, Option("FILE", "Write the current page and exit.")] = None


def watch(settings: WatchSettings) -> None:
    """Follow runs on a live page: loss, learning rate, gradient norm, speed, memory, experts, samples.

    Runs that start later below a folder are followed, too. Ctrl-C ends the page,
    not the runs, which are only read.
    """
    from heddle.lab.live import open_live_page
    from heddle.lab.pages.runs import watch_page
    from heddle.lab.runs import FolderFollower, write_sample
    from heddle.storage.file_io import refuse_no_page, write_file

    prompt, out = settings.prompt, settings.out
    if out is not None and (settings.port is not None or settings.open):
        raise ConfigError(f"--out {out}: a file needs no server; leave --port and --open out")
    if out is not None:
        refuse_no_page(out)
    write = None if prompt is None else write_sample(prompt, SAMPLE_TOKENS)
    follower = FolderFollower(settings.paths or [Path("runs")], write)
    if out is not None:
        write_file(out, watch_page(follower.follow()), "choose another file, or free space")
        print_text(str(out))
        return
    with ExitStack() as stack:
        live = open_live_page(stack, settings.port, settings.open)
        assert live is not None  # else it has raised
        print_text(live.address)
        print_status("watch: Ctrl-C ends the page; the runs continue")
        try:
            _follow(follower, live)
        except Interrupted as interrupted:
            raise Interrupted(interrupted.exit_code - 128, "the page has ended; the runs continue") from None


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
