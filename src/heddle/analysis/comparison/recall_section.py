"""The report's section on recall: right answers by design and probe as a heat table, and what they tell."""

from html import escape

from heddle.analysis.comparison import wording
from heddle.analysis.comparison.trades import recalled

MEANING = (
    "A small copy of each design (the same width and mixers, two layers or one of each kind, a vocabulary of the "
    "task's own) learns a task that is drawn anew in every step, all copies with the same budget and one seed. Loss "
    "after a short training is mostly about frequent words and short phrases, which every mixer learns; whether a "
    "design can fetch one of many things it has read, from a state of a fixed size say, shows only later there, and "
    "shows here at once. A low number means that the copy did not learn the task within this budget; it may with more. "
    "Differences of a few percent are luck: one seed was trained."
)
DEEPEST = 55  # percent of colour at which text is still easy to read


def recall_section(report: wording.Report) -> str:
    """Nothing where no probe was asked for."""
    probes = report["recall"]
    if not probes:
        return ""
    heads = "".join(f'<th scope="col">{escape(probe["title"])}</th>' for probe in probes.values())
    rows = []
    for design in report["designs"]:
        cells = "".join(_cell(recalled(design, name), probe["chance"]) for name, probe in probes.items())
        rows.append(f'<tr><th scope="row">{escape(design["name"])}</th>{cells}</tr>')
    blind = "".join(f"<td>{wording.percent(probe['chance'])}</td>" for probe in probes.values())
    rows.append(f'<tr class="blindly"><th scope="row">picking blindly</th>{blind}</tr>')
    table = (
        f'<div class="scroll"><table class="data heat" aria-label="Right answers by design and task"><thead><tr>'
        f'<th scope="col">right answers</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )
    asked = "".join(
        f"<div><dt>{escape(probe['title'])}</dt><dd>{escape(probe['asks'])} Rows of {probe['length']} tokens, "
        f"{wording.scaled(probe['train_tokens'])} tokens to learn from.</dd></div>"
        for probe in probes.values()
    )
    return (
        f'<section><h2>Recall</h2><div class="card recall"><p class="small">{MEANING}</p>{table}<dl>{asked}</dl>'
        "</div></section>"
    )


def _cell(value: float | None, chance: float) -> str:
    """Coloured by how far it is from blind picking to all right."""
    above = 0.0 if value is None else max(0.0, (value - chance) / (1 - chance))
    return f'<td style="--heat:{DEEPEST * above:.0f}%">{wording.percent(value)}</td>'
