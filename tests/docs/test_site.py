"""The site of `make docs`: every public name, no broken link, no request that leaves it, formulas typeset."""

import ast
import os
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from heddle.lab.explore.page import pieces_of
from tests.source import ROOT, package_sources
from tools.site import build as site_build
from tools.site import contents, markdown_pages, reference
from tools.site.__main__ import main
from tools.site.build import Site, SiteError
from tools.site.reference import Entry

LOADING = {"src", "srcset", "data", "poster", "background"}  # and the href of a <link>
OUTWARD = re.compile(r"""@import|url\(\s*["']?(?!data:)|fetch\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon""")

REPORT = """<meta http-equiv="Content-Security-Policy" content="default-src 'none'"><p>A report."""


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
        self.loads += [value for name, value in values.items() if name in LOADING or (tag, name) == ("link", "href")]
        self.links += [values["href"]] if tag == "a" and "href" in values else []
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]


def public_names(node: ast.AST, path: str) -> Iterator[str]:
    """The classes, functions, methods, fields and constants without an underscore: `heddle.model.decoder.Decoder`."""
    for child in ast.iter_child_nodes(node):
        names: list[str] = []
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [child.name]
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        public = [name for name in names if not name.startswith("_")]
        yield from (f"{path}.{name}" for name in public)
        if isinstance(child, ast.ClassDef) and public:
            yield from public_names(child, f"{path}.{child.name}")


def public_entries() -> set[str]:
    """Every public module, and the public names in it."""
    sources = [source for source in package_sources() if not re.search(r"\._[^_]", source.name)]
    return {name for source in sources for name in (source.name, *public_names(source.tree, source.name))}


@pytest.fixture(scope="module")
def modules() -> list[Entry]:
    """Every module of the reference."""
    return reference.modules(ROOT / "src")


@pytest.fixture(scope="module")
def entries(modules: list[Entry]) -> dict[str, Entry]:
    """Every entry of the reference by its name."""
    return {entry.name: entry for module in modules for entry in module.walk()}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, modules: list[Entry]) -> dict[str, Links]:
    """Every page of the site by its path. Sources are plain: colors take most of the time."""
    out, runs = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("runs")
    (runs / "compare").mkdir()
    (runs / "compare/report.html").write_text(REPORT, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_build.reference, "modules", lambda _: modules)
        Site(out, highlighted=False).build(runs)
    parsed = {"": Links("")}
    for file in out.rglob("*"):
        path = file.relative_to(out).as_posix()
        if file.suffix == ".html" and not path.startswith("src/"):
            parsed[path] = Links(file.read_text(encoding="utf-8"))
        elif file.suffix == ".html":
            parsed[path] = Links("")
            parsed[path].ids = set(re.findall(r'id="(\w+)"', file.read_text(encoding="utf-8")))
        elif file.is_file():
            parsed[path] = Links("")
            assert file.suffix in contents.IMAGES or not OUTWARD.search(_code_of(file)), path
    return parsed


def _code_of(file: Path) -> str:
    """A style sheet or a script; the index of the search is text that a script reads."""
    return "" if file.name == "search.js" else file.read_text(encoding="utf-8")


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
            full = os.path.normpath(os.path.join(os.path.dirname(path), link))
            lines += [] if link.startswith("data:") or full in pages else [f"{path}: loads {link}"]
    return lines


def test_every_public_name_has_an_entry(entries: dict[str, Entry]) -> None:
    assert sorted(public_entries() - entries.keys()) == []


@pytest.mark.nightly
def test_every_public_name_has_an_anchor(site: dict[str, Links]) -> None:
    ids = {identifier for path, page in site.items() if path.startswith("api/") for identifier in page.ids}
    assert sorted(public_entries() - ids) == []


@pytest.mark.nightly
def test_every_link_has_a_target_and_nothing_is_loaded_from_elsewhere(site: dict[str, Links]) -> None:
    assert faults(site) == []
    policies = {page.policy for path, page in site.items() if path.endswith(".html") and not path.startswith("src/")}
    assert {policy.split(";")[0] for policy in policies} == {"default-src 'none'"}
    assert "http" not in "".join(policies)


