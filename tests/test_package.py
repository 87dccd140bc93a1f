"""The wheel holds every file of the package: the patterns of pyproject.toml, and the check of `make package`."""

import tomllib
import zipfile
from pathlib import Path

from tests.source import ROOT
from tools.package import faults

PACKAGE = ROOT / "src/heddle"


def test_every_data_file_has_a_pattern() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = settings["package-data"]["heddle"]
    packaged = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert sorted(files - packaged) == []
    assert all(list(PACKAGE.glob(pattern)) for pattern in patterns)


def test_every_folder_is_a_package() -> None:
    """Files without an `__init__.py` beside them would be left out of the wheel."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_a_wheel_that_lacks_a_file_or_holds_another_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "src/heddle"
    package.mkdir(parents=True)
    for name in ("__init__.py", "page.html"):
        (package / name).write_text("")
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("heddle/__init__.py", "")
        archive.writestr("tests/other.py", "")
        archive.writestr("heddle_lm-1.dist-info/METADATA", "")
    assert faults(wheel, package) == ["heddle/page.html: is missing", "tests/other.py: does not belong there"]
