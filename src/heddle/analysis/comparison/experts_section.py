"""The report's section on mixtures of experts: for each layer the load of every expert, beside an even share."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from heddle.analysis.comparison import wording
from heddle.analysis.comparison.figures import styles
from heddle.analysis.comparison.statistics import finished
from heddle.training.router_metrics import Told, average

MEANING = (
    "How often each expert was chosen, in the last tenth of the training, from the most chosen on, averaged over the "
    "finished seeds. A bar is one expert; the line is an even share, written as 1. Experts far below it cost memory "
    "and learn little. Entropy "
    "is that of the router's probabilities for one token, in nats, beside what it would be if all experts were "
    "equally likely: near 0 the router is sure. Dropped is the share of choices beyond an expert's capacity."
)
WIDTH, HEIGHT = 10, 40  # of a bar's place and of the picture, in its own units


def experts_section(report: wording.Report) -> str:
    """A table a design, layers as rows; nothing where no design has experts."""
    cards = []
    for design in report["designs"]:
        told = [run["experts"] for run in finished(design["runs"]) if run.get("experts")]
        if told:
            cards.append(
                _card(design["name"], styles(report)[design["name"]][0], average([_in_order(one) for one in told]))
            )
    if not cards:
        return ""
    return (
        f'<section><h2>Experts</h2><p class="small experts-meaning">{MEANING}</p>'
        f'<div class="grid">{"".join(cards)}</div></section>'
    )


def _in_order(told: Told) -> Told:
    """Loads from the largest on: experts of two seeds have no more in common than their rank."""
    return {path: {**layer, "load": sorted(layer["load"], reverse=True)} for path, layer in told.items()}


def _card(name: str, colour: str, told: Told) -> str:
    shares = {path: [load * len(layer["load"]) for load in layer["load"]] for path, layer in told.items()}
    top = max(2.0, *(share for loads in shares.values() for share in loads))
    heads = ("layer", "load", "least", "most", "entropy", "dropped")
    head = "".join(f'<th scope="col">{word}</th>' for word in heads)
    rows = "".join(_row(path, layer, shares[path], top) for path, layer in told.items())
    table = (
        f'<div class="scroll"><table class="data experts" aria-label="Loads of the experts of {escape(name)}">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    return (
        f'<figure class="card" style="--own:var(--{colour})"><figcaption><div><h3>{escape(name)}</h3></div>'
        f"</figcaption>{table}</figure>"
    )


def _row(path: str, layer: Mapping[str, Any], shares: Sequence[float], top: float) -> str:
    even = math.log(len(shares))
    entropy = wording.MISSING if layer["entropy"] is None else f"{layer['entropy']:.2f} of {even:.2f}"
    numbers = (f"{min(shares):.2f}", f"{max(shares):.2f}", entropy, wording.percent(layer["dropped"]))
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    name = escape(path.removesuffix(".feedforward"))
    return f'<tr><th scope="row">{name}</th><td class="loads">{_bars(shares, top)}</td>{cells}</tr>'


def _bars(shares: Sequence[float], top: float) -> str:
    """One bar an expert, and the line of an even share behind them."""
    bars = []
    for place, share in enumerate(shares):
        height = HEIGHT * share / top
        bars.append(
            f'<rect x="{WIDTH * place + 1}" y="{HEIGHT - height:.2f}" width="{WIDTH - 2}" height="{height:.2f}">'
            f"<title>expert {place}: {share:.2f}</title></rect>"
        )
    words = f"Loads of {len(shares)} experts, from {min(shares):.2f} to {max(shares):.2f} of an even share"
    even = (
        f'<line x1="0" x2="{WIDTH * len(shares)}" y1="{HEIGHT - HEIGHT / top:.2f}" y2="{HEIGHT - HEIGHT / top:.2f}"/>'
    )
    return (
        f'<svg role="img" aria-label="{words}" viewBox="0 0 {WIDTH * len(shares)} {HEIGHT}" preserveAspectRatio="none">'
        f"{''.join(bars)}{even}</svg>"
    )
