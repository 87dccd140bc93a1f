"""`heddle plan`: predict memory and time of training on many GPUs, running nothing, or on this CPU, timing a step."""

import json
from typing import TYPE_CHECKING, Any

from heddle.lab.plan.training_plan import PlanSettings
from heddle.progress import format_amount, format_duration, terminal_safe

if TYPE_CHECKING:
    from rich.console import Console

MAX_LAYOUTS = 6
GB = 10**9
NAME_DATA = "add --data with your text; without it, the run reads the source code of Python"
_DAY = 86_400


def plan(settings: PlanSettings) -> None:
    """Print the fastest layouts of ranks that fit, and why others do not.

    Memory, communication and FLOPs follow from the design; the speed, from published training runs. See
    docs/plan/accuracy.md for its accuracy.
    """
    from heddle.lab.plan.training_plan import plan

    facts = plan(settings).facts
    if settings.json:
        print(json.dumps(facts, indent=2))
    elif settings.cpu:
        _print_cpu(facts)
    else:
        _print(settings.design, facts)


def _parameters(facts: dict[str, Any]) -> str:
    modules = facts["multi_token_parameters"]
    return f"{facts['parameters']:,} parameters" + (f" ({modules:,} in multi-token modules)" if modules else "")


def _vocabulary(facts: dict[str, Any]) -> str:
    words = f"vocabulary of {facts['vocab_size']:,} assumed: vocab_size is not set\n"
    return words if facts["vocab_size_assumed"] else ""


def _print_cpu(facts: dict[str, Any]) -> None:
    print(
        f"{_parameters(facts)}, {facts['flops_per_token'] / 1e9:,.3g} training GFLOPs per token at "
        f"{facts['sequence_length']:,} tokens; {facts['cpu']}, {facts['threads']} "
        f"thread{'s' * (facts['threads'] != 1)}\n{_vocabulary(facts)}"
    )
    for plan in facts["plans"]:
        layers = ", recomputed layers" if plan["recompute"] == "layers" else ""
        seconds, size = plan["step_seconds"], f"about {format_amount(plan['memory_total'], 'bytes')}"
        if seconds:
            rate = f"a step takes {seconds:.3g} s, {facts['tokens_per_step'] / seconds:,.0f} tokens/s"
        else:
            rate = "not timed, because it is slower than without" if plan["fits"] else "does not fit"
        print(f"  {plan['precision']}{layers}: {size}; {rate}")
    print(
        f"\nfastest: {facts['precision']}, steps of {facts['batch_size']:,} × {facts['sequence_length']:,} = "
        f"{facts['tokens_per_step']:,} tokens, {facts['tokens_per_second']:,.0f} tokens/s, "
        f"{facts['share_of_products']:.0%} of its matmul speed\n"
        f"memory at most {format_amount(facts['peak_memory'], 'bytes')} of {format_amount(facts['memory'], 'bytes')}"
    )
    seconds = facts["training_seconds"]
    if seconds is not None:
        print(f"training takes {_time(seconds)}, plus evaluations and checkpoints")
    if facts["command"]:
        print(f"\n{facts['command']}\n{NAME_DATA}")


def _time(seconds: float) -> str:
    return f"{seconds / _DAY:,.1f} days" if seconds > 2 * _DAY else format_duration(seconds)


def _print(design: str, facts: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=132)
    console.print(
        f"{design}: {_parameters(facts)}, {facts['flops_per_token'] / 1e9:,.1f} training GFLOPs per token at "
        f"{facts['sequence_length']:,} tokens; {facts['gpus']:,} × {facts['gpu']}, sequences of that length\n"
        f"{_vocabulary(facts)}",
        markup=False,
    )
    if facts["layouts"]:
        _print_layouts(console, facts)
        _print_best(console, facts["layouts"][0])
        for limit in facts["limits"]:
            console.print(f"  {limit}", markup=False)
        if facts["command"]:
            where = ", on each node, with NODE_RANK and MASTER_ADDR set" * facts["command"].startswith("torchrun")
            print(f"\nthe fastest layout{where}:\n{terminal_safe(facts['command'])}\n{NAME_DATA}\n")
    if facts["not_fitted"]:
        console.print(
            f"no published training with {' or '.join(facts['not_fitted'])} was fitted: this one may take longer than "
            "planned\n",
            markup=False,
        )
    _print_too_large(console, facts)
    if not facts["layouts"]:
        nearest = f": {' or '.join(facts['nearest'])} fits" if facts["nearest"] else ""
        console.print(f"no layout fits; use more or larger GPUs, or shorter sequences{nearest}")
    _print_engines(console, facts)
    if "dry_run" in facts:
        _print_dry_run(console, facts["dry_run"])


