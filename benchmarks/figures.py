"""The figures: one row for each goal of speed on a CPU, its table and its plot, from the results of every machine.

A row is measured by one benchmark, whose `Case.figure` (or the key `figure` of a row that it writes) names it. Below
the table stand the benchmarks of rows that no result answers.
"""

import json
import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS
from tools.markdown import table


@dataclass(frozen=True)
class Figure:
    """A row of the table: its name, the benchmark that measures it ("": there is none), and what is compared."""

    name: str
    module: str
    text: str


FIGURES = tuple(
    Figure(*row)
    for row in (
        ("training fp32", "training_step", "training, float32, against transformers tuned"),
        ("training bf16", "training_step", "training, bfloat16, against transformers tuned and compiled"),
        (
            "tiny training",
            "tiny_training",
            "training gqa-tiny, float32, against plain PyTorch, eager or compiled",
        ),
        ("finite check", "finite_check", "training, float32, against the same without the check for finite numbers"),
        ("stacked seeds", "", "eight stacked seeds of gqa-tiny against two one-thread workers"),
        ("prefill", "prefill", "prompt of 2,048 tokens, bfloat16, against transformers tuned"),
        ("prefill llama.cpp", "llama_cpp", "prompt of 2,048 tokens, bfloat16, against llama.cpp"),
        ("token after 128", "decode", "one token after 128, bfloat16, against transformers tuned"),
        ("token after 2000", "decode", "one token after 2,000, bfloat16, against transformers tuned"),
        ("token llama.cpp", "llama_cpp", "one token after 128, bfloat16, against llama.cpp"),
        ("token llama.cpp 2000", "llama_cpp", "one token after 2,000, bfloat16, against llama.cpp"),
        ("token int8 llama.cpp", "llama_cpp", "one token after 128, 8-bit weights, against llama.cpp Q8_0"),
        ("token int8", "quantized_weights", "one token after 128, 8-bit weights, against our bfloat16"),
        ("loss int8", "quantized_weights", "bits per byte that 8-bit weights add, %"),
        ("many requests", "serving", "50 clients of `small`, 128 in and 128 out, against one after another, tokens/s"),
        ("MLA 8k", "latent", "MLA, one token after 8k, float32, against transformers tuned"),
        ("MLA 32k", "latent", "MLA, one token after 32k, float32, against transformers tuned"),
        ("window 8k", "long_texts", "window of 256, forward and backward at 8k, against the best full attention"),
        ("linear 8k", "long_texts", "linear attention, forward and backward at 8k, against the best full attention"),
        ("delta 8k", "long_texts", "gated delta, forward and backward at 8k, against the best full attention"),
        ("experts fp32", "moe", "2 of 8 experts, float32, forward and backward, against dense of equal FLOPs"),
        ("experts bf16", "moe", "2 of 8 experts, bfloat16, forward and backward, against dense of equal FLOPs"),
        ("experts token", "moe", "2 of 8 experts, float32, one token, against dense of equal FLOPs"),
        ("delta training", "delta", "gated delta, forward and backward at 2k, against transformers' chunks"),
        ("encoding", "encode", "encoding text, MB/s on two cores"),
        ("tokenizer training", "encode", "training a tokenizer, MB/s"),
        ("cold start", "startup", "`heddle train preset:gqa-tiny --data stdlib` to the first step, s"),
    )
)
# The rows of README's table, beside transformers: what, benchmark, case.
README = (
    ("training step, 4 × 512 tokens, float32", "training_step", "training fp32"),
    ("training step, bfloat16 autocast", "training_step", "training bf16 autocast"),
    ("prompt of 2,048 tokens, float32", "prefill", "prefill fp32"),
    ("prompt of 2,048 tokens, bfloat16", "prefill", "prefill bf16"),
    ("one token after 2,000, float32", "decode", "decode fp32 after 2000"),
    ("one token after 128, bfloat16", "decode", "decode bf16 after 128"),
    ("one token after 2,000, bfloat16", "decode", "decode bf16 after 2000"),
    ("latent attention (MLA), one token after 8,192, float32", "latent", "latent decode fp32 after 8192"),
)
BAR, ROW, LABEL, VALUE, WIDTH = 14, 22, 480, 60, 960  # pixels of the plot


def machines() -> list[Path]:
    """The folders of results that hold figures, one for each kind of machine."""
    return sorted(folder for folder in RESULTS.iterdir() if folder.is_dir() and measured(folder))


