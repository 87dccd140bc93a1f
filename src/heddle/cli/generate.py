"""`heddle generate`: continue prompts with a trained model."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heddle.cli.options import Device, Json, Kernel, PartFile, Precision, Quiet, Threads, dtype_of, open_session
from heddle.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from heddle.generation.speculative import Round
    from heddle.tokenization.tokenizer import Tokenizer


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
    beams: Annotated[int, typer.Option("--beams", metavar="N", help="Follow n texts and write the likeliest.")] = 1,
    draft: Annotated[
        Path | None, typer.Option("--draft", metavar="RUN2", help="A smaller model that guesses ahead.")
    ] = None,
    lookahead: Annotated[
        int, typer.Option("--lookahead", metavar="N", help="Most tokens that the draft guesses at a time.")
    ] = 4,
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
        from heddle.generation.generate import generate as continue_prompts
        from heddle.storage.model import load

        dtype = dtype_of(precision)
        model, tokenizer = load(run, dtype=dtype, device=runtime.device)
        if tokenizer is None:
            raise CheckpointError(f"{run}: holds no tokenizer.json, so it cannot read a prompt; train it with heddle")
        guesser = None
        if draft is not None:
            guesser, own = load(draft, dtype=dtype, device=runtime.device)
            _check_draft(draft, own, run, tokenizer)
        rounds: list[Round] = []
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
            beams=beams,
            draft=guesser,
            lookahead=lookahead,
            on_round=rounds.append,
        )
        if as_json:
            answers = [{"prompt": one, "text": text} for one, text in zip(prompts, texts, strict=True)]
            print(json.dumps(answers, ensure_ascii=False))
        elif streams:
            print()
        else:
            for index, (one, text) in enumerate(zip(prompts, texts, strict=True)):
                print(f"--- {index + 1} of {len(prompts)}: {one!r}\n{text}")
        if rounds:
            _tell(rounds)


def _check_draft(draft: Path, own: "Tokenizer | None", run: Path, tokenizer: "Tokenizer") -> None:
    """Refuse a draft that spells otherwise: its guesses would be of other words."""
    if own is not None and own.to_json() != tokenizer.to_json():
        raise CheckpointError(f"--draft {draft}: has another tokenizer than {run}; train both with one --tokenizer")


def _tell(rounds: "list[Round]") -> None:
    """One line on what the draft was good for."""
    from heddle.progress import say

    guessed, kept, written, near = (sum(numbers) for numbers in zip(*rounds, strict=True))
    ties = f"; {near} were near ties, where rounding decides" if near else ""
    say(f"draft: {kept} of {guessed} guesses kept in {len(rounds)} calls; {written} tokens{ties}")


def _read(text: str) -> str:
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise DataError("--prompt -: standard input is not UTF-8 text") from None


def _show(row: int, piece: str) -> None:
    print(piece, end="", flush=True)
