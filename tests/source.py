"""The package's own source, as text and syntax trees, for the tests that read code instead of running it."""

import ast
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Source:
    """One module. `name` is dotted: `heddle.parts.mixers.attention`; `__init__.py` has its folder's name."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def package_sources() -> list[Source]:
    """Every module under src/heddle, sorted by name."""
    sources = []
    for path in (ROOT / "src/heddle").rglob("*.py"):
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources.append(Source(name, path.read_text(encoding="utf-8")))
    return sorted(sources, key=lambda source: source.name)


def slots() -> list[str]:
    """The slots: folders of `heddle.parts` whose `__init__.py` declares a slot of that name, sorted."""
    inits = (ROOT / "src/heddle/parts").glob("*/__init__.py")
    declares = {path.parent.name: f'slot: ClassVar[str] = "{path.parent.name}"' in path.read_text() for path in inits}
    return sorted(name for name, is_slot in declares.items() if is_slot)


def tracked_files() -> list[Path]:
    """Files that git tracks or would track; in a source archive, every file outside hidden folders."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        paths = [ROOT / name for name in listing.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        files = (path for path in ROOT.rglob("*") if "__pycache__" not in path.parts)
        paths = [path for path in files if not path.relative_to(ROOT).parts[0].startswith(".")]
    return [path for path in paths if path.is_file()]
