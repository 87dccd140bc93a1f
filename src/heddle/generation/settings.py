"""The settings of `heddle generate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from heddle.settings import Argument, Deterministic, Json, Kernel, Option, Precision, SessionSettings, Tf32

BatchInvariant = Annotated[bool, Option("", "Compute each prompt alone, so that it has the same bits.")]


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(SessionSettings):
    """Settings of `heddle generate`. Those of sampling and decoding are parameters of `heddle.generate`, too."""

    SHOWN: ClassVar = (
        "prompt", "prompts", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop", "device", "json",
    )  # fmt: skip

    run: Annotated[Path, Argument("RUN", "A run's or a model's folder.")]
    prompt: Annotated[tuple[str, ...], Option("TEXT", "Text to continue; repeat for a batch; - reads stdin.")] = ()
    prompts: Annotated[Path | None, Option("FILE", "One prompt in each line; of .jsonl, its prompt.")] = None
    streams: Annotated[int | None, Option("N", "Prompts decoded at once; the next one joins.")] = None
    batch_invariant: BatchInvariant = False
    max_new_tokens: Annotated[int, Option("N", "Most tokens generated.")] = 128
    temperature: Annotated[float, Option("X", "Sampling temperature; 0 is greedy.")] = 0.0
    top_k: Annotated[int | None, Option("N", "Sample from the k most likely tokens.")] = None
    top_p: Annotated[float | None, Option("X", "Nucleus sampling with this probability.")] = None
    seed: Annotated[int, Option("N", "Random seed of the sampling.")] = 0
    stop: Annotated[tuple[str, ...], Option("TEXT", "Stop string; repeatable.")] = ()
    num_beams: Annotated[int, Option("N", "Beams of beam search.")] = 1
    draft_model: Annotated[Path | None, Option("RUN", "Draft model for speculative decoding.")] = None
    speculative_tokens: Annotated[int, Option("N", "Tokens the draft model proposes at a time.")] = 4
    compile: Annotated[bool, Option("", "Compile the step of a token: pays from 1,000 new tokens on.")] = False
    weights: Annotated[str | None, Option("NAME", "int8 or int4: fewer bits a weight. [as saved]")] = None
    precision: Precision = "fp32"
    tf32: Tf32 = False
    deterministic: Deterministic = False
    kernel: Kernel = ()
    json: Json = False
