"""`python -m evidence.search_regret`: how far a search's choice is from the best of all 4,096 assignments of a model.

A model of 6 layers is trained, and each layer can stay as it is or become one of three others. All 4^6 models, fitted
and not healed, are measured on text that neither fits, scores nor checks read. The regret of a choice within a budget
is (KL − best KL) / (median KL − best KL) over the assignments within it; its interval is a bootstrap over sequences.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import heddle
from evidence.row import attention, stack
from heddle import progress
from heddle.conversion.convert import open_source
from heddle.conversion.heal import calibration_from_corpus
from heddle.conversion.weights import CalibrationText
from heddle.data.corpus import prepare_corpus
from heddle.lab.search.goals import parse_goals
from heddle.lab.search.scores import Evaluator, Replacement
from heddle.lab.search.search import Search, SearchInput, search_tokens
from heddle.lab.search.solve import Choice, FloatArray
from heddle.runtime import hardware
from heddle.training.init_checkpoint import model_rows

DEPTH, WIDTH, VOCAB_SIZE, LENGTH, STEPS = 6, 64, 512, 128, 800
ALTERNATIVES = ("kv_heads=1", "window=32", "gated_delta,fit_steps=200")
BUDGETS = ("50%", "25%", "12.5%")
CALIBRATION_TOKENS, FINAL_TOKENS = 2**14, 2**11
RESAMPLES = 1000
RESULT = Path(__file__).parent / "search_regret.json"


def trained_model(folder: Path, seed: int) -> Path:
    """The run of a model of 6 layers on Python's own sources, continued where it stopped."""
    design = stack(*[attention() for _ in range(DEPTH)], width=WIDTH, hidden=176)
    heddle.train(
        design, data=["stdlib"], vocab_size=VOCAB_SIZE, steps=STEPS, batch_size=8, sequence_length=LENGTH,
        lr=3e-3, seed=seed, out=folder,
    )  # fmt: skip
    return folder


@torch.no_grad()
def all_assignments(search: Search, text: CalibrationText) -> Iterator[tuple[Choice, FloatArray]]:
    """The KL by sequence of every assignment; assignments with equal first layers share these layers' outputs."""
    evaluator = Evaluator(search.weights, text, search.given.folder, search.scoring.model)
    model = evaluator.model
    modules = [[(-1, layer)] for layer in model.layers]
    for number, item in enumerate(search.items):
        modules[item.layer].append((number, evaluator.replaced([item]).layers[item.layer]))

    def walk(layer: int, streams: Sequence[Tensor], choice: Choice) -> Iterator[tuple[Choice, FloatArray]]:
        if layer == DEPTH:
            hidden = torch.cat([model.final_norm(stream).flatten(0, 1) for stream in streams])
            yield choice, evaluator.measure([hidden.numpy()])[0][0]
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


def run_seed(folder: Path, seed: int) -> dict[str, Any]:
    """Train, search at every budget, and measure all assignments of one seed."""
    source = open_source(trained_model(folder / f"model-{seed}", seed))
    assert source.tokenizer is not None
    rows = model_rows(source.folder, source.tokenizer)
    corpus = prepare_corpus(["stdlib"], vocab_size=None, max_train_tokens=None, tokenizer=source.tokenizer, rows=rows)
    text = calibration_from_corpus(corpus, search_tokens(CALIBRATION_TOKENS) + FINAL_TOKENS, LENGTH)
    read = replace(text, batches=text.batches[:-1], layouts=text.layouts[:-1])
    final = replace(text, batches=text.batches[-1:], layouts=text.layouts[-1:])
    found = dict[str, dict[str, Any]]()
    kl, choices = np.zeros(0), list[Choice]()
    for budget in BUDGETS:
        began, goals = time.process_time(), parse_goals([f"state@2k={budget}"])
        given = SearchInput(source, read, goals, ALTERNATIVES, (), LENGTH, folder / f"search-{seed}", corpus)
        search = Search(given)
        _, results = search.run()
        seconds = time.process_time() - began
        if not choices:
            began = time.process_time()
            pairs = list(all_assignments(search, final))
            choices, kl = [choice for choice, _ in pairs], np.stack([row for _, row in pairs])
            all_seconds = time.process_time() - began
            pick: list[Replacement] = [search.items[item] for item in choices[1234]]
            alone = Evaluator(search.weights, final, search.given.folder, search.scoring.model).divergence(pick)
            assert np.abs(alone - kl[1234]).max() < 1e-4, "an assignment differs from the model put together"
        table = search._table(np.zeros(len(search.items)), np.zeros((len(search.items),) * 2))
        allowed = [number for number, choice in enumerate(choices) if table.is_allowed(choice, search.limits)]
        number_of = {tuple(search._by_layer(choice)): number for number, choice in enumerate(choices)}
        measured: Mapping[str, dict[str, Any]] = {
            each.name: {"choice": each.choice} | regret(kl, allowed, number_of[tuple(each.choice)])
            for each in results.measured
        }
        means = kl[allowed].mean(1)
        found[budget] = {
            "feasible": len(allowed), "best_kl": round(float(means.min()), 5),
            "median_kl": round(float(np.median(means)), 5),
            "chosen": {"choice": results.chosen} | regret(kl, allowed, number_of[tuple(results.chosen)]),
            "others": measured, "pair_check": vars(results.pair_check),
            "gaps": [point.gap for point in results.frontier], "search_seconds": round(seconds, 1),
        }  # fmt: skip
        chosen = found[budget]["chosen"]
        print(f"seed {seed}, state@2k={budget}: regret {chosen['regret']:.2%} [{chosen['low']:.2%}, "
              f"{chosen['high']:.2%}], rank {chosen['rank']} of {len(allowed)}", flush=True)  # fmt: skip
    return {"seed": seed, "assignments": len(choices), "final_tokens": FINAL_TOKENS, "budgets": found,
            "parameters": sum(p.numel() for p in search.scoring.model.parameters()),
            "exhaustive_seconds": round(all_seconds, 1)}  # fmt: skip


def main() -> None:
    """Parse the arguments, run the seeds that have no result yet, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m evidence.search_regret", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/search-regret"), help="where the work is kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = json.loads(RESULT.read_text(encoding="utf-8"))["runs"] if RESULT.exists() else []
    for seed in itertools.filterfalse({run["seed"] for run in runs}.__contains__, arguments.seeds):
        with progress.quiet():
            runs.append(run_seed(arguments.out, seed))
        content = {
            "date": datetime.now(UTC).date().isoformat(), "cpu": hardware()["cpu"], "steps": STEPS,
            "alternatives": ALTERNATIVES, "runs": sorted(runs, key=lambda run: run["seed"]),
        }  # fmt: skip
        RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
