"""Sentences about a comparison: they claim no more than the intervals, and say what a design gains and costs."""

from typing import Any

import pytest

from heddle.lab.compare.report import Judging
from tests.analysis.comparison import plain as verdict
from tests.analysis.comparison import reports
from tests.analysis.comparison.plain import judgment, need_words, pair_report, verdict_sentences

LUCK = reports.TINY["gqa-tiny"][1:]


def shifted(offsets: dict[str, float], seeds: int = 3) -> dict[str, Any]:
    """A report of designs whose bits per byte are certain and differ by the given offsets."""
    report = reports.make_report(dict.fromkeys(offsets, reports.TINY["gqa-tiny"]), seeds=seeds)
    for row, offset in zip(report["designs"], offsets.values(), strict=True):
        source = report["designs"][0]["runs"]
        row["runs"] = [
            {
                **run,
                "bits_per_byte": 2.0 + offset,
                "windows": [[(2.0 + offset) * size, size] for _, size in run["windows"]],
            }
            for run in source
        ]
    return reports.finish(report)


def test_verdict_claims_a_lead_only_where_it_is_resolved() -> None:
    assert shifted({"a": 0.0, "b": -0.1})["verdict"][0] == (
        "b has the lowest bits per byte, 1.900; its difference to a, −0.100 ± 0.000, is resolved."
    )
    assert "each of the other 2 is resolved" in shifted({"a": 0.0, "b": -0.1, "c": 0.1})["verdict"][0]
    pair = reports.make_report({name: reports.TINY[name] for name in ("mha-tiny", "gqa-tiny")})["verdict"][0]
    assert pair == ("No clear winner: mha-tiny 2.249 and gqa-tiny 2.258 bits per byte, a difference of −0.009 ± 0.015.")


def test_a_resolved_difference_without_the_leader_is_said() -> None:
    """Where the leader's runs vary most, others may differ clearly though the leader does not."""
    sizes = reports.TINY["gqa-tiny"][2:]
    traits = {"a": (0.0, 0.002, *sizes), "b": (0.25, 0.002, *sizes), "noisy": (-0.27, 0.9, *sizes)}
    report = reports.make_report(traits)
    assert {(row["design"], row["reference"]): row["resolved"] for row in report["pairs"]} == {
        ("noisy", "a"): False,
        ("noisy", "b"): False,
        ("a", "b"): True,
    }
    assert report["verdict"][0].startswith("No clear winner: noisy 2.")
    assert " Resolved: a against b (−0.24" in report["verdict"][0]


def test_a_pair_on_one_seed_is_not_resolved_beside_pairs_on_several() -> None:
    """The first seeds of three designs and a second one of two, as when a budget ends."""
    sizes = reports.TINY["gqa-tiny"][2:]
    report = reports.make_report(
        {name: (shift, 0.002, *sizes) for name, shift in (("a", 0.0), ("b", 0.1), ("c", 0.2))}, seeds=2
    )
    late = report["designs"][2]
    reports.diverge(late["runs"][1])
    reports.finish(report)
    assert {row["reference"]: row["pairs"] for row in report["pairs"] if row["design"] == "a"} == {"b": 2, "c": 1}
    verdict = " ".join(report["verdict"])
    assert "The lead of a is resolved against b." in verdict
    assert "With one seed of c no interval covers seed variance" in verdict


def test_intervals_as_wide_as_the_loss_are_no_advice() -> None:
    sizes = reports.TINY["gqa-tiny"][2:]
    report = reports.make_report({"a": (0.0, 0.6, *sizes), "b": (0.1, 0.9, *sizes)}, seeds=2)
    sentences = " ".join(report["verdict"])
    assert "Seeds differ more than designs, so intervals say little; train more than 2 of each." in sentences
    assert "To narrow to" not in sentences


