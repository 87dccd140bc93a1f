"""hashes.txt, which `make lock` writes, locks every pin of constraints.txt, and nothing else."""

import re

import pytest
from packaging.utils import canonicalize_name

from tests.source import ROOT

CONSTRAINTS = "# A comment.\nfirst==1.0\nSecond_part==2.1\n"
HASHES = "".join(f"{pin} \\\n    --hash=sha256:{'1' * 64}\n" for pin in ("first==1.0", "second-part==2.1"))


def locked(text: str) -> dict[str, str]:
    """The version of each name whose lines hold a hash, or, in constraints.txt, of each name."""
    pins = re.findall(r"^([\w.-]+)==(\S+)$", re.sub(r" \\\n *--hash=sha256:[0-9a-f]{64}", "", text), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pins}


def faults(constraints: str, hashes: str) -> set[tuple[str, str]]:
    """The pins that stand in one of the two alone, or without a hash in the second."""
    bare = set(re.findall(r"^([\w.-]+)==(\S+)$", hashes, re.MULTILINE))
    return (locked(constraints).items() ^ locked(hashes).items()) | bare


def test_every_pin_has_hashes_and_no_other_version() -> None:
    constraints, hashes = ((ROOT / name).read_text(encoding="utf-8") for name in ("constraints.txt", "hashes.txt"))
    assert faults(constraints, hashes) == set()
    assert len(locked(hashes)) > 100


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("first==1.0", "first==1.1", {"first"}),
        (f"first==1.0 \\\n    --hash=sha256:{'1' * 64}", "first==1.0", {"first"}),
        (f"first==1.0 \\\n    --hash=sha256:{'1' * 64}\n", "", {"first"}),
        ("first==1.0", f"other==1.0 \\\n    --hash=sha256:{'1' * 64}\nfirst==1.0", {"other"}),
    ],
)
def test_planted_differences_are_listed(old: str, new: str, names: set[str]) -> None:
    assert faults(CONSTRAINTS, HASHES) == set()
    assert {name for name, _ in faults(CONSTRAINTS, HASHES.replace(old, new, 1))} == names
