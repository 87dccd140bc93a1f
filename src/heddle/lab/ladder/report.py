"""The report of a ladder as plain data: what was measured, the fit, and what it predicts."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from heddle import __version__
from heddle.errors import ConfigError, DataError
from heddle.lab.compare.statistics import CONFIDENCE, t_quantile
from heddle.lab.compare.tables import NO_VALUE, TextTable, format_bits, format_number, format_percent, join_names
from heddle.lab.ladder.fit import LOG_QUADRATIC, MAX_EXTRAPOLATION, LadderFit, SizeLosses, too_few_points
from heddle.lab.ladder.plan import equal_rungs
from heddle.lab.ladder.predictions import (
    FLOPS_FACTOR,
    LadderPoints,
    best_size,
    cost_for_equal_loss,
    crossing,
    hold_out,
    interval,
    predict_loss,
)
from heddle.lab.ladder.results import (
    BestSize,
    Crossing,
    CurvePoint,
    EqualLoss,
    FitResult,
    LadderData,
    LadderDesign,
    LadderReport,
    LadderRun,
    Prediction,
    SizeResult,
)

if TYPE_CHECKING:
    from heddle.lab.ladder.run import Ladder


# What a ladder found, in sentences: the loss at the target, the cost of equal loss, crossings, and the self-test.


_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MOST = 0.975  # of the draws: if this share agrees, a statement counts as known


def ladder_verdict(report: LadderReport) -> list[str]:
    """The sentences of a report, the most important ones first."""
    if report.fit is None:
        return [f"Nothing is predicted: {report.reason}."]
    tests = list(_held_out(report))
    sentences = [*_predictions(report), *map(best_size_sentence, report.best_sizes)]
    sentences += map(equal_loss_sentence, report.equal_loss)
    sentences += map(crossing_sentence, report.crossings)
    return [*sentences, *tests] if all(test.within for test in report.held_out) else [*tests, *sentences]


def format_interval(interval: Any) -> str:
    """ "1.210 to 1.254"."""
    return " to ".join(map(format_bits, interval))


def ratios_text(report: LadderReport) -> str:
    """The tokens per parameter of the runs: "5, 10 and 20 tokens per parameter"."""
    ratios = report.settings["tokens_per_parameter"]
    ratios = ratios if isinstance(ratios, list) else [ratios]
    unit = "token" if ratios == [1] else "tokens"
    return f"{join_names(map(format_number, ratios), len(ratios))} {unit} per parameter"


def _predictions(report: LadderReport) -> Iterator[str]:
    """Sentences on the loss of each design at the target, and on designs without one."""
    target = format_number(report.target)
    predicted = [each for each in report.predictions if each.loss is not None]
    if predicted:
        first, *rest = predicted
        tokens = format_number(report.target_tokens)
        reached = f"{format_bits(first.loss)} bits per byte ({format_interval(first.measurement)})"
        numbers = f"{first.design} is predicted to reach {reached}"
        numbers += "".join(
            f", {each.design} {format_bits(each.loss)} ({format_interval(each.measurement)})" for each in rest
        )
        yield f"At {target} parameters and {tokens} tokens {numbers}."
    if report.target_note:
        yield report.target_note
    for each in report.predictions:
        if each.reason:
            yield f"{each.design} has no prediction: it {each.reason}."


def best_size_sentence(best: BestSize) -> str:
    """A sentence on the size of a design with the lowest loss for the budget."""
    budget, name = f"{_flops(best.flops)} training FLOPs (6·N·D)", best.design
    least, most = format_number(best.least), format_number(best.most)
    if best.reason is not None:
        return f"A budget of {budget} {best.reason}."
    if best.low is None and best.high is None:
        return (
            f"The best size of {name} for {budget} is not resolved: it may be below {least} or above {most} parameters."
        )
    if best.size is None:
        side = f"below {least}" if best.is_less else f"above {most}"
        end = best.high if best.is_less else best.low
        return (
            f"For {budget} {name} is best {side} parameters, but the tokens per parameter there are outside the "
            f"trained range, so no number is given; the 95 % interval ends at {format_number(end)}."
        )
    low = f"under {least}" if best.low is None else format_number(best.low)
    high = f"over {most}" if best.high is None else format_number(best.high)
    ratio = format_number(best.tokens_per_parameter)
    return (
        f"For {budget} {name} is best at {format_number(best.size)} parameters ({low} to {high}) and "
        f"{format_number(best.tokens)} tokens, {ratio} per parameter: {format_bits(best.loss)} bits per byte "
        f"({format_interval(best.curve)})."
    )


def equal_loss_sentence(equal: EqualLoss) -> str:
    """A sentence on the cost of a design for the baseline's loss at the target."""
    name, baseline, size = equal.design, equal.baseline, format_number(equal.size)
    goal = f"the loss of {baseline} at {size} parameters"
    if equal.is_less:
        return f"{name} reaches {goal} already at its smallest size, for {_ratio(equal.least)} the FLOPs."
    if equal.ratio is None:
        most = _ratio(equal.most)
        return f"{name} may not reach {goal} at all: not within {most} the FLOPs, the limit of predictions."
    low = f"under {_ratio(equal.least)}" if equal.low is None else f"{equal.low:.2f}"
    if equal.high is None:
        return (
            f"For {goal} {name} needs {_ratio(equal.ratio)} the FLOPs, {low} or more; there is no upper bound, since "
            f"it may need more than {_ratio(equal.most)}."
        )
    ends = f"{low} to {equal.high:.2f}"
    is_resolved = not (equal.low or 0.0) <= 1 <= equal.high
    doubt = "" if is_resolved else ": which of the two is cheaper is not resolved"
    return f"For {goal} {name} needs {_ratio(equal.ratio)} the FLOPs ({ends}){doubt}."


