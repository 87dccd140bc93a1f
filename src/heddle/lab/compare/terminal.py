"""Print a comparison to the terminal: a row for each design, effects of varied fields, the verdict, caveats."""

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from heddle.lab.compare.abilities import left_out_sentences
from heddle.lab.compare.results import Design, Report
from heddle.lab.compare.tables import (
    CostColumn,
    TextTable,
    cost_columns,
    difference_to_baseline,
    effect_table,
    equal_size_table,
    first_probe,
    format_bits,
    format_context,
    format_difference,
    format_number,
    format_percent,
    format_rate,
    half_width,
    judgment,
    mean_loss,
    ranked_designs,
    recall_accuracy,
)
from heddle.lab.compare.verdict import resolution_table

JUDGMENT_STYLES = {"better": "bold green", "worse": "bold red"}
HEADER_LINES = 3
PLAIN_WIDTH = 100  # columns, where the output is not a terminal


def print_report(report: Report, console: Console | None = None) -> None:
    """Print to standard output; as plain text of 100 columns where that is not a terminal."""
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=PLAIN_WIDTH)
    console.print(report_tables(report))


def report_tables(report: Report) -> RenderableType:
    """All tables and sentences. Texts are never interpreted as rich's markup, whatever a design's name is."""
    parts: list[RenderableType] = [_design_table(report), Text()]
    # a single field's rows would repeat those of the designs
    fields = report.effects.fields
    for field in fields if len(fields) > 1 else []:
        parts += [_text_table(effect_table(field)), Text()]
    if report.equal_size:
        sizes = equal_size_table(report)
        titled = TextTable(["equal size: design", *sizes.header[1:]], sizes.rows)
        parts += [_text_table(titled), Text()]
    unresolved = resolution_table(report)
    if unresolved is not None:
        parts += [_text_table(unresolved), Text()]
    parts += [Text(sentence) for sentence in report.verdict]
    parts += [Text(sentence) for sentence in left_out_sentences(report)]
    parts += [Text(sentence) for sentence in (report.tuning.sentences if report.tuning else ())]
    if report.progress.stop_reason:
        parts.append(Text(report.progress.stop_reason))
    if report.warnings:
        parts.append(Text("\nCaveats:", style="bold yellow"))
        parts += [Text(f"• {warning}") for warning in report.warnings]
    return Group(*parts)


def _new_table() -> Table:
    return Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", show_edge=False, pad_edge=False)


def _text_table(text_table: TextTable) -> Table:
    table = _new_table()
    for index, title in enumerate(text_table.header):
        table.add_column(Text(title), justify="right" if index else "left", overflow="fold")
    for row in text_table.rows:
        table.add_row(*map(Text, row))
    return table


def _design_table(report: Report) -> Table:
    """The designs, lowest bits per byte first."""
    table = _new_table()
    costs = cost_columns(report)
    single = len(report.designs) == 1
    probe = first_probe(report)
    table.add_column("\n\ndesign", overflow="fold", min_width=14)
    table.add_column("\nbits per\nbyte", justify="right", no_wrap=True)
    if not single:
        baseline = Text(report.baseline)
        baseline.truncate(16, overflow="ellipsis")
        table.add_column(Text("\ndifference to\n").append(baseline), no_wrap=True)
    if probe is not None:
        table.add_column(Text(f"\nright\n{probe[1].title}"), justify="right", no_wrap=True)
    for column in costs:
        table.add_column(_cost_header(column), justify="right", no_wrap=True)
    for design in ranked_designs(report):
        name = Text(design.name, style="bold")
        name.append(f"\n{format_number(design.parameters)} parameters", style="not bold dim")
        loss = Text(format_bits(mean_loss(design)))
        half = half_width(design.bits_per_byte)
        if half is not None:
            loss.append(f"\n±{half:.3f}", style="dim")
        cells = [] if single else [_difference_cell(report, design)]
        if probe is not None:
            cells.append(Text(format_percent(recall_accuracy(design, probe[0]))))
        # the header already has the unit of speeds
        cells += [_cost_cell(column, design.name) for column in costs]
        table.add_row(name, loss, *cells)
    return table


def _cost_header(column: CostColumn) -> Text:
    """Up to three short lines, aligned at the bottom: "decode", "tok/s", "at 8k"."""
    lines = column.name.lower().replace("training", "train").split()
    if column.format is format_rate:
        lines.append("tok/s")
    if column.context is not None:
        lines.append(f"at {format_context(column.context)}")
    return Text("\n" * (HEADER_LINES - len(lines)) + "\n".join(lines))


def _cost_cell(column: CostColumn, name: str) -> Text:
    """The value, and below it the range of its measurements where it has one."""
    cell, ends = Text(column.format(column.values[name]).replace(" tok/s", "")), column.range_text(name)
    # on two lines: beside each other they leave no room for the other costs
    return cell.append("\n" + ends.replace(" to ", "–\n"), style="dim") if ends else cell


def _difference_cell(report: Report, design: Design) -> Text:
    if design.name == report.baseline:
        return Text("baseline", style="dim")
    difference = difference_to_baseline(report, design.name)
    word = judgment(difference)
    style = JUDGMENT_STYLES.get(word.partition(",")[0], "dim")
    return Text(f"{format_difference(difference)}\n").append(word, style=style)
