"""Write the site into a folder: pages, reference, sources, results, reports, and the index that the search reads."""

import json
import posixpath
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pygments.formatters import HtmlFormatter

from heddle.lab.explore.choices import SLOTS
from heddle.lab.explore.page import explorer_page
from tools.markdown import prose
from tools.site import contents, markdown_pages, reference
from tools.site.links import Links
from tools.site.markdown_pages import Rendered, Section

HERE = Path(__file__).parent
BASE_STYLE = contents.ROOT / "src/heddle/lab/pages/static/base.css"
REPORTS = ("report.html", "conversion.html", "ladder.html", "growth.html")
CHINESE_BREAK = re.compile(r"(?<=[\u3000-\u9fff\uff00-\uffef])\n(?=[\u3000-\u9fff\uff00-\uffef])")  # would be a space
SEARCH_TEXT = 1200  # characters of a section that the search reads
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "sh"}


class SiteError(Exception):
    """The pages do not fit together; its lines say where."""


@dataclass
class Site:
    """A build. out: the folder. highlighted: whether the package's files have colors, which takes half of the time."""

    out: Path
    highlighted: bool = True

    def __post_init__(self) -> None:
        self.links = Links(contents.ROOT)
        self.groups = contents.groups()
        self.modules = reference.modules(contents.ROOT / "src")
        # title of the page, title of the section, link, text, kind (page, section, row or other), other words for it
        self.search: list[tuple[str, str, str, str, str, str]] = []
        self.titles: dict[str, str] = {}
        self.environment = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.environment.filters |= {
            "markdown": self._docstring,
            "python": lambda text: Markup(markdown_pages.code(text, "python")),
            "relative": contents.relative,
            "anchor": markdown_pages.anchor_of,
        }

    def build(self, reports: Path | None = None) -> None:
        """Write everything. reports: a folder of runs, whose reports are copied. Raises SiteError for a broken link."""
        rendered = {page: self._render(page) for page in contents.pages()}
        self.titles = {page.target: content.title for page, content in rendered.items()}
        self.links.check_anchors({page.target: {s.anchor for s in made.sections} for page, made in rendered.items()})
        if self.links.faults:
            raise SiteError("\n".join(self.links.faults))
        shutil.rmtree(self.out, ignore_errors=True)
        for page, content in rendered.items():
            self._write_markdown(page, content)
        self._write_reference()
        self._write_files()
        self._write_results()
        self._write_reports(reports)
        self._write_explorers()
        self._write_assets()

    def _render(self, page: contents.Page) -> Rendered:
        text = CHINESE_BREAK.sub("", (contents.ROOT / page.source).read_text(encoding="utf-8"))
        formulas = page.source.startswith("docs/parts/")
        links = self.links
        return markdown_pages.render(
            text, lambda link: links.follow(page, link), formulas, lambda link: links.title(page, link)
        )

    def _docstring(self, text: str) -> Markup:
        return markdown_pages.render(prose(text), lambda link: link, formulas=True).html

    def write(self, target: str, template: str, title: str, **context: Any) -> None:
        """Write one page from a template."""
        text = self.environment.get_template(template).render(
            title=title,
            target=target,
            home=contents.relative(".", target),
            groups=self.groups,
            titles=self.titles,
            **({"sections": [], "language": "en", "twin": None, "neighbors": (None, None)} | context),
        )
        self._save(target, text)

    def _save(self, target: str, text: str) -> None:
        file = self.out / target
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def _write_markdown(self, page: contents.Page, content: Rendered) -> None:
        ordered = [None, *(each for pages in self.groups.values() for each in pages), None]
        at = ordered.index(page) if page in ordered else None
        neighbors = (None, None) if at is None else (ordered[at - 1], ordered[at + 1])
        twin = next((each for each in contents.pages() if each.source == page.twin), None)
        self.write(
            page.target, "page.html", content.title, body=content.html, language=page.language, twin=twin,
            neighbors=neighbors, sections=[section for section in content.sections if section.level in {2, 3}],
        )  # fmt: skip
        for number, section in enumerate(content.sections):
            link = f"{page.target}#{section.anchor}" if number else page.target
            keys = "" if number else contents.KEYWORDS.get(page.source, "")
            self._index(content.title, section, link, "section" if number else "page", keys)
            for name, text in section.rows:
                row = Section(section.level, section.anchor, name.split(" ")[0], text)
                self._index(section.title, row, f"{page.target}#{section.anchor}", "row")

    def _index(self, title: str, section: Section, link: str, kind: str = "other", keys: str = "") -> None:
        text = " ".join(section.text.split())[:SEARCH_TEXT]
        self.search.append((title, section.title, link, text, kind, keys))

    def _write_reference(self) -> None:
        names = reference.top_level(contents.ROOT / "src/heddle/__init__.py")
        entries = {entry.name: (entry, module) for module in self.modules for entry in module.entries}
        public = [(name, *entries[full]) for name, full in names.items()]
        for module in self.modules:
            target = f"api/{module.name}.html"
            self.write(target, "module.html", module.name, module=module, sections=_sections(module))
            for entry in module.walk():
                section = Section(2, entry.name, entry.name, f"{entry.what} {entry.first_sentence}")
                self._index(module.name, section, f"{target}#{entry.name}")
        self.write("api/index.html", "api.html", "Python API", public=public, modules=self.modules)
        self._index("Python API", Section(1, "", "Python API", "reference of every name"), "api/index.html")

    def _write_files(self) -> None:
        package = {module.path: module.text for module in self.modules}
        for path in sorted(package.keys() | self.links.files):
            file = contents.ROOT / path
            if path.endswith(contents.IMAGES):
                (self.out / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, self.out / path)
                continue
            language = LANGUAGES.get(file.suffix, "text") if self.highlighted or path not in package else "text"
            text = package[path] if path in package else file.read_text(encoding="utf-8")
            lines = markdown_pages.code(text, language).splitlines()
            self.write(contents.target_of(path), "source.html", path, lines=[Markup(line) for line in lines])

        for folder in sorted(self.links.folders):
            names = [file.name for file in contents.shown_files(contents.ROOT / folder)]
            listed = [(name, contents.target_of(f"{folder}/{name}")) for name in names]
            self.write(f"{folder}/index.html", "folder.html", folder, files=listed)

    def _write_results(self) -> None:
        for folder in contents.RESULTS:
            files = sorted((contents.ROOT / folder).glob("*.json"))
            results = [(file.stem, json.loads(file.read_text(encoding="utf-8"))) for file in files]
            title = f"Results of {posixpath.dirname(folder)}"
            self.write(f"{folder}/index.html", "results.html", title, results=results)
            for name, data in results:
                text = str(data.get("question", " ".join(each["claim"] for each in data.get("findings", []))))
                self._index(title, Section(2, name, name, text), f"{folder}/index.html#{name}")

    def _write_reports(self, folder: Path | None) -> None:
        copied = []
        for file in _reports(folder):
            target = f"reports/{file.parent.name}-{file.name}"
            (self.out / "reports").mkdir(exist_ok=True)
            shutil.copyfile(file, self.out / target)
            copied.append((file.parent.name, file.stem, target))
        self.write("reports/index.html", "reports.html", "Reports", reports=copied)
        self._index("Reports", Section(1, "", "Reports", "comparisons, conversions"), "reports/index.html")

    def _write_explorers(self) -> None:
        """The explorer of a whole design, and of each slot: pages of their own, as `heddle explore` writes them."""
        for slot in (None, *SLOTS):
            self._save(f"explorer/{slot or 'index'}.html", explorer_page(slot))
            title = "Explorer" if slot is None else f"Explorer: {slot}"
            text = "choose kinds and options, see formulas, pictures, parameters, FLOPs and state"
            self._index(title, Section(1, "", title, text), f"explorer/{slot or 'index'}.html", "page")

    def _write_assets(self) -> None:
        light = HtmlFormatter(style="default").get_style_defs(".code")
        dark = HtmlFormatter(style="github-dark").get_style_defs(".code")
        styles = [BASE_STYLE.read_text(encoding="utf-8"), (HERE / "static/site.css").read_text(encoding="utf-8"), light]
        self._save("assets/site.css", "\n".join([*styles, f"@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"]))
        shutil.copyfile(HERE / "static/site.js", self.out / "assets/site.js")
        index = json.dumps(self.search, ensure_ascii=False, separators=(",", ":"))
        self._save("assets/search.js", f"searchEntries({index});\n")


def _sections(module: reference.Entry) -> list[Section]:
    return [Section(2, entry.name, entry.short) for entry in module.entries]


def _reports(folder: Path | None) -> Iterator[Path]:
    """The reports of a folder of runs, two folders deep at most."""
    if folder is not None:
        yield from sorted(file for name in REPORTS for file in [*folder.glob(f"*/{name}"), *folder.glob(f"*/*/{name}")])
