"""hashes.txt locks every pin of constraints.txt, and nothing else."""

from typing import Any

import pytest

from tests.source import ROOT
from tools.hashes import faults, lock, read_pins

CONSTRAINTS = "# A comment.\nfirst==1.0\nSecond_part==2.1\n"
DIGESTS = ["1" * 64, "2" * 64, "3" * 64]
HASHES = f"first==1.0 --hash=sha256:{DIGESTS[0]}\nSecond_part==2.1 --hash=sha256:{DIGESTS[1]}\n"


def report(name: str, version: str, digest: str) -> dict[str, Any]:
    item = {"metadata": {"name": name, "version": version}}
    return {"install": [item | {"download_info": {"url": "x", "archive_info": {"hashes": {"sha256": digest}}}}]}


def test_every_pin_has_hashes_and_no_other_version() -> None:
    constraints, hashes = ((ROOT / name).read_text(encoding="utf-8") for name in ("constraints.txt", "hashes.txt"))
    assert faults(constraints, hashes) == []
    assert len(read_pins(hashes)) > 100


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("first==1.0", "first==1.1", "first: 1.1 is not 1.0"),
        (f" --hash=sha256:{DIGESTS[0]}", "", "first: no hash"),
        (f"first==1.0 --hash=sha256:{DIGESTS[0]}\n", "", "first: no hash"),
        ("first==1.0", f"other==1.0 --hash=sha256:{DIGESTS[2]}\nfirst==1.0", "other: not in constraints.txt"),
    ],
)
def test_planted_differences_are_listed(old: str, new: str, line: str) -> None:
    assert faults(CONSTRAINTS, HASHES) == []
    assert faults(CONSTRAINTS, HASHES.replace(old, new, 1)) == [line]


@pytest.mark.parametrize("line", ["first>=1.0", "--index-url https://a", "first==1.0 --hash=md5:1", "first @ /a"])
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="is no pin"):
        read_pins(line)
    with pytest.raises(ValueError, match="twice"):
        read_pins(CONSTRAINTS + "first==1.0\n")


def test_hashes_are_added_until_the_pin_changes() -> None:
    """Builds for a CPU are of the same version; names are compared as pip does."""
    text = lock(CONSTRAINTS, HASHES, [report("First", "1.0+cpu", DIGESTS[2])])
    assert read_pins(text) == {
        "first": ("1.0", frozenset([DIGESTS[0], DIGESTS[2]])),
        "Second_part": ("2.1", frozenset([DIGESTS[1]])),
    }
    newer = CONSTRAINTS.replace("2.1", "2.2")
    text = lock(newer, HASHES, [report("second.part", "2.2", DIGESTS[2])])
    assert read_pins(text)["Second_part"] == ("2.2", frozenset([DIGESTS[2]]))
    with pytest.raises(ValueError, match=r"second-part 2.1 is not in constraints.txt"):
        lock(newer, HASHES, [report("second-part", "2.1", DIGESTS[2])])
    with pytest.raises(ValueError, match=r"third 1 is not in constraints.txt"):
        lock(newer, HASHES, [report("third", "1", DIGESTS[2])])