def _ratio(value: float) -> str:
    return f"{value:.2f} ×" if value < 9.95 else f"{value:.0f} ×"


def crossing_sentence(result: Crossing) -> str:
    """A sentence on whether, and where, the curves of two designs cross."""
    name, baseline = result.design, result.baseline
    better, worse, crosses = result.better, result.worse, result.crosses
    if better is None or worse is None or crosses is None:
        return f"{name} and {baseline} share no range of training costs, so a crossing cannot be predicted."
    first, last = map(_flops, result.costs)
    span = f"from {first} to {last} training FLOPs"
    if better >= MOST:
        return f"{name} is better than {baseline} at every cost {span}: no crossing."
    if worse >= MOST:
        return f"{name} is worse than {baseline} at every cost {span}: no crossing."
    if result.cost is not None and result.low is not None and result.high is not None:
        ends = f"{_flops(result.low)} to {_flops(result.high)}"
        return f"The curves of {name} and {baseline} cross at {_flops(result.cost)} training FLOPs ({ends})."
    shares = [
        f"{format_percent(share)} {words}"
        for share, words in (
            (better, f"have {name} always better"),
            (worse, "have it always worse"),
            (crosses, "cross somewhere"),
        )
        if share >= 0.005
    ]
    return f"Whether {name} and {baseline} cross {span} is not resolved: of the possible curves {join_names(shares)}."


