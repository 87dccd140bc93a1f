"""What a ladder found, in sentences: the loss at the target, the cost of equal loss, crossings, and the self-test."""

from collections.abc import Iterator, Mapping
from typing import Any

from heddle.analysis.comparison.formatting import format_bits, format_number, format_percent, join_names

Report = Mapping[str, Any]
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MOST = 0.975  # of the draws: what they agree on counts as known


def ladder_verdict(report: Report) -> list[str]:
    """The sentences of a report, the most important ones first."""
    if report["fit"] is None:
        return [f"Nothing is predicted: {report['reason']}."]
    tests = list(_held_out(report))
    sentences = [*_predictions(report), *map(best_size_sentence, report["best_sizes"])]
    sentences += map(equal_loss_sentence, report["equal_loss"])
    sentences += map(crossing_sentence, report["crossings"])
    return [*sentences, *tests] if all(test["within"] for test in report["held_out"]) else [*tests, *sentences]


def format_interval(interval: Any) -> str:
    """ "1.210 to 1.254"."""
    return " to ".join(map(format_bits, interval))


def ratios_text(report: Report) -> str:
    """The tokens per parameter of the runs: "5, 10 and 20"."""
    ratios = report["settings"]["tokens_per_parameter"]
    ratios = ratios if isinstance(ratios, list) else [ratios]
    return join_names(map(format_number, ratios), len(ratios))


def _predictions(report: Report) -> Iterator[str]:
    """The loss of each design at the target, and which have none."""
    target = format_number(report["target"])
    predicted = [each for each in report["predictions"] if each["loss"] is not None]
    if predicted:
        first, *rest = predicted
        tokens = format_number(report["target_tokens"])
        reached = f"{format_bits(first['loss'])} bits per byte ({format_interval(first['measurement'])})"
        numbers = f"{first['design']} is predicted to reach {reached}"
        numbers += "".join(
            f", {each['design']} {format_bits(each['loss'])} ({format_interval(each['measurement'])})" for each in rest
        )
        yield f"At {target} parameters and {tokens} tokens {numbers}."
    for reason in dict.fromkeys(each["reason"] for each in report["predictions"] if each["reason"]):
        yield f"The target of {target} parameters {reason}."


def best_size_sentence(best: Mapping[str, Any]) -> str:
    """The size of a design with the least loss for the budget."""
    budget, name = f"{_flops(best['flops'])} training FLOPs (6·N·D)", best["design"]
    least, most = format_number(best["least"]), format_number(best["most"])
    if best["reason"] is not None:
        return f"A budget of {budget} {best['reason']}."
    if best["low"] is None and best["high"] is None:
        return (
            f"The best size of {name} for {budget} is not resolved: it may be below {least} or above {most} parameters."
        )
    if best["size"] is None:
        side = f"below {least}" if best["is_less"] else f"above {most}"
        end = best["high"] if best["is_less"] else best["low"]
        return (
            f"For {budget} {name} is best {side} parameters, where its tokens per parameter are none that were "
            f"trained, so no number is given; the 95 % interval ends at {format_number(end)}."
        )
    low = f"under {least}" if best["low"] is None else format_number(best["low"])
    high = f"over {most}" if best["high"] is None else format_number(best["high"])
    ratio = format_number(best["tokens"] / best["size"])
    return (
        f"For {budget} {name} is best at {format_number(best['size'])} parameters ({low} to {high}) and "
        f"{format_number(best['tokens'])} tokens, {ratio} per parameter: {format_bits(best['loss'])} bits per byte "
        f"({format_interval(best['curve'])})."
    )


def equal_loss_sentence(equal: Mapping[str, Any]) -> str:
    """What a design costs for the loss of the baseline at the target."""
    name, baseline, size = equal["design"], equal["baseline"], format_number(equal["size"])
    goal = f"the loss of {baseline} at {size} parameters"
    if equal["is_less"]:
        return f"{name} has {goal} already at its smallest size, for {_ratio(equal['least'])} the FLOPs."
    if equal["ratio"] is None:
        most = _ratio(equal["most"])
        return f"{name} may not reach {goal} at all: not with {most} the FLOPs, as far as anything is predicted."
    low = f"under {_ratio(equal['least'])}" if equal["low"] is None else f"{equal['low']:.2f}"
    if equal["high"] is None:
        return (
            f"For {goal} {name} needs {_ratio(equal['ratio'])} the FLOPs, {low} or more; there is no upper end, since "
            f"it may need more than {_ratio(equal['most'])}."
        )
    ends = f"{low} to {equal['high']:.2f}"
    is_resolved = not (equal["low"] or 0.0) <= 1 <= equal["high"]
    doubt = "" if is_resolved else ": which of the two is cheaper is not resolved"
    return f"For {goal} {name} needs {_ratio(equal['ratio'])} the FLOPs ({ends}){doubt}."


def _ratio(value: float) -> str:
    return f"{value:.2f} ×" if value < 9.95 else f"{value:.0f} ×"


def crossing_sentence(result: Mapping[str, Any]) -> str:
    """Whether, and where, the curves of two designs cross."""
    name, baseline = result["design"], result["baseline"]
    if result["better"] is None:
        return f"{name} and {baseline} were trained at no common cost, so nothing is said of a crossing."
    first, last = map(_flops, result["costs"])
    span = f"from {first} to {last} training FLOPs"
    if result["better"] >= MOST:
        return f"{name} is better than {baseline} at every cost {span}: no crossing."
    if result["worse"] >= MOST:
        return f"{name} is worse than {baseline} at every cost {span}: no crossing."
    if result["low"] is not None:
        ends = " to ".join(_flops(result[end]) for end in ("low", "high"))
        return f"The curves of {name} and {baseline} cross at {_flops(result['cost'])} training FLOPs ({ends})."
    shares = [
        f"{format_percent(result[key])} {words}"
        for key, words in (
            ("better", f"have {name} always better"),
            ("worse", "have it always worse"),
            ("crosses", "cross somewhere"),
        )
        if result[key] >= 0.005
    ]
    return f"Whether {name} and {baseline} cross {span} is not resolved: of the possible curves {join_names(shares)}."


def _flops(value: float) -> str:
    """ "3.0·10¹²"."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}·{format_power(int(exponent))}"


def format_power(exponent: int) -> str:
    """ "10¹²"."""
    return "10" + str(exponent).translate(_SUPERSCRIPTS)


def _held_out(report: Report) -> Iterator[str]:
    """The self-test; where it failed, first that it did."""
    tests = report["held_out"]
    if not tests:
        largest = "sizes and most tokens" if report["law"] == "L(N, D)" else "sizes"
        yield f"The method could not be tested on these points: without the largest {largest}, too few are left."
        return
    parts = []
    for test in tests:
        predicted = f"{format_bits(test['loss'])} ({format_interval(test['measurement'])})"
        measured = f"{format_bits(test['measured'])}: {'within' if test['within'] else 'OUTSIDE'}"
        parts.append(f"that of {test['design']} is predicted at {predicted} and measured at {measured}")
    if not all(test["within"] for test in tests):
        yield "The self-test failed, so no prediction here is to be trusted: the points lie on no curve of these forms."
    if report["law"] == "L(N, D)":
        yield f"Self-test, the largest size on its most tokens, from smaller ones and fewer alone: {'; '.join(parts)}."
    else:
        yield f"Self-test, the largest size from the smaller ones alone: {'; '.join(parts)}."
