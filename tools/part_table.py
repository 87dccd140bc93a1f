"""Write benchmarks/results/parts.md: the parts of 2026, each with its oracle's errors, laws, sizes and files.

python -m tools.part_table [NAME ...]      takes minutes; names: only these cases, printed
"""

import argparse
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.lab.explore.choices import explorer_design
from heddle.laws import run
from heddle.model.size import size
from tests.analysis.explorer.sizes import declared_size
from tests.cases import case, parts_of
from tests.laws.violations import OTHERS
from tools.markdown import joined, table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks/results/parts.md"
DESIGNS, TOKENS = 40, 96
LAYOUTS = {
    "packed": "document_packing",
    "padded": "padding_invariance",
    "cut": "chunked_decoding",
    "rolled back": "state_rollback",
}
HEAD = ("part", "oracle", "designs", "values", "gradients", "laws", "layouts", "state and FLOPs", "files")
INTRODUCTION = f"""Errors are the largest in float64 over the random designs of the test that is named; one number for
both is in both columns. Laws: those that apply to the case of `tests/cases.py` and hold;
`tests/model/test_options.py` asks for an effect of every field. State and FLOPs: those that the explorer's formulas
give and that are measured for {TOKENS} tokens; "law" where there is no formula and `size_matches_model` holds. Files:
those of `src` that name a kind, without families and the explorer."""


class Row(NamedTuple):
    """name: of a case. oracle: whose result it is. test: "module:function" of a seed. first: its other arguments.

    patches: what else is set for the comparison.
    """

    part: str
    name: str
    oracle: str
    test: str
    first: tuple[Any, ...] = ()
    in_float64: bool = False
    patches: tuple[tuple[str, Any], ...] = ()


LOOP = "plain loop of the paper"
ROWS = (
    Row("indexer", "latent-indexer", "transformers: DeepSeek V3.2", "parity.test_indexer:compare", ("deepseek_v32",)),
    Row("indexer of blocks", "attention-indexer-blocks", "transformers: MiniMax M3",
        "parity.test_indexer:minimax_errors"),
    Row("pooled index keys", "latent-indexer-pool", "transformers: GLM 5", "parity.test_indexer:glm_errors"),
    Row("pooled index keys, mean", "attention-indexer-pool", "transformers: Qwen4", "parity.test_indexer:qwen4_errors"),
    Row("compressed attention", "compressed-index", LOOP, "parts.test_compressed_attention:largest_errors"),
    Row("native sparse attention", "nsa", LOOP, "parts.test_native_sparse_attention:largest_errors"),
    Row("shared keys and values", "attention-shared-keys", LOOP,
        "parts.test_shared_keys:test_shared_keys_are_those_of_a_plain_loop"),
    Row("value residual", "attention-value-residual", LOOP,
        "parts.test_shared_keys:test_mixed_values_are_those_of_a_plain_loop"),
    Row("attention residuals", "residual-attention-blocks", LOOP, "parts.test_attention_residuals:difference"),
    Row("attention residuals of Inkling 2", "residual-attention", "transformers: Inkling 2",
        "parity.test_inkling2:both", in_float64=True),
    Row("multi-token prediction", "multi-token", LOOP, "model.test_multi_token:largest_errors"),
    Row("value embeddings", "attention-value-embedding", LOOP, "parts.test_value_embedding:largest_errors"),
    Row("per-layer embeddings", "per-layer-embedding", LOOP, "model.test_per_layer:largest_errors"),
    Row("n-gram memory", "ngram-memory", LOOP, "parts.test_ngram_memory:largest_errors"),
    Row("delta rules: β up to 2, bounded decay, steps, channel gates, preconditioned", "delta-steps", LOOP,
        "parity.test_delta_options:largest_difference"),
    Row("RWKV-7", "rwkv7-own-widths", LOOP, "parts.test_rwkv7:test_values_and_gradients_are_those_of_a_plain_loop"),
    *(
        Row(f"hyper-connections of {family}", name, f"transformers: {family}", "parity.test_hyper_connections:both",
            (family,), True)
        for family, name in (("deepseek_v4", "residual-hyper-weighted"), ("glm5_next", "residual-hyper-whole"),
                             ("hy_v4", "residual-hyper-not-mixed"), ("qwen4_exp", "residual-hyper-gates"))
    ),
    Row("exclusive attention", "attention-exclusive", LOOP,
        "parts.test_attention:test_exclusive_heads_are_those_of_a_plain_loop"),
    Row("gated norms", "residual-pre-norm-gated", "transformers: A.X K2",
        "parity.test_residual_layers:gated_norm_errors", in_float64=True),
    Row("alternating updates (AltUp)", "residual-altup", LOOP, "parts.test_altup:largest_errors", (True,)),
    Row("learned residuals of low rank (LAuReL)", "residual-laurel", LOOP, "parts.test_altup:largest_errors", (False,)),
    Row("xIELU", "mlp-xielu", "the formula", "parts.test_feedforwards:largest_errors"),
    Row("looped depth", "shared-layer", "plain loop, and copies", "model.test_shared_layers:largest_errors"),
    Row("short convolutions", "short-convolution", LOOP,
        "parts.test_short_convolution:test_convolutions_are_those_of_a_plain_loop"),
    *(
        Row(part, name, LOOP, "parts.test_attention:largest_errors", (option,))
        for part, name, option in (
            ("chunked attention", "attention-chunked", "chunked"),
            ("log-n query scale", "attention-temperature-smooth", "temperature"),
            ("relative logits", "attention-relative", "relative"),
            ("values that are keys", "attention-values-are-keys", "k_eq_v"),
        )
    ),
    Row("layers before the router", "moe-router-layers", "transformers: ZAYA1", "parity.test_experts:zaya_errors"),
    Row("experts by a hash", "moe-hash", LOOP, "parts.test_hash_routing:largest_errors"),
    Row("forgetting attention", "attention-forget", LOOP, "parts.test_forgetting_attention:largest_errors"),
    Row("PaTH attention, with and without gates", "path-forget", LOOP, "parts.test_path_attention:largest_errors",
        patches=(("heddle.numerics.attention.householder.BLOCK", 7),)),
)  # fmt: skip