def _print_too_large(console: "Console", facts: dict[str, Any]) -> None:
    """For each recomputation mode, the shard degrees that do not fit, and what the smallest of them would need."""
    for recompute in ("none", "layers"):
        refused = [each for each in facts["too_large"] if each["recompute"] == recompute]
        if not refused:
            continue
        nearest = min(refused, key=lambda each: each["memory_total"])
        largest = max(nearest["memory"], key=nearest["memory"].get)
        degrees = ", ".join(f"{degree:,}" for degree in sorted(each["data_parallel_shard_degree"] for each in refused))
        console.print(
            f"recompute {recompute} does not fit at shard degree {degrees}: with one sequence per GPU it needs "
            f"{nearest['memory_total'] / GB:,.1f} GB of {facts['usable_memory'] / GB:,.1f} usable, "
            f"{nearest['memory'][largest] / GB:,.1f} of it {largest}",
            markup=False,
        )


def _print_layouts(console: "Console", facts: dict[str, Any]) -> None:
    from rich.table import Table

    has_time = facts["layouts"][0]["training_seconds"] is not None
    degrees = ("replicate", "shard", "sequences", "accumulation", "recompute")
    table = Table(box=None, pad_edge=False)
    speeds = ("GB", "tokens/s per GPU", "MFU", "tokens/s", *(["time"] if has_time else []))
    for name in (*degrees, "tokens per step", *speeds):
        table.add_column(name, justify="right")
    for each in facts["layouts"][:MAX_LAYOUTS]:
        table.add_row(
            f"{each['data_parallel_replicate_degree']:,}",
            f"{each['data_parallel_shard_degree']:,}",
            str(each["micro_batch_size"]),
            str(each["accumulation"]),
            each["recompute"],
            f"{each['tokens_per_step']:,}",
            f"{each['memory_total'] / GB:,.1f}",
            f"{each['tokens_per_second_per_gpu']:,.0f}",
            f"{each['mfu']:.1%}",
            f"{each['tokens_per_second_per_gpu'] * facts['gpus']:,.0f}",
            *([_time(each["training_seconds"])] if has_time else []),
        )
    console.print(table)


def _print_best(console: "Console", best: dict[str, Any]) -> None:
    memory = ", ".join(f"{name} {size / GB:,.1f}" for name, size in best["memory"].items())
    console.print(f"\nthe fastest layout, GB per rank: {memory}", markup=False)
    _print_collectives(console, best["collectives"])
    seconds = best["seconds"]
    console.print(
        f"  a step takes {seconds['step']:.2f} s: matmuls {seconds['products']:.2f}, attention "
        f"{seconds['attention']:.2f}, communication {seconds['communication']:.2f} (mostly overlapped with matmuls), "
        f"optimizer {seconds['optimizer']:.2f}"
    )
    console.print(
        f"  MFU counts causal attention; full attention, as in torchtitan, makes it {best['mfu_full_attention']:.1%}\n"
    )


def _print_collectives(console: "Console", collectives: list[dict[str, Any]]) -> None:
    for each in collectives:
        size = format_amount(each["bytes"], "bytes")
        console.print(f"  {each['name']} over {each['ranks']:,} ranks: {size} per step")


def _print_engines(console: "Console", facts: dict[str, Any]) -> None:
    """What the state of one sequence takes where the trained model is served."""
    served = [
        f"{each['engine']} {format_amount(each['state_bytes'][0], 'bytes')} ({each['dtype']})"
        for each in facts["engines"]
        if each["state_bytes"]
    ]
    if served:
        sequence = f"the state of {facts['sequence_length']:,} tokens, when served"
        console.print(f"{sequence}: {', '.join(served)}", markup=False)


def _print_dry_run(console: "Console", facts: dict[str, Any]) -> None:
    from rich.table import Table

    console.print(
        f"dry run of {facts['data_parallel_replicate_degree']:,} × {facts['data_parallel_shard_degree']:,} ranks, "
        f"{facts['micro_batch_size']} sequences each, recompute {facts['recompute']}: {facts['traced_layers']} layers "
        f"traced; most memory: {facts['peak']}",
        markup=False,
    )
    table = Table(box=None, pad_edge=False)
    for name in ("GB per rank", "planned", "traced"):
        table.add_column(name, justify="left" if name.startswith("GB") else "right")
    for name in (*facts["planned_memory"], "all"):
        sizes = [facts["planned_memory"], facts["memory"]]
        numbers = [sum(each.values()) if name == "all" else each.get(name, 0) for each in sizes]
        table.add_row(name, *(f"{number / GB:,.2f}" for number in numbers))
    console.print(table)
    _print_collectives(console, facts["collectives"])
    console.print(f"  {facts['flops'] / 1e12:,.1f} TFLOPs per step, including recomputation")