def _flops(value: float) -> str:
    """ "3.0·10¹²"."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}·{format_power(int(exponent))}"


def format_power(exponent: int) -> str:
    """ "10¹²"."""
    return "10" + str(exponent).translate(_SUPERSCRIPTS)


def _held_out(report: LadderReport) -> Iterator[str]:
    """Sentences on the self-test; if it failed, this comes first."""
    tests = report.held_out
    if not tests:
        largest = "sizes and most tokens" if report.law == "L(N, D)" else "sizes"
        yield f"The self-test was not possible: without the largest {largest}, too few points are left."
        return
    parts = []
    for test in tests:
        predicted = f"{format_bits(test.loss)} ({format_interval(test.measurement)})"
        measured = f"{format_bits(test.measured)}: {'within' if test.within else 'OUTSIDE'}"
        parts.append(f"{test.design} is predicted at {predicted} and measured at {measured}")
    if not all(test.within for test in tests):
        yield "The self-test failed, so do not trust the predictions: the points do not lie on a curve of these forms."
    if report.law == "L(N, D)":
        yield f"Self-test, the largest size on its most tokens, from smaller ones and fewer tokens: {'; '.join(parts)}."
    else:
        yield f"Self-test, the largest size predicted from the smaller ones: {'; '.join(parts)}."


CUT = "the time budget ended first"  # the end of the message of a run that did not end in time
DEFAULT_TARGET = 10  # times the largest size
CURVE_POINTS = 41  # of each curve in the figure
TRAINING_FACTOR = 3  # a backward pass costs twice a forward pass
DEFAULT_CORRELATION = 0.5  # of two runs of one trunk, if there is only one seed
MAX_CORRELATION = 0.95
Runs = Mapping[tuple[str, int, float, int], Mapping[str, Any]]  # by design, width, tokens per parameter and seed


def ladder_report(ladder: "Ladder", results: Runs) -> LadderReport:
    """The report of a ladder whose runs have ended. If nothing can be fitted, `reason` says why."""
    designs = [_design_report(ladder, name, results) for name in ladder.rungs]
    plan, largest = ladder.plan, max(rung.parameters for design in designs for rung in design.rungs)
    target = plan.target or DEFAULT_TARGET * largest
    ratio = ladder.ratios[-1] if plan.target_tokens is None else plan.target_tokens / target
    deviation, degrees = _pooled_deviation(designs)
    degrees //= len(ladder.ratios)  # branches of one trunk share its seed variance
    report = LadderReport(
        heddle=__version__,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=ladder.command,
        hardware=ladder.runtime.describe() | {"torch": torch.__version__},
        data=LadderData(
            name=ladder.corpus.name,
            hash=ladder.corpus.hash,
            train_tokens=sum(len(file) for file in ladder.corpus.train),
            validation_bytes=ladder.corpus.report["validation"]["bytes"],
            vocab_size=ladder.corpus.tokenizer.vocab_size,
        ),
        settings=plan.settings.plain(),
        law="L(N, D)" if plan.settings.shares_trunk else "L(N)",
        sizes=list(ladder.sizes),
        seeds=plan.seeds,
        share_irreducible=plan.share_irreducible,
        baseline=plan.entries[0].name,
        target=target,
        target_tokens=ratio * target,
        target_flops=plan.target_flops or FLOPS_FACTOR * target * ratio * target,
        tokens_per_parameter=ratio,
        designs=[
            replace(design, rungs=[_with_interval(rung, deviation, degrees) for rung in design.rungs])
            for design in designs
        ],
        curves={},
    )
    report = _with_predictions(ladder, report, deviation, degrees)
    report = replace(report, warnings=_warnings(ladder, report))
    return replace(report, verdict=ladder_verdict(report))


def _with_interval(rung: SizeResult, deviation: float, degrees: int) -> SizeResult:
    """The result with the interval of its mean, from the deviation between seeds of all sizes."""
    if not degrees or rung.loss is None:
        return rung
    half = t_quantile(CONFIDENCE, degrees) * deviation / math.sqrt(rung.seeds)
    return replace(rung, interval=(rung.loss * math.exp(-half), rung.loss * math.exp(half)))


def _design_report(ladder: "Ladder", name: str, results: Runs) -> LadderDesign:
    entry = next(entry for entry in ladder.plan.entries if entry.name == name)
    rungs = []
    for rung, ratio in itertools.product(ladder.rungs[name], ladder.ratios):
        runs = [_run_report(results[name, rung.width, ratio, seed], seed) for seed in range(ladder.plan.seeds)]
        losses = [run.bits_per_byte for run in runs if run.bits_per_byte is not None]
        tokens = ladder.steps(rung, ratio) * ladder.plan.settings.tokens_per_step
        rungs.append(
            SizeResult(
                width=rung.width,
                parameters=rung.parameters,
                flops_per_token=rung.flops_per_token,
                tokens=tokens,
                tokens_per_parameter=ratio,
                training_flops=TRAINING_FACTOR * rung.flops_per_token * tokens,
                learning_rate=ladder.learning_rate(name, rung),
                runs=runs,
                seeds=len(losses),
                loss=float(np.mean(losses)) if losses else None,
            )
        )
    return LadderDesign(name=name, source=entry.source, width=ladder.scales[name].config.width, rungs=rungs)


def _run_report(result: Mapping[str, Any], seed: int) -> LadderRun:
    loss = result.get("bits_per_byte") if result["status"] == "done" else None
    return LadderRun(
        seed=seed,
        status=result["status"],
        message=result.get("message"),
        bits_per_byte=loss if loss is not None and math.isfinite(loss) else None,
        seconds=result.get("seconds"),
    )


def _pooled_deviation(designs: Sequence[LadderDesign]) -> tuple[float, int]:
    """The standard deviation of log loss between seeds of one size, and its degrees of freedom; 0 and 0 without any."""
    squares, degrees = 0.0, 0
    for rung in (rung for design in designs for rung in design.rungs):
        logs = np.log([run.bits_per_byte for run in rung.runs if run.bits_per_byte is not None])
        if len(logs) > 1:
            squares += float(((logs - logs.mean()) ** 2).sum())
            degrees += len(logs) - 1
    return (math.sqrt(squares / degrees) if degrees else 0.0), degrees


def _trunk_correlation(designs: Sequence[LadderDesign]) -> float:
    """The correlation over seeds of the log losses of two branches of one trunk, pooled over sizes."""
    squares, products = 0.0, 0.0
    for design in designs:
        for _, rungs in itertools.groupby(design.rungs, key=lambda rung: rung.width):
            table = np.array([[run.bits_per_byte or math.nan for run in rung.runs] for rung in rungs])
            logs = np.log(table[:, ~np.isnan(table).any(axis=0)])  # [branches, seeds]
            if logs.shape[1] > 1:
                covariance = np.cov(logs).reshape(len(logs), -1)
                squares += float(covariance.trace()) * (len(logs) - 1)
                products += float(covariance.sum() - covariance.trace())
    return min(max(products / squares, 0.0), MAX_CORRELATION) if squares else DEFAULT_CORRELATION


def _ladder_points(ladder: "Ladder", report: LadderReport, deviation: float) -> LadderPoints:
    losses = {design.name: _size_losses(design.rungs, report.law) for design in report.designs}
    most_seeds = max([count for each in losses.values() for count in each.seeds], default=1)
    ratio = report.tokens_per_parameter
    return LadderPoints(
        losses,
        {name: _costs(ladder, name, ratio) for name in losses},
        deviation / math.sqrt(most_seeds),
        _trunk_correlation(report.designs) if ladder.plan.settings.shares_trunk else 0.0,
        ratio,
    )


def _with_predictions(ladder: "Ladder", report: LadderReport, deviation: float, degrees: int) -> LadderReport:
    """The report with the fit and its predictions, or with the reason why there are none."""
    points = _ladder_points(ladder, report, deviation)
    lacking = {name: reason for name, each in points.losses.items() if (reason := too_few_points(each))}
    losses = {name: each for name, each in points.losses.items() if name not in lacking}
    names, baseline = list(losses), report.baseline
    if not names:
        return replace(report, reason=": ".join(next(iter(lacking.items()))))
    points = replace(points, losses=losses)
    others = [name for name in names if name != baseline] if baseline in names else []
    try:
        fit = points.fit(report.share_irreducible)
    except DataError as error:
        return replace(report, reason=str(error))
    report = _within_reach(report, fit, points, has_own_flops=ladder.plan.target_flops is not None)
    target = report.target
    equal = [cost_for_equal_loss(fit, points, name, baseline, target) for name in others]
    has_best_size = fit.token_center is not None
    return replace(
        report,
        fit=FitResult(
            center=fit.center,
            seed_deviation=deviation,
            seed_degrees_of_freedom=degrees,
            correlation=points.correlation,
            forms=fit.forms,
            parameters={name: _law_parameters(fit, name) for name in names},
        ),
        predictions=[
            Prediction(design=design.name, size=target, reason=lacking[design.name])
            if design.name in lacking
            else predict_loss(fit, points, design.name, target)
            for design in report.designs
        ],
        best_sizes=[best_size(fit, points, name, report.target_flops) for name in names] if has_best_size else [],
        equal_loss=[each for each in equal if each is not None],
        crossings=[crossing(fit, points, name, baseline) for name in others],
        held_out=hold_out(points, report.share_irreducible),
        curves={name: _curve(fit, points, name) for name in names},
    )


def _within_reach(report: LadderReport, fit: LadderFit, points: LadderPoints, *, has_own_flops: bool) -> LadderReport:
    """The report with the largest target that all fitted designs have a prediction for, if its own is larger."""
    nearest = min(points.losses, key=points.limit)
    asked, target = report.target, points.limit(nearest)
    reason = predict_loss(fit, points, nearest, asked).reason
    if reason is None:
        return report
    share = target / asked
    return replace(
        report,
        target=target,
        target_tokens=share * report.target_tokens,
        target_flops=report.target_flops * (1 if has_own_flops else share**2),
        target_note=f"The target of {format_number(asked)} parameters {reason}; the predictions are for "
        f"{format_number(target)}.",
    )


def _size_losses(rungs: Sequence[SizeResult], law: str) -> SizeLosses:
    measured = [rung for rung in rungs if rung.loss is not None]
    tokens = [rung.tokens for rung in measured] if law == "L(N, D)" else []
    losses = [rung.loss for rung in measured if rung.loss is not None]
    return SizeLosses([rung.parameters for rung in measured], losses, [rung.seeds for rung in measured], tokens)


def _costs(ladder: "Ladder", name: str, tokens_per_parameter: float) -> tuple[list[float], list[float]]:
    """Sizes and training FLOPs of a design: of the trained rungs, and of larger ones up to the limit of predictions."""
    rungs = list(ladder.rungs[name])
    largest = rungs[-1].parameters
    for step in range(1, math.ceil(math.log2(MAX_EXTRAPOLATION)) + 1):
        try:
            larger = ladder.scales[name].nearest_rung(largest * min(2**step, MAX_EXTRAPOLATION))
        except ConfigError:
            break
        if larger.parameters > rungs[-1].parameters:
            rungs.append(larger)
    costs = [TRAINING_FACTOR * rung.flops_per_token * tokens_per_parameter * rung.parameters for rung in rungs]
    return [rung.parameters for rung in rungs], costs


def _law_parameters(fit: LadderFit, name: str) -> dict[str, tuple[float, float, float] | None]:
    """E and γ of a design over the draws of the power law with E: median and 95 % interval; None without such draws.

    For L(N, D): E, α, β, and the exponent of the budget in the best size, β / (α + β).
    """
    draws, is_curve = fit.draws[name], fit.token_center is None
    chosen = draws[(draws[:, 0] > 0) & (draws[:, -1] == (0 if is_curve else 1))]
    values = {"E": chosen[:, 0], "exponent": -chosen[:, 2]}
    if not is_curve:
        size, tokens = chosen[:, 2], chosen[:, 4]
        values |= {"token_exponent": -tokens, "budget_exponent": tokens / (size + tokens)}
    return {key: interval(each) if len(chosen) else None for key, each in values.items()}


def _curve(fit: LadderFit, points: LadderPoints, name: str) -> list[CurvePoint]:
    """The curve of a design from its smallest size to the largest one with a prediction."""
    rows = []
    for size in np.geomspace(min(points.losses[name].sizes), points.limit(name), CURVE_POINTS):
        loss, low, high = interval(fit.losses(name, float(size), points.tokens(float(size))))
        cost = float(points.cost(name, float(size)))
        rows.append(CurvePoint(parameters=float(size), training_flops=cost, loss=loss, low=low, high=high))
    return rows


def _warnings(ladder: "Ladder", report: LadderReport) -> list[str]:
    sentences = equal_rungs(ladder.rungs)
    runs = [run for design in report.designs for rung in design.rungs for run in rung.runs]
    cut = sum((run.message or "").endswith(CUT) for run in runs)
    if cut:
        sentences.append(f"The time budget ended before {cut} of {len(runs)} runs; the same command continues them.")
    failed = sum(run.bits_per_byte is None for run in runs) - cut
    if failed:
        sentences.append(f"{failed} of {len(runs)} runs did not finish; a mean without them may look too good.")
    if max(rung.seeds for design in report.designs for rung in design.rungs) <= 1:
        sentences.append("One seed: seed variance is estimated only from how far the points lie from the curve.")
    tokens = max(rung.tokens for design in report.designs for rung in design.rungs)
    if tokens > report.data.train_tokens:
        sentences.append(
            f"The largest size read the text {tokens / report.data.train_tokens:.1f} times; repeated text "
            "teaches less than new text, so larger sizes look worse than they are."
        )
    fit = report.fit
    misfit = 0.0 if fit is None else min((form.deviation for form in fit.forms), default=0.0)
    deviation = 0.0 if fit is None else fit.seed_deviation / math.sqrt(ladder.plan.seeds)
    if deviation and misfit > 3 * deviation:
        sentences.append(
            f"The points lie {misfit / deviation:.0f} times as far from the curve as seed variance explains: "
            "sizes differ in more than size, for example in how well the learning rate suits them."
        )
    if steepening := [] if fit is None else _steepening(fit):
        sentences.append(
            f"The loss of {join_names(steepening)} falls faster from size to size, which is usual only for very small "
            "models. Beyond the largest size the curves continue straight, and the loss may be higher than predicted; "
            "train larger sizes."
        )
    if report.law == "L(N, D)":
        ratio = format_number(report.tokens_per_parameter)
        sentences.append(f"Costs of equal loss and crossings compare designs at {ratio} tokens per parameter.")
    exponent = ladder.plan.settings.rate_exponent
    sentences.append(
        f"Every size had {ratios_text(report)} and a learning rate in proportion to "
        f"width^−{exponent:g}; a design with a best rate that scales differently is at a disadvantage at some sizes."
    )
    return sentences


def _steepening(fit: FitResult) -> list[str]:
    """The designs with a log L that bends down with log N in the likeliest form of L(N)."""
    names = []
    for form in fit.forms:
        rivals = [other.weight for other in fit.forms if other.coefficients.keys() & form.coefficients.keys()]
        if form.form == LOG_QUADRATIC and form.weight == max(rivals):
            names += [name for name, coefficients in form.coefficients.items() if coefficients[3] < 0]
    return names


# Rows and columns that the terminal and the page of a ladder share: rungs, predictions, fits, the self-test.


def rung_table(design: LadderDesign) -> TextTable:
    """A row for each size of a design."""
    rows = []
    for rung in design.rungs:
        half = None if rung.interval is None else (rung.interval[1] - rung.interval[0]) / 2
        loss = format_bits(rung.loss) + ("" if half is None else f" ± {half:.3f}")
        rows.append(
            [
                format_number(rung.parameters),
                str(rung.width),
                format_number(rung.tokens),
                f"{rung.training_flops:.2e}",
                f"{rung.learning_rate:.2g}",
                f"{rung.seeds} of {len(rung.runs)}",
                loss,
            ]
        )
    header = ["parameters", "width", "tokens", "training FLOPs", "rate", "seeds", "bits per byte"]
    return TextTable(header, rows, f"Sizes of {design.name}")


def prediction_tables(report: LadderReport) -> dict[str, TextTable | None]:
    """The tables of what is predicted, by name; None for one without a row."""
    tables = {
        "predictions": prediction_table(report),
        "best_sizes": best_size_table(report),
        "costs": cost_table(report),
        "held_out": held_out_table(report),
    }
    return {name: table if table.rows else None for name, table in tables.items()}


def prediction_table(report: LadderReport) -> TextTable:
    """A row for each design: the loss at the target, its intervals, and the prediction of each form of the fit."""
    predictions = report.predictions
    forms = list(dict.fromkeys(form.form for each in predictions for form in each.forms))
    rows = []
    for each in predictions:
        by_form = {form.form: format_bits(form.loss) for form in each.forms}
        intervals = [NO_VALUE if ends is None else format_interval(ends) for ends in (each.curve, each.measurement)]
        rows.append([each.design, format_bits(each.loss), *intervals, *(by_form.get(f, NO_VALUE) for f in forms)])
    header = ["design", "predicted", "curve interval", "measurement interval", *forms]
    tokens = f" and {format_number(report.target_tokens)} tokens" if report.law == "L(N, D)" else ""
    return TextTable(header, rows, f"Bits per byte at {format_number(report.target)} parameters{tokens}")


def best_size_table(report: LadderReport) -> TextTable:
    """A row for each design: the size with the lowest loss for the budget, its tokens and its loss."""
    rows = []
    for each in report.best_sizes:
        low = f"under {format_number(each.least)}" if each.low is None else format_number(each.low)
        high = f"over {format_number(each.most)}" if each.high is None else format_number(each.high)
        numbers = [format_number(value) for value in (each.tokens, each.tokens_per_parameter)]
        ends = NO_VALUE if each.reason else f"{low} to {high}"
        rows.append([each.design, format_number(each.size), ends, *numbers, format_bits(each.loss)])
    header = ["design", "best size", "95 % interval", "tokens", "per parameter", "bits per byte"]
    return TextTable(header, rows, f"The best size for {report.target_flops:.2e} training FLOPs, 6·N·D")


def cost_table(report: LadderReport) -> TextTable:
    """A row for each other design: the FLOPs for the baseline's loss at the target."""
    rows = []
    for each in report.equal_loss:
        ends = ["no lower bound" if each.low is None else f"{each.low:.2f}"]
        ends.append("no upper bound" if each.high is None else f"{each.high:.2f}")
        ratio = NO_VALUE if each.ratio is None else f"{each.ratio:.2f} ×"
        interval = "out of reach" if each.low == math.inf else " to ".join(ends)
        rows.append([each.design, ratio, interval])
    title = f"the FLOPs of {report.baseline} for its loss at {format_number(report.target)} parameters"
    return TextTable(["design", title, "95 % interval"], rows, "Cost of equal loss")


