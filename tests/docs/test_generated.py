"""Generated pages match the code, every link has a target, and the rows of a table have equally many cells."""

import re

import pytest

from heddle.laws import LAWS
from tests.docs.pages import DOCS, pages
from tests.source import ROOT
from tools import make_docs

LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


def test_the_pages_are_up_to_date() -> None:
    generated_pages = make_docs.pages()
    stale = [path.name for path, text in generated_pages.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run: python tools/make_docs.py"
    assert set((DOCS / "parts").iterdir()) - set(generated_pages) == set(), "pages of slots that do not exist"


def test_a_changed_statement_makes_the_page_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAWS, "chunked_decoding", LAWS["chunked_decoding"]._replace(statement="Another."))
    page = (DOCS / "laws.md").read_text(encoding="utf-8")
    updated = make_docs.with_statements(page)
    assert "\n**`chunked_decoding`** Another.\n" in updated
    assert updated != page


def test_missing_marks_are_an_error() -> None:
    with pytest.raises(ValueError, match="no marks for 'laws'"):
        make_docs.between("# Laws\n", "laws", "")


def test_every_law_is_explained() -> None:
    text = (DOCS / "laws.md").read_text(encoding="utf-8")
    assert re.findall(r"^\*\*`(\w+)`\*\*", text, re.MULTILINE) == list(LAWS)


def test_laws_and_tests_that_catch_a_mistake_exist() -> None:
    sections = (DOCS / "commonly-wrong.md").read_text(encoding="utf-8").split("\n### ")[1:]
    for section in sections:
        _, separator, caught_by = section.partition("\nCaught by ")
        assert separator, section
        names = re.findall(r"`(\S+)`", caught_by.partition("\n\n")[0])
        assert [name for name in names if name not in LAWS and not (ROOT / name).is_file()] == []


def headings(text: str) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", pages())
def test_links_have_targets(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for file, anchor in LINK.findall(text):
        target = (DOCS / page).parent / file if file else DOCS / page
        assert target.exists(), f"{page}: {file}"
        assert not anchor or anchor in headings(target.read_text(encoding="utf-8")), f"{page}: {file}#{anchor}"


@pytest.mark.parametrize("page", pages())
def test_table_rows_have_equally_many_cells(page: str) -> None:
    width = 0
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("| ") else 0
        assert width in (0, cells) or cells == 0, f"{page}: {line}"
        width = cells
