"""Which mixers are compiled as whole graphs, and how many graphs many calls take.

python -m tests.accelerator.graphs      writes tests/goldens/graphs.json, and its table in docs/gpu/budgets.md

A training step is forward, loss and backward, compiled with `fullgraph=True`. Each packed batch has other documents. A
decoding step reads a token of each row with a pinned state and chooses the next one.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from heddle.laws.harness import layout_for, model_under_test, random_tokens
from heddle.model.decoder import Decoder
from heddle.numerics.cross_entropy import loss_sum
from heddle.numerics.random import RandomKey, use_random_key
from heddle.parts.layout import Layout
from heddle.parts.modules.router_statistics import record_router_statistics
from tests.cases import case
from tests.generation.loops import pinned_decoder

GOLDEN = Path(__file__).parent.parent / "goldens/graphs.json"
PAGE = Path(__file__).parent.parent.parent / "docs/gpu/budgets.md"
BEGIN, END = "<!-- graphs: begin -->", "<!-- graphs: end -->"

MIXERS = {
    "attention": "attention-gqa",
    "window": "attention-window-7",
    "softcap, sink, window": "attention-softcap-sink-window",
    "ALiBi": "alibi",
    "latent attention": "latent-low-rank-query",
    "differential attention": "differential",
    "cross-attention": "cross-grouped",
    "pair of windows": "pair-windows",
    "linear attention": "linear-attention-elu",
    "retention": "retention-rope-gate",
    "gated delta": "delta",
    "KDA": "kda",
    "RWKV-7": "rwkv7",
    "Mamba-2": "mamba2",
    "gated delta and attention": "delta-hybrid",
    "attention, experts": "moe",
    "attention, dropout": "dropout-everywhere",
}
LAYOUTS = ("causal", "padded", "packed")
KINDS = (*LAYOUTS, "decoding")
ROWS, LENGTH = 2, 24
PROMPT, TOKENS, LIMIT = 6, 100, 128  # of decoding


class Cell(NamedTuple):
    """graphs: how many were compiled for `calls` calls, 0 if none serves as a whole. error: the compiler's reason."""

    graphs: int
    calls: int
    error: str = ""

    @property
    def text(self) -> str:
        """The cell of a table."""
        return f"{self.graphs} / {self.calls}" if self.graphs else f"— ({self.error})"


def layouts(kind: str, calls: int) -> list[Layout]:
    """The layouts of the calls. Documents and padding differ from call to call."""
    if kind == "causal":
        return [Layout.causal(ROWS, LENGTH) for _ in range(calls)]
    if kind == "padded":
        return [Layout.padded([1 + call % LENGTH, LENGTH]) for call in range(calls)]
    return [Layout.packed([_cut(call), _cut(3 * call + 5)]) for call in range(calls)]


def _cut(call: int) -> list[int]:
    """The lengths of a row's documents, several in each row, not equally many."""
    first, second = 1 + call % 7, 2 + call % 5
    rest = LENGTH - first - second
    return [first, second, rest] if call % 3 else [first, rest // 2, second, rest - rest // 2]


def train(name: str, kind: str, calls: int) -> Cell:
    """Compile the training step of a case. Raises AssertionError if a loss or a gradient differs from the eager one."""
    torch._dynamo.reset()
    model = model_under_test(case(name)).train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_loss, backend=counter, fullgraph=True)
    tokens, targets = (random_tokens(model.config, ROWS, LENGTH, seed) for seed in (0, 1))
    try:
        for call, layout in enumerate(layouts(kind, calls)):
            if call == 0:  # before the first graph: the constants of a module are made by its first call
                want = _gradients(model, call, _loss, tokens, _for_model(model, layouts(kind, 1)[0]), targets)
            got = _gradients(model, call, compiled, tokens, _for_model(model, layout), targets)
            if call == 0:
                assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-10) for a, b in zip(got, want, strict=True)), name
    except torch._dynamo.exc.TorchDynamoException as error:
        return Cell(0, calls, _reason(error))
    return Cell(counter.frame_count, calls)


