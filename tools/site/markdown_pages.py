"""Markdown to HTML: GitHub's anchors, highlighted code, formulas as MathML, and links that lead to pages of the site.

Formulas between dollars are LaTeX. They are MathML when the page is written, so that no script and no font is loaded.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup, escape
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from heddle.lab.explore.page import Piece, pieces_of

LEXERS = {"python": "python", "yaml": "yaml", "sh": "bash", "console": "console", "json": "json"}
SIMPLE = HtmlFormatter(nowrap=True)
FILE_NAME = re.compile(r"^[\w./-]+(\.md|/)$")  # of a page, or of a folder with one
NAMING = {"field", "option", "setting"}  # heads of tables whose rows the search finds by name


@dataclass
class Section:
    """A heading and the text below it. level: 1 to 6. anchor: its id. text: without marks, for the search.

    rows: of tables of fields or options, and of lists whose items begin with a name: (name, what it does).
    """

    level: int
    anchor: str
    title: str
    text: str = ""
    rows: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Rendered:
    """A page's HTML, its sections in order, and the links that it contains, as written."""

    html: Markup
    sections: list[Section] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The first heading."""
        return self.sections[0].title if self.sections else ""


def render(
    text: str,
    target_of: Callable[[str], str],
    formulas: bool = False,
    title_of: Callable[[str], str] | None = None,
) -> Rendered:
    """Render a page. target_of: turns the target of a link or an image, as written, into one from the written page.

    formulas: whether blocks of text are typeset where they are formulas. title_of: the title of the page that a link
    leads to, which replaces a file's name as its text.
    """
    parser = _parser()
    tokens = parser.parse(text)
    sections = list(_number_headings(tokens))
    for link, shown in pairwise(_inline(tokens)):
        if title_of is not None and link.type == "link_open" and FILE_NAME.match(shown.content):
            shown.content = title_of(str(link.attrs["href"])) or shown.content
    for token in _inline(tokens):
        for name in ("href", "src"):
            if (target := token.attrs.get(name)) is not None:
                token.attrs[name] = target_of(str(target))
    html = parser.renderer.render(tokens, parser.options, {"formulas": formulas})
    return Rendered(Markup(html), sections)


def code(text: str, language: str) -> str:
    """Highlighted source."""
    lexer = LEXERS.get(language)
    return highlight(text, _lexer(lexer), SIMPLE) if lexer else str(escape(text))


@cache
def _lexer(name: str) -> Any:
    return get_lexer_by_name(name)


def math(formula: str, display: bool = False) -> str:
    """LaTeX as MathML. The formula itself is the text alternative."""
    made = convert(formula.strip(), display="block" if display else "inline")
    return made.replace("<math ", f'<math aria-label="{escape(formula.strip())}" ', 1)


def anchor_of(title: str) -> str:
    """GitHub's anchor of a heading: `kv_heads, and more` -> `kv_heads-and-more`."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": True, "typographer": False}).enable(["table", "strikethrough"])
    parser.use(dollarmath_plugin, allow_space=False, allow_digits=False, double_inline=False, renderer=_dollars)
    parser.add_render_rule("fence", _fence)
    parser.add_render_rule("code_block", _fence)
    parser.add_render_rule("table_open", lambda *_: '<div class="scroll"><table class="data">\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return parser


def _dollars(content: str, options: dict[str, Any]) -> str:
    return math(content, bool(options["display_mode"]))


def _fence(renderer: Any, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
    """A block of code, with its formula typeset above it where the block is one."""
    token = tokens[index]
    language = token.info.split()[0] if token.info else "text"
    typeset = pieces_of(token.content) if language == "text" and env.get("formulas") else None
    block = f'<pre class="code" data-language="{language}"><code>{code(token.content, language)}</code></pre>\n'
    if typeset is None:
        return block
    lines = "\n".join(f"<div>{''.join(map(_piece, line))}</div>" for line in typeset)
    return f'<div class="formula">{lines}<details><summary>as text</summary>{block}</details></div>\n'


def _piece(piece: Piece) -> str:
    return math(piece.text, display=True) if piece.is_formula else f"<span>{escape(piece.text)}</span>"


def _inline(tokens: Sequence[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from token.children or ()


def _plain(token: Token) -> str:
    return "".join(child.content if child.content else " " for child in token.children or ())


def _number_headings(tokens: list[Token]) -> Iterator[Section]:
    """Give each heading its id, and collect the text of each section."""
    used: dict[str, int] = {}
    section = None
    head, cells = "", list[str]()
    for index, token in enumerate(tokens):
        if token.type == "tr_open":
            cells = []
        elif token.type == "inline" and tokens[index - 1].type in {"th_open", "td_open"}:
            cells.append(_plain(token).strip())
        elif token.type == "thead_close":
            head = cells[0]
        elif (
            token.type == "tr_close" and section is not None and head in NAMING and tokens[index - 1].type == "td_close"
        ):
            section.rows.append((cells[0], " ".join(cells[1:])))
        elif (
            token.type == "inline"
            and section is not None
            and tokens[index - 2].type == "list_item_open"
            and (children := token.children or ())
            and children[0].type == "code_inline"
        ):
            section.rows.append((children[0].content, _plain(token)[len(children[0].content) :].strip(" :")))
        if token.type == "heading_open":
            if section is not None:
                yield section
            title = _plain(tokens[index + 1]).strip()
            anchor = anchor_of(title)
            count = used[anchor] = used.get(anchor, -1) + 1
            anchor = f"{anchor}-{count}" if count else anchor
            token.attrs["id"] = anchor
            section = Section(int(token.tag[1]), anchor, title)
        elif section is not None and token.type == "inline" and tokens[index - 1].type != "heading_open":
            section.text += _plain(token) + " "
        elif section is not None and token.type in {"fence", "code_block"}:
            section.text += token.content + " "
    if section is not None:
        yield section
