"""What the documentation takes from the code is what the code says now, and every link and table is whole."""

import re

import pytest

from heddle.laws import LAWS
from tests.docs.pages import DOCS, pages
from tests.source import ROOT
from tools import make_docs
from tools.refusals import reasons

LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


def test_the_pages_are_up_to_date() -> None:
    made = make_docs.pages()
    stale = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run: python tools/make_docs.py"
    assert set((DOCS / "parts").iterdir()) - set(made) == set(), "pages of slots that are no more"


def test_another_statement_makes_the_page_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAWS, "chunked_decoding", LAWS["chunked_decoding"]._replace(statement="Another."))
    page = (DOCS / "laws.md").read_text(encoding="utf-8")
    fresh = make_docs.between(page, "laws", make_docs.laws_table())
    assert "| `chunked_decoding` | Another. |" in fresh
    assert fresh != page


def test_missing_marks_are_told() -> None:
    with pytest.raises(ValueError, match="no marks for 'laws'"):
        make_docs.between("# Laws\n", "laws", "")


def test_every_law_is_explained() -> None:
    text = (DOCS / "laws.md").read_text(encoding="utf-8")
    assert re.findall(r"^\*\*`(\w+)`\*\*", text, re.MULTILINE) == list(LAWS)


def test_what_catches_a_mistake_exists() -> None:
    sections = (DOCS / "commonly-wrong.md").read_text(encoding="utf-8").split("\n### ")[1:]
    for section in sections:
        _, found, caught = section.partition("\nCaught by ")
        assert found, section
        names = re.findall(r"`(\S+)`", caught.partition("\n\n")[0])
        assert [name for name in names if name not in LAWS and not (ROOT / name).is_file()] == []


LIMIT = 64


def refuse_some(n: int) -> str | None:
    if n > LIMIT:
        return f"at most {LIMIT} rows, here are {n}"
    return "no rows" if n == 0 else None


def test_reasons_are_read_from_the_source() -> None:
    assert set(reasons(refuse_some)) == {"at most 64 rows, here are n", "no rows"}


def headings(text: str) -> set[str]:
    """The anchors that a page's headings make."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for file, anchor in LINK.findall(text):
        target = (DOCS / page).parent / file if file else DOCS / page
        assert target.exists(), f"{page}: {file}"
        assert not anchor or anchor in headings(target.read_text(encoding="utf-8")), f"{page}: {file}#{anchor}"


@pytest.mark.parametrize("page", pages())
def test_tables_are_whole(page: str) -> None:
    width = 0
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("| ") else 0
        assert width in (0, cells) or cells == 0, f"{page}: {line}"
        width = cells
