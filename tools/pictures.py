"""Draw the pictures of pages in docs/images again: of the explorer, and of `heddle inspect` on a trained run.

    python tools/pictures.py [RUN]

RUN: of local_global-tiny on Python's standard library; without it the picture of inspect stays. Needs chromium.
"""

import argparse
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, sync_playwright

from heddle.cli.main import run_command

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
MODEL = "DeepSeek-V3"
TEXT = '''def lift(self, thread):
    """Lift a thread of the warp."""
    if thread not in self.warp:
        raise KeyError(thread)
    return self.warp[thread]'''
SHOW = """([name, tab]) => {
  setModel(DATA.models.findIndex(model => model.name === name));
  state.layer = state.design.layers.length - 1;
  document.getElementById(tab).click();
}"""


def draw(browser: Browser, file: Path, name: str, height: int, tab: str = "", dark: bool = False) -> None:
    """A picture of the top of a page. tab: of the explorer, which then shows MODEL."""
    width = 1280 if tab else 1400
    page = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
    )
    page.goto(file.resolve().as_uri())
    if tab:
        page.evaluate(SHOW, [MODEL, tab])
    page.wait_for_timeout(500)
    page.screenshot(path=str(IMAGES / name))
    page.close()


def main(run: str | None) -> None:
    """Draw them all."""
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        file = Path(folder, "page.html")
        assert run_command(["explore", "--out", str(file)]) == 0
        draw(browser, file, "explore.png", 1800, tab="tab-mixers")
        draw(browser, file, "explore-experts.png", 1330, tab="tab-feedforwards", dark=True)
        if run is not None:
            assert run_command(["inspect", run, "--text", TEXT, "--out", str(file)]) == 0
            draw(browser, file, "inspect.png", 960)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", nargs="?")
    main(parser.parse_args().run)