def measured(folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """By the figure's name, the row of a machine's results and its date."""
    rows: dict[str, tuple[dict[str, Any], str]] = {}
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        rows |= {row["figure"]: (row, content["date"]) for row in content["results"] if "figure" in row}
    return rows


def value_of(row: dict[str, Any]) -> str:
    """A ratio with its quartiles, or a value."""
    if "ratio" in row:
        low, high = row["quartiles"]
        return f"{row['ratio']:.2f}× ({low:.2f}–{high:.2f}){', unsteady' if row.get('unsteady') else ''}"
    return f"{row['value']:g}"


def figures_table(folder: Path) -> str:
    """The table of one machine."""
    rows_of, lines, missing = measured(folder), [], dict[str, None]()
    for figure in FIGURES:
        if figure.name not in rows_of:
            missing[f"`{figure.module}.py`" if figure.module else f"{figure.text} (no benchmark yet)"] = None
            continue
        row, date = rows_of[figure.name]
        share = next((f"{value:g} %" for name, value in row.items() if name.endswith("% of the limit")), "")
        met = ("met" if row["met"] else "not met") if "met" in row else ""
        lines.append((figure.text, row.get("goal", ""), value_of(row), met, share, f"`{figure.module}.py`, {date}"))
    head = ("what", "goal", "measured (quartiles)", "", "of the limit", "benchmark")
    return table(head, lines) + (f"\n\nNot measured: {', '.join(missing)}." if missing else "")


def readme_table() -> str:
    """Ratios beside transformers, at the worst and the best machine: by the tuned peer if all machines ran it."""
    lines = []
    for text, module, name in README:
        found = []
        for folder in sorted(RESULTS.iterdir()):
            file = folder / f"{module}.json"
            content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"results": []}
            for row in content["results"]:
                if row["case"] == name:
                    found.append((*beside_transformers(row), folder.name, content["date"]))
        tuned = all(ratios[1] is not None for ratios in found)
        ordered = sorted(found, key=lambda ratios: ratios[1] if tuned and ratios[1] else ratios[0])
        cells = [_machine_cell(*ratios) for ratios in (ordered[:1] + ordered[1:][-1:])]
        lines.append((text, *cells, *[""] * (2 - len(cells))))
    return table(("100 M parameters, 2 cores", "worst machine", "best machine"), lines)


def beside_transformers(row: dict[str, Any]) -> tuple[float, float | None]:
    """The ratios to transformers at its defaults, and tuned; results that name no peer have the defaults' ratio."""
    ratios = {row.get("against", "transformers"): row["ratio"]}
    ratios |= {key.removeprefix("ratio to "): value for key, value in row.items() if key.startswith("ratio to ")}
    return ratios["transformers"], ratios.get("transformers tuned")


def _machine_cell(defaults: float, tuned: float | None, machine: str, date: str) -> str:
    name = f"[{machine.removesuffix('-2-cores')}](benchmarks/results/{machine}), {date}"
    return f"{defaults:.2f} / {'–' if tuned is None else f'{tuned:.2f}'} ({name})"


def plot(folder: Path) -> str:
    """An SVG of the ratios of one machine: a bar from 1 for each on a logarithmic axis, and a line at its goal."""
    rows_of = measured(folder)
    bars = [(figure, rows_of[figure.name][0]) for figure in FIGURES if "ratio" in rows_of.get(figure.name, ({},))[0]]
    goals = [float(row["goal"].split()[-1]) if "goal" in row else 1.0 for _, row in bars]
    ratios = [row["ratio"] for _, row in bars]
    low, high = math.log2(min(1.0, *ratios, *goals)), math.log2(max(1.0, *ratios, *goals))
    scale = (WIDTH - LABEL - VALUE) / max(high - low, 1.0)
    height = ROW * (len(bars) + 1) + 5

    def x(ratio: float) -> float:
        return round(LABEL + (math.log2(ratio) - low) * scale, 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        lines.append(f'<path d="M{x(2.0**power)} {ROW - 4}V{height}" stroke="{"#888" if power == 0 else "#ddd"}"/>')
        lines.append(f'<text x="{x(2.0**power)}" y="{ROW - 8}" text-anchor="middle">{2.0**power:g}×</text>')
    for index, ((figure, row), ratio, goal) in enumerate(zip(bars, ratios, goals, strict=True)):
        top = ROW * (index + 1)
        color = "#2a7f9e" if row.get("met", True) else "#b5651d"
        left, right = sorted((x(1.0), x(ratio)))
        lines.append(f'<text x="{LABEL - 8}" y="{top + 11}" text-anchor="end">{escape(figure.text)}</text>')
        lines.append(f'<rect x="{left}" y="{top}" width="{max(right - left, 1):.1f}" height="{BAR}" fill="{color}"/>')
        lines.append(f'<text x="{WIDTH - 4}" y="{top + 11}" text-anchor="end">{ratio:.2f}×</text>')
        if "goal" in row:
            lines.append(f'<path d="M{x(goal)} {top - 2}v{BAR + 4}" stroke="#000" stroke-width="1.5"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def pages(docs: Path, intro: str) -> dict[Path, str]:
    """docs/benchmarks.md, and a plot for each machine that measured a ratio."""
    blocks, contents = [intro], {}
    for folder in machines():
        if not measured(folder) and not (folder / "limits.json").is_file():
            continue
        blocks += [f"## {folder.name}", figures_table(folder)]
        if any("ratio" in row for row, _ in measured(folder).values()):
            contents[docs / f"images/benchmarks-{folder.name}.svg"] = plot(folder)
            blocks.append(f"![Ratios and goals on {folder.name}](images/benchmarks-{folder.name}.svg)")
        if (folder / "limits.json").is_file():
            blocks.append(f"[The machine's limits](../benchmarks/results/{folder.name}/limits.json)")
    contents[docs / "benchmarks.md"] = "\n\n".join(blocks) + "\n"
    return contents
