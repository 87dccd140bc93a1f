"""How large is a checkout? `python tools/budgets.py [CHECKOUT …]` prints a column for each, of this one by default.

Lines of code are those with a token of Python that is neither a comment nor a docstring. Words of docs are those with a
letter or a digit (no bars of tables), without the log and the decisions, which are not cut. The budgets are reviewed,
and held by no test: a number that a test holds is met by cutting files where they end.
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
BUDGETS = {
    "files": "400",
    "lines": "58,000",
    "code": "36,000",
    "imports": "7.0 %",
    "lines of tests": "52,000",
    "words of docs": "80,000",
    "words of README": "1,200",
}


def code_lines(source: str) -> tuple[int, int]:
    """Lines of code, and those of them that import."""
    tree = ast.parse(source)
    documentation: set[int] = set()
    imports: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            documentation |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in LAYOUT for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - documentation), len(imports)


def words(files: Iterable[Path]) -> int:
    """Words with a letter or a digit."""
    texts = (file.read_text(encoding="utf-8") for file in files)
    return sum(any(map(str.isalnum, word)) for text in texts for word in text.split())


def measure(checkout: Path) -> dict[str, str]:
    """The sizes of src, tests and docs."""
    docs = checkout / "docs"
    pages = [page for page in docs.rglob("*.md") if page != docs / "log.md" and docs / "decisions" not in page.parents]
    sources = [file.read_text(encoding="utf-8") for file in (checkout / "src").rglob("*.py")]
    tests = [file.read_text(encoding="utf-8") for file in (checkout / "tests").rglob("*.py")]
    lines = sum(source.count("\n") for source in sources)
    code, imports = (sum(counts) for counts in zip(*map(code_lines, sources), strict=True))
    return {
        "files": f"{len(sources):,}",
        "lines": f"{lines:,}",
        "code": f"{code:,}",
        "imports": f"{100 * imports / lines:.1f} %",
        "lines of tests": f"{sum(source.count(chr(10)) for source in tests):,}",
        "words of docs": f"{words(pages):,}",
        "words of README": f"{words([checkout / 'README.md']):,}",
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", metavar="CHECKOUT", nargs="*", type=Path)
    checkouts = parser.parse_args().checkouts or [Path(__file__).resolve().parent.parent]
    columns = [measure(checkout) for checkout in checkouts]
    print(f"{'':16}{'budget':>10}" + "".join(f"{checkout.resolve().name:>14}" for checkout in checkouts))
    for row, budget in BUDGETS.items():
        print(f"{row:16}{budget:>10}" + "".join(f"{column[row]:>14}" for column in columns))


if __name__ == "__main__":
    main()
