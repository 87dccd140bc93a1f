"""Run conformance kits on bugs that shipped: the rows of docs/shipped-bugs.md that concern inference, planted again.

    python tools/conformance_historic.py KIT… [--out evidence/results/conformance_historic.json]

A bug's faulty code path is re-created in heddle's own code, by the plant that `tests/laws/test_planted.py` has for it,
or in transformers here. An engine runs with it in a forked child: in float32, and in bfloat16 if nothing is wrong. What
no kit can see is counted apart, with why. `--seen-in` runs the rows that match it, and keeps the others of `--out`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from heddle.lab.conformance.build import DTYPES
from heddle.lab.conformance.run import WRONG, HeddleModel, TransformersModel, _run_model
from tests.laws.planting import wrapped
from tests.laws.test_planted import BUGS
from tools.mutants import in_child

Patch = pytest.MonkeyPatch
SECONDS = 300.0  # of a processor, for one run of a family
MODELS = 4  # of a family
PLANTS = {bug.description: bug.plant for bug in reversed(BUGS)}


def as_longer_texts_had_it(patch: Patch) -> None:
    """Frequencies that a longer text has scaled stay for the shorter one after it."""

    def stale(frequencies: Any, rope: Any, layout: Any, dtype: torch.dtype) -> Any:
        rope.longest = max(vars(rope).get("longest", 0), layout.length)
        return frequencies(rope, replace(layout, start=None, doc_lengths=((rope.longest,),), cache={}), dtype)

    wrapped(PLANTS["rotary frequencies changed by a long text and not restored"].target, stale)(patch)


def other_layout(patch: Patch) -> None:
    """Neighbours are rotated as pairs, not the halves of a head."""
    from transformers.models.llama import modeling_llama

    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    def apply(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        pairs = [
            each[..., : each.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for each in (cos, sin)
        ]
        return tuple(x * pairs[0] + turned(x) * pairs[1] for x in (q, k))

    patch.setattr(modeling_llama, "apply_rotary_pos_emb", apply)


def positions_restart(patch: Patch) -> None:
    """Positions count from the start of each call; the cache is whole."""
    run = TransformersModel._run
    patch.setattr(TransformersModel, "_run", lambda self, tokens, start=0, **inputs: run(self, tokens, 0, **inputs))


def positions_after_rollback(patch: Patch) -> None:
    """After a rollback from 20 tokens to 12, positions go on from 20."""
    run = TransformersModel._run

    def wrong(self: Any, tokens: Any, start: int = 0, **inputs: Any) -> Any:
        return run(self, tokens, 20 if start == 12 and len(tokens) > 1 else start, **inputs)

    patch.setattr(TransformersModel, "_run", wrong)


def tiled_heads(patch: Patch) -> None:
    """Key and value heads are tiled, not repeated."""
    from transformers.models.llama import modeling_llama

    attend = modeling_llama.eager_attention_forward

    def wrong(module: Any, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
        groups, module.num_key_value_groups = module.num_key_value_groups, 1
        result = attend(module, q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), *rest, **options)
        module.num_key_value_groups = groups
        return result

    patch.setattr(modeling_llama, "eager_attention_forward", wrong)


def wider_window(patch: Patch) -> None:
    """A mask with one key more."""
    from transformers import masking_utils

    overlay = masking_utils.sliding_window_overlay
    patch.setattr(masking_utils, "sliding_window_overlay", lambda window: overlay(window + 1))


def unused_memory(patch: Patch) -> None:
    """Slots of a static cache are multiplied by weights of zero, and no number before they are written."""
    from transformers.cache_utils import StaticLayer

    begin = StaticLayer.lazy_initialization

    def wrong(self: Any, *states: Any) -> None:
        begin(self, *states)
        for buffer in (self.keys, self.values):
            buffer.fill_(torch.nan)

    patch.setattr(StaticLayer, "lazy_initialization", wrong)


def positions_in_the_window(patch: Patch) -> None:
    """A token's position is the number of keys that the trimmed cache holds."""
    run = TransformersModel._run

    def wrong(self: Any, tokens: Any, start: int = 0, **inputs: Any) -> Any:
        return run(self, tokens, min(start, self.model.config.sliding_window - 1), **inputs)

    patch.setattr(TransformersModel, "_run", wrong)


