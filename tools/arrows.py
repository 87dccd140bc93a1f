"""Count the imports between the folders of the package: `python tools/arrows.py` prints each arrow and its count."""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src/heddle"


def room(module: str) -> str:
    """`heddle.parts.mixers` -> `parts`."""
    return f"{module}.".split(".")[1]


def imports(path: Path) -> Iterator[str]:
    """The modules of heddle that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "heddle":
            inside = [f"heddle.{alias.name}" for alias in node.names] if node.module == "heddle" else [str(node.module)]
            yield from inside


def main() -> None:
    """Print every arrow, the busiest first, and the totals."""
    arrows: Counter[tuple[str, str]] = Counter()
    rooms = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        source = room(".".join(["heddle", *path.relative_to(PACKAGE).with_suffix("").parts]))
        rooms.add(source)
        arrows.update((source, room(target)) for target in imports(path) if room(target) != source)
    for (source, target), count in arrows.most_common():
        print(f"{count:4} {source} -> {target}")
    print(f"{len(rooms)} rooms, {len(arrows)} arrows", file=sys.stderr)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
