"""Every design on the simulated GPU: no mixed devices, no host wait, the CPU's results.

The CI takes a few cases that have every kind of part and every form of attention, and each law on one of them. The soak
takes every case, with every law.
"""

import pytest

from heddle.config import kinds
from heddle.laws import LAWS, run
from tests.accelerator.comparison import faults_of
from tests.accelerator.pretend import DEVICE, pretending
from tests.cases import CASES, case, parts_of
from tests.covering import fewest
from tests.laws.violations import OPTIONS
from tests.source import slots

SHARES = 4
FORMS = [
    "attention-gqa", "attention-window-7", "attention-bidirectional-window", "attention-sink-window",
    "attention-softcap", "alibi-softcap-sink-window", "relative-bias", "delta-key-heads", "linear-attention-rope",
    "linear-attention-double-softmax", "cross-grouped", "moe-capacity", "moe-sigmoid-groups", "dropout-everywhere",
]  # fmt: skip
# Laws that run a model hundreds of times, on small cases.
REPEATED = {
    "chunked_decoding": "linear-attention-rope", "all_chunkings": "attention-gqa",
    "chunked_ragged_batch": "attention-sink-window", "state_rollback": "attention-window-7",
}  # fmt: skip
CI_CASES = list(dict.fromkeys((*fewest({name: parts_of(case(name)) for name in CASES}), *FORMS)))


def violations(name: str, laws: list[str]) -> list[str]:
    """The laws that a case violates on the simulated GPU."""
    with pretending():
        results = list(run(case(name), laws, device=DEVICE))
    return [f"{name}: {result.name}: {result.message}" for result in results if not result.passed]


@pytest.mark.parametrize("share", range(SHARES))
def test_every_kind_of_part_gives_the_results_of_the_cpu_without_a_host_wait(share: int) -> None:
    assert {name: faults for name in CI_CASES[share::SHARES] if (faults := faults_of(case(name)))} == {}


@pytest.mark.parametrize("share", range(SHARES))
def test_each_law_holds_on_the_accelerator(share: int) -> None:
    laws = [law for law in LAWS if law != OPTIONS]
    cases = [REPEATED.get(law, CI_CASES[number % len(CI_CASES)]) for number, law in enumerate(laws)]
    pairs = [*zip(cases, laws, strict=True)][share::SHARES]
    assert [fault for name, law in pairs for fault in violations(name, [law])] == []


def test_the_cases_of_the_ci_have_every_kind() -> None:
    covered = {part for name in CI_CASES for part in parts_of(case(name))}
    assert {(slot, kind) for slot in slots() for kind in kinds(slot)} == covered


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_every_case_gives_the_results_of_the_cpu_without_a_host_wait(name: str) -> None:
    assert faults_of(case(name)) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_every_case_satisfies_the_laws_on_the_accelerator(name: str) -> None:
    assert violations(name, list(LAWS)) == []
