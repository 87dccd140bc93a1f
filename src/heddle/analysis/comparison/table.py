"""A comparison in the terminal: one row a design, then the verdict and what to mind."""

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from heddle.analysis.comparison import wording
from heddle.analysis.comparison.summary import costs
from heddle.analysis.comparison.trades import recalled
from heddle.analysis.comparison.variation_table import variation_tables

LOOKS = {"better": "bold green", "worse": "bold red"}


def table(report: wording.Report) -> RenderableType:
    """The designs, lowest bits per byte first, then verdict and warnings; names are never read as markup."""
    parts: list[RenderableType] = [_designs(report), Text(), *variation_tables(report)]
    parts += [Text(sentence) for sentence in report["verdict"]]
    if report["warnings"]:
        parts.append(Text("\nMind when reading:", style="bold yellow"))
        parts += [Text(f"• {warning}") for warning in report["warnings"]]
    return Group(*parts)


def print_table(report: wording.Report, console: Console | None = None) -> None:
    """Prints the table to standard output; plain and 100 columns wide where that is no terminal."""
    place = console or Console()
    if console is None and not place.is_terminal:
        place = Console(width=100)
    place.print(table(report))


def _designs(report: wording.Report) -> Table:
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", show_edge=False, pad_edge=False)
    spent = costs(report)
    alone = len(report["designs"]) == 1
    made.add_column("\n\ndesign", overflow="fold", min_width=14)
    made.add_column("\nbits per\nbyte", justify="right", no_wrap=True)
    if not alone:
        baseline = Text(report["baseline"])
        baseline.truncate(16, overflow="ellipsis")
        made.add_column(Text("\ndifference to\n").append(baseline), no_wrap=True)
    probes = list(report["recall"].items())[:1]
    for _, probe in probes:
        made.add_column(Text(f"\nright\n{probe['title']}"), justify="right", no_wrap=True)
    for title, _, _ in spent:
        made.add_column(_heading(title), justify="right", no_wrap=True)
    for design in wording.ranked(report):
        name = Text(design["name"], style="bold")
        name.append(f"\n{wording.scaled(design['parameters'])} parameters", style="not bold dim")
        loss = Text(wording.bits(wording.mean_of(design)))
        half = wording.half_width(design["bits_per_byte"])
        if half is not None:
            loss.append(f"\n±{half:.3f}", style="dim")
        differences = [] if alone else [_difference(report, design)]
        differences += [Text(wording.percent(recalled(design, name))) for name, _ in probes]
        # the heading says tokens per second once for all
        amounts = [Text(write(values[design["name"]]).replace(" tok/s", "")) for _, write, values in spent]
        made.add_row(name, loss, *differences, *amounts)
    return made


def _heading(title: str) -> Text:
    """Up to three short lines, the last ones level: "decode", "tok/s", "at 8k"."""
    kind, _, place = title.lower().replace("training", "train").partition(" at ")
    words = kind.split()
    if kind in ("train", "decode"):
        words.append("tok/s")
    if place:
        words.append(f"at {place}")
    return Text("\n" * (3 - len(words)) + "\n".join(words))


def _difference(report: wording.Report, design: wording.Design) -> Text:
    if design["name"] == report["baseline"]:
        return Text("baseline", style="dim")
    row = wording.difference_of(report, design["name"])
    word = wording.judgement(row)
    look = LOOKS.get(word.partition(",")[0], "dim")
    return Text(f"{wording.signed(row)}\n").append(word, style=look)
