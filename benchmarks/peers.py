"""The models of the comparisons: heddle's `preset:gqa-medium`, and transformers' Llama of the same shape.

A peer runs with the defaults of transformers and torch. A tuned peer also gets the allocator and the settings of matrix
products that heddle's command line sets for its process.
"""

import copy
import time
from typing import Any

import torch

from benchmarks.harness import Measured
from benchmarks.machine import THREADS
from heddle.exchange.transformers.peer import transformers_model
from heddle.machine import measured_choices
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.model.state import State
from heddle.parts.layout import Layout
from heddle.parts.states import KVCache
from heddle.runtime import set_up_runtime

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
DESIGN = "preset:gqa-medium"
VOCABULARY = 32000


def ours(design: str | dict[str, Any] = DESIGN, dtype: torch.dtype = torch.float32) -> Decoder:
    """A heddle model, in a process set up like the command line."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    return build(load_config(design)).to(dtype)


def llama(dtype: torch.dtype = torch.float32, tuned: bool = False) -> Any:
    """transformers' model with the weights of `ours`. tuned: with the process settings of heddle."""
    return transformers_peer(DESIGN, dtype, tuned)


def transformers_peer(design: str | dict[str, Any] | ModelConfig, dtype: torch.dtype, tuned: bool) -> Any:
    """The model of transformers that computes a design, as heddle exports it, from equal weights."""
    if tuned:
        set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    torch.set_num_threads(THREADS)
    config = design if isinstance(design, ModelConfig) else load_config(design)
    model = transformers_model(config).to(dtype)
    if dtype == torch.float64:
        float32_is_float64()
        for module in model.modules():
            if hasattr(module, "inv_freq"):
                module.inv_freq = module.compute_default_rope_parameters(module.config)[0]
    return model


def float32_is_float64() -> None:
    """Let transformers compute in float64, in a process that does nothing else: it asks for float32 by name."""
    for name in ("float", "float32"):
        setattr(torch, name, torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """torch's fused AdamW with the settings of the benchmarks; it decays the weights that heddle's does."""
    decayed = {name for name, weight in model.named_parameters() if weight.dim() >= 2 and not name.endswith(".bias")}
    groups = [
        {"params": [weight for name, weight in model.named_parameters() if (name in decayed) is is_decayed],
         "weight_decay": 0.1 if is_decayed else 0.0}
        for is_decayed in (True, False)
    ]  # fmt: skip
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)


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


def transformers_cache(state: State, context: int, config: Any) -> Any:
    """transformers' default cache with the `context` tokens of a state of full or latent attention.

    config: that of transformers' model; its cache of latent attention holds latents and rotated keys side by side.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    for index, layer in enumerate(state.layers):
        assert isinstance(layer, KVCache)
        keys, values = (x[:, :, :context].clone() for x in (layer.keys, layer.values))
        if not values.shape[-1]:
            keys, values = keys.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        cache.update(keys, values, index)
    return cache


def generating(model: Any, prompt: torch.Tensor, start: Any, steps: int) -> Measured:
    """transformers' greedy `generate` from a cache of all tokens but the last: seconds per token after the first.

    A logits processor measures the time between tokens. The values are logits of the first one.
    """
    from transformers import LogitsProcessorList

    times: list[float] = []
    values: list[float] = []

    def watch(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not times:
            values[:] = scores[0, :8].tolist()
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

    return Measured(step, lambda: values)