def test_what_is_not_resolved_comes_with_what_would_resolve_it() -> None:
    pair = reports.make_report({name: reports.TINY[name] for name in ("mha-tiny", "gqa-tiny")})
    assert pair["verdict"][1:3] == [
        "Ruled out: a difference of more than 0.025; 80 % power to detect 0.020.",
        "To narrow to ± 0.01, train 7 seeds of each, 3 min more.",
    ]
    several = reports.make_report({"a": reports.TINY["mha-tiny"], "b": reports.TINY["gqa-tiny"], "c": (0.3, *LUCK)})
    assert several["verdict"][1].startswith("Ruled out: a difference of more than 0.0")
    assert not any("Ruled out" in sentence for sentence in shifted({"a": 0.0, "b": -0.1})["verdict"])
    assert not any("Ruled out" in sentence for sentence in reports.make_report(seeds=1)["verdict"])


def test_the_text_is_named_where_it_is_the_larger_part() -> None:
    [needed] = [row["needs"] for row in reports.make_report()["pairs"] if not row["resolved"]]
    assert need_words(needed[1]) == (
        "To narrow to ± 0.005, read 1.3 times the held-out text, the larger part, "
        "and train 37 seeds of each, 25 min more"
    )
    assert need_words({"half_width": 0.02, "seeds": None, "seconds": None, "text_factor": 1.0}) == (
        "To narrow to ± 0.02, train more than 100 seeds of each"
    )


def test_a_comparison_that_is_not_finished_judges_nothing() -> None:
    report = shifted({"a": 0.0, "b": -0.1, "c": 0.1})
    report |= pair_report({row["name"]: row["runs"] for row in report["designs"]}, "a", Judging(is_final=False))
    assert [judgment(row) for row in report["differences"]] == ["so far", "so far"]
    first = verdict_sentences(report)[0]
    assert first.startswith("No clear winner: b 1.900, a 2.000 and c 2.100")


def test_equal_designs_tie() -> None:
    assert shifted({"a": 0.0, "b": 0.0})["verdict"][0] == "a and b tie: each reaches 2.000 bits per byte."
    assert shifted({"a": 0.0, "b": 0.0, "c": 0.0})["verdict"][0].startswith("a, b and c tie")
    assert shifted({"a": 0.0, "b": 0.0, "c": 0.1})["verdict"][0] == (
        "Lowest, and not resolved from each other: a 2.000 and b 2.000 bits per byte. "
        "The lead of a is resolved against c."
    )
    assert judgment(shifted({"a": 0.0, "b": 0.0})["differences"][0]) == "equal"


def test_designs_with_the_smallest_state_are_all_named() -> None:
    tied = reports.make_report({"full": reports.TINY["mha-tiny"]} | dict.fromkeys(("b", "c"), reports.TINY["gqa-tiny"]))
    assert any("b and c need a quarter of the state of full" in sentence for sentence in tied["verdict"])


def test_overlapping_speeds_give_no_ratio() -> None:
    report = reports.make_report()
    baseline, gqa, *_ = report["designs"]
    gqa["decode"] = [[context, 1.7 * speed, low, 1.8 * high] for context, speed, low, high in baseline["decode"]]
    gqa["train_speed_range"] = (0.9 * baseline["train_speed_range"][0], 1.7 * baseline["train_speed_range"][1])
    phrases = verdict.compare_with_baseline(report, gqa)
    assert phrases[1] == "no measured difference in decoding speed at 8k: the measurements overlap"
    assert phrases[2] == "no measured difference in training speed: the measurements overlap"
    gqa["decode"] = [[context, 1.7 * speed, 1.5 * high, 1.8 * high] for context, speed, _, high in baseline["decode"]]
    assert verdict.compare_with_baseline(report, gqa)[1] == "1.7 times its decoding speed at 8k"


def test_verdict_says_what_the_smallest_state_costs() -> None:
    report = reports.make_report()
    assert any(
        sentence.startswith(
            "window-tiny needs 6 % of the state of mha-tiny (1.57 MB against 25.2 MB at 8k); bits per byte: +0.03"
        )
        and sentence.endswith("(worse).")
        for sentence in report["verdict"]
    )
    pair = reports.make_report({name: reports.TINY[name] for name in ("mha-tiny", "gqa-tiny")})
    assert any("gqa-tiny needs a quarter of the state" in s and "(not resolved)" in s for s in pair["verdict"])
    assert shifted({"a": 0.0, "b": 0.1})["verdict"][1] == "All keep the same state: 6.29 MB at 8k."


