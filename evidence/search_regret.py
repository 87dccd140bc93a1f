"""`python -m evidence.search_regret`: how far a search's choice is from the best of all 4,096 assignments of a model.

A model of 6 layers is trained, and each layer can stay as it is or become one of three others. All 4^6 models, fitted
and not healed, are measured on text that neither fits, scores nor checks read. The regret of a choice within a budget
is (KL − best KL) / (median KL − best KL) over the assignments within it; its interval is a bootstrap over sequences.
The choice is compared with every baseline of the search, paired over sequences. FLOPs are forward products, three
times for steps with gradients. `--heal SEED` heals the best and random assignments within HEALED_BUDGET alike.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

import heddle
from benchmarks.machine import RESULTS, machine_name
from evidence.row import attention, stack
from heddle import progress
from heddle.conversion.convert import ConversionSource, open_source
from heddle.conversion.heal import (
    calibration_from_corpus,
    convert_and_heal,
    healing_rate,
    healing_settings,
)
from heddle.conversion.weights import CalibrationText
from heddle.data.corpus import Corpus, prepare_corpus
from heddle.lab.search.goals import parse_goals
from heddle.lab.search.plan import SearchInput, search_tokens
from heddle.lab.search.scores import Evaluator, Replacement
from heddle.lab.search.search import Search, mean_and_half
from heddle.lab.search.solve import Choice, FloatArray
from heddle.numerics.dispatch import count_flops
from heddle.runtime import hardware
from heddle.storage.model import load
from heddle.training.distillation import Distillation, LossWeights
from heddle.training.evaluation.scores import EvaluationBudget
from heddle.training.init_checkpoint import model_rows

DEPTH, WIDTH, VOCAB_SIZE, LENGTH, STEPS = 6, 64, 512, 128, 800
ALTERNATIVES = ("kv_heads=1", "window=32", "gated_delta,fit_steps=200")
BUDGETS = ("50%", "25%", "12.5%")
CALIBRATION_TOKENS, FINAL_BATCHES = 2**14, 2  # of 16 sequences
BATCH_SIZE, HEALED_SHARE, HEALED_BUDGET, HEALED = 8, 0.05, "25%", 20  # HEALED: the best, and as many random ones
RESAMPLES = 1000
RESULT = RESULTS / machine_name() / "search_regret.json"


def trained_model(folder: Path, seed: int) -> Path:
    """The run of a model of 6 layers on Python's own sources, continued where it stopped."""
    design = stack(*[attention() for _ in range(DEPTH)], width=WIDTH, hidden=176)
    heddle.train(
        design, data=["stdlib"], vocab_size=VOCAB_SIZE, steps=STEPS, batch_size=BATCH_SIZE, sequence_length=LENGTH,
        lr=3e-3, seed=seed, out=folder,
    )  # fmt: skip
    return folder


@torch.no_grad()
def all_assignments(search: Search, text: CalibrationText) -> Iterator[tuple[Choice, FloatArray]]:
    """The KL by sequence of every assignment; assignments with equal first layers share these layers' outputs.

    With logits z and p of the source: KL = Σ p log p − p · z + logsumexp z.
    """
    evaluator = Evaluator(search.weights, text, search.given.folder, search.scoring.model)
    model, head = evaluator.model, evaluator.model.head.weight
    modules = [[(-1, layer)] for layer in model.layers]
    for number, item in enumerate(search.items):
        modules[item.layer].append((number, evaluator.replaced([item]).layers[item.layer]))
    log_p = (evaluator.reference @ head.T).log_softmax(-1)
    p = log_p.exp()
    entropy, mean_row = (p * log_p).sum(-1), p @ head

    def walk(layer: int, streams: Sequence[Tensor], choice: Choice) -> Iterator[tuple[Choice, FloatArray]]:
        if layer == DEPTH:
            hidden = torch.cat([model.final_norm(stream).flatten(0, 1) for stream in streams])
            kl = entropy - (mean_row * hidden).sum(-1) + (hidden @ head.T).logsumexp(-1)
            yield choice, kl.double().view(-1, LENGTH).mean(1).numpy()
            return
        for item, module in modules[layer]:
            new = [module(stream, layout)[0] for stream, layout in zip(streams, text.layouts, strict=True)]
            yield from walk(layer + 1, new, choice if item < 0 else (*choice, item))

    pairs = zip(text.batches, text.layouts, strict=True)
    yield from walk(0, [model.expand_stream(model.embed(batch, layout)) for batch, layout in pairs], ())


