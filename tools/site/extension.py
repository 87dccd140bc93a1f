"""What Sphinx lacks for these pages: rows that the search finds, formulas as MathML, docstrings in Markdown."""

import builtins
import fnmatch
import functools
import inspect
import json
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from latex2mathml.converter import convert
from markupsafe import escape
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains import Domain, ObjType
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform

from heddle.lab.explore.page import pieces_of
from tools.markdown import prose
from tools.site.contents import FOLDERS, GROUPS, KEYWORDS, ROOT

NAMING = {"field", "option", "setting"}  # heads of tables whose rows the search finds by name
ASKING = {*"can do does get how many much my out ran what when where which why".split()}  # noqa: SIM905
FILE_NAME = re.compile(r"^[\w./-]+(\.md|/)$")  # a link's text in whose place the page's title is shown
CHINESE_BREAK = re.compile(r"(?<=[\u3000-\u9fff\uff00-\uffef])\n(?=[\u3000-\u9fff\uff00-\uffef])")  # would be a space
SHOWN = 100  # characters of a field with its default


class Questions(SearchEnglish):
    """English, without the words that questions are asked with."""

    stopwords = SearchEnglish.stopwords | ASKING


class Rows(Domain):
    """Fields and options of tables and lists: name, kind, page, anchor."""

    name, label = "row", "Row"
    object_types: ClassVar = {"field": ObjType("field"), "option": ObjType("option")}
    initial_data: ClassVar = {"rows": []}

    def merge_domaindata(self, docnames: Any, otherdata: dict[str, Any]) -> None:
        self.data["rows"] += [row for row in otherdata["rows"] if row[2] in docnames]

    def get_type_name(self, kind: ObjType, primary: bool = False) -> str:
        return kind.lname

    def resolve_any_xref(self, *_: Any) -> list[Any]:
        return []

    def get_objects(self) -> Iterator[tuple[str, str, str, str, str, int]]:
        for name, kind, docname, anchor in self.data["rows"]:
            yield name, name, kind, docname, anchor, 0


class Pages(SphinxTransform):
    """Rows, keywords, formulas, links and fields of one page."""

    default_priority = 500

    def apply(self, **kwargs: Any) -> None:
        docname, document = self.env.docname, self.document
        for section in document.findall(nodes.section):
            title = section[0].astext()
            for number, (node, name) in enumerate(_rows(section)):
                node["ids"].append(f"{section['ids'][0]}-{number}-{nodes.make_id(name)}")
                kind = "option" if name.startswith("-") else "field"
                whole = re.fullmatch(r"heddle [\w ]+" if kind == "option" else r"\w+", title)
                shown = f"{title}{' ' if kind == 'option' else '.'}{name}" if whole else name
                self.env.domains["row"].data["rows"].append((shown, kind, docname, node["ids"][-1]))
        if docname in KEYWORDS:
            entries = [("single", words, "", "main", None) for words in KEYWORDS[docname].split(", ")]
            document.append(addnodes.index(entries=entries))
        for node in [*document.findall(addnodes.pending_xref)]:
            if node["reftype"] == "myst":
                self._link(node)
            elif node["reftype"] == "class" and node["reftarget"] in vars(builtins):
                node.replace_self(node.children)  # else `bytes` links to a field of that name
        if docname.startswith(("docs/parts/", "api/")):
            for block in [*document.findall(nodes.literal_block)]:
                _typeset(block)
        for description in document.findall(addnodes.desc):
            if description["objtype"] in {"attribute", "data"}:
                _as_written(*description)

    def _link(self, node: addnodes.pending_xref) -> None:
        if FILE_NAME.match(node.astext()):
            node["refexplicit"] = False
        here = posixpath.dirname(self.env.docname)
        folder = posixpath.normpath(posixpath.join(here, node["reftarget"]))
        if node["refdomain"] is None and any(ROOT / folder in ROOT.glob(each) for each in FOLDERS):
            page = posixpath.relpath(f"{folder}/index.html", here or ".")
            node.replace_self(nodes.reference("", "", *node.children, refuri=page, internal=True))


def _rows(section: nodes.section) -> Iterator[tuple[nodes.Element, str]]:
    """The rows and list items right below a heading that begin with the name of a field or option."""
    for child in section.children:
        if isinstance(child, nodes.table):
            head, *rows = child.findall(nodes.row)
            if head[0].astext() in NAMING:
                yield from ((row, _name(row[0].astext())) for row in rows)
        elif isinstance(child, nodes.bullet_list):
            for item in child:
                first = item.next_node(nodes.Text)
                if first is not None and isinstance(first.parent, nodes.literal):
                    yield item, _name(first.astext())


def _name(words: str) -> str:
    """`-q, --quiet` -> `--quiet`, `--lr X` -> `--lr`."""
    return next(iter(re.findall(r"--[\w-]+", words)), words.split(" ")[0])


def mathml(formula: str, display: str = "inline") -> str:
    """LaTeX as MathML. The formula itself is the text alternative."""
    made = convert(formula.strip(), display=display)
    return made.replace("<math ", f'<math aria-label="{escape(formula.strip())}" ', 1)


def _inline_math(writer: Any, node: nodes.Element) -> None:
    writer.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def _block_math(writer: Any, node: nodes.Element) -> None:
    writer.body.append(mathml(node.astext(), "block"))
    raise nodes.SkipNode