class Errors:
    """Largest errors of values and of gradients; None where none was reported."""

    def __init__(self) -> None:
        self.values: float | None = None
        self.gradients: float | None = None

    def add(self, values: float, gradients: float | None = None) -> None:
        """What one comparison found."""
        self.values = max(values, self.values or 0.0)
        if gradients is not None:
            self.gradients = max(gradients, self.gradients or 0.0)

    def add_result(self, result: Any) -> None:
        """One number of both, two numbers, or the tensors of both sides, outputs first."""
        if isinstance(result, float):
            self.add(result, result)
        elif isinstance(result, tuple):
            self.add(*result)
        elif result is not None:
            found = [float((got - want).detach().abs().max()) for got, want in zip(*result, strict=True)]
            self.add(found[0], max(found[1:]))


def measured(row: Row) -> tuple[int, Errors]:
    """The oracle's designs, and its largest errors; what a test compares itself is read from its comparisons."""
    name, _, function = row.test.partition(":")
    module = importlib.import_module(f"tests.{name}")
    compare, found = getattr(module, function), Errors()
    takes = inspect.signature(compare).parameters
    designs = DESIGNS if {"seed", "number"} & takes.keys() else 1
    for seed in range(designs):
        with pytest.MonkeyPatch.context() as patch:
            if row.in_float64:
                patch.setattr(Tensor, "float", Tensor.double)
            for target, value in row.patches:
                patch.setattr(target, value)
            if function.startswith("test_"):
                for reported in {"errors", "decoder_errors", "largest_errors", "close"} & vars(module).keys():
                    patch.setattr(module, reported, reporting(getattr(module, reported), found))
            seeds = (seed,) if designs > 1 else ()
            others = (patch,) if {"patch", "monkeypatch"} & takes.keys() else ()
            result = compare(*row.first, *seeds, *others)
        found.add_result(result)
    return designs, found


def reporting(compare: Any, found: Errors) -> Any:
    """The comparison, which also adds what it finds."""

    def reported(*arguments: Any) -> Any:
        result = compare(*arguments)
        if result is None:  # of two tensors
            found.add(float((arguments[0] - arguments[1]).detach().abs().max()))
        else:
            found.add_result(result)
        return result

    return reported


def files_of(kind: str) -> list[str]:
    """The files of `src` that name a kind."""
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True)
    word = re.compile(rf"\b{kind}\b")
    apart = ("src/heddle/exchange/", "src/heddle/lab/explore/")
    return [
        path
        for path in listed.stdout.splitlines()
        if path.endswith(".py")
        and not path.startswith(apart)
        and word.search((ROOT / path).read_text(encoding="utf-8"))
    ]


def own_kind(name: str) -> str:
    """The kind that a case is about; empty for an option of another kind."""
    new = {
        "compressed_attention",
        "native_sparse_attention",
        "path_attention",
        "rwkv7",
        "attention_residuals",
        "ngram_memory",
    }
    return next((kind for _, kind in sorted(parts_of(case(name))) if kind in new), "")


def row_of(row: Row) -> tuple[str, ...]:
    """The cells of a part."""
    config = case(row.name)
    designs, found = measured(row)
    results = {result.name: result for result in run(config, OTHERS)}
    violated = [name for name, result in results.items() if not result.passed]
    silent = sum(bool(result.not_applicable) for result in results.values())
    laws = f"{len(results) - silent} of {len(results)}" if not violated else f"violated: {', '.join(violated)}"
    layouts = [name for name, law in LAYOUTS.items() if results[law].passed and not results[law].not_applicable]
    kind = own_kind(row.name)
    files = files_of(kind) if kind else []
    return (
        f"{row.part} (`{row.name}`)", f"{row.oracle}, `tests/{row.test.partition(':')[0].replace('.', '/')}.py`",
        str(designs), shown(found.values), shown(found.gradients), laws, ", ".join(layouts), sizes(config),
        f"{len(files)}: {', '.join(f'`{Path(path).name}`' for path in files)}" if files else "an option",
    )  # fmt: skip


def shown(error: float | None) -> str:
    return "—" if error is None else f"{error:.0e}"


def sizes(config: Any) -> str:
    """Whether the explorer's formulas give the size that is measured."""
    try:
        explorer_design(config)
    except ConfigError:
        return "law"
    built, declared = size(config, TOKENS), declared_size(config, TOKENS)
    if declared is None:
        return "law"
    state = built.state_bytes - built.position_table_bytes
    equal = declared.flops == round(built.flops_per_token * TOKENS) and declared.state_bytes == state
    return f"formula: {state:,} bytes, {declared.flops:,} FLOPs" if equal else f"differ: {declared}, {built}"


def rows(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The rows of these cases, or of all."""
    wanted = set(names)
    for row in ROWS:
        if not wanted or row.name in wanted:
            cells = row_of(row)
            print(*cells, sep=" | ", file=sys.stderr, flush=True)
            yield cells


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*")
    names = parser.parse_args().names
    text = table(HEAD, list(rows(names)))
    if names:
        print(text)
        return
    PAGE.write_text(
        joined("# The parts of 2026", "<!-- Written by tools/part_table.py. -->", INTRODUCTION, text), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
