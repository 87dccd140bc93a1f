"""Links of Markdown files, turned into links of written pages. A link without a target stops the build."""

import posixpath
from dataclasses import dataclass, field
from pathlib import Path

from tools.site import contents


@dataclass
class Links:
    """Follows the links of all pages, and remembers what they need.

    root: of the repository. files: other files that pages link to, to be shown or copied. folders: those without a
    page of their own, to be listed. faults: links without a target. anchors: (page, target, anchor) of links into a
    page, checked once all pages are rendered.
    """

    root: Path
    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    anchors: list[tuple[str, str, str]] = field(default_factory=list)

    def follow(self, page: contents.Page, link: str) -> str:
        """The link that a written page has in the place of one in its source."""
        if link.startswith(("https://", "http://", "mailto:", "data:")):
            return link
        path, _, anchor = link.partition("#")
        target = self._target(_source_of(page, path))
        if target is None:
            self.faults.append(f"{page.source}: no target for '{link}'")
            return link
        if anchor:
            self.anchors.append((page.source, target, anchor))
        shown = contents.relative(target, page.target) if path else ""
        return f"{shown}#{anchor}" if anchor else shown

    def title(self, page: contents.Page, link: str) -> str:
        """The first heading of the page of documentation that a link leads to, or nothing."""
        source = _source_of(page, link.partition("#")[0])
        source = f"{source}/README.md" if (self.root / source).is_dir() else source
        if source not in contents.markdown_files():
            return ""
        return (self.root / source).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")

    def _target(self, source: str) -> str | None:
        file = self.root / source
        if file.is_dir():
            if (file / "README.md").is_file():
                return contents.target_of(f"{source}/README.md")
            if source not in contents.RESULTS:
                self.folders.add(source)
                self.files |= {f"{source}/{each.name}" for each in contents.shown_files(file)}
            return f"{source}/index.html"
        if not file.is_file():
            return None
        if not source.endswith(".md"):
            self.files.add(source)
        elif source not in contents.markdown_files():
            return None
        return contents.target_of(source)

    def check_anchors(self, ids: dict[str, set[str]]) -> None:
        """Add a fault for every link to an anchor that its page lacks. ids: of every page written from Markdown."""
        for page, target, anchor in self.anchors:
            if target in ids and anchor not in ids[target]:
                self.faults.append(f"{page}: {target} has no heading '{anchor}'")


def _source_of(page: contents.Page, path: str) -> str:
    """The file that a link's path names, from the root; no path is the page itself."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page.source), path)) if path else page.source
