"""The site of `make docs`: no broken link, no request that leaves it, rows in the search, formulas typeset."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from heddle.lab.explore.page import pieces_of
from tests.source import ROOT, package_sources
from tools.site import __main__ as site_command
from tools.site.contents import GROUPS, KEYWORDS

LOADING = {"src", "srcset", "data", "poster", "background"}  # and the href of a <link> to a file
OUTWARD = re.compile(r"""@import|url\(\s*+["']?+(?!data:)|XMLHttpRequest|WebSocket|EventSource|sendBeacon""")
ERRORS = re.compile(r"Error$|^(Broken|Diverged|Interrupted)")
FEW = {
    "README.md": "# heddle\n\n[few.md](docs/parts/few.md), [one kind](docs/parts/few.md#attention), $x^2$\n",
    "docs/parts/few.md": (
        "# A few parts\n\n## attention\n\n```text\nq / sqrt(d_k),   query head h reads one\n```\n\n"
        "- `kv_heads` (positive integer): default: heads\n\n## heddle compare\n\n- `-b, --budget TIME`: All of it.\n\n"
        "| option | meaning |\n| --- | --- |\n| `--lr X` | rate |\n"
    ),
}
REFERENCE = ("heddle.model.attention_maps", "heddle.parts.mixers.gated_delta")
# The menu names pages that a few lack.
BUILD = """
import sys; from pathlib import Path; from tools.site.__main__ import build
sys.exit(build(Path(sys.argv[1]), Path(sys.argv[2]), "-D", "suppress_warnings=toc"))
"""


class Links(HTMLParser):
    """What a page loads, where its links lead, and its ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.policy = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values["id"]} if "id" in values else set()
        loading = LOADING | ({"href"} if tag == "link" and values.get("href") != "#" else set())
        self.loads += [value for name, value in values.items() if name in loading]
        self.links += [values["href"]] if tag == "a" and "href" in values else []
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]


def few(folder: Path, more: str = "", reference: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Build a few pages, with `more` on the last, in a process of its own: Sphinx keeps what it registers."""
    api = {
        f"api/{name}.rst": f":orphan:\n\n{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n" for name in reference
    }
    for name, text in (FEW | {"docs/tour.md": f"# A tour\n\n{more}\n"} | api).items():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_text(text, encoding="utf-8")
    words = [sys.executable, "-c", BUILD, str(folder / "source"), str(folder / "site")]
    return subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of a few pages and modules."""
    folder = tmp_path_factory.mktemp("few")
    ended = few(folder, "[tour](tour.md#a-tour)", REFERENCE)
    assert ended.returncode == 0, ended.stderr
    return folder / "site"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Links]:
    """Every file of the whole site, but for most of the reference, by its path."""
    out = tmp_path_factory.mktemp("whole") / "site"
    words = [sys.executable, "-m", "tools.site", str(out), "--modules", "heddle.model.s*"]
    ended = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    parsed = {"": Links("")}
    for file in filter(Path.is_file, out.rglob("*")):
        parsed[file.relative_to(out).as_posix()] = Links(text_of(file) if file.suffix == ".html" else "")
        if file.suffix in {".css", ".js"} and file.name not in {"searchindex.js", "texts.js"}:
            assert not OUTWARD.search(text_of(file)), file
    return parsed


def faults(pages: dict[str, Links]) -> list[str]:
    """Links without a target, and whatever is loaded from elsewhere."""
    lines = []
    for path, page in pages.items():
        for link in page.links:
            if link.startswith(("https://", "http://")):
                continue
            target, _, anchor = link.partition("#")
            full = os.path.normpath(os.path.join(os.path.dirname(path), target)) if target else path
            if full not in pages:
                lines.append(f"{path}: {link}")
            elif anchor and full.endswith(".html") and anchor not in pages[full].ids:
                lines.append(f"{path}: no anchor {link}")
        for link in page.loads:
            full = os.path.normpath(os.path.join(os.path.dirname(path), link.partition("?")[0]))
            lines += [] if link.startswith("data:") or full in pages else [f"{path}: loads {link}"]
    return lines


@pytest.mark.nightly
def test_every_link_has_a_target_and_nothing_is_loaded_from_elsewhere(site: dict[str, Links]) -> None:
    assert faults(site) == []
    policies = {page.policy for path, page in site.items() if path.endswith(".html")}
    assert {policy.split(";")[0] for policy in policies} == {"default-src 'none'"}
    assert "http" not in "".join(policies)


@pytest.mark.nightly
def test_planted_faults_of_pages_are_seen(site: dict[str, Links]) -> None:
    planted = Links('<img src="https://a.test/b.png"><a href="none.html">x</a><a href="index.html#none">y</a>')
    assert len(faults(site | {"planted.html": planted})) == 3


def test_a_folder_with_other_files_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["tools.site", str(tmp_path)])
    assert site_command.main() == 1
    assert "holds other files; name an empty folder" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_every_page_of_the_documentation_is_in_the_menu() -> None:
    names = [name for group in GROUPS.values() for name in group.split()]
    found = {name: {path.relative_to(ROOT).as_posix() for path in ROOT.glob(f"{name}.md")} for name in names}
    written = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    listed = set[str]().union(*found.values())
    assert sorted(path for path in written - listed if not path.endswith(".zh.md")) == []
    assert sorted(name for name, paths in found.items() if not paths and name != "api/index") == []
    assert sorted(name for name in KEYWORDS if f"{name}.md" not in listed) == []


def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    ended = few(tmp_path, "[x](gone.md) [x](parts/few.md#no-such-heading) [x](../src/heddle/gone.py)")
    assert ended.returncode == 1
    assert ended.stderr.count("tour.md:3: WARNING") == 3
    assert [name for name in ("gone.md", "no-such-heading", "gone.py") if name not in ended.stderr] == []


def test_an_entry_has_its_shapes_notes_and_source(small: Path) -> None:
    page = text_of(small / "api/heddle.model.attention_maps.html")
    plain = re.sub(r"<[^>]+>", "", page)
    assert "[B, H, T, S]" in plain
    assert "layout: Layout | None = None" in plain
    source = re.search(r'href="\.\./(_modules/heddle/model/attention_maps\.html)#([\w.]*attention_weights)"', page)
    assert source is not None
    assert source[2] in Links(text_of(small / source[1])).ids
    fields = re.sub(r"<[^>]+>", "", text_of(small / "api/heddle.parts.mixers.gated_delta.html"))
    assert re.search(r"key_heads: Width \| None = None\S*\s+of queries and keys; default: heads", fields)
    assert "FieldInfo" not in fields


def test_the_search_finds_fields_and_options_at_their_rows(small: Path) -> None:
    index = json.loads(text_of(small / "searchindex.js").removeprefix("Search.setIndex(").rstrip().removesuffix(")"))
    rows = {
        ".".join(filter(None, [prefix, row[4]])): row[3]
        for prefix, objects in index["objects"].items()
        for row in objects
        if index["objtypes"][str(row[1])].startswith("row:")
    }
    assert rows.keys() == {"attention.kv_heads", "heddle compare --budget", "heddle compare --lr"}
    assert set(rows.values()) <= Links(text_of(small / "docs/parts/few.html")).ids


def test_formulas_are_mathml_and_links_show_titles(small: Path) -> None:
    start, page = text_of(small / "index.html"), text_of(small / "docs/parts/few.html")
    assert start.count("<math ") == 1
    assert re.search(r'href="docs/parts/few\.html"[^>]*><span[^>]*>A few parts<', start)
    assert page.count("<math ") == 1
    assert page.index("<math ") < page.index("as text") < page.index("q / sqrt(d_k)")


def public_names() -> dict[str, str]:
    """The names of `import heddle`, and the module of each, from the imports for type checkers."""
    tree = ast.parse((ROOT / "src/heddle/__init__.py").read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module or "" for node in found for alias in node.names if alias.asname == alias.name}


def raised(node: ast.AST) -> Iterator[str]:
    """The errors that the lines of a function or of a class's __init__ raise."""
    if isinstance(node, ast.ClassDef):
        node = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), node)
    for each in ast.walk(node) if isinstance(node, ast.FunctionDef) else ():
        if isinstance(each, ast.Raise) and each.exc is not None:
            name = ast.unparse(each.exc.func if isinstance(each.exc, ast.Call) else each.exc)
            yield from [name] if ERRORS.search(name.rpartition(".")[2]) else []