def fit_table(fit: FitResult) -> TextTable:
    """A row for each design: E and γ of the power law with E; for L(N, D), E, α, β and the exponent of the budget."""
    rows = [
        [name, *(NO_VALUE if each is None else "{:.3f} ({:.3f} to {:.3f})".format(*each) for each in values.values())]
        for name, values in fit.parameters.items()
    ]
    names = ["γ"] if len(rows[0]) == 3 else ["α", "β", "exponent of C in best N"]
    return TextTable(["design", "E, bits per byte", *names], rows, "The power law with E")


def form_table(fit: FitResult) -> TextTable:
    """A row for each form: its share of the draws, how far points lie from its curve, its degrees of freedom."""
    rows = []
    for form in fit.forms:
        deviation = f"{100 * form.deviation:.2f} %"
        fitted = list(form.coefficients)
        designs = "" if len(fitted) == len(fit.parameters) else f" ({', '.join(fitted)})"  # not to all
        rows.append([form.form + designs, format_percent(form.weight), deviation, str(form.degrees_of_freedom)])
    return TextTable(["form", "share", "points off the curve by", "degrees of freedom"], rows, "Forms of the fit")


def held_out_table(report: LadderReport) -> TextTable:
    """A row for each design: its largest size, predicted from the smaller ones, and measured."""
    rows = [
        [
            test.design,
            format_number(test.size),
            format_bits(test.loss),
            format_interval(test.measurement),
            format_bits(test.measured),
            "within" if test.within else "outside",
        ]
        for test in report.held_out
    ]
    header = ["design", "largest size", "predicted", "95 % interval", "measured", ""]
    return TextTable(header, rows, "Self-test: the largest size, predicted from the others")
