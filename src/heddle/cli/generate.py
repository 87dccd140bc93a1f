"""`heddle generate`: continue prompts with a trained model."""

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from heddle.cli.serve import load_causal
from heddle.errors import CheckpointError, ConfigError, DataError, read_named_file
from heddle.progress import print_status, print_text
from heddle.session import GENERATION_NEEDS, dtype_of, open_session
from heddle.settings import (
    Argument,
    Deterministic,
    Json,
    Kernel,
    Option,
    Precision,
    SessionSettings,
    Tf32,
    parse_text,
    shared,
)

if TYPE_CHECKING:
    from heddle.generation.speculative import SpeculativeRound
    from heddle.model.decoder import Decoder
    from heddle.tokenization.tokenizer import Tokenizer

BatchInvariant = Annotated[bool, Option("", "Compute each prompt alone, so that no result depends on the batch.")]


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(SessionSettings):
    """Settings of `heddle generate`; `heddle.generate` takes its sampling and decoding settings, too."""

    SHOWN: ClassVar = (
        "prompt", "prompts", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop", "device", "json",
    )  # fmt: skip

    run: Annotated[Path, Argument("RUN", "A run, a model folder or a transformers folder.")]
    prompt: Annotated[
        tuple[str, ...], Option("TEXT", "Text to continue; repeat for a batch; - reads stdin.", parse_text)
    ] = ()
    prompts: Annotated[Path | None, Option("FILE", "One prompt per line; in .jsonl, the field prompt.")] = None
    streams: Annotated[int | None, Option("N", "Prompts decoded at once; as one ends, the next begins.")] = None
    batch_invariant: BatchInvariant = False
    max_new_tokens: Annotated[int, Option("N", "Max new tokens.")] = 128
    temperature: Annotated[float, Option("X", "Sampling temperature; 0 is greedy.")] = 0.0
    top_k: Annotated[int | None, Option("N", "Sample from the k most likely tokens.")] = None
    top_p: Annotated[float | None, Option("X", "Nucleus sampling with this probability.")] = None
    seed: Annotated[int, Option("N", "Random seed of the sampling.")] = 0
    stop: Annotated[tuple[str, ...], Option("TEXT", "Stop string; repeatable.", parse_text)] = ()
    num_beams: Annotated[int, Option("N", "Beams of beam search.")] = 1
    draft_model: Annotated[Path | None, Option("RUN", "Draft model for speculative decoding.")] = None
    multi_token_draft: Annotated[bool, Option("", "Draft with the model's own multi-token module.")] = False
    speculative_tokens: Annotated[int, Option("N", "Tokens the draft proposes at a time.")] = 4
    compile: Annotated[bool, Option("", "Compile the decode step: pays off from 1,000 new tokens on.")] = False
    weights: Annotated[str | None, Option("NAME", "int8 or int4: quantize the weights. [as saved]")] = None
    precision: Precision = "fp32"
    tf32: Tf32 = False
    deterministic: Deterministic = False
    kernel: Kernel = ()
    json: Json = False


DEFAULT_STREAMS = 32  # of a file of prompts


