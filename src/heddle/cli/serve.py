"""`heddle serve`: serve a model over an OpenAI-compatible HTTP API, with limits."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from heddle.errors import ConfigError, pip_install, read_named_file
from heddle.progress import print_status, print_text
from heddle.serving.limits import ServeSettings
from heddle.session import GENERATION_NEEDS, dtype_of, open_session

if TYPE_CHECKING:
    import torch

    from heddle.model.decoder import Decoder
    from heddle.serving.engine import Engine
    from heddle.serving.requests import RequestReader
    from heddle.tokenization.tokenizer import Tokenizer

TOKEN_VARIABLE = "HEDDLE_SERVE_TOKEN"
MIN_TOKEN_CHARACTERS = 16


def serve(settings: ServeSettings) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    On SIGTERM, requests finish within --drain-seconds, and it exits with 0, or with 143 if it cut requests off.
    """
    token = _read_token(settings.token_file)
    check_installed()
    with ExitStack() as stack:
        runtime = open_session(stack, settings, kernels=settings.kernel)
        from heddle.machine import with_measured_choices
        from heddle.serving.app import Access, Application
        from heddle.serving.chat_page import add_chat_page
        from heddle.serving.engine import Engine
        from heddle.serving.requests import RequestReader
        from heddle.serving.server import LOOPBACK, host_names, listen, run_server

        host = settings.host
        is_loopback = host in LOOPBACK
        if not is_loopback and token is None:
            raise ConfigError(f"--host {host}: is reachable from outside; give --token-file, or set {TOKEN_VARIABLE}")
        listener = stack.enter_context(listen(host, settings.port))
        used_port = listener.getsockname()[1]
        decoder, tokenizer = load_causal(settings.model, dtype_of(settings.precision), runtime.device)
        if not settings.batch_invariant:
            with_measured_choices(runtime, settings.threads, GENERATION_NEEDS)
        reader = RequestReader(tokenizer, settings.name or settings.model.resolve().name, settings)
        access = Access(host_names(host, used_port) if is_loopback else None, token)
        engine = stack.enter_context(Engine(decoder, tokenizer, settings, settings.batch_invariant))
        print_text(f"http://{f'[{host}]' if ':' in host else host}:{used_port}/v1")
        end = f"running requests finish first, within {settings.drain_seconds} s"
        limits = f"prompts up to {settings.max_prompt:,} tokens, answers up to {settings.max_new_tokens:,}"
        limits += _model_length(decoder, settings.model)
        print_status(f"serve: {reader.name}; {limits}; on Ctrl-C or SIGTERM, {end}")
        application = Application(engine, reader, access)
        if token is None:  # a browser that opens the page sends no token
            add_chat_page(application, page_of([(engine, reader)]))
        run_server(application, listener)


def _model_length(decoder: "Decoder", folder: Path) -> str:
    """What is known of the tokens that the model was made for: longer prompts are served too."""
    from heddle.storage.model import trained_length

    length = decoder.config.position_limit or decoder.imported_config.get("max_position_embeddings")
    if isinstance(length, int):
        return f"; the model was made for {length:,}"
    length = trained_length(folder)
    return "" if length is None else f"; the model was trained on sequences of {length:,}"


def page_of(models: "Sequence[tuple[Engine, RequestReader]]") -> str:
    """Return the HTML chat page for these models; the first is served at the root, the others at /models/N."""
    served = [
        ServedModel(
            name=reader.name,
            address=f"/models/{index}" if index else "",
            parameters=sum(parameter.numel() for parameter in engine.model.parameters()),
            is_chat=reader.chat_format is not None,
            has_scores=engine.gives_scores,
            vocab_size=reader.tokenizer.vocab_size,
        )
        for index, (engine, reader) in enumerate(models)
    ]
    return chat_page(served, models[0][0].limits.max_new_tokens)


@dataclass(frozen=True)
class ServedModel:
    """A model that a server answers for.

    address: the prefix of its URLs, "" for the server's own. is_chat: whether it has a chat template.
    has_scores: whether answers come with the probabilities of their tokens.
    """

    name: str
    address: str
    parameters: int
    is_chat: bool
    has_scores: bool
    vocab_size: int


def chat_page(models: Sequence[ServedModel], most_tokens: int) -> str:
    """The chat page as one HTML document. most_tokens: the limit of an answer."""
    from heddle.lab.pages.render import render

    return render(
        "chat.html",
        title=f"heddle chat: {' and '.join(model.name for model in models)}",
        models=models,
        most_tokens=most_tokens,
        smallest_vocabulary=min(model.vocab_size for model in models),
        data=[asdict(model) for model in models],
    )


def load_any(folder: Path, dtype: "torch.dtype | None", device: "torch.device | str") -> "tuple[Decoder, Tokenizer]":
    """Load a model of heddle or of transformers with its tokenizer. Raises CheckpointError if it has none.

    dtype: None keeps the folder's.
    """
    from heddle.conversion.convert import is_transformers_folder
    from heddle.storage.model import load, require_tokenizer

    if is_transformers_folder(folder):
        from heddle.exchange.load import load as load_transformers

        imported = load_transformers(folder, dtype)
        model, tokenizer = imported.model.to(device), imported.tokenizer
    else:
        model, tokenizer = load(folder, dtype=dtype, device=device)
    return model, require_tokenizer(tokenizer, folder)


def load_causal(folder: Path, dtype: "torch.dtype | None", device: "torch.device | str") -> "tuple[Decoder, Tokenizer]":
    """As `load_any`. Raises ConfigError for a model that is not causal."""
    model, tokenizer = load_any(folder, dtype, device)
    require_causal(model, folder)
    return model, tokenizer


def require_causal(model: "Decoder", folder: Path) -> None:
    """Raises ConfigError for a model that is not causal."""
    if not model.causal:
        reason = "attends to later tokens (causal: false), so it cannot generate text"
        raise ConfigError(f"{folder}: {reason}; read its logits in Python, as docs/huggingface/encoders.md shows")


def _read_token(file: Path | None) -> str | None:
    """Read the token from the file, else from the environment. Raises ConfigError for a short one."""
    if file is not None:
        source = f"--token-file {file}"
        token = read_named_file(source, file, f"give a file of one token, or set {TOKEN_VARIABLE}").strip()
    else:
        token, source = os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
        if not token:
            return None
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii():
        raise ConfigError(f"{source}: the token needs at least {MIN_TOKEN_CHARACTERS} ASCII characters")
    return token


def check_installed() -> None:
    """Raise ConfigError if a library of the server is not installed."""
    from heddle.numerics.dispatch import optional_module

    for name in ("fastapi", "uvicorn"):
        if optional_module(name) is None:
            raise ConfigError(f"serve: needs {name}; install it with {pip_install('serve')}")
