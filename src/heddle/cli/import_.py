"""`heddle import`: convert a transformers checkpoint or a GGUF into a heddle model."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from heddle.errors import ConfigError
from heddle.progress import print_status, print_text
from heddle.session import open_session
from heddle.settings import Argument, Option, Quiet, SessionSettings, VerbSettings
from heddle.storage.file_io import is_gguf, refuse_existing

if TYPE_CHECKING:
    from heddle.exchange.imported_checkpoint import ImportedModel

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class ImportSettings(VerbSettings):
    """Settings of `heddle import`."""

    folder: Annotated[Path, Argument("FOLDER", "config.json, safetensors and a tokenizer; or a .gguf.")]
    out: Annotated[Path, Argument("OUT", "The model folder to write.")]
    dequantize: Annotated[str | None, Option("NAME", "Dequantize weights to fp32, bf16 or fp16. [refuse them]")] = None
    tokenizer: Annotated[Path | None, Option("FILE", "A tokenizer.json in place of the checkpoint's tokenizer.")] = None
    chat_template: Annotated[Path | None, Option("FILE", "A Jinja chat template in place of the checkpoint's.")] = None
    allow_non_finite: Annotated[bool, Option("", "Accept weights with Inf or NaN.")] = False
    quiet: Quiet = False


def import_(settings: ImportSettings) -> None:
    """Convert a transformers checkpoint or a GGUF into a heddle model, checking every field and tensor.

    No code in the folder runs and no pickle is loaded. OUT must not exist; it is written atomically.
    """
    folder, out, dequantize = settings.folder, settings.out, settings.dequantize
    if dequantize is not None and dequantize not in DTYPES:
        raise ConfigError(f"--dequantize {dequantize}: unknown; choices: {', '.join(DTYPES)}")
    refuse_existing(out, "the model")
    with ExitStack() as stack:
        open_session(stack, SessionSettings(device="cpu", quiet=settings.quiet))
        import torch

        from heddle.data.chat import chat_template_text
        from heddle.exchange.load import load
        from heddle.storage.model import save

        dtype = None if dequantize is None else getattr(torch, DTYPES[dequantize])
        if is_gguf(folder):
            from heddle.exchange.gguf import load_gguf

            imported = load_gguf(folder, dtype, settings.allow_non_finite, settings.tokenizer)
        else:
            imported = load(folder, None, dtype, settings.allow_non_finite, settings.tokenizer)
        if settings.chat_template is not None:
            _set_chat_template(settings.chat_template, imported)
        save(imported.model, out, imported.tokenizer, imported.text_files)
        if imported.tokenizer is not None and (template := chat_template_text(imported.text_files)) is not None:
            _warn_of_unknown_names(template, str(folder))
        if imported.tokenizer is None and folder.is_dir():
            print_status(
                f"noted: {folder}: has no tokenizer.json, so {out} reads no text; --tokenizer FILE gives it one"
            )
        parameters = sum(parameter.numel() for parameter in imported.model.parameters())
        model_type, layers = imported.preserved_config["model_type"], imported.model.config.depth
        print_text(f"{out}: {model_type} of {parameters:,} parameters, {layers} layers")


def _set_chat_template(file: Path, imported: "ImportedModel") -> None:
    """Put the template of a file into the tokenizer's files. Raises ConfigError if it cannot be compiled."""
    from heddle.data.chat import CHAT_TEMPLATE_FILE
    from heddle.data.chat_template import ChatTemplate
    from heddle.data.documents import UnreadableError
    from heddle.exchange.safetensors_folder import read_text_file

    if imported.tokenizer is None:
        raise ConfigError(f"--chat-template {file}: needs a tokenizer, and the checkpoint has none; give --tokenizer")
    text = read_text_file(file)
    try:
        ChatTemplate(text)
    except UnreadableError as error:
        raise ConfigError(f"--chat-template {file}: {error}; give a chat template in Jinja") from error
    imported.text_files[CHAT_TEMPLATE_FILE] = text
    imported.tokenizer.companion_files = {**imported.tokenizer.companion_files, CHAT_TEMPLATE_FILE: text}


def _warn_of_unknown_names(template: str, source: str) -> None:
    from heddle.data.chat_template import unknown_names
    from heddle.data.documents import UnreadableError

    try:
        names = unknown_names(template)
    except UnreadableError as error:
        print_status(f"warning: {source}: its chat template {error}; conversations cannot be rendered")
        return
    if names:
        listed = ", ".join(f"'{name}'" for name in names[:8])
        print_status(f"warning: {source}: its chat template reads {listed}, which heddle does not set: it stays empty")
