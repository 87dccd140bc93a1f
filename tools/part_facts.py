"""What the pages of parts tell beside the code's words: measured states and costs, and the planted bugs of a kind."""

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, nn

from heddle.config import PARTS, kinds
from heddle.model.config import ModelConfig
from heddle.model.decoder import Layer, build
from heddle.numerics.dispatch.flop_counter import count_flops
from heddle.parts.context.build import ResidualContext
from heddle.parts.context.encoder_output import EncoderOutput
from heddle.parts.context.layout import Layout
from tests.cases import case, parts_of
from tests.laws.test_planted import BUGS, Bug
from tools.markdown import table

ELEMENT = 4  # bytes of a float32
SHORT, LONG = 64, 1024  # tokens of the texts that costs are told for
MEMORY = 64  # tokens of the memory that cross-attention reads
COSTS = f"""Costs are measured on a case of `tests/cases.py` built on the meta device, for one layer and row: operations
of matrix products (a multiply-add is two; causal pairs only), and elements of the state, 4 bytes each in float32. A
mixer's operations are a token's share of a text of {SHORT} and of one of {LONG:,} tokens; a memory has {MEMORY}."""
FAR = 99  # imports from what does not lean on a module at all


def state_of(config: ModelConfig) -> tuple[int, int]:
    """Elements of one layer's state for one row: what a further token adds, and what is held after `SHORT` tokens."""
    model = build(config, device="meta")
    if not model.causal:
        return 0, 0
    memory = memory_for(model.encoder_width)
    states = [model.init_state(1, tokens, memory) for tokens in (SHORT, SHORT + 1)]
    kept, more = (sum(state.layer_bytes) // (ELEMENT * config.depth) for state in states)
    return more - kept, kept


def memory_for(width: int | None) -> EncoderOutput | None:
    """What cross-attention reads, where something is read."""
    return None if width is None else EncoderOutput(torch.zeros(1, MEMORY, width, device="meta"))


def layer_of(config: ModelConfig) -> Layer:
    """The first layer of a design, on the meta device."""
    found = build(config, device="meta").layers[0]
    assert isinstance(found, Layer)
    return found


def counted(tokens: int, run: Callable[[Tensor, Layout], object], width: int) -> int:
    """Operations a token of the matrix products of one call on the meta device (a multiply-add is two)."""
    with torch.no_grad(), count_flops() as tally:
        run(torch.zeros(1, tokens, width, device="meta"), Layout.causal(1, tokens, device="meta"))
    return round(tally[0] / tokens)


def mixer_costs(config: ModelConfig) -> tuple[int, int]:
    """Operations a token of the first layer's mixer, in texts of `SHORT` and of `LONG` tokens."""
    mixer = layer_of(config).mixer
    assert mixer is not None

    def run(x: Tensor, layout: Layout) -> object:
        memory = memory_for(mixer.encoder_width)
        return mixer(x, layout if memory is None else layout.with_encoder_output(memory))

    return counted(SHORT, run, config.width), counted(LONG, run, config.width)


def forward_costs(config: ModelConfig) -> tuple[int, int, int]:
    """Parameters of the first layer's feed-forward, those that a token meets, and its operations a token."""
    forward = layer_of(config).feedforward
    assert forward is not None
    whole = sum(parameter.numel() for parameter in forward.parameters())
    return whole, whole - forward.inactive_parameters, counted(SHORT, forward, config.width)


def wiring_costs(config: ModelConfig) -> tuple[int, int]:
    """Parameters of the wiring of one layer of two branches, and operations a token of its own matrix products."""
    wiring = ResidualContext(("mixer", "feedforward"), config.width, config.norm, 0.0)
    with torch.device("meta"):
        block = config.residual.build(wiring)
    branches = {name: nn.Identity() for name in wiring.branches}
    cost = counted(SHORT, lambda x, _: block(config.residual.expand(x), branches), config.width)
    return sum(parameter.numel() for parameter in block.parameters()), cost


def mixer_table(kind: str, cases: list[str]) -> str:
    """State and cost of each case whose layers are all alike."""
    rows, seen = [], set()
    for name in cases:
        config = case(name)
        mixer = config.layers[0].mixer
        if len(config.layers) > 1 or mixer is None:
            continue
        plain = {key: value for key, value in mixer.dump().items() if key in ("window", "causal") or type(value) is int}
        cost = tuple(f"{flops:,}" for flops in mixer_costs(config))
        more, kept = state_of(config)
        cells = ("refused: it sees later tokens", "", *cost) if kept == 0 else (f"{more:,}", f"{kept:,}", *cost)
        if cells not in seen:
            seen.add(cells)
            shown = [f"{key} {value}" for key, value in plain.items() if value is not True]
            sizes = ", ".join([f"width {config.width}", *shown]).replace("False", "false")
            rows.append((f"`{name}`", sizes, *cells))
    head = ("case", "sizes", "state: elements a further token adds", f"elements after {SHORT}")
    return table((*head, f"operations a token of {SHORT}", f"of {LONG:,}"), rows)


def forward_table(kind: str, cases: list[str]) -> str:
    """Parameters and cost of each case whose first layer has the feed-forward."""
    rows: dict[tuple[str, ...], str] = {}
    for name in cases:
        config = case(name)
        forward = config.layers[0].feedforward
        if forward is not None and forward.kind == kind:
            rows.setdefault(tuple(f"{number:,}" for number in forward_costs(config)), name)
    head = ("case", "parameters", "of these a token meets", "operations a token")
    return table(head, [(f"`{name}`", *cells) for cells, name in rows.items()])


def wiring_table(kind: str, cases: list[str]) -> str:
    """Parameters and cost of the wiring in each case that has it."""
    rows: dict[tuple[str, ...], str] = {}
    for name in cases:
        rows.setdefault(tuple(f"{number:,}" for number in wiring_costs(case(name))), name)
    head = ("case", "parameters of one layer's wiring", "operations a token of its own products")
    return table(head, [(f"`{name}`", *cells) for cells, name in rows.items()])


COSTED = {"mixers": mixer_table, "feedforwards": forward_table, "residuals": wiring_table}


@cache
def leans_on(module: str) -> dict[str, int]:
    """How many imports away from a kind's file are the numerics under it, and what is beside the slots (1 only)."""
    depths, new = {module: 0}, [module]
    while new:
        here = new.pop(0)
        for name in imported(here):
            beside = here == module and name.count(".") == 2 and name.startswith("heddle.parts.") and is_file(name)
            if name not in depths and (beside or name.startswith("heddle.numerics.")):
                depths[name] = depths[here] + 1
                if not beside:
                    new.append(name)
    return depths


@cache
def owners(module: str) -> frozenset[str]:
    """The slots whose kinds lean on a module most directly; none where more than two do, for it is everyone's."""
    found = {}
    for slot in (folder.name for folder in PARTS.iterdir() if (folder / "__init__.py").is_file()):
        near = [leans_on(f"heddle.parts.{slot}.{kind}").get(module, FAR) for kind in kinds(slot)]
        found[slot] = min(near)
    nearest = [slot for slot, depth in found.items() if depth == min(found.values())]
    return frozenset(nearest if len(nearest) <= 2 else ())


def imported(module: str) -> Iterator[str]:
    """The modules that a module's source imports from."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    yield from (node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module)


def is_file(module: str) -> bool:
    """Whether a module is a file rather than a slot's folder."""
    return not vars(importlib.import_module(module)).get("__path__")


def bugs_of(slot: str, kind: str) -> list[Bug]:
    """The planted bugs whose case holds the kind and whose place is its file, or what that leans on."""
    here = leans_on(f"heddle.parts.{slot}.{kind}")
    found = []
    for bug in BUGS:
        module = f"heddle.{bug.place.partition(':')[0]}"
        if module in here and slot in owners(module) and (slot, kind) in parts_of(case(bug.case)):
            found.append(bug)
    return found
