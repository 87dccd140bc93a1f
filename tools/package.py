"""Build the sdist and the wheel into dist/, offline, and try the wheel from an empty folder.

    python tools/package.py

The wheel is built from the sdist, so that nothing outside it is needed. It must hold every file of the package, and no
other; the commands run from it in a folder without the repository.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRIED = (
    ("--version",),
    ("presets",),
    ("show", "preset:gqa-tiny", "--context-length", "64"),
    ("explore", "--out", "explorer"),
    ("train", "preset:gqa-tiny", "width=16", "layers.0.repeat=1", "--data", "text.txt", "--vocab-size", "300",
     "--steps", "2", "--batch-size", "2", "--sequence-length", "16", "--out", "run", "--quiet"),
    ("generate", "run", "--prompt", "thread", "--max-new-tokens", "4"),
)  # fmt: skip


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist from a copy of the tracked and new files, and the wheel from the sdist; returns both."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    source, unpacked, out = folder / "source", folder / "unpacked", folder / "dist"
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    out.mkdir()
    sdist = out / _backend(source, "build_sdist", out)
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    return sdist, out / _backend(next(unpacked.iterdir()), "build_wheel", out)


def _backend(folder: Path, step: str, out: Path) -> str:
    code = f"import sys; from setuptools.build_meta import {step} as step; print('built', step(sys.argv[1]))"
    result = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=folder, capture_output=True, text=True, check=False
    )
    if result.returncode:
        sys.exit(f"heddle: {step} failed:\n{result.stderr[-2000:]}")
    return result.stdout.rpartition("built ")[2].strip()


def faults(wheel: Path, package: Path) -> list[str]:
    """What the wheel lacks of the package's folder, and what it holds besides."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    expected = {path.relative_to(package.parent).as_posix() for path in files}
    return [f"{name}: is missing" for name in sorted(expected - held)] + [
        f"{name}: does not belong there" for name in sorted(held - expected)
    ]


def try_wheel(wheel: Path, folder: Path) -> None:
    """Run commands from the unpacked wheel in an empty folder. Exits with the first that fails."""
    installed, empty = folder / "installed", folder / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    (empty / "text.txt").write_text("".join(f"thread {i} over {j}\n" for i in range(40) for j in range(40)))
    environment = os.environ | {"PYTHONPATH": str(installed), "HEDDLE_CACHE": str(folder / "cache")}
    where = [sys.executable, "-c", "import heddle; print(heddle.__file__)"]
    home = subprocess.run(where, cwd=empty, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(home).is_relative_to(installed):
        sys.exit(f"heddle: the wheel was not tried: heddle was imported from {home}")
    for arguments in TRIED:
        command = [sys.executable, "-m", "heddle", *arguments]
        result = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            sys.exit(f"heddle: in an empty folder, heddle {' '.join(arguments)} failed:\n{result.stderr[-2000:]}")
        print(f"heddle: from the wheel: heddle {' '.join(arguments[:2])}")


def main() -> None:
    """Build, check, try; then move both files to dist/."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        if lines := faults(wheel, folder / "source" / "src" / "heddle"):
            sys.exit("heddle: the wheel is not the package:\n" + "\n".join(lines))
        try_wheel(wheel, folder)
        (ROOT / "dist").mkdir(exist_ok=True)
        for file in (sdist, wheel):
            shutil.move(file, ROOT / "dist" / file.name)
            print(f"heddle: dist/{file.name}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