def another_request(patch: Patch) -> None:
    """A text is read with the cache that the one before has left."""
    run = TransformersModel._run

    def wrong(self: Any, tokens: Any, start: int = 0, **inputs: Any) -> Any:
        left = vars(self).get("left")
        result = run(self, tokens, start, **{"past_key_values": left, **inputs, "use_cache": True})
        self.left = result.past_key_values
        return result

    patch.setattr(TransformersModel, "_run", wrong)


def _masks(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    from transformers import masking_utils

    make = masking_utils.eager_mask

    def changed(*arguments: Any, **options: Any) -> Any:
        mask = make(*arguments, **options)
        return mask if mask is None else change(mask)

    masking_utils.AttentionMaskInterface.register("eager", changed)


def another_row_after_64(patch: Patch) -> None:
    """Beyond 64 keys a query has the mask of the next."""
    _masks(
        lambda mask: torch.cat((mask[..., :64, :], mask[..., 65:, :], mask[..., -1:, :]), 2)[..., : mask.shape[2], :]
    )


def rows_without_keys(patch: Patch) -> None:
    """What is masked is minus infinity, so a row without keys is not a number."""
    _masks(lambda mask: mask.masked_fill(mask < -1e30, -torch.inf))


def weight_before_the_cast(patch: Patch) -> None:
    """A norm whose weight is applied in the other precision."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * wide).to(x.dtype)

    patch.setattr(LlamaRMSNorm, "forward", forward)


def chunks_alone(patch: Patch) -> None:
    """A chunk's mask without the prefix: its queries see the chunk alone."""

    def changed(mask: torch.Tensor) -> torch.Tensor:
        before = mask.shape[-1] - mask.shape[-2]
        return mask if mask.shape[-2] == 1 else mask.index_fill(-1, torch.arange(before), torch.finfo(mask.dtype).min)

    _masks(changed)


def epsilon_outside(patch: Patch) -> None:
    """The epsilon is added to the root."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        root = wide.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon
        return self.weight * (wide / root).to(x.dtype)

    patch.setattr(LlamaRMSNorm, "forward", forward)


class Row(NamedTuple):
    """A shipped bug. plant: a description in `BUGS`, or a change of transformers; None: why it cannot be run.

    name: in the name that a kit must give it.
    """

    seen_in: str
    family: str
    plant: str | Callable[[Patch], None] | None
    name: str = ""
    why: str = ""


ROWS = [
    Row("transformers#25199, gpt-fast#190", "llama", other_layout, "position.layout is"),
    Row("gpt-neox#1003, transformers#29285", "llama", "rotary angles computed in the model's bfloat16", "angles of"),
    Row("Megatron-LM#744", "llama", "rotary frequencies in a buffer that a dtype conversion rounds"),
    Row("transformers#27033", "phi3", as_longer_texts_had_it, "RoPE stays as a longer text had it"),
    Row("unsloth#4078", "llama", "the first row's positions used for every row", "positions of its longest row"),
    Row("C2C#19, transformers#43082", "llama", positions_restart, "positions restart at each cut"),
    Row("Token-Print#268", "mistral", positions_in_the_window, "counted within the window"),
    Row("transformers#37574", "mistral", "a ring buffer unrolled one step too far", "unrolled one slot too far"),
    Row("transformers#47708", "mistral", "ring buffer slots off by one", "keys are one slot too far"),
    Row("transformers#45940", "llama", "attention to unused slots beyond the text", "ends at the last slot"),
    Row("litgpt#2182, mlxcel#405", "mistral", "a ring buffer overwritten before it is read", "is overwritten"),
    Row("mlxcel#678", "mistral", "positions of a ring buffer rolled the wrong way", "unrolled the wrong way"),
    Row("Megatron-Bridge#2656", "mistral", wider_window, "window is"),
    Row("pytorch#108108", "llama", "a causal mask aligned to the first key instead of the last", "at the first key"),
    Row("transformers#48821", "llama", "a causal mask left out", "causal is False"),
    Row("pytorch#103749, unsloth#9848", "llama", rows_without_keys, "not numbers"),
    Row("pytorch#101967", "llama", unused_memory, "not numbers"),
    Row("candle#3743", "llama", chunks_alone, "each piece sees itself alone"),
    Row("tt-metal#48899", "qwen3", another_row_after_64, "the mask of the next"),
    Row("vllm#23279", "qwen3_next", "a recurrent state that does not decay between chunks"),
    Row("LMCache#4385", "llama", another_request, "text before is still in the cache"),
    Row("mlx-lm#1494", "llama", positions_after_rollback, "removed tokens still count"),
    Row("nanoVLM#204", "llama", "the documents of a packed row attended to as one", "packed texts see each other"),
    Row("onnx#7274, axlearn#842", "llama", tiled_heads, "tiled"),
    Row("transformers#29402, gemma_pytorch#67", "llama", weight_before_the_cast),
    Row("gpt-neox#1345", "llama", epsilon_outside, "epsilon is added to the root"),
    Row("llama.cpp#11446, flashinfer#551", "deepseek_v3", "absorbed values sliced from the wrong end"),
    Row("transformers#28163", "", None, why="scores overflow in float16 alone, which kits have no tolerance for"),
    Row("flash-linear-attention#77, #389", "", None, why="the gates that overflow are larger than drawn ones"),
    Row("litgpt's odd cases", "", None, why="an error of shapes before any logit"),
    Row("flash-linear-attention#1198, fast-transformers#32", "", None, why="no family of transformers has such sums"),
]  # fmt: skip


def wrong_cases(folders: list[Path], in_heddle: bool, dtype: str, plant: Callable[[Patch], None] | None) -> str:
    """The cases that are wrong with a plant, as JSON: model and number -> property and name."""
    if plant is not None:
        plant(Patch())
    mode = "static" if plant is unused_memory else "eager"
    engine: Any = HeddleModel if in_heddle else partial(TransformersModel, mode=mode)
    found = {}
    for folder in folders:
        findings = _run_model(folder, lambda place: nullcontext(engine(place, dtype=DTYPES[dtype])), dtype)
        for number, each in enumerate(findings):
            if each.status == WRONG:
                found[f"{folder.name} {number}"] = each.property, each.bug
    return json.dumps(found)


@cache
def wrong_without(folders: tuple[Path, ...], in_heddle: bool, dtype: str) -> dict[str, Any]:
    """The cases that are wrong without any."""
    found: dict[str, Any] = json.loads(in_child(partial(wrong_cases, list(folders), in_heddle, dtype, None), SECONDS))
    return found


def check(row: Row, folders: list[Path]) -> dict[str, Any]:
    """Plant the bug and run the cases: in float32, and where nothing is wrong in bfloat16."""
    in_heddle = isinstance(row.plant, str) or row.plant is as_longer_texts_had_it
    plant: Any = PLANTS[row.plant] if isinstance(row.plant, str) else row.plant
    found, dtype = {}, ""
    for dtype in DTYPES:
        answer = in_child(partial(wrong_cases, folders, in_heddle, dtype, plant), SECONDS)
        before = wrong_without(tuple(folders), in_heddle, dtype)
        found = {key: each for key, each in json.loads(answer or '{"all": ["no end", null]}').items()
                 if key not in before}  # fmt: skip
        if found:
            break
    return {
        "planted in": "heddle" if in_heddle else "transformers", "found": bool(found), "cases": len(found),
        "dtype": dtype if found else None, "properties": sorted({what for what, _ in found.values()}),
        "names": sorted({name for _, name in found.values() if name}),
        "named": any(row.name in (name or "") for _, name in found.values()) if row.name else False,
    }  # fmt: skip


def main() -> int:
    """Run the rows, print each, and write them with the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kits", nargs="+", type=Path, metavar="KIT")
    parser.add_argument("--seen-in", default="")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    import transformers  # noqa: F401  # before children are forked

    torch.set_num_threads(1)
    warm = next(folder for kit in arguments.kits for folder in kit.glob("llama/*"))
    for in_heddle in (True, False):  # what every child would import
        wrong_cases([warm], in_heddle, "float32", None)
    lines: list[dict[str, Any]] = []
    before = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    for row in ROWS:
        if not re.search(arguments.seen_in, row.seen_in):
            lines += [line for line in before if line["seen in"] == row.seen_in]
            continue
        line: dict[str, Any] = {"seen in": row.seen_in, "family": row.family, "found": False, "why": row.why}
        if row.plant is not None:
            folders = [folder for kit in arguments.kits for folder in sorted(kit.glob(f"{row.family}/*"))]
            line |= check(row, folders[:MODELS])
        lines.append(line)
        print(json.dumps(line), flush=True)
    ran = [line for line in lines if "planted in" in line]
    found = [line for line in ran if line["found"]]
    counts = {"run": len(ran), "found": len(found), "named": sum(line["named"] for line in found)}
    print(counts)
    if arguments.out:
        arguments.out.write_text(json.dumps({**counts, "rows": lines}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
