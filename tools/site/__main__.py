"""`python -m tools.site build/docs`: write the site with Sphinx, and say where it is."""

import argparse
import re
import shutil
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from sphinx.cmd.build import main as sphinx

import heddle
from heddle.lab.explore.choices import SLOTS
from heddle.lab.explore.page import explorer_page
from tools.site.contents import ROOT

COPIED = ("*.md", "LICENSE", "docs", "benchmarks", "evidence", "examples", "notebooks", "src", "tests")
IMPORTED = re.compile(r"(?:from|import) (heddle[\w.]*)")


def documented(pattern: str | None) -> Iterator[str]:
    """Modules whose name fits, or: the parts, homes of names of `import heddle`, and what pages and examples import."""
    folders = [ROOT / name for name in ("docs", "examples", "notebooks")]
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in {".md", ".py", ".ipynb"}]
    texts = (file.read_text(encoding="utf-8") for file in [ROOT / "src/heddle/__init__.py", *files])
    named = {name for text in texts for name in IMPORTED.findall(text)}
    for file in sorted((ROOT / "src/heddle").rglob("*.py")):
        parts = file.relative_to(ROOT / "src").with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        public = name in named or name.startswith("heddle.parts.") if pattern is None else fnmatch(name, pattern)
        if public and not re.search(r"\._", name):
            yield name


def write_sources(folder: Path, modules: list[str]) -> None:
    """The pages, what they link to, and a page for each module."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in (each for each in ROOT.iterdir() if any(fnmatch(each.name, pattern) for pattern in COPIED)):
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy2(path, folder / path.name)
    (folder / "api").mkdir()
    for name in modules:
        text = f":orphan:\n\n{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n"
        (folder / f"api/{name}.rst").write_text(text, encoding="utf-8")
    names = [f"{getattr(heddle, name).__module__}.{name}" for name in heddle.__all__ if name != "__version__"]
    tables = [
        f"{title}\n{'-' * len(title)}\n\n.. autosummary::\n\n" + "".join(f"   {name}\n" for name in rows)
        for title, rows in (("Names of heddle", names), ("Modules", modules))
    ]
    (folder / "api/index.rst").write_text("\n".join(["Python API\n==========\n", *tables]), encoding="utf-8")


def build(source: Path, out: Path, *options: str, strict: bool = True) -> int:
    """Run Sphinx. strict: a warning is an error. Returns its status."""
    trees = ("-c", str(ROOT / "tools/site"), "-d", str(source.parent / "trees"))
    return sphinx(["-q", *(["-W"] if strict else []), *trees, *options, str(source), str(out)])


def main() -> int:
    """Write the site. Returns 1, and prints each fault, where a link has no target."""
    parser = argparse.ArgumentParser(prog="python -m tools.site", description="Write the documentation as a site.")
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "build/docs", help="the folder that it replaces")
    parser.add_argument("--modules", help="the modules of the reference: 'heddle.*'; warnings are no errors then")
    parser.add_argument("--jobs", default="auto", help="processes")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if out.is_dir() and any(out.iterdir()) and not (out / ".buildinfo").is_file():
        print(f"heddle: {out} holds other files; name an empty folder", file=sys.stderr)
        return 1
    started = time.monotonic()
    source = out.parent / f".{out.name}/source"
    write_sources(source, list(documented(arguments.modules)))
    shutil.rmtree(out, ignore_errors=True)
    if failed := build(source, out, "-j", arguments.jobs, strict=arguments.modules is None):
        return failed
    (out / "explorer").mkdir()
    for slot in (None, *SLOTS):  # pages of their own, as `heddle explore` writes them
        (out / f"explorer/{slot or 'index'}.html").write_text(explorer_page(slot), encoding="utf-8")
    pages = sum(1 for _ in out.rglob("*.html"))
    print(f"heddle: {pages} pages in {time.monotonic() - started:.0f} s; open {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
