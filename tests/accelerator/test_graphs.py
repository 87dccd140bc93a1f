"""Training and decoding steps are compiled as whole graphs, and many calls take few graphs."""

import pytest
import torch

from heddle.generation.decode import PinnedDecoder
from tests.accelerator import graphs
from tests.accelerator.graphs import Cell, read

pytestmark = [  # of the compiler itself, which instantiates autograd functions and reads .grad of any tensor
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
COVERING = [("window", "packed")]
ALL = [(mixer, kind) for mixer in graphs.MIXERS for kind in graphs.LAYOUTS]
SOAK = [pytest.param(*cell, marks=pytest.mark.soak) for cell in ALL if cell not in COVERING]


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(("mixer", "kind"), [*COVERING, *SOAK])
def test_a_training_step_takes_as_few_graphs_as_the_table_says(mixer: str, kind: str) -> None:
    cell = graphs.train(graphs.MIXERS[mixer], kind, 4)
    committed = read()[mixer].get(kind, Cell(1, 4))
    assert bool(cell.graphs) == bool(committed.graphs), cell
    assert cell.graphs <= committed.graphs, cell


@pytest.mark.parametrize(
    "mixer",
    ["window", *(pytest.param(mixer, marks=pytest.mark.soak) for mixer in graphs.MIXERS if mixer != "window")],
)
def test_all_tokens_take_one_graph(mixer: str) -> None:
    committed = read()[mixer]["decoding"]
    cell = graphs.decode(graphs.MIXERS[mixer], 12)
    assert cell.graphs == committed.graphs, cell
    assert committed.graphs == 1 or committed.error


def test_a_number_that_changes_with_each_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the index of the token is a Python number."""
    original = PinnedDecoder._read_tokens

    def read_tokens(self: PinnedDecoder, state: object) -> object:
        self.count = getattr(self, "count", 0) + 1  # type: ignore[attr-defined]
        self.position = torch.full((), self.count)  # type: ignore[attr-defined]
        return original(self, state)  # type: ignore[arg-type]

    monkeypatch.setattr(PinnedDecoder, "_read_tokens", read_tokens)
    assert graphs.decode(graphs.MIXERS["window"], 3).graphs > 1


def test_the_table_has_a_row_for_each_mixer() -> None:
    table = read()
    assert list(table) == list(graphs.MIXERS)
    assert "1 / 100 |" in graphs.markdown(table)
    assert Cell(0, 50, "why").text == "— (why)"
