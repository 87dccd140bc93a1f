"""`heddle generate`: continue prompts with a trained model."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from heddle.cli.options import Device, Json, Kernel, PartFile, Precision, Quiet, Threads, dtype_of, open_session
from heddle.errors import CheckpointError, DataError


def generate(  # noqa: PLR0913 - one parameter an option
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's or a model's folder.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="Text to continue; repeat for a batch; - reads stdin."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", metavar="N", help="Most tokens to write.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", metavar="X", help="0 is greedy.")] = 0.0,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="N", help="Sample from the k likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", metavar="X", help="Sample from the likeliest that reach p.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the sampling.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; repeat.")
    ] = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    kernel: Kernel = None,
    part: PartFile = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write on from prompts; one prompt streams as it is written, several are printed one after another."""
    with ExitStack() as stack:
        runtime = open_session(stack, device=device, threads=threads, kernels=kernel, parts=part, quiet=quiet)
        from heddle.checkpoints.model import load
        from heddle.generation.generate import generate as continue_prompts

        model, tokenizer = load(run, dtype=dtype_of(precision), device=runtime.device)
        if tokenizer is None:
            raise CheckpointError(f"{run}: holds no tokenizer.json, so it cannot read a prompt; train it with heddle")
        prompts = [_read(text) for text in prompt or [""]]
        streams = len(prompts) == 1 and not as_json
        texts = continue_prompts(
            model,
            prompts,
            tokenizer,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop or (),
            on_text=_show if streams else None,
        )
    if as_json:
        print(json.dumps([{"prompt": p, "text": t} for p, t in zip(prompts, texts, strict=True)], ensure_ascii=False))
    elif streams:
        print()
    else:
        for index, (one, text) in enumerate(zip(prompts, texts, strict=True)):
            print(f"--- {index + 1} of {len(prompts)}: {one!r}\n{text}")


def _read(text: str) -> str:
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise DataError("--prompt -: standard input is not UTF-8 text") from None


def _show(row: int, piece: str) -> None:
    print(piece, end="", flush=True)
