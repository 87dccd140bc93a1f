"""The models of the comparisons: heddle's `preset:gqa-medium`, and transformers' Llama of the same shape.

A peer runs with the defaults of transformers and torch. A tuned peer also gets the allocator and the settings of matrix
products that heddle's command line sets for its process.
"""

import copy
import time
from typing import Any

import torch

from benchmarks.harness import Step
from benchmarks.machine import THREADS
from heddle.machine import measured_choices
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.model.state import State
from heddle.parts.layout import Layout
from heddle.runtime import set_up_runtime

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 0.01, "bf16": 0.1}  # of logits after 12 layers, relative to the largest
VOCABULARY = 32000


def ours(design: str | dict[str, Any] = "preset:gqa-medium", dtype: torch.dtype = torch.float32) -> Decoder:
    """A heddle model, in a process set up like the command line."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    return build(load_config(design), dtype=dtype)


def llama(dtype: torch.dtype = torch.float32, tuned: bool = False) -> Any:
    """transformers' LlamaForCausalLM with the weights of `ours`. tuned: with the process settings of heddle."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from heddle.exchange.export import HFTensors
    from heddle.exchange.family import families

    logging.set_verbosity_error()
    if tuned:
        set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(dict(HFTensors(families()["llama"], build(load_config("preset:gqa-medium")))), strict=False)
    return model.to(dtype)


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random tokens, int64 [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator)


def filled(model: Decoder, context: int, max_new_tokens: int) -> State:
    """A state of one row after `context` tokens, filled with random numbers instead of a prefill."""
    state = model.init_state(1, context + max_new_tokens)
    table, _ = state.table.extend(Layout.causal(1, context))
    generator = torch.Generator().manual_seed(0)
    draw = lambda _, x: torch.randn(x.shape, generator=generator).to(x.dtype)  # noqa: E731
    return State(table, [None if layer is None else layer.map(draw) for layer in state.layers], state.fingerprint)


def generating(model: Any, prompt: torch.Tensor, start: Any, steps: int) -> Step:
    """transformers' greedy `generate` from a cache of all tokens but the last: seconds per token after the first.

    A logits processor measures the time between tokens.
    """
    from transformers import LogitsProcessorList

    times: list[float] = []

    def watch(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        times.append(time.perf_counter())
        return scores

    def step() -> float:
        times.clear()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=copy.deepcopy(start),
            max_new_tokens=steps + 1,
            do_sample=False,
            logits_processor=LogitsProcessorList([watch]),
        )
        return (times[-1] - times[0]) / (len(times) - 1)

    return step
