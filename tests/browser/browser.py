"""One page at a time in the chromium of the system, which Playwright drives: nothing is downloaded."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
LOCAL = ("file:", "data:", "blob:", "about:")
PHONE = 390


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program is not None, "chromium: not found; install the package chromium"
    with sync_playwright() as playwright:
        options = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        yield playwright.chromium.launch(executable_path=program, args=options)


def open_page(
    chromium: Browser, address: Path | str, fragment: str = "", width: int = 1280, dark: bool = False
) -> Page:
    """A file, or an address of this machine, in a new window, of a phone where it is narrow; others are closed."""
    for context in chromium.contexts:
        context.close()
    page = chromium.new_page(
        viewport={"width": width, "height": 900}, is_mobile=width < 600, color_scheme="dark" if dark else "light"
    )
    page.goto((address if isinstance(address, str) else address.resolve().as_uri()) + fragment)
    return page


def errors(page: Page) -> list[str]:
    """What the page complained about since it was opened."""
    said = (message.text for message in page.console_messages() if message.type in {"error", "warning"})
    return [*map(str, page.page_errors()), *said]