@pytest.mark.nightly
def test_reports_of_runs_are_pages(site: dict[str, Links]) -> None:
    assert "reports/compare-report.html" in site
    assert "compare-report.html" in site["reports/index.html"].links


def test_a_folder_with_other_files_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["tools.site", str(tmp_path)])
    assert main() == 1
    assert "holds other files; name an empty folder" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.nightly
def test_planted_faults_of_pages_are_seen(site: dict[str, Links]) -> None:
    planted = Links('<img src="https://a.test/b.png"><a href="none.html">x</a><a href="index.html#none">y</a>')
    assert len(faults(site | {"planted.html": planted})) == 3


def test_every_page_of_the_documentation_is_in_the_menu() -> None:
    listed = {page.source for pages in contents.groups().values() for page in pages}
    written = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(path for path in written - listed if not path.endswith(contents.TRANSLATED)) == []
    named = {path for paths in contents.GROUPS.values() for path in paths}
    assert sorted(named - listed) == [], "pages that no longer exist"


@pytest.mark.parametrize("link", ["gone.md", "tour.md#no-such-heading", "../src/heddle/gone.py"])
def test_a_broken_link_stops_the_build(link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = markdown_pages.render

    def render(text: str, *arguments: object) -> markdown_pages.Rendered:
        return real(f"[x]({link})\n" if text.startswith("# Glossary") else text, *arguments)  # type: ignore[arg-type]

    files = ["docs/glossary.md", "docs/tour.md", "docs/parts/README.md"]
    monkeypatch.setattr(markdown_pages, "render", render)
    monkeypatch.setattr(contents, "markdown_files", lambda: tuple(files))
    monkeypatch.setattr(site_build.reference, "modules", lambda _: [])
    with pytest.raises(SiteError, match=r"glossary\.md"):
        Site(tmp_path / "site").build()
    assert not (tmp_path / "site").exists()


def test_an_entry_has_its_shapes_errors_and_source(entries: dict[str, Entry]) -> None:
    maps = entries["heddle.model.attention_maps.attention_weights"]
    assert "layout: Layout | None = None" in maps.signature
    assert "[B, H, T, S]" in maps.docstring
    assert maps.path == "src/heddle/model/attention_maps.py"
    text = (ROOT / maps.path).read_text(encoding="utf-8").splitlines()
    assert text[maps.lines[0] - 1].startswith("def attention_weights(")
    assert entries["heddle.model.presets.preset"].raises == ["ConfigError"]
    assert "default: heads" in entries["heddle.parts.mixers.attention.AttentionConfig.kv_heads"].docstring


def test_names_of_the_package_state_what_they_raise(entries: dict[str, Entry]) -> None:
    """A docstring of `import heddle` names each error that its own lines raise."""
    names = reference.top_level(ROOT / "src/heddle/__init__.py")
    assert set(names) == {name for name in ast.literal_eval(_all_names()) if not name.startswith("__")}
    assert [name for name, full in names.items() if not entries[full].docstring] == []
    raised = [(name, error) for name, full in names.items() for error in entries[full].raises]
    assert [pair for pair in raised if pair[1] not in entries[names[pair[0]]].docstring] == []


def _all_names() -> str:
    tree = ast.parse((ROOT / "src/heddle/__init__.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    return next(ast.unparse(node.value) for node in assigned if ast.unparse(node.targets[0]) == "__all__")


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
    assert markdown_pages.math(made[0][0].text).startswith("<math ")
    assert [piece.is_formula for line in made for piece in line] == ["query" not in text for text in pieces]


@pytest.mark.parametrize("block", ["x ── N ── mixer ──(+)", "one token after the other", ""])
def test_drawings_and_sentences_stay_text(block: str) -> None:
    assert pieces_of(block) is None