def generate(settings: GenerateSettings) -> None:
    """Continue prompts. The text of a single prompt is streamed; several are printed when all are done."""
    with ExitStack() as stack:
        runtime = open_session(
            stack,
            settings,
            kernels=settings.kernel,
            tf32=settings.tf32,
            deterministic=settings.deterministic,
        )
        from heddle.generation.generate import check_decoding
        from heddle.generation.generate import generate as generate_texts
        from heddle.machine import with_measured_choices
        from heddle.storage.model import load

        run, dtype, bits = settings.run, dtype_of(settings.precision), _bits_of(settings.weights)
        check_decoding(**shared(settings, check_decoding))
        prompts = [_read_prompt(text) for text in settings.prompt or (() if settings.prompts else ("",))]
        if settings.prompts is not None:
            prompts += _read_prompts(settings.prompts)
        model, tokenizer = load_causal(run, dtype, runtime.device)
        draft = None
        if settings.draft_model is not None:
            draft, draft_tokenizer = load(settings.draft_model, dtype=dtype, device=runtime.device)
            _check_same_tokenizer(settings.draft_model, draft_tokenizer, run, tokenizer)
        rounds: list[SpeculativeRound] = []
        streams, has_draft = settings.streams, draft is not None or settings.multi_token_draft
        if settings.prompts is not None:
            takes_turns = settings.batch_invariant or settings.num_beams > 1 or has_draft
            streams = (None if takes_turns else DEFAULT_STREAMS) if streams is None else streams
        streaming = len(prompts) == 1 and not settings.json
        if not settings.batch_invariant:
            with_measured_choices(runtime, settings.threads, GENERATION_NEEDS)
        if bits is not None:
            model = _quantized(model, bits)
        options = shared(settings, generate_texts) | {
            "streams": streams,
            "draft_model": draft,
            "on_text": _print_piece if streaming else None,
            "on_speculative_round": rounds.append if has_draft else None,
            "compile_decoding": settings.compile,
        }
        del options["prompts"]
        texts = generate_texts(model, prompts, tokenizer, **options)
        if settings.json:
            results = [{"prompt": text, "text": new_text} for text, new_text in zip(prompts, texts, strict=True)]
            print_text(json.dumps(results, ensure_ascii=False))
        elif streaming:
            print_text("")
        else:
            for index, (text, new_text) in enumerate(zip(prompts, texts, strict=True)):
                print_text(f"--- {index + 1} of {len(prompts)}: {text!r}\n{new_text}")
        if rounds:
            _report_rounds(rounds)


def _bits_of(weights: str | None) -> int | None:
    """8 for `int8`. Raises ConfigError for an unknown name."""
    choices = {"int8": 8, "int4": 4}
    if weights is not None and weights not in choices:
        raise ConfigError(f"--weights {weights}: unknown; choices: {', '.join(choices)}")
    return None if weights is None else choices[weights]


def _quantized(model: "Decoder", bits: int) -> "Decoder":
    """Return the model with quantized weights; print how many were quantized."""
    from heddle.model.copies import quantize_weights

    quantized = quantize_weights(model, bits)
    print_status(f"--weights int{bits}: {quantized.quantized:,} of {quantized.weights:,} weights have {bits} bits")
    return quantized.model


def _check_same_tokenizer(
    draft_model: Path, draft_tokenizer: "Tokenizer | None", run: Path, tokenizer: "Tokenizer"
) -> None:
    """Raise CheckpointError for a draft model with a different tokenizer: its token ids mean other text."""
    if draft_tokenizer is not None and draft_tokenizer.to_json() != tokenizer.to_json():
        raise CheckpointError(
            f"--draft-model {draft_model}: its tokenizer differs from {run}'s; train both with the same --tokenizer"
        )


def _report_rounds(rounds: "list[SpeculativeRound]") -> None:
    """Print one line with the draft's acceptance rate."""
    proposed, accepted, emitted, near_ties = (sum(counts) for counts in zip(*rounds, strict=True))
    ties = f"; {near_ties} were near ties, decided by rounding" if near_ties else ""
    print_status(
        f"draft: {accepted} of {proposed} proposed tokens accepted in {len(rounds)} rounds; "
        f"{emitted} tokens generated{ties}"
    )


def _read_prompt(text: str) -> str:
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise DataError("--prompt -: standard input is not UTF-8 text") from None


def _read_prompts(file: Path) -> list[str]:
    """Read one prompt per line; in a .jsonl file, the line's field `prompt`. Raises HeddleError."""
    text = read_named_file(f"--prompts {file}", file, "give a file of prompts")
    prompts = []
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), 1):
        prompt: Any = line
        if file.suffix == ".jsonl":
            try:
                prompt = json.loads(line)["prompt"]
            except (ValueError, TypeError, KeyError, RecursionError):
                prompt = None
        if not isinstance(prompt, str):
            raise DataError(f'--prompts {file}: line {number} is not of the form {{"prompt": "text"}}')
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"--prompts {file}: is empty; write one prompt per line")
    return prompts


def _print_piece(row: int, piece: str) -> None:
    print_text(piece, end="")
