"""What heddle costs on a GPU, counted without one, and the budgets: `python -m tests.accelerator.budgets`.

The command rewrites `tests/goldens/gpu_budgets.json` and prints the table. The numbers of the start
were counted the same way on the source as it was before heddle had kernels for a GPU.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from heddle.numerics.dispatch import KernelChoice, record_choices
from tests.accelerator import budget_rows as calls
from tests.accelerator.launches import Launches, counting, without_pages
from tests.source import ROOT

GOLDEN = ROOT / "tests/goldens/gpu_budgets.json"
LAYERS = 16
PEAK = 989e12  # FLOP/s of bf16 products of an H200 by its data sheet, what MFU is measured against
PEAK_MEMORY = 1000  # MB
LARGEST = 300  # MB: twice a float32 copy of the queries; one T x S tensor of these rows has 8,590
LOSS_ROWS = {"loss_32k": 32000, "loss_128k": 128256}


@dataclass(frozen=True)
class Row:
    """One figure. `unit` says how it is counted; `budget` is the most that is allowed, or the least of an MFU."""

    title: str
    measure: Callable[[], float]
    unit: str = "launches"
    budget: float | None = None
    cheap: bool = True

    def met(self, value: float) -> bool | None:
        """Whether a figure keeps the budget; None without one."""
        if self.budget is None:
            return None
        return value >= self.budget if self.unit == "% MFU" else value <= self.budget

    def worse(self, value: float, committed: float) -> bool:
        """Whether a figure is worse than the committed one, rounding apart."""
        sign = -1 if self.unit == "% MFU" else 1
        return sign * (value - committed) > 0.001 * abs(committed) + 1e-9


def count(
    make: Callable[[], calls.Call], gradients: bool = True, compiled: bool = False, fla: bool = False
) -> tuple[Launches, list[KernelChoice]]:
    """What a call and its backward pass cost, and the kernels that were chosen. The options are those of `counting`."""
    lifts, mode = torch._C._only_lift_cpu_tensors(), torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(0)  # without the filling of memory that tests are run with
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(…, device=…) makes a fake tensor
    try:
        with (
            record_choices("cuda") as choices,
            FakeTensorMode(allow_non_fake_inputs=True),
            without_pages(),
            torch.set_grad_enabled(gradients),
        ):
            call = make()
            choices.clear()
            with counting(compiled, fla) as counter:
                y = call()
                if gradients:
                    (y if y.dim() == 0 else y.float().sum()).backward()
            return counter.total, choices
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
        torch.set_deterministic_debug_mode(mode)


def launches(
    make: Callable[[], calls.Call], gradients: bool = True, compiled: bool = False, fla: bool = False
) -> float:
    return count(make, gradients, compiled, fla)[0].launches


def extrapolated(make: Callable[[int], calls.Call], gradients: bool, compiled: bool, fla: bool = False) -> Launches:
    """The cost of `LAYERS` equal layers from that of two and of three."""
    two, three = (count(partial(make, n), gradients, compiled, fla)[0] for n in (2, 3))
    factor = LAYERS - 2

    def at(name: str) -> Any:
        return getattr(two, name) + factor * (getattr(three, name) - getattr(two, name))

    return Launches(at("launches"), at("bytes"), at("flops"), at("kernel_time"))


def mfu(name: str, how: str) -> float:
    """Modelled percentage of the peak in training: 8 rows of 4,096 tokens, forward, loss and backward.

    FLOPs are 6 for each active parameter and token, and for gqa those of the visible pairs. how: "eager", "--compile"
    (each layer, with the methods that stay eager) or "one graph", each also ", with fla".
    """

    def make(layers: int) -> calls.Call:
        return calls.training_call(name, layers, by_layers="--compile" in how)

    cost = extrapolated(make, True, "one graph" in how, "fla" in how)
    tokens = calls.BATCH * calls.LENGTH
    flops = 6 * calls.active_parameters(name, LAYERS) * tokens
    if name == "gqa":
        flops += 6 * LAYERS * 2048 * calls.LENGTH * tokens
    return round(100 * flops / cost.time / PEAK, 1)


def decoded(name: str, batch: int, pinned: bool, compiled: bool) -> float:
    """Launches of one token of a model of 16 layers. pinned: as a CUDA graph replays it."""
    return extrapolated(lambda n: calls.decode_call(name, n, batch, pinned), False, compiled).launches


def loss_passes(vocab_size: int) -> float:
    """How often the gradient of the vocabulary matrix is read and written."""
    cost, _ = count(lambda: calls.loss_call(vocab_size))
    return cost.updated[vocab_size * 2048]


def megabytes(make: Callable[[], calls.Call]) -> tuple[float, float]:
    """Megabytes of the largest tensor that is made, and of all that live at the peak."""
    cost, _ = count(make)
    return round(cost.largest / 1e6), round(cost.peak / 1e6)


SOFTCAPPED = lambda: calls.attention_call(softcap=50.0)  # noqa: E731
ATTENTION: dict[str, tuple[str, Callable[[], calls.Call]]] = {
    "causal": ("plain causal rows", calls.attention_call),
    "packed": ("packed documents", lambda: calls.attention_call(calls.packed)),
    "padded": ("padded rows", lambda: calls.attention_call(calls.padded)),
    "window": ("window of 1,024", lambda: calls.attention_call(window=1024)),
    "window_packed": ("window of 1,024, packed", lambda: calls.attention_call(calls.packed, window=1024)),
    "softcap": ("soft cap", SOFTCAPPED),
    "softcap_window": ("soft cap, window of 1,024", lambda: calls.attention_call(window=1024, softcap=50.0)),
    "sink": ("sinks", lambda: calls.attention_call(sink=True)),
    "sink_window": ("sinks, window of 128", lambda: calls.attention_call(window=128, sink=True)),
    "alibi": ("ALiBi", lambda: calls.attention_call(alibi=True)),
    "mla": ("latent attention", lambda: calls.latent_call(calls.BATCH, calls.LENGTH, calls.LENGTH)),
}
RECURRENCES: dict[str, tuple[str, Callable[[], calls.Call]]] = {
    "retention": ("retention", lambda: calls.sums_call(True)),
    "linear": ("linear attention", lambda: calls.sums_call(False)),
    "gated_delta": ("gated delta rule", calls.delta_call),
    "kda": ("Kimi delta attention", lambda: calls.delta_call(channels=True)),
    "mamba2": ("Mamba-2", calls.ssd_call),
    "convolution": ("short convolution", calls.convolution_call),
}
NEEDS_FLA = {"gated_delta"}  # for its budget
MFU_BUDGETS = {"gqa": 60, "mla": 50, "moe": 45, "retention": 50, "gated_delta": 45}


def _rows() -> dict[str, Row]:
    rows = {}
    for name, (title, make) in ATTENTION.items():
        rows[name] = Row(title, partial(launches, make), budget=40, cheap=name != "softcap_window")
    shared = lambda: launches(calls.shared_call, gradients=False)  # noqa: E731
    rows["shared"] = Row("block mask and document starts of a packed batch, for all layers", shared)
    for name, (title, make) in RECURRENCES.items():
        rows[name] = Row(f"{title}, eager", partial(launches, make))
        rows[f"{name}_compiled"] = Row(f"{title}, compiled", partial(launches, make, compiled=True), budget=150)
        if name != "convolution":
            rows[f"{name}_fla"] = Row(f"{title}, with fla", partial(launches, make, fla=True), budget=60)
    rows["experts"] = Row("experts, 8 of 64", lambda: launches(calls.experts_call))
    for name, batch, budget in (("gqa", 1, 400), ("gqa", 32, 400), ("mla", 1, 700), ("mla", 32, 700)):
        key, title, cheap = f"decode_{name}_{batch}", f"a decoded token, {name}, batch {batch}", batch == 1
        rows[key] = Row(f"{title}, eager", partial(decoded, name, batch, False, False), cheap=cheap)
        rows[f"{key}_graph"] = Row(
            f"{title}, its graph", partial(decoded, name, batch, True, False), "nodes", cheap=cheap
        )
        rows[f"{key}_compiled"] = Row(
            f"{title}, its graph, --compile", partial(decoded, name, batch, True, True), "nodes", budget, cheap
        )
    rows["decode_mla_layer"] = Row(
        "latent attention of a decoded token, batch 32, 8,192 keys",
        lambda: launches(lambda: calls.latent_call(32, 1, 8192), gradients=False),
        budget=30,
    )
    for name, vocab_size in LOSS_ROWS.items():
        title = f"vocabulary loss, 32,768 tokens, {vocab_size:,} words"
        rows[name] = Row(title, partial(loss_passes, vocab_size), "passes over dW", 10)
    rows["softcap_largest"] = Row("soft cap: the largest tensor", lambda: megabytes(SOFTCAPPED)[0], "MB", LARGEST)
    rows["softcap_peak"] = Row("soft cap: memory at the peak", lambda: megabytes(SOFTCAPPED)[1], "MB", PEAK_MEMORY)
    for name, budget in MFU_BUDGETS.items():
        note = ", with fla" if name in NEEDS_FLA else ""
        for how, limit in (("eager", None), (f"--compile{note}", budget), (f"one graph{note}", None)):
            key = f"mfu_{name}_{how.partition(',')[0].strip('-').replace(' ', '_')}"
            title = f"training of {name}, about 1 B, {how}"
            rows[key] = Row(title, partial(mfu, name, how), "% MFU", limit, cheap=False)
    return rows


ROWS = _rows()


@dataclass
class Table:
    """The committed figures: what each row was at the start, and is now."""

    start: dict[str, float] = field(default_factory=dict)
    now: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def read() -> "Table":
        """The committed table; empty if there is none."""
        if not GOLDEN.is_file():
            return Table()
        return Table(**json.loads(GOLDEN.read_text(encoding="utf-8")))

    def write(self) -> None:
        """Write the table."""
        GOLDEN.write_text(json.dumps({"start": self.start, "now": self.now}, indent=1) + "\n", encoding="utf-8")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def main() -> None:
    """Count every row, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="count the rows whose name contains this, and write nothing")
    options = parser.parse_args()
    table = Table.read()
    for name, row in ROWS.items():
        if options.only in name:
            value = row.measure()
            table.now[name] = value
            limit = "" if row.budget is None else f"{'≥' if row.unit == '% MFU' else '≤'} {row.budget:,}"
            print(f"{row.title:58s} {_number(value):>12s} {row.unit:12s} {limit}", flush=True)
    if not options.only:
        table.write()


if __name__ == "__main__":
    main()
