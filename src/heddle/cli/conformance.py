"""`heddle conformance`: small models that any engine can be checked with."""

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import click

from heddle import progress
from heddle.errors import ConfigError
from heddle.progress import print_text
from heddle.settings import Argument, Json, Option, Quiet, VerbSettings

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "q8_0": "q8_0"}


@dataclass(frozen=True, kw_only=True)
class ConformanceSettings(VerbSettings):
    """Settings of `heddle conformance`."""

    action: Annotated[str, Argument("ACTION", "`build` for a kit, or `run` for an engine on one.")]
    kit: Annotated[Path, Argument("KIT", "The kit's folder.")]
    family: Annotated[tuple[str, ...], Option("NAME", "Model type; repeatable. [all]")] = ()
    gguf: Annotated[str | None, Option("KINDS", "Build GGUF files, too: float32, q8_0, or both with a comma.")] = None
    engine: Annotated[
        str | None,
        Option(
            "ENGINE",
            "heddle, transformers, transformers:eager, llama.cpp, module:function, or a command with {model}.",
        ),
    ] = None
    precision: Annotated[str, Option("NAME", "What the engine computes in: fp32, bf16 or q8_0.")] = "fp32"
    junit: Annotated[Path | None, Option("FILE", "Write the results as JUnit XML.")] = None
    page: Annotated[Path | None, Option("FILE", "Write the results as an HTML page.")] = None
    quiet: Quiet = False
    json: Json = False


def conformance(settings: ConformanceSettings) -> None:
    """Check an inference engine with small models of each family: build a kit, or run an engine on one.

    A kit holds models with drawn weights, ways to feed them (whole, cut, padded, packed, rolled back), the float64
    logits, and the logits of usual mistakes, so that a wrong answer is named. Exit code of run: 0 if nothing is wrong,
    1 if something is.
    """
    if settings.action not in ("build", "run"):
        raise ConfigError(f"ACTION {settings.action}: unknown; give build or run")
    if settings.precision not in DTYPES:
        raise ConfigError(f"--precision {settings.precision}: unknown; give {', '.join(DTYPES)}")
    with progress.quiet() if settings.quiet else nullcontext():
        if settings.action == "build":
            _build(settings)
        else:
            _run(settings)


def _build(settings: ConformanceSettings) -> None:
    if settings.engine is not None:
        raise ConfigError(f"--engine {settings.engine}: is for run; leave it out")
    from heddle.lab.conformance.build import build_kit

    summary = build_kit(settings.kit, settings.family, () if settings.gguf is None else settings.gguf.split(","))
    if settings.json:
        print(json.dumps(summary, indent=2))
        return
    models = summary["models"]
    size = sum(file.stat().st_size for file in settings.kit.rglob("*") if file.is_file())
    names = {entry["family"] for entry in models}
    bugs = sum(entry["bugs"] for entry in models)
    print_text(
        f"{len(models)} models of {len(names)} {'family' if len(names) == 1 else 'families'}, {bugs:,} planted bugs, "
        f"{progress.format_amount(size, 'bytes')}"
    )
    print_text(str(settings.kit))


def _run(settings: ConformanceSettings) -> None:
    if settings.gguf is not None:
        raise ConfigError(f"--gguf {settings.gguf}: is for build; leave it out")
    if settings.engine is None:
        raise ConfigError("--engine: is missing; give heddle, transformers, module:function, or a command with {model}")
    from heddle.lab.conformance.run import WRONG, conformance_page, engine_of, junit, run_kit, table
    from heddle.storage.file_io import refuse_no_page, write_file

    if settings.junit is not None and settings.junit == settings.page:
        raise ConfigError(f"--junit and --page: both name {settings.junit}; give each its own file")
    for file in (settings.junit, settings.page):
        if file is not None:
            refuse_no_page(file)
    dtype = DTYPES[settings.precision]
    findings = list(run_kit(settings.kit, engine_of(settings.engine, dtype), dtype, settings.family))
    if settings.junit is not None:
        write_file(settings.junit, junit(findings, settings.engine))
    if settings.page is not None:
        write_file(settings.page, conformance_page(settings.engine, settings.precision, findings), "free space")
    if settings.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for line in table(findings):
            print_text(line)
    counts = {status: sum(each.status == status for each in findings) for status in ("right", "wrong", "not seen")}
    if not settings.json:
        print_text(f"{len(findings)} cases: {', '.join(f'{count} {status}' for status, count in counts.items())}")
    if counts[WRONG]:
        raise click.exceptions.Exit(1)
