"""The report below its summary: figures with their numbers, designs, how it was measured, what words mean."""

from collections.abc import Iterable, Sequence
from html import escape

from heddle.analysis.comparison import wording
from heddle.analysis.comparison.figures import figures, mean_curve, styles
from heddle.analysis.comparison.statistics import finished
from heddle.analysis.comparison.summary import swatch
from heddle.analysis.comparison.trades import against, state_growth

CAPTIONS = {
    "loss": ("Learning", "Validation loss. Thick: mean of the seeds; thin: each seed. Lower is better."),
    "trade": (
        "Loss against memory",
        "A bar is the interval of the difference to the baseline; not resolved where it crosses the line.",
    ),
    "state": (
        "Memory over context",
        "What one sequence keeps between tokens as its context grows. Lower is better.",
    ),
    "speed": (
        "Speed over context",
        "One sequence: tokens written, and prompt tokens read, per second. Higher is better.",
    ),
}


def figure_section(report: wording.Report) -> str:
    """The legend and the four figures, each with its numbers as a table."""
    buttons = []
    for place, design in enumerate(report["designs"]):
        picture = swatch(styles(report)[design["name"]])
        buttons.append(
            f'<button type="button" data-design="{place}" aria-pressed="true">'
            f"{picture}{escape(design['name'])}</button>"
        )
    group = '<div class="legend needs-script" role="group" aria-label="Designs shown" hidden>'
    legend = f"{group}{''.join(buttons)}<small>Press a name to hide or show it.</small></div>"
    tables = {"loss": _loss_table, "trade": _trade_table, "state": _state_table, "speed": _speed_table}
    drawn = figures(report)
    cards = []
    for name, (title, caption) in CAPTIONS.items():
        whole = ""
        if name == "loss" and drawn[name]:
            whole = (
                '<button type="button" class="needs-script" data-whole="loss" aria-pressed="false" hidden>'
                "from the start</button>"
            )
        plot = f'<div class="plot needs-script" id="plot-{name}" role="img" aria-label="{title}" hidden></div>'
        numbers = f"<details><summary>The numbers</summary>{tables[name](report)}</details>"
        without = '<noscript><p class="small">The figure needs JavaScript; its numbers follow.</p></noscript>'
        nothing = '<p class="empty">Nothing was measured for this figure.</p>'
        content = plot + without + numbers if drawn[name] else nothing
        head = f'<div><h3>{title}</h3>{whole}</div><p class="small">{caption}</p>'
        cards.append(f'<figure class="card"><figcaption>{head}</figcaption>{content}</figure>')
    return f'<section><h2>Side by side</h2>{legend}<div class="grid">{"".join(cards)}</div></section>'


