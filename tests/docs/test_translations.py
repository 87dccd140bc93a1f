"""A translation is in step with its page: the same headings, code, numbers, links and tables."""

import re
from collections.abc import Callable

import pytest

from tests.source import ROOT
from tools.site.contents import TRANSLATED, markdown_files

PAGES = [path for path in markdown_files() if path.endswith(TRANSLATED)]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)]*)\)")
CHINESE = re.compile("[\u4e00-\u9fff]")


def facts(text: str) -> dict[str, object]:
    """What both languages share. Of a link to a page that is translated, either language counts."""
    prose = CODE.sub("", text)
    links = sorted(link.replace(TRANSLATED, ".md") for link in LINK.findall(prose))
    words = LINK.sub("]", prose)
    return {
        "headings": [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)],
        "code blocks": CODE.findall(text),
        "code in lines": sorted(re.findall(r"`[^`\n]+`", words)),
        "numbers": sorted(re.findall(r"\d+(?:[.,]\d+)*", words)),
        "rows of tables": [line.count(" | ") for line in words.splitlines() if line.startswith("|")],
        "links": links,
    }


def differences(page: str, translation: str) -> list[str]:
    """The facts in which two texts differ."""
    first, second = facts(page), facts(translation)
    return [name for name in first if first[name] != second[name]]


def texts(path: str) -> tuple[str, str]:
    page = path.removesuffix(TRANSLATED) + ".md"
    return (ROOT / page).read_text(encoding="utf-8"), (ROOT / path).read_text(encoding="utf-8")


def test_the_readme_and_the_start_page_are_translated() -> None:
    assert {"README.zh.md", "docs/start/README.zh.md"} <= set(PAGES)


@pytest.mark.parametrize("path", PAGES)
def test_a_translation_says_the_same(path: str) -> None:
    page, translation = texts(path)
    assert differences(page, translation) == [], f"bring {path} into step"
    assert len(CHINESE.findall(CODE.sub("", translation))) > len(page) / 10


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda text: text.replace("## 安装\n", ""), "headings"),
        (lambda text: text.replace("seed=0", "seed=1"), "code blocks"),
        (lambda text: text.replace("0.103", "0.102"), "numbers"),
        (lambda text: text.replace("(docs/tour.md)", "(docs/gpu.md)"), "links"),
        (lambda text: text.replace("| 单个 GPU |", "| 单个 GPU"), "rows of tables"),
        (lambda text: text.replace("`kda`", "`kdb`"), "code in lines"),
    ],
)
def test_planted_differences_are_seen(change: Callable[[str], str], fact: str) -> None:
    _, translation = texts("README.zh.md")
    changed = change(translation)
    assert changed != translation
    assert differences(translation, changed) == [fact]
