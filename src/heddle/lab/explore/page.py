"""The design explorer: choose kinds and options, and see sizes and costs, as one HTML document."""

import re
from dataclasses import asdict
from functools import cache
from typing import Any, NamedTuple

from latex2mathml.converter import convert
from markupsafe import Markup

from heddle.lab.explore.choices import SLOTS, explorer_design, kinds_of, mistakes, model_fields, published_designs
from heddle.lab.explore.formulas import formulas_of, model_formulas
from heddle.lab.pages.render import render
from heddle.model.config import MAX_DISTINCT_LAYERS, ModelConfig

# Formulas of docstrings as LaTeX: `S_t = α_t S_{t−1} + k_t v_tᵀ` is read as it stands, so that it is written once.
#
# A block is a formula if one of its pieces is a formula, and it has no drawing. Three spaces separate pieces; a piece
# that is a sentence stays a sentence, as is one with the name of a field in backticks.


_SIGNS = {
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "θ": r"\theta ",
    "λ": r"\lambda ", "μ": r"\mu ", "σ": r"\sigma ", "φ": r"\varphi ", "ψ": r"\psi ", "π": r"\pi ",
    "Δ": r"\Delta ", "Φ": r"\Phi ",
    "τ": r"\tau ", "·": r"\cdot ", "⊙": r"\odot ", "Σ": r"\sum ", "Π": r"\prod ", "≤": r"\le ", "≥": r"\ge ",
    "∈": r"\in ", "⋯": r"\cdots ", "…": r"\dots ", "∞": r"\infty ", "←": r"\leftarrow ", "→": r"\rightarrow ", "−": "-",
    "×": r"\times ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "<": r"\lt ", ">": r"\gt ", "≠": r"\ne ", "*": r"\ast ",
    "²": "^{2}", "ᵀ": "^{T}", "₁": "_{1}", "₂": "_{2}", "₃": "_{3}", "↑": r"\uparrow ", "↓": r"\downarrow ", "'": "'",
    "%": r"\%", "#": r"\#", "&": r"\&", "$": r"\$", "{": r"\{", "}": r"\}", "_": r"\_",
}  # fmt: skip
_ACCENTS = {"\u0302": r"\hat", "\u0303": r"\tilde", "\u0304": r"\bar"}
_FUNCTIONS = {
    "softmax", "exp", "log", "tanh", "sigmoid", "softplus", "relu", "SiLU", "norm", "tril", "Diag", "logsumexp",
    "onehot", "max", "min", "mean", "cos", "sin", "act", "GELU", "Sinkhorn", "sqrt", "bucket", "elu", "clamp", "score",
}  # fmt: skip
DIAGRAM = re.compile("[\u2500-\u257f]")
_GAP = re.compile(r"\s{3,}")
_SIGN = re.compile(r"[=≤∈←·⊙Σ+ᵀ(\[₁]|_\w")
_SENTENCE = re.compile(r"(?<![\w^])[a-z]{3,} [a-z]{2,}\b|\b(?:19|20)\d\d\b")
_GREEK = "α-ωΔΦ"
_TOKEN = re.compile(
    rf"""
    (?P<space>\s+)
    | (?P<identifier>[A-Za-z]{{2,}}(?:_[a-z]{{2,}})+)
    | (?P<name>[A-Za-z]+)
    | (?P<below>_(?:\{{[^}}]*\}}|[A-Za-z{_GREEK}0-9↑↓]+(?:,[a-z](?![a-z]))?))
    | (?P<above>\^(?:\{{[^}}]*\}}|\([^()]*(?:\([^()]*\)[^()]*)*\)|\w+))
    | (?P<inverse>⁻¹)
    | (?P<number>\d+(?:[.,]\d+)*)
    | (?P<accent>[\u0302\u0303\u0304])
    | (?P<sign>.)
    """,
    re.VERBOSE,
)
_ROOT = re.compile(r"\\operatorname\{sqrt\}\(([^()]*)\)")


class Piece(NamedTuple):
    """A part of a line. text: LaTeX if it is a formula, else a sentence."""

    text: str
    is_formula: bool


def pieces_of(block: str) -> list[list[Piece]] | None:
    """The pieces of each line of a block, or None if none of them is a formula."""
    lines = [[piece for piece in _GAP.split(line.strip()) if piece] for line in block.splitlines() if line.strip()]
    if DIAGRAM.search(block) or not any(is_formula(piece) for line in lines for piece in line):
        return None
    return [
        [Piece(latex(piece), True) if is_formula(piece) else Piece(piece.replace("`", ""), False) for piece in line]
        for line in lines
    ]


def is_formula(piece: str) -> bool:
    """Whether a piece has a sign of a formula, and neither a year, two words in a row, nor the name of a field."""
    return bool(_SIGN.search(piece)) and not _SENTENCE.search(piece) and "`" not in piece


