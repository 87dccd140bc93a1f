"""Effects of varied fields: paired within the other fields, compared with sums written out."""

import copy
import itertools
from typing import Any

import numpy as np
import pytest

from heddle.lab.compare.report import Judging, parse_number
from heddle.lab.compare.statistics import t_quantile, text_half_width
from tests.analysis.comparison import reports
from tests.analysis.comparison.plain import field_effects, mean_bits_per_byte

FIELDS = {"layers.*.mixer.kv_heads": ("1", "2", "4"), "residual.kind": ("pre_norm", "parallel")}
BASE = "kv_heads=2 pre_norm"


def varied() -> dict[str, Any]:
    """A report of six variants, in which one pair of values does more than the sum of both."""
    choices = list(itertools.product(*FIELDS.values()))
    offsets = {"1": 0.02, "2": 0.0, "4": -0.02, "pre_norm": 0.0, "parallel": 0.01}
    traits = {}
    for heads, kind in choices:
        offset = offsets[heads] + offsets[kind] + 0.05 * ((heads, kind) == ("1", "parallel"))
        traits[f"kv_heads={heads} {kind}"] = (offset, 0.004, 768 * int(heads), 0, 21_000, 240)
    report = reports.make_report(traits)
    for design, choice in zip(report["designs"], choices, strict=True):
        design["varied_fields"] = dict(zip(FIELDS, choice, strict=True))
    return reports.finish(report | {"baseline": BASE})


