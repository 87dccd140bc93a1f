"""What inference engines allocate for the state of a design: transformers, vLLM and llama.cpp.

The design's own state says what its layers store. An engine rounds that up to whole blocks or cells, pads it, and may
store it in another dtype. The rules follow the engines' source code, read on 2026-11-28: `StaticCache` of transformers
5.23; `v1/core/kv_cache_utils.py` and `v1/kv_cache_interface.py` of vLLM; `llama-kv-cache-iswa.cpp` of llama.cpp.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from heddle.errors import ConfigError
from heddle.exchange.family_match import HEDDLE, FamilyMatch, best_match
from heddle.exchange.gguf.match import architecture_of
from heddle.model.config import refuse_overflow
from heddle.model.decoder import Decoder
from heddle.model.shapes_only import ShapesOnly
from heddle.model.size import Size

BLOCK = 16  # vLLM: tokens of a block, and what blocks of hybrids are multiples of
BATCHED_TOKENS = 8192  # vLLM: the most tokens of a step, `max_num_batched_tokens`, by default on an H100 or H200
FEW_PADDED_LAYERS = 1.5  # vLLM: kinds of layers whose numbers differ by less are padded to the larger number
# Families that the registry of vLLM has no class for.
NOT_IN_VLLM = frozenset(
    "diffllama helium lfm3 ministral nanochat recurrent_gemma solar_open vaultgemma youtu".split()  # noqa: SIM905
)
# Families whose recurrent states vLLM keeps in float32, since their class or their published files ask for it.
FLOAT32_STATES = frozenset({"kimi_linear", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text"})
CELLS = 256  # llama.cpp: cells of a cache are a multiple of this number
UBATCH = 512  # llama.cpp: tokens that are computed at once, `n_ubatch`
CELL_DTYPE = torch.float16  # llama.cpp: `--cache-type-k` and `-v`, whatever the weights are

Caches = Counter[tuple[int, int | None]]  # how many layers have these bytes a token and this window


@dataclass(frozen=True)
class EngineState:
    """What an engine allocates for the state of a design.

    state_bytes: for each context length; empty if the engine cannot hold the design, for the reason given.
    """

    engine: str
    dtype: str
    state_bytes: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True)
class Kept:
    """How many numbers one layer stores for one sequence.

    token: keys and values of each token, or its latent. index: an indexer's keys of each token. window: for how many
    tokens; None is all. recurrent: the states of recurrences. channels, kernel: of short convolutions.
    """

    token: int
    latent: bool
    index: int
    window: int | None
    recurrent: int
    channels: int
    kernel: int


def engine_states(model: Decoder, sizes: Sequence[Size], imported: str | None = None) -> list[EngineState]:
    """What each engine allocates for the design of a meta model, in the model's dtype where the engine follows it.

    sizes: the design's size at each context, all for one batch. imported: the family that the model came from. A
    bidirectional design has no state, and the list is empty.
    """
    if not model.causal:
        return []
    dtype, match = model.embed.weight.dtype, best_match(model.config, imported)
    engines = (
        ("transformers", dtype, lambda: _transformers(model, match, sizes, dtype)),
        ("vLLM", dtype, lambda: _vllm(model, match, sizes)),
        ("llama.cpp", CELL_DTYPE, lambda: _llama_cpp(model, sizes, imported)),
    )
    states = []
    for engine, kept_dtype, allocate in engines:
        try:
            allocated, reason = tuple(allocate()), ""
        except ConfigError as error:
            allocated, reason = (), str(error)
        states.append(EngineState(engine, str(kept_dtype).removeprefix("torch."), allocated, reason))
    return states


def kept_by_layers(model: Decoder) -> Counter[Kept]:
    """How many layers of a meta model's design store what, read off its state for one token."""
    kept: Counter[Kept] = Counter()
    with refuse_overflow(), ShapesOnly():
        state = model.init_state(1, 1)
    for layer, distinct, count in zip(state.layers, model.config.distinct_layers, model.layer_counts, strict=True):
        numbers: Counter[str] = Counter()
        latent = False
        for path, tensor in () if layer is None else layer.tensors().items():
            *parents, name = path.split(".")
            if name == "conv_state":
                numbers["kernel"], numbers["channels"] = tensor.shape[1] + 1, tensor.shape[2]
            elif name in ("keys", "values"):
                numbers["index" if "index" in parents else "token"] += tensor.numel()
                latent |= not tensor.numel() and "index" not in parents  # its values are a part of its keys
            else:
                numbers["recurrent"] += tensor.numel()
        mixer = distinct.config.mixer
        window = min(() if mixer is None else mixer.windows, default=None)
        names = ("token", "index", "recurrent", "channels", "kernel")
        kept[Kept(window=window, latent=latent, **{name: numbers[name] for name in names})] += count
    return kept


def _transformers(model: Decoder, match: FamilyMatch, sizes: Sequence[Size], dtype: torch.dtype) -> list[int]:
    """A `StaticCache` at each context; for heddle's own class, heddle's state."""
    if match.family.model_type == HEDDLE:
        return [size.state_bytes for size in sizes]
    if match.family.model_type in ("deepseek_v4", "minimax", "openai-gpt"):
        raise ConfigError("its class takes no StaticCache")
    if match.family.model_type == "recurrent_gemma":
        raise ConfigError("its class has its recurrent states outside of a StaticCache")
    if match.family.model_type == "qwen4_exp_text":
        raise ConfigError("keeps keys of indexers and tokens of memories in a form of its own, uncounted")
    kept = list(kept_by_layers(model).items())
    if match.family.model_type == "gpt_neo":  # its config names windows in a way that the cache does not read
        kept = [(replace(each, window=None), count) for each, count in kept]
    return [size.batch * sum(count * _static_bytes(each, size, dtype) for each, count in kept) for size in sizes]


