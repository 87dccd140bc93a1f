"""Rows and columns that the terminal and the report's page share: costs, effects of varied fields, equal sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from heddle.analysis.comparison.formatting import (
    Formatter,
    format_bits,
    format_bytes,
    format_context,
    format_difference,
    format_number,
    format_rate,
    format_signed,
    judgment,
)
from heddle.analysis.comparison.lookup import Report, baseline_design, range_at, shared_context, value_at

# of each kind of size: its key in a design's report, and its name in a sentence
SIZE_WORDS = {
    "parameters": ("parameters", "parameters"),
    "active-parameters": ("active_parameters", "active parameters per token"),
    "flops": ("flops_per_token", "forward FLOPs per token"),
}


@dataclass(frozen=True)
class CostColumn:
    """A cost of all designs. context: where it was measured; values: by the design's name.

    ranges: of the measurements of a speed, (low, high) by the design's name; none for what is counted.
    """

    name: str
    context: int | None
    format: Formatter
    less_is_better: bool
    values: Mapping[str, float | None]
    ranges: Mapping[str, tuple[float, float] | None] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """ "State at 8k"."""
        return self.name if self.context is None else f"{self.name} at {format_context(self.context)}"

    def range_text(self, name: str) -> str:
        """The range of a design's measurements: "16.8 to 17.6 k"; "" where it has none."""
        ends = self.ranges.get(name)
        if ends is None:
            return ""
        low, high = (format_number(end) for end in ends)
        unit = high.partition(" ")[2]
        return f"{low.removesuffix(f' {unit}')} to {high}"  # "16.8 to 17.6 k"


@dataclass(frozen=True)
class TextTable:
    """A table of formatted numbers; the first column names the row."""

    header: list[str]
    rows: list[list[str]]
    label: str = ""


def cost_columns(report: Report) -> list[CostColumn]:
    """What the designs cost: training speed, peak memory, state, decoding speed."""
    designs = report["designs"]
    training_speed = {design["name"]: design["train_tokens_per_second"] for design in designs}
    peak_memory = {design["name"]: design["peak_memory_bytes"] for design in designs}
    state_context, decode_context = shared_context(designs, "state_bytes"), shared_context(designs, "decode")
    states = {design["name"]: value_at(design["state_bytes"], state_context) for design in designs}
    decode_speed = {design["name"]: value_at(design["decode"], decode_context) for design in designs}
    training_ranges = {design["name"]: design["train_speed_range"] for design in designs}
    decode_ranges = {design["name"]: range_at(design["decode"], decode_context) for design in designs}
    return [
        CostColumn("Training", None, format_rate, False, training_speed, training_ranges),
        CostColumn("Peak memory", None, format_bytes, True, peak_memory),
        CostColumn("State", state_context, format_bytes, True, states),
        CostColumn("Decode", decode_context, format_rate, False, decode_speed, decode_ranges),
    ]


def effect_table(field: Mapping[str, Any]) -> TextTable:
    """A row for each value of a varied field: its mean, its difference to the baseline's value, and the judgment."""
    rows = []
    for value in field["values"]:
        difference = ["", "baseline"]
        if value["difference"]:
            difference = [format_difference(value["difference"]), judgment(value["difference"])]
        rows.append([value["label"], format_bits(value["mean"]), *difference])
    header = [field["title"], "bits per byte", f"difference to {field['baseline']}", ""]
    return TextTable(header, rows, f"Bits per byte by {field['title']}")


def equal_size_words(report: Report) -> str:
    """What all designs have alike, in words: "parameters"."""
    kind, _, context = report["equal_size"].partition("@")
    return f"state bytes at {context} tokens" if context else SIZE_WORDS[kind][1]


def equal_size_table(report: Report) -> TextTable:
    """A row for each design: what was changed, its size, and its deviation from the baseline's.

    What changed is the width (before and after), or the fields that set the size of a state.
    """
    baseline, is_state = baseline_design(report), "@" in report["equal_size"]
    key = "equal_state_bytes" if is_state else SIZE_WORDS[report["equal_size"]][0]
    rows = []
    for design in report["designs"]:
        original, trained = design["width"]["original"], design["width"]["trained"]
        change = str(trained) if original == trained else f"{original} → {trained}"
        if is_state:
            change = ", ".join(design["scaled_fields"]) or "nothing"
        amount = (format_bytes if is_state else format_number)(design[key])
        deviation = f"{format_signed(100 * (design[key] / baseline[key] - 1), 1)}%"
        rows.append([design["name"], change, amount, "baseline" if design is baseline else deviation])
    header = ["design", "changed" if is_state else "width", equal_size_words(report), "deviation"]
    return TextTable(header, rows, "States of equal size" if is_state else "Widths of equal size")