def latex(piece: str) -> str:
    """A formula as LaTeX."""
    parts: list[str] = []
    for match in _TOKEN.finditer(piece):
        kind, value = match.lastgroup, match[0]
        if kind == "accent":
            parts[-1] = rf"{_ACCENTS[value]}{{{parts[-1]}}}"
        elif kind in {"below", "above"}:
            parts.append(("_{" if kind == "below" else "^{") + _raised_or_lowered(value[1:]) + "}")
        elif kind == "inverse":
            parts.append("^{-1}")
        elif kind == "name":
            parts.append(_name(value))
        elif kind == "identifier":
            parts.append(_upright(value))
        else:
            parts.append(r" \quad " if value == "  " else " " if kind == "space" else _SIGNS.get(value, value))
    return _ROOT.sub(r"\\sqrt{\1}", "".join(parts))


def _raised_or_lowered(text: str) -> str:
    """A superscript or subscript; a word is upright, as in W_out."""
    inner = text[1:-1] if text[0] in "{(" else text
    return _upright(inner) if re.fullmatch(r"[A-Za-z]{2,}(,[a-z])?", inner) else latex(inner)


def _upright(word: str) -> str:
    return rf"\text{{{word}}}" if "_" in word else rf"\mathrm{{{word}}}"


def _name(word: str) -> str:
    if len(word) == 1:
        return word
    if word in _FUNCTIONS:
        return rf"\operatorname{{{word}}}"
    return rf"\text{{ {word} }}" if word in {"of", "or", "in", "so", "from", "on"} else _upright(word)


BLOCK = re.compile(r"\n\s*\n")
CODE = re.compile(r"`([^`]+)`")


def explorer_page(slot: str | None = None, config: ModelConfig | None = None, context: int | None = None) -> str:
    """The page of a slot, or of a whole design; the same input gives the same bytes.

    config: the design that is shown first. context: the tokens that its model was trained or made for, if known.
    """
    slots = {name: kinds_of(name) for name in SLOTS}
    pages = list(SLOTS) if slot is None else [slot]
    kinds = [kind for name in pages for kind in slots[name]]
    start = _start() if config is None else explorer_design(config) | {"tokens": _context(config, context), "bytes": 2}
    if slot == "positions" and config is None:
        start["layers"][0]["mixer"]["position"] = {"kind": "rope"}
    if slot == "scalings" and config is None:
        yarn = next(kind.first for kind in kinds_of("scalings") if kind.kind == "yarn")
        start["layers"][0]["mixer"]["position"] = {"kind": "rope", "scaling": dict(yarn)}
        start["tokens"] = 32768
    subject = "a whole design" if slot is None else f"the {SLOTS[slot]} of a layer"
    return render(
        "explorer.html",
        title="heddle explore" + ("" if slot is None else f": {slot}"),
        subject=subject,
        heading="Design explorer" + ("" if slot is None else f": {SLOTS[slot]}"),
        kind_count=len(kinds),
        data={
            "slots": {name: [_kind_data(kind) for kind in each] for name, each in slots.items()},
            "pages": pages,
            "whole": slot is None,
            "about": {name: {kind.kind: docstring_html(kind.source) for kind in slots[name]} for name in pages},
            "fields": {place: list(map(asdict, fields)) for place, fields in model_fields().items()},
            "most_layers": MAX_DISTINCT_LAYERS,
            "models": published_designs(),
            "mistakes": mistakes(),
            "start": {"slot": pages[0], "layer": 0, "design": start},
        },
        formulas=Markup(_script()),
    )


@cache
def _script() -> str:
    """The formulas of all kinds as a JavaScript object."""
    entries = []
    for slot in SLOTS:
        formulas = ((kind.kind, formulas_of(slot, kind.kind)) for kind in kinds_of(slot))
        kinds = ",".join(f"{name}:{'null' if each is None else each.script()}" for name, each in formulas)
        entries.append(f"{slot}:{{{kinds}}}")
    return f"{{{','.join(entries)},model:{model_formulas().script()}}}"


def _kind_data(kind: Any) -> dict[str, Any]:
    return {key: value for key, value in asdict(kind).items() if key not in ("source", "slot")}


def _context(config: ModelConfig, context: int | None) -> int:
    """The context length that the page shows first: of the learned positions, else the model's own, else 4096."""
    return config.position_limit or context or 4096


def _start() -> dict[str, Any]:
    """A small design."""
    mixer = next(kind.first for kind in kinds_of("mixers") if kind.kind == "attention")
    return {
        "vocab_size": 32000,
        "width": 512,
        "tokens": 4096,
        "bytes": 2,
        "layers": [{"count": 8, "mixer": dict(mixer), "feedforward": {"kind": "gated", "hidden": 1536}}],
        "residual": {"kind": "pre_norm"},
        "norm": {"kind": "rms"},
        "embedding": {},
        "head": {"tied": True},
    }


@cache
def docstring_html(source: str) -> str:
    """A docstring as HTML, with its formulas as MathML."""
    return render("docstring.html", blocks=[_block(block) for block in BLOCK.split(source) if block.strip()])


def _block(block: str) -> dict[str, Any]:
    """A block for the template: words, of which every second piece is code, drawn text, or lines of formulas."""
    if DIAGRAM.search(block) is None and not block.startswith("    "):
        return {"words": CODE.split(block)}
    lines = pieces_of(block)
    if lines is None:
        return {"drawn": block}
    return {"lines": [[Markup(convert(text)) if is_latex else text for text, is_latex in line] for line in lines]}
