"""What commands with a live page share: its server and the browser."""

import webbrowser
from contextlib import ExitStack
from typing import TYPE_CHECKING

from heddle.errors import ConfigError
from heddle.progress import print_status, print_warning

if TYPE_CHECKING:
    from heddle.lab.live import LivePage


def open_live_page(stack: ExitStack, port: int | None, open_page: bool, what: str | None = None) -> "LivePage | None":
    """A live page, until the stack closes.

    what: shown live beside other work; where this machine has no loopback address and nobody asked for a port, a
    warning says so and the page is None. Without it, raises ConfigError there.
    """
    from heddle.lab.live import LivePage

    try:
        live = stack.enter_context(LivePage(port or 0))
    except ConfigError as error:
        if port is not None or what is None:
            raise ConfigError(f"--{error}") from error
        print_warning(f"{what} is not live: {error}")
        return None
    if what is not None:
        print_status(f"{what} is live at {live.address}")
    if open_page:
        webbrowser.open(live.address)
    return live