def runs_of(report: dict[str, Any], heads: str, kind: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = next(
        design["runs"] for design in report["designs"] if design["name"] == f"kv_heads={heads} {kind}"
    )
    return runs


def test_each_value_has_a_row_with_its_difference() -> None:
    report = varied()
    heads, kind = report["effects"]["fields"]
    assert (heads["title"], heads["baseline"], kind["title"], kind["baseline"]) == (
        "kv_heads",
        "2",
        "residual",
        "pre_norm",
    )
    assert [(value["label"], value["number"]) for value in heads["values"]] == [("1", 1.0), ("2", 2.0), ("4", 4.0)]
    assert [(value["label"], value["number"]) for value in kind["values"]] == [("pre_norm", None), ("parallel", None)]
    assert heads["values"][1]["difference"] is None
    first = heads["values"][0]
    assert first["designs"] == ["kv_heads=1 pre_norm", "kv_heads=1 parallel"]
    every = [run["bits_per_byte"] for name in FIELDS["residual.kind"] for run in runs_of(report, "1", name)]
    assert first["mean"] == pytest.approx(np.mean(every))
    seeds = []
    table = np.zeros((128, 2))
    for seed in range(3):
        pairs = [
            (runs_of(report, "1", name)[seed], runs_of(report, "2", name)[seed]) for name in FIELDS["residual.kind"]
        ]
        seeds.append(float(np.mean([run["bits_per_byte"] - reference["bits_per_byte"] for run, reference in pairs])))
        for run, reference in pairs:
            table[:, 0] += (np.array(run["windows"]) - np.array(reference["windows"]))[:, 0] / 6
            table[:, 1] += np.array(run["windows"])[:, 1] / 6
    text = text_half_width(table[:, 0], table[:, 1])
    assert text is not None
    difference = first["difference"]
    assert difference["mean"] == pytest.approx(np.mean(seeds))
    # five rows hold at once; a third of the variance is the row's own, the rest from the residuals of all six designs
    losses = np.array([[run["bits_per_byte"] for run in design["runs"]] for design in report["designs"]])
    residuals = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    variance = np.var(seeds, ddof=1) / 3 + 2 / 3 * (residuals**2).sum() / 10
    degrees = 0.9 / ((1 / 9) / 2 + (8 / 9) / 10)
    confidence = 0.95 ** (1 / 5)
    text *= t_quantile(confidence, 20) / t_quantile(0.95, 20)
    half = float(np.hypot(t_quantile(confidence, degrees) * np.sqrt(variance / 3), text))
    assert difference["high"] - difference["low"] == pytest.approx(2 * half)
    assert (difference["pairs"], difference["resolved"]) == (3, True)
    assert difference["method"].endswith("Averaged over 2 choices of the other fields.")


def test_the_interaction_of_two_fields() -> None:
    report = varied()
    [table] = report["effects"]["interactions"]
    assert table["titles"] == ["kv_heads", "residual"]
    cells = {tuple(cell["values"]): cell for cell in table["cells"]}
    assert list(cells) == list(itertools.product(*FIELDS.values()))
    trivial = {values for values, cell in cells.items() if cell["interaction"] is None}
    assert trivial == {values for values in cells if "2" in values or "pre_norm" in values}
    assert cells["4", "pre_norm"]["mean"] == pytest.approx(mean_bits_per_byte(runs_of(report, "4", "pre_norm"))["mean"])
    beyond = []
    for seed in range(3):
        y = {pair: runs_of(report, *pair)[seed]["bits_per_byte"] for pair in cells}
        beyond.append(y["1", "parallel"] - y["2", "parallel"] - (y["1", "pre_norm"] - y["2", "pre_norm"]))
    interaction = cells["1", "parallel"]["interaction"]
    assert interaction["mean"] == pytest.approx(np.mean(beyond))
    assert 0.03 < interaction["mean"] < 0.07
    assert interaction["resolved"]
    assert not cells["4", "parallel"]["interaction"]["resolved"]


def test_added_designs_do_not_narrow_the_rows_that_were_there() -> None:
    """Designs without seed variance are added: the rows of the others stay as wide, as the differences of pairs do."""
    designs = varied()["designs"]
    earlier = [design["name"] for design in designs if design["varied_fields"]["layers.*.mixer.kv_heads"] != "4"]
    for design in designs:
        for seed, run in enumerate(design["runs"]):
            if design["name"] not in earlier:
                others = [other["runs"][seed]["bits_per_byte"] for other in designs if other["name"] in earlier]
                run["bits_per_byte"] = float(np.mean(others))

    def interaction(judging: Judging) -> dict[str, Any]:
        cells = field_effects(designs, BASE, judging)["interactions"][0]["cells"]
        found: dict[str, Any] = next(cell["interaction"] for cell in cells if cell["values"] == ["1", "parallel"])
        return found

    at_once, grown = interaction(Judging()), interaction(Judging(earlier_designs=(earlier,)))
    assert grown["high"] - grown["low"] > 1.2 * (at_once["high"] - at_once["low"])
    assert "Designs that were added later do not narrow it." in grown["method"]
    assert "added later" not in at_once["method"]


def test_one_field_is_the_designs_own_differences() -> None:
    report = reports.make_report()
    for design in report["designs"]:
        design["varied_fields"] = {"layers.*.mixer": design["name"]}
    report = reports.finish(report)
    [field] = report["effects"]["fields"]
    assert report["effects"]["interactions"] == []
    for value, row in zip(field["values"][1:], report["differences"], strict=True):
        assert {key: value["difference"][key] for key in ("resolved", "pairs", "method")} == {
            key: row[key] for key in ("resolved", "pairs", "method")
        }
        for key in ("mean", "low", "high"):
            assert value["difference"][key] == pytest.approx(row[key])


def test_runs_that_failed_take_their_partner_with_them() -> None:
    report = varied()
    whole = report["effects"]["fields"][0]["values"][0]["difference"]
    reports.diverge(runs_of(report, "1", "parallel")[0])
    again = reports.finish(report)["effects"]["fields"][0]["values"][0]["difference"]
    assert again["pairs"] == 3
    assert "Left out, because a design did not finish: 1 of 6 pairs." in again["method"]
    assert again["mean"] != whole["mean"]
    for run in runs_of(report, "1", "parallel") + runs_of(report, "1", "pre_norm"):
        reports.diverge(run)
    none = reports.finish(report)["effects"]["fields"][0]["values"][0]
    assert (none["mean"], none["difference"]["mean"], none["difference"]["pairs"]) == (None, None, 0)


def test_runs_without_windows_and_one_seed() -> None:
    report = varied()
    for design in report["designs"]:
        del design["runs"][1:]
        design["runs"][0]["windows"] = []
    difference = reports.finish(report)["effects"]["fields"][0]["values"][0]["difference"]
    assert (difference["low"], difference["pairs"], difference["resolved"]) == (None, 1, False)


def test_nothing_varied() -> None:
    designs = copy.deepcopy(reports.make_report()["designs"])
    assert field_effects(designs, "mha-tiny") == {"fields": [], "interactions": []}
    for design in designs:
        design["varied_fields"] = {"one": "value"}
    assert field_effects(designs, "mha-tiny") == {"fields": [], "interactions": []}


@pytest.mark.parametrize(
    ("label", "value"), [("2", 2.0), ("1e-4", 1e-4), ("rope", None), ("nan", None), (".inf", None)]
)
def test_labels_that_are_numbers(label: str, value: float | None) -> None:
    assert parse_number(label) == value
