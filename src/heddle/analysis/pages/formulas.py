"""Formulas of docstrings as LaTeX: `S_t = α_t S_{t−1} + k_t v_tᵀ` is read as it stands, so that it is written once.

A block is a formula where a piece of it is one, and nothing in it is drawn. Three spaces separate pieces; a piece that
is a sentence stays one.
"""

import re
from typing import NamedTuple

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
    """A part of a line. text: LaTeX where it is a formula, else a sentence."""

    text: str
    is_formula: bool


def pieces_of(block: str) -> list[list[Piece]] | None:
    """The pieces of each line of a block, or None where none of them is a formula."""
    lines = [[piece for piece in _GAP.split(line.strip()) if piece] for line in block.splitlines() if line.strip()]
    if DIAGRAM.search(block) or not any(is_formula(piece) for line in lines for piece in line):
        return None
    return [
        [Piece(latex(piece), True) if is_formula(piece) else Piece(piece, False) for piece in line] for line in lines
    ]


def is_formula(piece: str) -> bool:
    """Whether a piece has a sign of a formula, and neither a year nor two words in a row, as a sentence has."""
    return bool(_SIGN.search(piece)) and not _SENTENCE.search(piece)


def latex(piece: str) -> str:
    """A formula as LaTeX."""
    parts: list[str] = []
    for match in _TOKEN.finditer(piece):
        kind, value = match.lastgroup, match[0]
        if kind == "accent":
            parts[-1] = rf"{_ACCENTS[value]}{{{parts[-1]}}}"
        elif kind in {"below", "above"}:
            parts.append(("_{" if kind == "below" else "^{") + _script(value[1:]) + "}")
        elif kind == "inverse":
            parts.append("^{-1}")
        elif kind == "name":
            parts.append(_name(value))
        elif kind == "identifier":
            parts.append(_upright(value))
        else:
            parts.append(r" \quad " if value == "  " else " " if kind == "space" else _SIGNS.get(value, value))
    return _ROOT.sub(r"\\sqrt{\1}", "".join(parts))


def _script(text: str) -> str:
    """What stands above or below: a word of letters is upright, as in W_out."""
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
