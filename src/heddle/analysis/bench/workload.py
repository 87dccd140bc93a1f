"""The workload whose seconds are measured: a training step, the prefill of a prompt, and tokens after a context."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from heddle.data.samples import Batch
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.size import size
from heddle.numerics.linear import PackedWeightCache, packed_weights
from heddle.training.optimizer import build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients

PHASE = "phase: "  # begins the names of a step's phases in a profile
HEDDLE, DEFAULTS, TUNED = "heddle", "transformers", "transformers tuned"  # sides of a design
TRAINING, PREFILL, TOKEN = "training", "prefill", "token"
TOKENS = 8  # that a measurement of decoding decodes
COMPARED_LOGITS = 8
WEIGHT_DECAY, LEARNING_RATE, MAX_GRADIENT_NORM = 0.1, 1e-4, 1.0


class Workload(NamedTuple):
    """A kind of work (training, prefill or token), its sequences, and their length: of the text or of the context."""

    kind: str
    rows: int
    length: int

    @property
    def name(self) -> str:
        """What a table calls it."""
        if self.kind == TRAINING:
            return f"training step of {self.rows} × {self.length:,} tokens"
        return f"prefill of {self.length:,} tokens" if self.kind == PREFILL else f"one token after {self.length:,}"

    @property
    def tokens(self) -> int:
        """How many tokens it processes."""
        return self.rows if self.kind == TOKEN else self.rows * self.length


def least_cost(config: ModelConfig, workload: Workload, precision: str) -> tuple[str, float]:
    """(name of a limit of `measure_limits`, how much of it the workload takes): FLOPs of products, or bytes read."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    sizes = size(config, workload.length, dtype=dtype)
    if workload.kind == TOKEN:
        read = sizes.active_parameters * dtype.itemsize + workload.rows * sizes.state_bytes
        return "read_bytes_per_second", read
    passes = 3 if workload.kind == TRAINING else 1
    limit = "fp32_flops_per_second" if precision == "fp32" else "bf16_flops_per_second"
    return limit, passes * workload.tokens * sizes.flops_per_token


def benchmark_tokens(config: ModelConfig, rows: int, length: int) -> np.ndarray:
    """int64 [rows, length]: equal in every process."""
    return np.random.default_rng(0).integers(0, config.vocab_size or 1, (rows, length))


def weight_dtype(workload: Workload, precision: str) -> torch.dtype:
    """The dtype of the weights: training in bf16 keeps float32 weights and casts, decoding has bfloat16 ones."""
    is_wide = precision == "fp32" or (precision == "bf16" and workload.kind == TRAINING)
    return torch.float32 if is_wide else torch.bfloat16


def training_step(model: Decoder, rows: int, length: int, precision: str) -> Callable[[], float]:
    """A step of AdamW on the same texts each time, as `heddle train` takes it. It returns the loss before it."""
    model.train()
    optimizer = build_optimizer(model, WEIGHT_DECAY)
    batch = Batch(benchmark_tokens(model.config, rows, length + 1), ((length,),) * rows, np.arange(rows))
    autocast = torch.bfloat16 if precision == "bf16" else None

    def step() -> float:
        with record_function(PHASE + "forward"):
            result = accumulate_gradients(model, batch, (0, 0), autocast=autocast)
        with record_function(PHASE + "update"):
            apply_gradients(model, optimizer, result, LEARNING_RATE, MAX_GRADIENT_NORM)
        return float(result.loss)

    return step


class Prepared(NamedTuple):
    """Workload that is ready: `run(before())` does it once, and `before` is not part of it.

    values: the loss of the first step, or the first logits after the prompt: what another side must compute alike.
    """

    before: Callable[[], Any]
    run: Callable[[Any], object]
    values: list[float]


def prepare_heddle(config: ModelConfig, workload: Workload, precision: str, device: str) -> Prepared:
    """Build a model and make the workload ready."""
    model = build(config, dtype=weight_dtype(workload, precision), device=device)
    if workload.kind == TRAINING:
        step = training_step(model, workload.rows, workload.length, precision)
        return Prepared(_nothing, lambda _: step(), [step()])
    model.eval()
    cache = PackedWeightCache()  # a generation packs its weights once

    def read(texts: Tensor, state: Any) -> tuple[Tensor, Any]:
        with torch.no_grad(), packed_weights(cache):
            hidden, after = model(texts, None, state)
            return model.head(hidden[:, -1:]), after

    return _reading(read, config, workload, device, lambda: model.init_state(workload.rows, workload.length + TOKENS))


def prepare_transformers(model: Any, config: ModelConfig, workload: Workload, precision: str) -> Prepared:
    """The same workload, of a model of transformers: causal rows, torch's fused AdamW, a dynamic cache."""
    model = model.to(weight_dtype(workload, precision))
    if workload.kind == TRAINING:
        tokens = torch.from_numpy(benchmark_tokens(config, workload.rows, workload.length + 1)[:, :-1]).to(model.device)
        step = _transformers_step(model.train(), tokens, precision)
        return Prepared(_nothing, lambda _: step(), [step()])
    model.eval()

    def read(texts: Tensor, cache: Any) -> tuple[Tensor, Any]:
        with torch.no_grad():
            output = model(input_ids=texts, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return output.logits, output.past_key_values

    return _reading(read, config, workload, str(model.device), _nothing)


def _nothing() -> None:
    return None


def _reading(
    read: Callable[[Tensor, Any], tuple[Tensor, Any]],
    config: ModelConfig,
    workload: Workload,
    device: str,
    first_state: Callable[[], Any],
) -> Prepared:
    """A prefill, or some tokens decoded from a copy of the state after it. read: (tokens, state) -> (logits, state)."""
    prompt = torch.from_numpy(benchmark_tokens(config, workload.rows, workload.length)).to(device)
    logits, start = read(prompt, first_state())
    first, values = logits.argmax(-1), logits[0, -1, :COMPARED_LOGITS].tolist()

    def decode(state: Any) -> None:
        token = first
        for _ in range(TOKENS):
            logits, state = read(token, state)
            token = logits.argmax(-1)

    if workload.kind == PREFILL:
        return Prepared(first_state, lambda state: read(prompt, state)[0].argmax(-1), values)
    return Prepared(lambda: copy.deepcopy(start), decode, values)


def _transformers_step(model: Any, tokens: Tensor, precision: str) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True
    )
    autocast = torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=precision == "bf16")

    def step() -> float:
        with autocast:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step