def _static_bytes(kept: Kept, size: Size, dtype: torch.dtype) -> int:
    """The convolution's own token is cached, too; recurrences are as computed, in float32."""
    tokens = min(kept.window or size.context_length, size.context_length)
    in_dtype = kept.token * tokens + kept.index * size.context_length + kept.channels * kept.kernel
    return in_dtype * dtype.itemsize + kept.recurrent * max(dtype.itemsize, torch.float32.itemsize)


def _vllm(model: Decoder, match: FamilyMatch, sizes: Sequence[Size]) -> list[int]:
    """The blocks of each sequence, as vLLM counts them before it says how many fit."""
    family = match.family.model_type
    if family == HEDDLE or family in NOT_IN_VLLM:
        raise ConfigError(f"no class of its registry holds this design (as {match.architecture})")
    caches, states = vllm_layers(model, family)
    return [size.batch * block_bytes(caches, states, size.context_length) for size in sizes]


def vllm_layers(model: Decoder, family: str) -> tuple[Caches, Counter[int]]:
    """The layers as `block_bytes` takes them. Raises ConfigError for states that vLLM stores in a layout of its own."""
    dtype = model.embed.weight.dtype
    state_dtype = torch.float32 if family in FLOAT32_STATES else dtype
    caches: Caches = Counter()
    states: Counter[int] = Counter()
    kept = kept_by_layers(model)
    for each, count in kept.items():
        if each.token:
            caches[each.token * dtype.itemsize, each.window] += count
        convolution = each.channels * max(0, each.kernel - 1) * dtype.itemsize
        if fixed := convolution + each.recurrent * state_dtype.itemsize:
            states[fixed] += count
    if any(each.index for each in kept):
        raise ConfigError("packs an indexer's keys, uncounted")
    if states and any(each.latent for each in kept):
        raise ConfigError("its pages of latents depend on the GPU")
    return caches, states


def block_bytes(caches: Caches, states: Counter[int], context_length: int, batched_tokens: int = BATCHED_TOKENS) -> int:
    """What vLLM reserves for one sequence, in bytes.

    caches: how many layers have these bytes a token and this window. states: how many layers have a state of these
    bytes. batched_tokens: `max_num_batched_tokens`. Raises ConfigError for pages that cannot be made equal.

    Layers of one kind have pages of their own size. Of several kinds, all pages are as large as the largest, and layers
    lie in groups of one number of layers; a group that is not full wastes pages.
    """
    if not caches or (not states and len({window for _, window in caches}) == 1):
        blocks = {cache: _blocks(cache[1], BLOCK, context_length, batched_tokens) for cache in caches}
        kept = sum(count * BLOCK * cache[0] * blocks[cache] for cache, count in caches.items())
        return kept + sum(count * state for state, count in states.items())
    block = hybrid_block(caches, states)
    page = block * max(token for token, _ in caches)
    if any(page % (block * token) for token, _ in caches):
        raise ConfigError("cannot give its layers pages of one size")
    kinds = [(count, 1) for count in states.values()]
    for (token, window), count in caches.items():
        kinds.append((count, _blocks(window, page // token, context_length, batched_tokens)))
    fewest, most = min(count for count, _ in kinds), max(count for count, _ in kinds)
    group = most if most < FEW_PADDED_LAYERS * fewest else fewest
    return group * page * sum(-(-count // group) * blocks for count, blocks in kinds)


def hybrid_block(caches: Caches, states: Counter[int]) -> int:
    """Tokens of a block of vLLM: enough that a page of keys and values is no smaller than a layer's state."""
    if not caches or not states:
        return BLOCK
    return BLOCK * -(-max(states) // (BLOCK * max(token for token, _ in caches)))


def _blocks(window: int | None, block: int, context_length: int, batched_tokens: int) -> int:
    """Blocks of a sequence. A window holds the tokens of one step besides its own, and may begin within a block."""
    if window is None:
        return -(-context_length // block)
    return -(-min(window - 1 + batched_tokens, context_length) // block) + 1


def _llama_cpp(model: Decoder, sizes: Sequence[Size], imported: str | None) -> list[int]:
    """Cells of a context with `n_seq_max` = batch, each sequence with cells of its own (`kv_unified` off)."""
    if architecture_of(model.config, imported) is None:
        raise ConfigError("heddle writes no GGUF")
    kept = kept_by_layers(model).items()
    return [size.batch * sum(count * _cell_bytes(each, size) for each, count in kept) for size in sizes]


def _cell_bytes(kept: Kept, size: Size) -> int:
    """Keys and values in cells, and recurrent states and the inputs of convolutions in float32, one for a sequence."""
    state = kept.recurrent + max(kept.kernel - 1, 0) * kept.channels
    token = kept.token * CELL_DTYPE.itemsize
    return token * cells(kept.window, size.context_length) + state * torch.float32.itemsize


def cells(window: int | None, context_length: int) -> int:
    """Cells of a layer of llama.cpp for one sequence. A window's cache has room for the tokens computed at once."""
    every = -(-context_length // CELLS) * CELLS
    return every if window is None else -(-min(every, window + UBATCH) // CELLS) * CELLS
