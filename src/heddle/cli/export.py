"""`heddle export`: convert a heddle model into a transformers folder or a GGUF file."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from heddle.cli.import_ import DTYPES
from heddle.errors import ConfigError
from heddle.progress import print_text
from heddle.session import open_session
from heddle.settings import Argument, Option, Quiet, SessionSettings, VerbSettings
from heddle.storage.file_io import refuse_existing

if TYPE_CHECKING:
    from heddle.exchange.imported_checkpoint import ImportedModel

FORMATS = ("hf", "gguf")
Q8_0 = "q8_0"  # of a GGUF only, as the others
K_QUANTS = ("q4_k_m", "q5_k_m", "q6_k")


@dataclass(frozen=True, kw_only=True)
class ExportSettings(VerbSettings):
    """Settings of `heddle export`."""

    checkpoint: Annotated[Path, Argument("CHECKPOINT", "A run's or a model's folder.")]
    out: Annotated[Path, Argument("OUT", "The folder or file to write.")]
    format: Annotated[
        str | None, Option("NAME", "hf: a transformers folder. gguf: a llama.cpp file. [gguf for OUT.gguf, else hf]")
    ] = None
    dtype: Annotated[
        str | None,
        Option("NAME", "fp32, bf16 or fp16; for a GGUF q8_0, q6_k, q5_k_m or q4_k_m, too. [as in the checkpoint]"),
    ] = None
    library: Annotated[
        Path | None, Option("FILE", "libllama.so, which makes q6_k, q5_k_m and q4_k_m. [of a Python binding]")
    ] = None
    family: Annotated[str | None, Option("NAME", "Family to write, if several fit; `heddle show` lists them.")] = None
    quiet: Quiet = False


def export(settings: ExportSettings) -> None:
    """Write a model in its family's format, such as Llama's, or as heddle's own class; print which one and why.

    OUT must not exist; it is written atomically.
    """
    family, out = settings.family, settings.out
    output_format = settings.format or ("gguf" if out.suffix == ".gguf" else "hf")
    dtype = settings.dtype and settings.dtype.lower()  # llama.cpp writes Q8_0
    if output_format not in FORMATS:
        raise ConfigError(f"--format {output_format}: unknown format; choices: {', '.join(FORMATS)}")
    choices = (*DTYPES, Q8_0, *K_QUANTS) if output_format == "gguf" else tuple(DTYPES)
    if dtype is not None and dtype not in choices:
        raise ConfigError(
            f"--dtype {settings.dtype}: unknown for --format {output_format}; choices: {', '.join(choices)}"
        )
    if settings.library is not None and dtype not in K_QUANTS:
        raise ConfigError(f"--library: is for --dtype {', '.join(K_QUANTS)}; choose one, or leave it out")
    if family is not None and output_format != "hf":
        raise ConfigError(f"--family {family}: works with --format hf only; leave one of them out")
    refuse_existing(out, "the export")
    with ExitStack() as stack:
        open_session(stack, SessionSettings(device="cpu", quiet=settings.quiet))
        import torch

        from heddle.exchange.export import export as write
        from heddle.exchange.family_match import match_report
        from heddle.exchange.imported_checkpoint import open_checkpoint

        torch_dtype = getattr(torch, DTYPES[dtype]) if dtype in DTYPES else None
        # GGUF export rounds only the matrices, and so reads the weights as they were saved.
        imported = open_checkpoint(settings.checkpoint, torch_dtype if output_format == "hf" else None)
        _set_max_positions(settings.checkpoint, imported)
        if output_format == "gguf":
            from heddle.exchange.gguf import export_gguf

            _, architecture = export_gguf(
                imported.model,
                out,
                imported.tokenizer,
                imported,
                torch_dtype,
                q8_0=dtype == Q8_0,
                k_quant=dtype if dtype in K_QUANTS else None,
                library=settings.library,
            )
            print_text(f"{out}: llama.cpp runs it as {architecture}")
            return
        match = write(imported.model, out, imported.tokenizer, imported, family=family)
        print_text(f"{out}: exports as: {match.architecture}")
        if match.family.model_type == "heddle" and family is None:
            for line in match_report(imported.model.config, imported.preserved_config.get("model_type")).lines()[1:]:
                print_text(f"  {line}")
            print_text("  loads after `import heddle.exchange.transformers`, or with trust_remote_code=True")


def _set_max_positions(checkpoint: Path, imported: "ImportedModel") -> None:
    """Export a run's training sequence length as max_position_embeddings."""
    from heddle.storage.model import trained_length

    if (length := trained_length(checkpoint)) is not None:
        imported.preserved_config.setdefault("max_position_embeddings", length)