def test_verdict_mentions_one_seed_and_failures() -> None:
    first, second, *_ = reports.make_report(seeds=1)["verdict"]
    assert "on one seed" in first
    assert "resolved for the sampling error of the text only" in first
    assert "seed variance" in second
    assert "seed variance" not in " ".join(reports.make_report(seeds=3)["verdict"])
    text = " ".join(reports.crowd()["verdict"])
    assert "Only some seeds finished" in text
    assert "No run finished: experiments" in text


def test_verdict_of_one_design_compares_nothing() -> None:
    assert verdict_sentences(reports.single()) == [
        "mha-tiny reaches 2.249 bits per byte; there is no second design to compare it with.",
        "Recall (MQAR): mha-tiny answers 100 % correctly; guessing gives 8.3 %.",
        "At 8 × the trained length bits per byte change, on the same text, on one seed: mha-tiny −0.091 ± 0.004.",
    ]


@pytest.mark.parametrize(
    ("per_token", "fixed", "sentence"),
    [
        (100, 0, "It keeps 100 B for each token."),
        (0, 5000, "It keeps 5.00 kB at every context length."),
        (100, 500_000, "It keeps 500 kB and 100 B for each token."),
    ],
)
def test_state_growth_is_described(per_token: int, fixed: int, sentence: str) -> None:
    states = [[context, float(per_token * context + fixed)] for context in reports.CONTEXTS]
    assert verdict.describe_state_growth({"state_bytes": states}) == sentence


def test_state_growth_of_windows_is_described() -> None:
    ring = [[context, 8.0 * min(context, 4096)] for context in reports.CONTEXTS]
    assert (
        verdict.describe_state_growth({"state_bytes": ring}) == "Its state grows up to 32.8 kB and then stays constant."
    )
    mixed = [[context, 8.0 * min(context, 4096) + 2.0 * context] for context in reports.CONTEXTS]
    assert (
        verdict.describe_state_growth({"state_bytes": mixed})
        == "Once its windows are full, it keeps 2 B for each token."
    )
    assert verdict.describe_state_growth({"state_bytes": []}) == "Its state was not measured."


def test_designs_are_compared_with_the_baseline() -> None:
    report = reports.make_report()
    baseline, gqa, *_ = report["designs"]
    assert verdict.compare_with_baseline(report, baseline) == []
    assert verdict.compare_with_baseline(report, gqa) == [
        "a quarter of its state at 8k", "2.0 times its decoding speed at 8k", "1.1 times its training speed",
        "+0.009 ± 0.013 bits per byte: not resolved", "90 % correct on MQAR, against 100 %",
    ]  # fmt: skip
    assert verdict.compare_with_baseline(reports.hollow(), reports.hollow()["designs"][1]) == []


def recall_sentence(accuracies: list[float | None]) -> str:
    report = reports.make_report()
    for row, accuracy in zip(report["designs"], accuracies, strict=True):
        row["recall"]["mqar"]["accuracy"] = accuracy
    return next((sentence for sentence in verdict_sentences(report) if sentence.startswith("Recall")), "")


def test_recall_in_the_verdict() -> None:
    chance = "guessing gives 8.3 %"
    assert (
        recall_sentence([1.0, 0.99, 0.95, 0.96])
        == f"Recall (MQAR): each design answers at least 95 % correctly; {chance}."
    )
    assert recall_sentence([1.0, 1.0, 0.9999, 1.0]) == f"Recall (MQAR): each design answers 100 % correctly; {chance}."
    assert recall_sentence([0.1, 0.09, None, 0.5]) == (
        "Recall (MQAR): no design learned it within the budget; "
        f"hybrid-delta-tiny 50 %, mha-tiny 10 % and gqa-tiny 9.0 % ({chance})."
    )
    assert recall_sentence([1.0, 0.09, 1.0, 0.5]) == (
        "Recall (MQAR): mha-tiny and window-tiny learned it within the budget; "
        f"hybrid-delta-tiny 50 % and gqa-tiny 9.0 % ({chance})."
    )
    assert recall_sentence([None] * 4) == ""