def _typeset(block: nodes.literal_block) -> None:
    """Put a block's formulas before it, and fold it."""
    lines = pieces_of(block.astext()) if block.get("language") == "text" else None
    if lines is not None:
        shown = [
            [mathml(text, "block") if is_latex else f"<span>{escape(text)}</span>" for text, is_latex in line]
            for line in lines
        ]
        rows = "".join(f"<div>{''.join(line)}</div>" for line in shown)
        before = nodes.raw("", f'<div class="formula">{rows}<details><summary>as text</summary>', format="html")
        block.replace_self([before, block.deepcopy(), nodes.raw("", "</details></div>", format="html")])


@functools.cache
def _source(module: str, owner: str) -> str:
    return inspect.getsource(functools.reduce(getattr, filter(None, owner.split(".")), sys.modules[module]))


def _as_written(signature: nodes.Element, content: nodes.Element) -> None:
    """Show a field's type, default and comment as its line has them; pydantic's objects are longer."""
    owner, _, name = signature["fullname"].rpartition(".")
    pattern = rf"^{'    ' if owner else ''}{name}(:? .*?)(?:  # (.*))?$"
    line = re.search(pattern, _source(signature["module"], owner), re.MULTILINE)
    for child in [*signature.findall(addnodes.desc_annotation)]:
        signature.remove(child)
    if line is not None:
        shown = line[1] if len(line[1]) < SHOWN else line[1].partition(" = ")[0]
        signature += addnodes.desc_annotation("", shown)
        if line[2] and not content.children and not line[2].startswith(("type:", "noqa", "fmt:")):
            content += nodes.paragraph("", line[2])


def _signature(app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str) -> Any:
    return ("", None) if "FieldInfo(" in (signature or "") else None


def _docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """A docstring's Markdown as reStructuredText."""
    blocks = []
    for block in prose("\n".join(lines)).split("\n\n"):
        rows = block.splitlines()
        if block.startswith("```text\n"):
            blocks.append("\n   ".join([".. code-block:: text", "", *rows[1:-1]]))
            continue
        if all(re.match(r" |[a-z_][\w, ]*: |\w+: ", row) for row in rows):  # arguments or fields
            rows = [f"  {row.strip()}" if row.startswith(" ") else f"- {row}" for row in rows]
        pieces = enumerate("\n".join(rows).split("`"))
        blocks.append("".join(f"``{each}``" if n % 2 else re.sub(r"([\\*_|])", r"\\\1", each) for n, each in pieces))
    lines[:] = [*"\n\n".join(blocks).splitlines(), ""]


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    """The menu is written behind the start page, where GitHub does not show it."""
    source[0] = CHINESE_BREAK.sub("", source[0])
    if docname.endswith(".zh"):
        source[0] = f"---\norphan: true\n---\n{source[0]}"
    elif docname == app.config.root_doc:
        for name, pages in GROUPS.items():
            there = (page for page in pages.split() if "*" not in page or fnmatch.filter(app.env.found_docs, page))
            listed = "\n".join(f"/{page}" for page in there)
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {name}\n\n{listed}\n```\n"


def _entries(app: Sphinx, folder: Path) -> Iterator[tuple[str, str]]:
    """Name and link of what a folder holds: files, which are copied, pages, and folders that have a page."""
    for each in sorted(folder.iterdir()):
        if each.is_dir():
            if any(each.relative_to(ROOT).match(pattern.rstrip("/")) for pattern in FOLDERS):
                yield each.name, f"{each.name}/index.html"
        elif each.suffix == ".md":
            yield each.stem, f"{each.stem}.html"
        else:
            shutil.copyfile(each, app.outdir / each.relative_to(ROOT))
            yield each.name, each.name


def _folders(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each folder that pages link to, beside its files."""
    for folder in sorted({each for pattern in FOLDERS for each in ROOT.glob(pattern)}):
        path = folder.relative_to(ROOT).as_posix()
        (app.outdir / path).mkdir(parents=True, exist_ok=True)
        listed = "".join(f'<li><a href="{link}">{name}</a></li>' for name, link in _entries(app, folder))
        yield f"{path}/index", {"title": path, "body": f"<h1>{path}</h1><ul>{listed}</ul>"}, "page.html"


def _paragraphs(document: nodes.document) -> Iterator[str]:
    """Paragraphs and rows of tables, each on one line."""
    for node in document.findall():
        if isinstance(node, nodes.row):
            yield " · ".join(" ".join(cell.astext().split()) for cell in node)
        elif isinstance(node, nodes.paragraph) and not isinstance(node.parent, nodes.entry):
            yield " ".join(node.astext().split())


def _finished(app: Sphinx, exception: Exception | None) -> None:
    """The start page under the name that servers open, and the texts of results."""
    if exception is None:
        shutil.copyfile(app.outdir / f"{app.config.root_doc}.html", app.outdir / "index.html")
        texts = {name: [*_paragraphs(app.env.get_doctree(name))] for name in app.env.found_docs}
        texts = {name: rows[:1] if name.startswith("api/") else rows for name, rows in texts.items()}
        (app.outdir / "_static/texts.js").write_text(f"const TEXTS = {json.dumps(texts)};\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls."""
    app.add_search_language(Questions)
    app.add_domain(Rows)
    app.add_transform(Pages)
    app.add_html_math_renderer("mathml", (_inline_math, None), (_block_math, None))
    app.connect("source-read", _read)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("html-collect-pages", _folders)
    app.connect("build-finished", _finished)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