def regret(kl: FloatArray, allowed: Sequence[int], chosen: int) -> dict[str, Any]:
    """The regret of an assignment among the allowed ones. kl: of all, by sequence [assignments, S]."""

    def of(rows: Any) -> float:
        means = kl[allowed][:, rows].mean(1)
        best, median = float(means.min()), float(np.median(means))
        return (float(kl[chosen, rows].mean()) - best) / (median - best)

    generator = np.random.default_rng(0)
    resampled = [of(generator.integers(kl.shape[1], size=kl.shape[1])) for _ in range(RESAMPLES)]
    low, high = np.quantile(resampled, (0.025, 0.975)).tolist()
    means = kl[allowed].mean(1)
    return {
        "regret": round(of(slice(None)), 5), "low": round(low, 5), "high": round(high, 5),
        "kl": round(float(kl[chosen].mean()), 5), "rank": 1 + int((means < kl[chosen].mean()).sum()),
    }  # fmt: skip


def difference(own: FloatArray, other: FloatArray) -> dict[str, float]:
    """The mean of a paired difference over sequences, with half of its 95 % interval."""
    mean, half = mean_and_half(own - other)
    return {"difference": round(mean, 5), "half": round(half, 5)}


@cache
def opened(folder: Path, seed: int) -> tuple[ConversionSource, Corpus, CalibrationText, CalibrationText]:
    """The model of a seed, its corpus, the text of a search, and the text of the regret."""
    source = open_source(trained_model(folder / f"model-{seed}", seed))
    assert source.tokenizer is not None
    rows = model_rows(source.folder, source.tokenizer)
    corpus = prepare_corpus(["stdlib"], vocab_size=None, max_train_tokens=None, tokenizer=source.tokenizer, rows=rows)
    tokens = search_tokens(CALIBRATION_TOKENS) + FINAL_BATCHES * 16 * LENGTH
    text = calibration_from_corpus(corpus, tokens, LENGTH)
    end = len(text.batches) - FINAL_BATCHES
    read, final = (
        replace(text, batches=text.batches[part], layouts=text.layouts[part]) for part in (slice(end), slice(end, None))
    )
    return source, corpus, read, final


def search_of(folder: Path, seed: int, budget: str) -> tuple[Search, CalibrationText]:
    """The search of a seed and budget, and the text of the regret."""
    source, corpus, read, final = opened(folder, seed)
    goals = parse_goals([f"state@2k={budget}"])
    given = SearchInput(source, read, goals, ALTERNATIVES, (), LENGTH, folder / f"search-{seed}", corpus)
    return Search(given), final


def allowed_among(search: Search, choices: Sequence[Sequence[str]]) -> list[int]:
    """The numbers of the choices, by layer, that are within the limits of a search."""
    table = search._table(np.zeros(len(search.items)), np.zeros((len(search.items),) * 2))
    number_of = {(item.layer, item.target): number for number, item in enumerate(search.items)}
    items = [tuple(number_of[layer, name] for layer, name in enumerate(choice) if name) for choice in choices]
    return [number for number, choice in enumerate(items) if table.is_allowed(choice, search.limits)]


def healing_tokens() -> int:
    """HEALED_SHARE of the training tokens."""
    return round(HEALED_SHARE * STEPS) * BATCH_SIZE * LENGTH


def count_search(search: Search) -> dict[str, float]:
    """The FLOPs of a whole search, in multiples of one healing; it runs here, and later runs read its files."""
    with count_flops() as fits:
        search._fit()
    with count_flops() as scores:
        search.run()
    gram = 2 * len(search.items) ** 2 * search.score.tokens * VOCAB_SIZE
    batch, layout = search.fit.batches[0], search.fit.layouts[0]
    with torch.no_grad(), count_flops() as forward:
        search.scoring.model.head(search.scoring.model(batch, layout)[0])
    heal = 4 * forward[0] / batch.numel() * healing_tokens()  # the teacher, and three times the model
    of = {"fits": 3 * fits[0], "scores and checks": scores[0] + gram}
    return {name: round(flops / heal, 3) for name, flops in of.items()} | {"flops of a healing": heal}


