"""What varied, in the terminal: a row a value of each field, and the widths of equal size."""

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from heddle.analysis.comparison import wording
from heddle.analysis.comparison.variation_section import equal_rows


def variation_tables(report: wording.Report) -> list[RenderableType]:
    """A table a varied field, if there are several (one field's rows are the designs), and one of equal sizes."""
    made: list[RenderableType] = []
    fields = report["varied"]["fields"]
    for field in fields if len(fields) > 1 else []:
        heads = [field["title"], "bits per byte", f"difference to {field['baseline']}", ""]
        rows = []
        for value in field["values"]:
            told = (wording.signed(value["difference"]), wording.judgement(value["difference"]))
            rows.append(
                [value["label"], wording.bits(value["mean"]), *(told if value["difference"] else ("", "baseline"))]
            )
        made += [_table(heads, rows), Text()]
    if report["equal"]:
        words, rows = equal_rows(report)
        made += [_table(["equal size: design", "width", words, "apart"], rows), Text()]
    return made


def _table(heads: list[str], rows: list[list[str]]) -> Table:
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", show_edge=False, pad_edge=False)
    for place, head in enumerate(heads):
        made.add_column(Text(head), justify="right" if place else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made