def _for_model(model: Decoder, layout: Layout) -> Layout:
    """The layout, with an encoder output that no gradient leads to if the design reads one."""
    with torch.no_grad():
        return layout_for(model, ROWS, LENGTH, layout)


def _loss(model: Decoder, tokens: Tensor, layout: Layout, targets: Tensor) -> Tensor:
    hidden, _ = model(tokens, layout)
    scored = hidden.masked_fill((layout.positions < 0)[..., None], 0.0)  # what padding yields is not defined
    return loss_sum(scored.flatten(0, 1), model.head.output_head, targets.flatten())


def _gradients(model: Decoder, step: int, run: Callable[..., Tensor], *arguments: object) -> list[Tensor]:
    """The losses, all that routers record and the gradients of all parameters, which are removed from them."""
    with use_random_key(RandomKey(1, step, torch.arange(ROWS))), record_router_statistics() as recorder:
        loss = run(model, *arguments)
    entries = recorder.entries
    aux_losses = [entry.aux_loss for entry in entries if entry.aux_loss is not None]
    recorded = [x.detach() for entry in entries for x in (*aux_losses, entry.expert_counts, entry.entropy)]
    sum(aux_losses, loss).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return [loss.detach(), *recorded, *gradients]


def decode(name: str, tokens: int = TOKENS) -> Cell:
    """Compile the decoding step of a case. Raises AssertionError if a token differs from the eager ones."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    eager, traced = (pinned_decoder(model_under_test(case(name)), PROMPT, TOKENS, LIMIT) for _ in range(2))
    step = torch.compile(traced.step, backend=counter, fullgraph=True)
    try:
        for _ in range(tokens):
            step()
            eager.step()
            assert torch.equal(traced.tokens, eager.tokens), name
    except torch._dynamo.exc.TorchDynamoException as error:
        return Cell(0, tokens, _reason(error))
    return Cell(counter.frame_count, tokens)


def _reason(error: Exception) -> str:
    """The compiler's reason in a few words."""
    line = str(error).split("\n")[0].strip()
    places = re.findall(r'File "[^"]*/src/heddle/([^"]*)", line (\d+)', str(error))
    return f"{line} at {places[-1][0]}" if places else line


def table(calls: int = 50) -> dict[str, dict[str, Cell]]:
    """All cells: of every mixer, training by layout, and decoding."""
    cells = {}
    for mixer, name in MIXERS.items():
        cells[mixer] = {kind: train(name, kind, calls) for kind in LAYOUTS}
        cells[mixer]["decoding"] = decode(name)
        print(mixer, *(f"{kind} {cell.text};" for kind, cell in cells[mixer].items()), flush=True)
    return cells


def markdown(cells: dict[str, dict[str, Cell]]) -> str:
    """The table of docs/gpu/budgets.md."""
    head = [f"| graphs / calls | {' | '.join(KINDS)} |", "|---" * (1 + len(KINDS)) + "|"]
    mixers: dict[tuple[str, ...], list[str]] = {}  # mixers with equal counts share a row
    for mixer, row in cells.items():
        counts = tuple(row[kind].text if kind in row else "not measured" for kind in KINDS)
        mixers.setdefault(counts, []).append(mixer)
    return "\n".join([*head, *(f"| {'; '.join(names)} | {' | '.join(row)} |" for row, names in mixers.items())])


def read() -> dict[str, dict[str, Cell]]:
    """The committed table."""
    return {
        mixer: {kind: Cell(*cell) for kind, cell in row.items()}
        for mixer, row in json.loads(GOLDEN.read_text()).items()
    }


def in_page(page: str, cells: dict[str, dict[str, Cell]]) -> str:
    """The page with the table between its two marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{markdown(cells)}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    cells = table()
    GOLDEN.write_text(json.dumps(cells, indent=1) + "\n")
    page = PAGE.read_text() if PAGE.exists() else ""
    if BEGIN in page:
        PAGE.write_text(in_page(page, cells))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