def data_table(heads: Iterable[str], rows: Iterable[Sequence[str]], label: str = "") -> str:
    """A table of numbers; the first column names the row."""
    head = "".join(f'<th scope="col">{escape(word)}</th>' for word in heads)
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    named = f' aria-label="{escape(label)}"' if label else ""
    return (
        f'<div class="scroll"><table class="data"{named}><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _loss_table(report: wording.Report) -> str:
    curves = {design["name"]: mean_curve(design) for design in report["designs"]}
    longest: list[tuple[float, float]] = max(curves.values(), key=len)
    step = -(-len(longest) // 8) or 1
    places = [x for x, _ in longest[::-1][::step]][::-1]
    rows = []
    for name, curve in curves.items():
        rows.append([name, *(wording.bits(wording.at(curve, place)) for place in places)])
    return data_table(["bits per byte after", *(f"{wording.scaled(place)} tokens" for place in places)], rows)


def _series_table(report: wording.Report, key: str, title: str, write: wording.Writer) -> str:
    places = sorted({place for design in report["designs"] for place, _ in design[key] or ()})
    rows = []
    for design in report["designs"]:
        rows.append([design["name"], *(write(wording.at(design[key], place)) for place in places)])
    return data_table([title, *(wording.context_name(place) for place in places)], rows)


def _state_table(report: wording.Report) -> str:
    return _series_table(report, "state_bytes", "state at context", wording.size)


def _speed_table(report: wording.Report) -> str:
    decode = _series_table(report, "decode", "decode at context", wording.rate)
    return decode + _series_table(report, "prefill", "prefill at context", wording.rate)


def _trade_table(report: wording.Report) -> str:
    rows = []
    context = wording.shared_context(report["designs"], "state_bytes")
    for design in wording.ranked(report):
        difference = wording.difference_of(report, design["name"])
        state = wording.size(wording.at(design["state_bytes"], context))
        rows.append([design["name"], wording.bits(wording.mean_of(design)), wording.signed(difference), state])
    place = "" if context is None else f" at {wording.context_name(context)}"
    return data_table(["design", "bits per byte", f"difference to {report['baseline']}", f"state{place}"], rows)


def design_section(report: wording.Report) -> str:
    """A card a design: what it is, its runs one by one, and a text it wrote."""
    cards = []
    for design in report["designs"]:
        colour = styles(report)[design["name"]][0]
        facts = [f"{wording.scaled(design['parameters'])} parameters"]
        if design["active_parameters"] not in (None, design["parameters"]):
            facts.append(f"{wording.scaled(design['active_parameters'])} active per token")
        if design["flops_per_token"] is not None:
            facts.append(f"{wording.scaled(design['flops_per_token'])} FLOPs per token")
        sample = next((run["sample"] for run in finished(design["runs"]) if run["sample"]), None)
        text = f'<pre tabindex="0" aria-label="Sample">{escape(sample)}</pre>' if sample else "<p>It wrote no text.</p>"
        name, source = escape(design["name"]), escape(str(design["source"]))
        cards.append(
            f'<article class="card design" style="--own:var(--{colour})"><h3>{name}</h3>'
            f"<p>{escape(design['summary'])}</p>"
            f'<p class="small">{escape(" · ".join(facts))}<br>from {source}</p>'
            f"<p>{escape(state_growth(design))}</p>{_against(report, design)}"
            f"{_runs(design)}{text}</article>"
        )
    title = "<h2>The designs, and what they write</h2>"
    return f'<section>{title}<div class="designs">{"".join(cards)}</div></section>'


def _against(report: wording.Report, design: wording.Design) -> str:
    parts = against(report, design)
    items = "".join(f"<li>{escape(part)}</li>" for part in parts)
    return f'<p class="beside">Beside {escape(report["baseline"])}:</p><ul>{items}</ul>' if parts else ""


def _runs(design: wording.Design) -> str:
    rows = []
    skipped = [f"{run['skipped_steps']} in seed {run['seed']}" for run in design["runs"] if run["skipped_steps"]]
    for run in design["runs"]:
        result = wording.bits(run["bits_per_byte"]) if run["status"] == "done" else run["status"]
        seconds = wording.MISSING if run["seconds"] is None else f"{run['seconds']:.1f} s"
        rows.append([f"seed {run['seed']}", result, wording.scaled(run["train_tokens"]), seconds])
    note = f'<p class="small">Skipped steps: {", ".join(skipped)}</p>' if skipped else ""
    return data_table(["", "bits per byte", "tokens", "time"], rows) + note


def explanation_section(report: wording.Report) -> str:
    """How it was measured, and in plain words what the page's words mean."""
    lists = (("How it was measured", _measured(report)), ("In plain words", _words(report)))
    cards = []
    for title, terms in lists:
        entries = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in terms)
        cards.append(f'<section class="card"><h2>{title}</h2><dl>{entries}</dl></section>')
    return f'<div class="lists">{"".join(cards)}</div>'


def _measured(report: wording.Report) -> list[tuple[str, str]]:
    budget, data, hardware = report["budget"], report["data"], report["hardware"]
    seeds = ", ".join(str(seed) for seed in budget["seeds"])
    training = (
        f"Every design on the same data in the same order: {wording.budget(budget)} a run, batches of "
        f"{budget['batch_size']} sequences of {budget['context']} tokens, seeds {seeds}."
    )
    text = (
        f"{data['name']} (hash {data['hash']}): {wording.size(data['train_bytes'])} or "
        f"{wording.scaled(data['train_tokens'])} tokens to train on, "
        f"{wording.size(data['validation_bytes'])} held out to measure, vocabulary of {data['vocab_size']}."
    )
    terms = [("Training", training), ("Data", text)]
    for method in dict.fromkeys(row["method"] for row in report["differences"]):
        designs = [row["design"] for row in report["differences"] if row["method"] == method]
        terms.append((f"Difference of {wording.listing(designs, 12)}", method))
    asked = report["extrapolation"]
    if asked["note"] and not asked["multiples"]:
        terms.append(("Longer texts", f"Not measured: {asked['note']}."))
    machine = (
        f"{hardware['device']}; {hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} threads, "
        f"{wording.size(hardware['memory_bytes'])} of memory; torch {hardware['torch']}, "
        f"heddle {report['heddle']}."
    )
    return [*terms, ("Machine", machine), ("Command", str(report["command"]))]


LOSS = (
    "How many bits the model needs, on average, for each byte of text it has not seen. Less is better. "
    "Unlike loss per token it does not depend on the tokenizer. What its ± covers is written beside it; to "
    "compare designs, read the differences, which are paired and therefore sharper."
)
DIFFERENCE = (
    "Seed by seed, the design minus the baseline. The truth is expected inside the 95 % interval; about one "
    "interval in twenty misses it."
)
JUDGEMENT = (
    "Better or worse: the interval leaves out 0. Not resolved: it holds 0, so this comparison cannot tell. "
    "That does not mean the two are equal; more seeds or more training narrow the interval."
)
STATE = (
    "What one sequence keeps in memory between tokens. Training saw {context} tokens at a time: whether a "
    "design makes use of a longer context is {longer}."
)
MANY = (
    "Each interval stands for itself. Of {many} differences between truly equal designs about {lucky} would "
    "look resolved by luck, and the lowest of many means is partly lucky."
)
SPEED = (
    "Decode writes one token at a time after a context of the given length; prefill reads a prompt. All "
    "speeds, training's too, are of the machine named here."
)
UNITS = "1 k is 1000 and 1 MB is a million bytes; as a context, 8k is 8192 tokens."


def _words(report: wording.Report) -> list[tuple[str, str]]:
    many = len(report["differences"])
    longer = "told under longer texts" if report["extrapolation"]["multiples"] else "not measured here"
    luck = [("Many designs at once", MANY.format(many=many, lucky=f"{many / 20:.1f}"))] if many > 1 else []
    return [
        ("Bits per byte", LOSS),
        ("Difference ± interval", DIFFERENCE),
        ("Better, worse, not resolved", JUDGEMENT),
        *luck,
        ("State", STATE.format(context=report["budget"]["context"], longer=longer)),
        ("Decode and prefill", SPEED),
        ("Units", UNITS),
    ]


def facts(report: wording.Report) -> str:
    """The comparison in one line: how many designs and seeds, how long, on what."""
    budget, hardware = report["budget"], report["hardware"]
    seeds, designs = len(budget["seeds"]), len(report["designs"])
    words = [
        f"{designs} design{'s' * (designs > 1)}",
        f"{seeds} seed{'s' * (seeds > 1)}{' each' * (designs > 1)}",
        f"{wording.budget(budget)} a run",
        f"context {budget['context']}",
        str(report["data"]["name"]),
        f"{hardware['device']}, {hardware['cpu']}" if hardware["device"] == "cpu" else str(hardware["device"]),
    ]
    return '<ul class="facts">' + "".join(f"<li>{escape(word)}</li>" for word in words) + "</ul>"