def unnamed(trees: dict[str, ast.Module]) -> list[tuple[str, str]]:
    """The names of `import heddle` whose docstring is missing or lacks an error that their own lines raise."""
    lines = []
    for name, module in public_names().items():
        found = [each for each in trees[module].body if getattr(each, "name", None) == name]
        assert found, name
        text = next((text for each in found if (text := ast.get_docstring(each))), "")  # type: ignore[arg-type]
        lines += [(name, error) for error in {*raised(found[-1])} if error not in text] + ([] if text else [(name, "")])
    return lines


def test_names_of_the_package_state_what_they_raise() -> None:
    trees = {source.name: source.tree for source in package_sources() if source.name in public_names().values()}
    assert unnamed(trees) == []
    node = next(each for each in trees["heddle.model.load_config"].body if getattr(each, "name", "") == "load_config")
    assert isinstance(node, ast.FunctionDef)
    node.body.append(ast.parse("raise PlantedError").body[0])
    assert unnamed(trees) == [("load_config", "PlantedError")]


@pytest.mark.parametrize(
    ("block", "pieces"),
    [
        ("S_t = α_t S_{t−1} + k_t v_tᵀ", [r"S_{t} = \alpha _{t} S_{t-1} + k_{t} v_{t}^{T}"]),
        ("y = W_out (N(o) ⊙ k\u0302)", [r"y = W_{\mathrm{out}} (N(o) \odot  \hat{k})"]),
        ("q / sqrt(d_k),   query head h reads one", [r"q / \sqrt{d_{k}},", "query head h reads one"]),
        ("l = N(x),   l = x without `query_rank`", ["l = N(x),", "l = x without query_rank"]),
    ],
)
def test_formulas_of_docstrings_are_typeset(block: str, pieces: list[str]) -> None:
    made = pieces_of(block)
    assert made is not None
    assert [piece.text for line in made for piece in line] == pieces
    assert [piece.is_formula for line in made for piece in line] == ["query" not in text for text in pieces]


@pytest.mark.parametrize("block", ["x ── N ── mixer ──(+)", "one token after the other", ""])
def test_drawings_and_sentences_stay_text(block: str) -> None:
    assert pieces_of(block) is None