def run_seed(folder: Path, seed: int) -> dict[str, Any]:
    """Train, search at every budget, and measure all assignments of one seed."""
    found = dict[str, dict[str, Any]]()
    kl, choices, by_layer = np.zeros(0), list[Choice](), list[list[str]]()
    for budget in BUDGETS:
        search, final = search_of(folder, seed, budget)
        if budget == BUDGETS[0]:
            began = time.process_time()
            flops = count_search(search)
            seconds = time.process_time() - began
            search, _ = search_of(folder, seed, budget)
        _, results = search.run()
        if not choices:
            began = time.process_time()
            kl = np.zeros(((1 + len(ALTERNATIVES)) ** DEPTH, sum(map(len, final.batches))))
            for number, (choice, row) in enumerate(all_assignments(search, final)):
                choices.append(choice)
                kl[number] = row  # kept as tensors, rows among freed ones made a heap of 17 GB
            all_seconds = time.process_time() - began
            pick: list[Replacement] = [search.items[item] for item in choices[len(choices) // 3]]
            alone = Evaluator(search.weights, final, search.given.folder, search.scoring.model).divergence(pick)
            assert np.abs(alone - kl[len(choices) // 3]).max() < 1e-4, "an assignment differs from its whole model"
            by_layer = [search._by_layer(choice) for choice in choices]
            (folder / f"all-{seed}.json").write_text(json.dumps({"choices": by_layer, "kl": kl.round(7).tolist()}))
        allowed = allowed_among(search, by_layer)
        number_of = {tuple(choice): number for number, choice in enumerate(by_layer)}
        own = kl[number_of[tuple(results.chosen)]]

        measured: Mapping[str, dict[str, Any]] = {
            each.name: {"choice": each.choice, "is_baseline": each.is_baseline}
            | difference(own, kl[number_of[tuple(each.choice)]])
            | regret(kl, allowed, number_of[tuple(each.choice)])
            for each in results.measured
        }
        means = kl[allowed].mean(1)
        found[budget] = {
            "feasible": len(allowed), "best_kl": round(float(means.min()), 5),
            "median_kl": round(float(np.median(means)), 5),
            "chosen": {"choice": results.chosen} | regret(kl, allowed, number_of[tuple(results.chosen)]),
            "others": measured, "pair_check": vars(results.pair_check),
            "gaps": [point.gap for point in results.frontier],
        }  # fmt: skip
        chosen = found[budget]["chosen"]
        print(f"seed {seed}, state@2k={budget}: regret {chosen['regret']:.2%} [{chosen['low']:.2%}, "
              f"{chosen['high']:.2%}], rank {chosen['rank']} of {len(allowed)}", flush=True)  # fmt: skip
    return {"seed": seed, "assignments": len(choices), "final_tokens": final.tokens, "budgets": found,
            "parameters": sum(p.numel() for p in search.scoring.model.parameters()),
            "search_in_healings": flops, "search_seconds": round(seconds, 1),
            "exhaustive_seconds": round(all_seconds, 1)}  # fmt: skip


def pooled(folder: Path, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean regret of all seeds, at each budget and at all of them, with the interval of a bootstrap."""
    generator, drawn = np.random.default_rng(0), dict[str, list[FloatArray]]()
    for run in runs:
        saved = json.loads((folder / f"all-{run['seed']}.json").read_text())
        kl, numbers = np.array(saved["kl"]), {tuple(choice): number for number, choice in enumerate(saved["choices"])}
        picks = [slice(None), *generator.integers(kl.shape[1], size=(RESAMPLES, kl.shape[1]))]
        means = np.stack([kl[:, pick].mean(1) for pick in picks])
        for budget, found in run["budgets"].items():
            allowed = allowed_among(search_of(folder, runs[0]["seed"], budget)[0], list(numbers))
            within = means[:, allowed]
            best, median = within.min(1), np.median(within, 1)
            chosen = means[:, numbers[tuple(found["chosen"]["choice"])]]
            drawn.setdefault(budget, []).append((chosen - best) / (median - best))
    of = {budget: np.mean(rows, 0) for budget, rows in drawn.items()}
    of["all"] = np.mean(list(of.values()), 0)
    found = dict[str, dict[str, float]]()
    for name, row in of.items():
        low, high = np.quantile(row[1:], (0.025, 0.975)).tolist()
        found[name] = {"regret": round(float(row[0]), 5), "low": round(low, 5), "high": round(high, 5)}
    return found


def heal_some(folder: Path, seed: int) -> dict[str, Any]:
    """Heal the best and random assignments within a budget: how their KL before and after healing agree."""
    search, final = search_of(folder, seed, HEALED_BUDGET)
    _, results = search.run()
    saved = json.loads((folder / f"all-{seed}.json").read_text())
    number_of = {(item.layer, item.target): number for number, item in enumerate(search.items)}
    fitted = dict[Choice, float]()
    chosen: Choice = ()
    for number in allowed_among(search, saved["choices"]):
        names = saved["choices"][number]
        choice = tuple(number_of[layer, target] for layer, target in enumerate(names) if target)
        fitted[choice] = float(np.mean(saved["kl"][number]))
        chosen = choice if names == results.chosen else chosen
    order = sorted(fitted, key=lambda choice: fitted[choice])
    drawn = np.random.default_rng(0).permutation(np.arange(HEALED, len(order)))[:HEALED].tolist()
    picked = list(dict.fromkeys([*order[:HEALED], *(order[number] for number in drawn), chosen]))
    evaluator = Evaluator(search.weights, final, search.given.folder, search.scoring.model)
    source, corpus, read, _ = opened(folder, seed)
    settings = healing_settings(
        healing_tokens(), LENGTH, healing_rate(WIDTH, BATCH_SIZE * LENGTH), read.samples, BATCH_SIZE
    )
    healed, seconds = dict[Choice, float](), time.process_time()
    for choice in picked:
        out = folder / f"healed-{seed}" / "-".join(map(str, choice))
        if not out.is_dir():
            out.parent.mkdir(exist_ok=True)
            conversion, towards = search._conversion(choice), Distillation(source, LossWeights())
            convert_and_heal(
                conversion, towards, corpus, settings, out, evaluation=EvaluationBudget(final_tokens=LENGTH)
            )
        model = load(out)[0].float()
        healed[choice] = float(evaluator.measure([evaluator.hidden(model).numpy()])[0][0].mean())
        print(f"{search._describe(choice)}: KL {fitted[choice]:.5f}, healed {healed[choice]:.5f}", flush=True)
    pairs = [(fitted[choice], healed[choice]) for choice in picked[: 2 * HEALED]]
    best, median = min(healed.values()), float(np.median([healed[order[number]] for number in drawn]))
    return {
        "seed": seed, "budget": HEALED_BUDGET, "tokens": healing_tokens(), "learning_rate": settings.learning_rate,
        "rank_correlation": {
            name: round(float(spearmanr(*zip(*part, strict=True)).statistic), 4)
            for name, part in (("all", pairs), ("best", pairs[:HEALED]), ("random", pairs[HEALED:]))
        },
        "chosen": {"fitted": round(fitted[chosen], 5), "healed": round(healed[chosen], 5)},
        "best_healed": round(best, 5), "median_random_healed": round(median, 5),
        "healed_regret": round((healed[chosen] - best) / (median - best), 5),
        "pairs": [[round(a, 5), round(b, 5)] for a, b in pairs], "seconds": round(time.process_time() - seconds, 1),
    }  # fmt: skip


def main() -> None:
    """Parse the arguments, run what has no result yet, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m evidence.search_regret", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/search-regret"), help="where the work is kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--heal", type=int, help="heal assignments of this seed, which was run before")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    content = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"results": []}
    content |= {"cpu": hardware()["cpu"], "steps": STEPS, "alternatives": ALTERNATIVES}

    def write() -> None:
        content["date"] = datetime.now(UTC).date().isoformat()
        content["results"].sort(key=lambda run: run["seed"])
        RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    with progress.quiet():
        if arguments.heal is not None:
            content["healed"] = heal_some(arguments.out, arguments.heal)
            write()
            return
        done = {run["seed"] for run in content["results"]}
        for seed in itertools.filterfalse(done.__contains__, arguments.seeds):
            content["results"].append(run_seed(arguments.out, seed))
            write()
        content["pooled"] = pooled(arguments.out, content["results"])
        write()


if __name__ == "__main__":
    main()
