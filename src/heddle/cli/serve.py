"""`heddle serve`: a model over HTTP with OpenAI's interface, within limits."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heddle.cli.options import Device, Kernel, PartFile, Precision, Quiet, Threads, dtype_of, open_session
from heddle.errors import CheckpointError, ConfigError
from heddle.progress import print_status, print_text

if TYPE_CHECKING:
    import torch

    from heddle.model.decoder import Decoder
    from heddle.serving.engine import Engine
    from heddle.serving.requests import RequestReader
    from heddle.tokenization.tokenizer import Tokenizer

TOKEN_VARIABLE = "HEDDLE_SERVE_TOKEN"
MIN_TOKEN_CHARACTERS = 16
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="A run, a model's folder, or one of transformers.")]


def serve(
    model: ModelFolder,
    host: Annotated[
        str, typer.Option("--host", metavar="NAME", help="Address; beyond loopback, a token is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", help="Port; 0 is any free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="File with the token that requests need.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="The model's name for clients. [its folder's]")
    ] = None,
    max_body: Annotated[int, typer.Option("--max-body", metavar="N", help="Bytes of a request.")] = 2**20,
    max_stops: Annotated[int, typer.Option("--max-stops", metavar="N", help="Stop strings of a request.")] = 4,
    max_stop_length: Annotated[int, typer.Option("--max-stop-length", metavar="N", help="Characters of each.")] = 256,
    max_prompt: Annotated[int, typer.Option("--max-prompt", metavar="N", help="Tokens of a prompt.")] = 8192,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", help="Most new tokens of a request.")
    ] = 2048,
    max_seconds: Annotated[int, typer.Option("--max-seconds", metavar="N", help="Seconds of a request.")] = 120,
    streams: Annotated[int, typer.Option("--streams", metavar="N", help="Requests decoded at once.")] = 32,
    slots: Annotated[int, typer.Option("--slots", metavar="N", help="Tokens that all states have room for.")] = 81_920,
    queue: Annotated[int, typer.Option("--queue", metavar="N", help="Requests that wait; others get 429.")] = 64,
    connections: Annotated[int, typer.Option("--connections", metavar="N", help="Open connections.")] = 512,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Compute each request alone, so that it has the same bits.")
    ] = False,
    drain_seconds: Annotated[
        int, typer.Option("--drain-seconds", metavar="N", help="Seconds that requests have after SIGTERM.")
    ] = 30,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    kernel: Kernel = None,
    part: PartFile = None,
    quiet: Quiet = False,
) -> None:
    """Serve a model over HTTP with OpenAI's interface. SIGTERM lets running requests end, and then ends with code 0."""
    token = _read_token(token_file)
    check_installed()
    with ExitStack() as stack:
        runtime = open_session(stack, device=device, threads=threads, kernels=kernel, parts=part, quiet=quiet)
        from heddle.serving.app import Access, Application
        from heddle.serving.chat_page import add_chat_page
        from heddle.serving.engine import Engine
        from heddle.serving.limits import ServerLimits
        from heddle.serving.requests import RequestReader
        from heddle.serving.server import LOOPBACK, host_names, listen, run_server

        is_loopback = host in LOOPBACK
        if not is_loopback and token is None:
            raise ConfigError(f"--host {host}: others can reach it; give --token-file, or set {TOKEN_VARIABLE}")
        limits = ServerLimits(
            body_bytes=max_body,
            stop_strings=max_stops,
            stop_characters=max_stop_length,
            prompt_tokens=max_prompt,
            new_tokens=max_new_tokens,
            seconds=max_seconds,
            streams=streams,
            slots=slots,
            connections=connections,
            queue=queue,
            drain_seconds=drain_seconds,
        )
        listener = stack.enter_context(listen(host, port))
        used_port = listener.getsockname()[1]
        decoder, tokenizer = load_any(model, dtype_of(precision), runtime.device)
        reader = RequestReader(tokenizer, name or model.resolve().name, limits)
        access = Access(host_names(host, used_port) if is_loopback else None, token)
        engine = stack.enter_context(Engine(decoder, tokenizer, limits, batch_invariant))
        print_text(f"http://{f'[{host}]' if ':' in host else host}:{used_port}/v1")
        print_status(f"serve: {reader.name}; Ctrl-C or SIGTERM lets running requests end")
        application = Application(engine, reader, access)
        if token is None:  # a browser that opens a page sends none
            add_chat_page(application, page_of([(engine, reader)]))
        run_server(application, listener)


def page_of(models: "Sequence[tuple[Engine, RequestReader]]") -> str:
    """The page on which one talks to these models; the first has the server's own addresses."""
    from heddle.lab.pages.chat import ServedModel, chat_page

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
    return chat_page(served, models[0][0].limits.new_tokens)


def load_any(folder: Path, dtype: "torch.dtype", device: "torch.device | str") -> "tuple[Decoder, Tokenizer]":
    """Load a model of heddle or of transformers with its tokenizer. Raises CheckpointError if it has none."""
    from heddle.conversion.convert import is_transformers_folder

    if is_transformers_folder(folder):
        from heddle.exchange.load import load as load_transformers

        imported = load_transformers(folder, dtype)
        model, tokenizer = imported.model.to(device), imported.tokenizer
    else:
        from heddle.storage.model import load

        model, tokenizer = load(folder, dtype=dtype, device=device)
    if tokenizer is None:
        raise CheckpointError(f"{folder}: holds no tokenizer.json, so it cannot read a prompt; train it with heddle")
    require_causal(model, folder)
    return model, tokenizer


def require_causal(model: "Decoder", folder: Path) -> None:
    """Raises ConfigError for a model that sees later tokens."""
    if not model.causal:
        reason = "sees later tokens (causal: false), so it writes no text"
        raise ConfigError(f"{folder}: {reason}; read its logits in Python, as docs/huggingface/loading.md shows")


def _read_token(file: Path | None) -> str | None:
    """The token of the file, else of the environment. Raises ConfigError for a short one."""
    if file is not None:
        token, source = file.read_text(encoding="utf-8").strip(), f"--token-file {file}"
    else:
        token, source = os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
        if not token:
            return None
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii():
        raise ConfigError(f"{source}: the token needs at least {MIN_TOKEN_CHARACTERS} ASCII characters")
    return token


def check_installed() -> None:
    """Raise ConfigError without the libraries of the server."""
    from heddle.numerics.dispatch import optional_module

    for name in ("fastapi", "uvicorn"):
        if optional_module(name) is None:
            raise ConfigError(f"serve: needs {name}; install it with pip install 'heddle-lm[serve]'")
