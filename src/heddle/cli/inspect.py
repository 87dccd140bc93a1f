"""`heddle inspect`: plot the attention maps of a trained model on a text, as one page."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from heddle.cli.serve import load_any
from heddle.errors import ConfigError
from heddle.progress import print_text
from heddle.session import dtype_of, open_session
from heddle.settings import Argument, Kernel, Option, Precision, SessionSettings, parse_text
from heddle.storage.file_io import refuse_no_page, write_file


@dataclass(frozen=True, kw_only=True)
class InspectSettings(SessionSettings):
    """Settings of `heddle inspect`."""

    run: Annotated[Path, Argument("RUN", "A run, a model folder or a transformers folder.")]
    text: Annotated[str, Option("TEXT", "Text that the model reads.", parse_text)]
    out: Annotated[Path, Option("FILE", "HTML file to write.")] = Path("inspect.html")
    precision: Precision = "fp32"
    kernel: Kernel = ()


def inspect(settings: InspectSettings) -> None:
    """Plot the attention maps of every layer and head on a text, as one HTML file that works offline."""
    run, text, out = settings.run, settings.text, settings.out
    if not text:
        raise ConfigError("--text: is empty; give some text")
    refuse_no_page(out)
    with ExitStack() as stack:
        runtime = open_session(stack, settings, kernels=settings.kernel)
        from heddle.lab.inspect import InspectedModel, inspect_layers, inspect_page

        model, tokenizer = load_any(run, dtype_of(settings.precision), runtime.device)
        text_ids = tokenizer.encode(text)
        views = inspect_layers(model, [*tokenizer.bos_ids, *text_ids])
        labels = [*("start" for _ in tokenizer.bos_ids), *(tokenizer.decode([token]) for token in text_ids)]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        page = inspect_page(InspectedModel(run.resolve().name, parameters, labels), views)
        write_file(out, page, "choose another file")
    print_text(str(out))
