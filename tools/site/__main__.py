"""`python -m tools.site build/docs`: write the site, and say where it is."""

import argparse
import sys
import time
from pathlib import Path

from tools.site.build import Site, SiteError
from tools.site.contents import ROOT


def main() -> int:
    """Write the site. Returns 1, and prints each fault, where a link has no target."""
    parser = argparse.ArgumentParser(prog="python -m tools.site", description="Write the documentation as a site.")
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "build/docs", help="the folder that it replaces")
    parser.add_argument("--reports", type=Path, default=ROOT / "runs", help="a folder of runs, whose reports are shown")
    arguments = parser.parse_args()
    if arguments.out.is_dir() and any(arguments.out.iterdir()) and not (arguments.out / "assets/site.css").is_file():
        print(f"heddle: {arguments.out} holds other files; name an empty folder", file=sys.stderr)
        return 1
    started = time.process_time()
    try:
        Site(arguments.out).build(arguments.reports)
    except SiteError as error:
        print(error, file=sys.stderr)
        return 1
    pages = sum(1 for _ in arguments.out.rglob("*.html"))
    print(f"heddle: {pages} pages in {time.process_time() - started:.0f} s; open {arguments.out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
