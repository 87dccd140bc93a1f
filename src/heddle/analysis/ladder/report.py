"""The report of a ladder as plain data: what was measured, the fit, and what it predicts."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from heddle import __version__
from heddle.analysis.comparison.formatting import format_number
from heddle.analysis.comparison.statistics import t_quantile
from heddle.analysis.ladder.best_size import FLOPS_FACTOR, best_size
from heddle.analysis.ladder.curves import SizeLosses
from heddle.analysis.ladder.fit import LadderFit
from heddle.analysis.ladder.forms import MAX_EXTRAPOLATION
from heddle.analysis.ladder.plan import equal_rungs
from heddle.analysis.ladder.predictions import (
    CONFIDENCE,
    LadderPoints,
    cost_for_equal_loss,
    crossing,
    hold_out,
    interval,
    predict_loss,
)
from heddle.analysis.ladder.scaling import Rung
from heddle.analysis.ladder.verdict import ladder_verdict, ratios_text
from heddle.errors import ConfigError, DataError

if TYPE_CHECKING:
    from heddle.analysis.ladder.run import Ladder

DEFAULT_TARGET = 10  # times the largest size
CURVE_POINTS = 41  # of each curve in the figure
TRAINING_FACTOR = 3  # a backward pass costs twice a forward pass
DEFAULT_CORRELATION = 0.5  # of two runs of one trunk, where one seed cannot tell
MAX_CORRELATION = 0.95
Runs = Mapping[tuple[str, int, float, int], Mapping[str, Any]]  # by design, width, tokens per parameter and seed


def ladder_report(ladder: "Ladder", results: Runs) -> dict[str, Any]:
    """The report of a ladder whose runs have ended. Where nothing can be fitted, `reason` says why."""
    designs = [_design_report(ladder, name, results) for name in ladder.rungs]
    plan, largest = ladder.plan, max(rung["parameters"] for design in designs for rung in design["rungs"])
    target = plan.target or DEFAULT_TARGET * largest
    ratio = ladder.ratios[-1] if plan.target_tokens is None else plan.target_tokens / target
    report: dict[str, Any] = {
        "heddle": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": ladder.command,
        "hardware": ladder.runtime.describe() | {"torch": torch.__version__},
        "data": {
            "name": ladder.corpus.name,
            "hash": ladder.corpus.hash,
            "train_tokens": sum(len(file) for file in ladder.corpus.train),
            "validation_bytes": ladder.corpus.report["validation"]["bytes"],
            "vocab_size": ladder.corpus.tokenizer.vocab_size,
        },
        "settings": plan.settings.plain(),
        "law": "L(N, D)" if plan.settings.shares_trunk else "L(N)",
        "sizes": list(ladder.sizes),
        "seeds": plan.seeds,
        "share_irreducible": plan.share_irreducible,
        "baseline": plan.entries[0].name,
        "target": target,
        "target_tokens": ratio * target,
        "target_flops": plan.target_flops or FLOPS_FACTOR * target * ratio * target,
        "tokens_per_parameter": ratio,
        "warnings": [],
        "designs": designs,
        "reason": None,
        "fit": None,
        "predictions": [],
        "best_sizes": [],
        "equal_loss": [],
        "crossings": [],
        "held_out": [],
        "curves": {},
    }
    _add_predictions(ladder, report)
    report["warnings"] = _warnings(ladder, report)
    report["verdict"] = ladder_verdict(report)
    return report


def _design_report(ladder: "Ladder", name: str, results: Runs) -> dict[str, Any]:
    entry = next(entry for entry in ladder.plan.entries if entry.name == name)
    rungs = []
    for rung, ratio in itertools.product(ladder.rungs[name], ladder.ratios):
        runs = [_run_report(results[name, rung.width, ratio, seed], seed) for seed in range(ladder.plan.seeds)]
        losses = [run["bits_per_byte"] for run in runs if run["bits_per_byte"] is not None]
        tokens = ladder.steps(rung, ratio) * ladder.plan.settings.tokens_per_step
        rungs.append(
            {
                "width": rung.width,
                "parameters": rung.parameters,
                "flops_per_token": rung.flops_per_token,
                "tokens": tokens,
                "tokens_per_parameter": ratio,
                "training_flops": TRAINING_FACTOR * rung.flops_per_token * tokens,
                "learning_rate": ladder.learning_rate(name, rung),
                "runs": runs,
                "seeds": len(losses),
                "loss": float(np.mean(losses)) if losses else None,
                "interval": None,
            }
        )
    return {"name": name, "source": entry.source, "width": ladder.scales[name].config.width, "rungs": rungs}


def _run_report(result: Mapping[str, Any], seed: int) -> dict[str, Any]:
    loss = result.get("bits_per_byte") if result["status"] == "done" else None
    is_finite = loss is not None and math.isfinite(loss)
    return {
        "seed": seed,
        "status": result["status"],
        "message": result.get("message"),
        "bits_per_byte": loss if is_finite else None,
        "seconds": result.get("seconds"),
    }


def _pooled_deviation(designs: Sequence[Mapping[str, Any]]) -> tuple[float, int]:
    """The standard deviation of log loss between seeds of one size, and its degrees of freedom; 0 and 0 without any."""
    squares, degrees = 0.0, 0
    for rung in (rung for design in designs for rung in design["rungs"]):
        logs = np.log([run["bits_per_byte"] for run in rung["runs"] if run["bits_per_byte"] is not None])
        if len(logs) > 1:
            squares += float(((logs - logs.mean()) ** 2).sum())
            degrees += len(logs) - 1
    return (math.sqrt(squares / degrees) if degrees else 0.0), degrees


def _trunk_correlation(designs: Sequence[Mapping[str, Any]]) -> float:
    """Of the log losses of two branches of one trunk, over seeds: between pairs of branches, pooled over sizes."""
    squares, products = 0.0, 0.0
    for design in designs:
        for _, rungs in itertools.groupby(design["rungs"], key=lambda rung: rung["width"]):
            table = np.array([[run["bits_per_byte"] or math.nan for run in rung["runs"]] for rung in rungs])
            logs = np.log(table[:, ~np.isnan(table).any(axis=0)])  # [branches, seeds]
            if logs.shape[1] > 1:
                covariance = np.cov(logs).reshape(len(logs), -1)
                squares += float(covariance.trace()) * (len(logs) - 1)
                products += float(covariance.sum() - covariance.trace())
    return min(max(products / squares, 0.0), MAX_CORRELATION) if squares else DEFAULT_CORRELATION


def _ladder_points(ladder: "Ladder", report: Mapping[str, Any], deviation: float) -> LadderPoints:
    losses = {design["name"]: _size_losses(design["rungs"], report["law"]) for design in report["designs"]}
    most_seeds = max([count for each in losses.values() for count in each.seeds], default=1)
    ratio = report["tokens_per_parameter"]
    return LadderPoints(
        losses,
        {name: _costs(ladder, name, ratio) for name in losses},
        deviation / math.sqrt(most_seeds),
        _trunk_correlation(report["designs"]) if ladder.plan.settings.shares_trunk else 0.0,
        ratio,
    )


def _add_predictions(ladder: "Ladder", report: dict[str, Any]) -> None:
    """Add the fit and what follows from it; the reason where there is none."""
    designs, baseline, target = report["designs"], report["baseline"], report["target"]
    deviation, degrees = _pooled_deviation(designs)
    degrees //= len(ladder.ratios)  # branches of one trunk share its luck
    for rung in (rung for design in designs for rung in design["rungs"]):
        if degrees and rung["loss"] is not None:
            half = t_quantile(CONFIDENCE, degrees) * deviation / math.sqrt(rung["seeds"])
            rung["interval"] = (rung["loss"] * math.exp(-half), rung["loss"] * math.exp(half))
    points, share_irreducible = _ladder_points(ladder, report, deviation), report["share_irreducible"]
    losses = points.losses
    try:
        fit = points.fit(share_irreducible)
    except DataError as error:
        report["reason"] = str(error)
        return
    report["fit"] = {
        "center": fit.center,
        "seed_deviation": deviation,
        "seed_degrees_of_freedom": degrees,
        "correlation": points.correlation,
        "forms": [asdict(form) for form in fit.forms],
        "parameters": {name: _law_parameters(fit, name) for name in losses},
    }
    report["predictions"] = [{"design": name, **predict_loss(fit, points, name, target)} for name in losses]
    if fit.token_center is not None:
        flops = report["target_flops"]
        report["best_sizes"] = [{"design": name, **best_size(fit, points, name, flops)} for name in losses]
    others = [name for name in losses if name != baseline]
    equal = [cost_for_equal_loss(fit, points, name, baseline, target) for name in others]
    report["equal_loss"] = [each for each in equal if each is not None]
    report["crossings"] = [crossing(fit, points, name, baseline) for name in others]
    report["held_out"] = hold_out(points, share_irreducible)
    report["curves"] = {name: _curve(fit, points, name) for name in losses}


def _size_losses(rungs: Sequence[Mapping[str, Any]], law: str) -> SizeLosses:
    measured = [rung for rung in rungs if rung["loss"] is not None]
    keys = ("parameters", "loss", "seeds", "tokens")[: 4 if law == "L(N, D)" else 3]
    return SizeLosses(*([rung[key] for rung in measured] for key in keys))


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
    return [rung.parameters for rung in rungs], [_cost(rung, tokens_per_parameter) for rung in rungs]


def _cost(rung: Rung, tokens_per_parameter: float) -> float:
    return TRAINING_FACTOR * rung.flops_per_token * tokens_per_parameter * rung.parameters


def _law_parameters(fit: LadderFit, name: str) -> dict[str, Any]:
    """E and γ of a design over the draws of the power law with E: median and 95 % interval; None without such draws.

    Of L(N, D): E, α, β, and the power of the budget that the best size is in proportion to, β / (α + β).
    """
    draws, is_curve = fit.draws[name], fit.token_center is None
    chosen = draws[(draws[:, 0] > 0) & (draws[:, -1] == (0 if is_curve else 1))]
    values = {"E": chosen[:, 0], "exponent": -chosen[:, 2]}
    if not is_curve:
        size, tokens = chosen[:, 2], chosen[:, 4]
        values |= {"token_exponent": -tokens, "budget_exponent": tokens / (size + tokens)}
    return {key: interval(each) if len(chosen) else None for key, each in values.items()}


def _curve(fit: LadderFit, points: LadderPoints, name: str) -> list[dict[str, float]]:
    """The curve of a design from its smallest size to the largest that is predicted."""
    rows = []
    for size in np.geomspace(min(points.losses[name].sizes), points.limit(name), CURVE_POINTS):
        loss, low, high = interval(fit.losses(name, float(size), points.tokens(float(size))))
        cost = float(points.cost(name, float(size)))
        rows.append({"parameters": float(size), "training_flops": cost, "loss": loss, "low": low, "high": high})
    return rows


def _warnings(ladder: "Ladder", report: Mapping[str, Any]) -> list[str]:
    sentences = equal_rungs(ladder.rungs)
    runs = [run for design in report["designs"] for rung in design["rungs"] for run in rung["runs"]]
    failed = sum(run["bits_per_byte"] is None for run in runs)
    if failed:
        sentences.append(f"{failed} of {len(runs)} runs gave no number; a mean without them may look too good.")
    if ladder.plan.seeds == 1:
        sentences.append("One seed: the luck of training is judged by how far the points lie from the curve alone.")
    tokens = max(rung["tokens"] for design in report["designs"] for rung in design["rungs"])
    if tokens > report["data"]["train_tokens"]:
        sentences.append(
            f"The largest size read the text {tokens / report['data']['train_tokens']:.1f} times; repeated text "
            "teaches less than new text, so larger sizes look worse than they are."
        )
    forms = (report["fit"] or {}).get("forms", [])
    misfit = min((form["deviation"] for form in forms), default=0.0)
    deviation = report["fit"]["seed_deviation"] / math.sqrt(ladder.plan.seeds) if forms else 0.0
    if deviation and misfit > 3 * deviation:
        sentences.append(
            f"The points lie {misfit / deviation:.0f} times as far from the curve as the luck of training explains: "
            "sizes differ in more than size, in how well the learning rate suits them, say."
        )
    if report["law"] == "L(N, D)":
        ratio = format_number(report["tokens_per_parameter"])
        sentences.append(f"Costs of equal loss and crossings compare designs at {ratio} tokens per parameter.")
    exponent = ladder.plan.settings.rate_exponent
    sentences.append(
        f"Every size had {ratios_text(report)} tokens per parameter and a learning rate in proportion to "
        f"width^−{exponent:g}; a design whose best rate moves otherwise is at a disadvantage at some sizes."
    )
    return sentences
