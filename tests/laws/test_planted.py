"""Planted bugs, each of a kind that real projects have had. The law named with a bug must catch it."""

import ast
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heddle.config import Config
from heddle.laws import LAWS, LawViolation
from heddle.model.decoder import Decoder, Layer
from heddle.model.embedding import Embedding, Head
from heddle.model.initialization import initialize_module
from heddle.model.multi_token import MultiTokenModule, _tokens_ahead, predictions
from heddle.model.size import measure_size
from heddle.model.state import State
from heddle.numerics.activations import swiglu_clamped
from heddle.numerics.attention.householder import householder_products
from heddle.numerics.attention.indexer import _block_scores, _selected, blocks_of, select_keys, show_blocks
from heddle.numerics.attention.latent import (
    _absorbed,
    _absorbed_queries,
    _absorbed_untiled,
    _latent_tile,
    expand_latents,
    online_attention,
)
from heddle.numerics.attention.mask import AttentionMask, ScoreModifiers, TokenBias, zero_unused_slots
from heddle.numerics.attention.sdpa import _torch_sdpa, sdpa, with_sink
from heddle.numerics.attention.sliding_window import Band, _edge
from heddle.numerics.attention.softmax import _causal, _fold_heads, _per_document, softmax_weights, unmasked_attention
from heddle.numerics.attention.tiled import (
    _bias_by_offset,
    _CausalAttention,
    _hide_future,
    _MaskedAttention,
    _part_modifiers,
    _query_tiles,
    _softcap_gradient,
    _sum_by_offset,
    _weights,
)
from heddle.numerics.cross_entropy import _chunk_sums
from heddle.numerics.experts.mixture import (
    _MoveRows,
    _per_expert,
    _rows_in_blocks,
    route,
    router_logits,
    run_experts,
    run_on_weighted_inputs,
    select_experts,
    stable_topk,
    within_capacity,
)
from heddle.numerics.experts.sorted import (
    _backward,
    _empty_gradient,
    _gather_rows,
    _hidden_gradients,
    _sort_by_expert,
    hidden_activation,
)
from heddle.numerics.linear import reference as linear_reference
from heddle.numerics.norms import _fused, _normalized, layer_norm_reference, sinkhorn
from heddle.numerics.norms import reference as rms_reference
from heddle.numerics.random import ParameterDraws, RandomStream, uniform
from heddle.numerics.recurrent.batched_chunks import (
    _sum_ranges,
    _visible,
    batched_sums,
    channel_decays,
    head_decays,
    mask_documents,
    unit_triangular_inverse,
)
from heddle.numerics.recurrent.causal_sums import _recurrent, _state_decay
from heddle.numerics.recurrent.chunked_sums import (
    _gradients,
    _split_chunks,
    _states_before_chunks,
    _token_counts,
    decay_weights,
    safe_reciprocal,
)
from heddle.numerics.recurrent.convolution import (
    _shifted,
    _ShiftedSum,
    _with_starts,
    find_input_indices,
    next_conv_state,
)
from heddle.numerics.recurrent.double_softmax import _normalize_keys
from heddle.numerics.recurrent.gated_delta import TriangularSolve, _decayed_pairs
from heddle.numerics.recurrent.gated_delta import _batched as delta_batched
from heddle.numerics.recurrent.gated_delta import _chunked as delta_chunked
from heddle.numerics.recurrent.gated_delta import _step as delta_step
from heddle.numerics.recurrent.general_delta import _solved as general_solved
from heddle.numerics.recurrent.general_delta import _step as general_step
from heddle.numerics.recurrent.linear_attention import _both_directions, softmax_over_tokens
from heddle.numerics.recurrent.selective_scan import _by_halves, _stretch
from heddle.numerics.recurrent.selective_scan import _diagonal_step as diagonal_step
from heddle.numerics.recurrent.selective_scan import _step as scan_step
from heddle.numerics.recurrent.ssd import _chunked as ssd_chunked
from heddle.numerics.recurrent.ssd import _step as ssd_step
from heddle.numerics.recurrent.ssd import reference as ssd_reference
from heddle.numerics.rotary import apply_rotary, rotary_table
from heddle.numerics.rotary import reference as rotate
from heddle.parts.feedforwards import Feedforward
from heddle.parts.feedforwards.moe import ExpertTable, MoE, Router, RouterTrunk, balance_loss, compute_router_statistics
from heddle.parts.feedforwards.ngram_memory import NGramMemory
from heddle.parts.layout import EncoderOutput, Layout
from heddle.parts.mixers.attention import Attention, query_temperature
from heddle.parts.mixers.compressed_attention import CompressedAttention
from heddle.parts.mixers.cross_attention import CrossAttention, _full_mask
from heddle.parts.mixers.differential_attention import DifferentialAttention
from heddle.parts.mixers.latent_attention import LatentAttention
from heddle.parts.mixers.linear_attention import LinearAttention
from heddle.parts.mixers.mamba import Mamba
from heddle.parts.mixers.mamba2 import Mamba2
from heddle.parts.mixers.pair import Pair, _larger
from heddle.parts.mixers.path_attention import PathAttention
from heddle.parts.mixers.retention import Retention
from heddle.parts.mixers.rg_lru import RGLRU
from heddle.parts.mixers.rwkv7 import RWKV7
from heddle.parts.mixers.short_conv import ShortConv
from heddle.parts.modules.blocks import BlockCache, _call_blocks, block_mask, extend_blocks, finished_blocks
from heddle.parts.modules.dropout import BranchDropout, Dropout
from heddle.parts.modules.indexer import Indexer
from heddle.parts.modules.linear import fill_normal
from heddle.parts.modules.recurrent import (
    BoundedDecay,
    DeltaRuleMixer,
    GatedDecay,
    Preconditioner,
    in_steps,
    last_token,
    one_step,
    token_before,
)
from heddle.parts.modules.router_statistics import record, record_index_loss
from heddle.parts.modules.short_convolution import ShortConvolution, ShortConvolutions
from heddle.parts.modules.value_embedding import ValueEmbedding
from heddle.parts.norms.layer import LayerNorm
from heddle.parts.position_table import PositionTable, SlotMapping, join_tables
from heddle.parts.positions import Rotation, check_base
from heddle.parts.positions.axial_rope import AxialRope
from heddle.parts.positions.rope import Rope
from heddle.parts.positions.sinusoidal import Sinusoidal
from heddle.parts.residuals.attention_residuals import AttentionResiduals, SourceMix
from heddle.parts.residuals.hyper_connections import GateMaps
from heddle.parts.residuals.parallel import Parallel
from heddle.parts.residuals.post_norm import PostNorm
from heddle.parts.residuals.pre_norm import PreNorm
from heddle.parts.residuals.reordered import Reordered
from heddle.parts.residuals.residual_dual import ResidualDual
from heddle.parts.residuals.sandwich import Sandwich
from heddle.parts.states import KVCache, MixerState, _mask_of_cache, _mask_of_ring_and_call, without_padding
from tests.cases import case
from tests.laws.bugs import Bug, assert_caught, check_without_bugs, each, inputs_with
from tests.laws.planting import (
    Plant,
    assigned,
    calls,
    condition,
    constant,
    operand_dropped,
    operator,
    reads,
    replaced,
    result,
    wrapped,
)


def in_strides(heads: Tensor, groups: int) -> Tensor:
    """Heads [B, H, ...] in another order: the first of each group, then the second of each."""
    return heads.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)


def mask_with(change: Callable[[AttentionMask], dict[str, Any]]) -> Plant:
    """Other fields of an attention mask where it becomes a tensor."""
    return wrapped(
        AttentionMask.materialize,
        lambda materialize, mask, *part, **parts: materialize(replace(mask, **change(mask)), *part, **parts),
    )


def table_with(method: Any, change: Callable[[PositionTable], dict[str, Any]]) -> Plant:
    """Other fields of a position table, as one method sees it."""
    return wrapped(method, lambda call, table, *arguments: call(replace(table, **change(table)), *arguments))


def coordinates_of(change: Callable[[AxialRope, Tensor], Tensor]) -> Plant:
    """Other coordinates for a table of rotations."""
    return wrapped(AxialRope._make_table, lambda make, rope, xy, dtype: make(rope, change(rope, xy), dtype))


def slots_as_positions(view: Any, slots: int, after: bool) -> tuple[Tensor, Tensor]:
    positions, segment_ids = view.ring(slots, after=after)
    return torch.arange(slots).expand_as(positions), segment_ids


def last_channels_as_values(attend: Any, q: Tensor, tile: Any, *rest: Any) -> Any:
    def other(keys: slice) -> tuple[Tensor, Tensor]:
        wide, values = tile(keys)
        return wide, wide[..., -values.shape[-1] :]

    return attend(q, other, *rest)


def both_tables(rotate: Any, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """The second dim of each pair is rotated by the table in the other order."""
    pairs, other = cos.shape[-1], rotate(x, cos.flip(-1), sin.flip(-1), layout)
    y = rotate(x, cos, sin, layout)
    return torch.cat((y[..., :pairs], other[..., pairs : 2 * pairs], y[..., 2 * pairs :]), dim=-1)


def in_a_buffer(frequencies: Any, rope: Rope, layout: Layout, dtype: torch.dtype) -> Any:
    inv_freq, by_text = frequencies(rope, layout, dtype)
    if not rope._buffers:
        rope.register_buffer("stored", torch.tensor(inv_freq, dtype=dtype))
    return tuple(rope.stored.tolist()), by_text  # type: ignore[operator]


def slower_for_good(frequencies: Any, rope: Any, layout: Layout, dtype: torch.dtype) -> Any:
    inv_freq, by_text = frequencies(rope, layout, dtype)
    rope.slower = max(getattr(rope, "slower", 1.0), layout.length / 16)
    return tuple(theta / rope.slower for theta in inv_freq), by_text


def scaled_at_random(init: Any, embedding: Embedding, std: float, draws: ParameterDraws) -> None:
    init(embedding, std, draws)
    embedding.scale = {torch.float64: 1.0 + float(draws("scale").uniform(0, 1))}


def own_token_left_out(run: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    y, state = run(q, k, v, *rest)
    return y - (q * k).sum(-1, keepdim=True) * v, state


def in_bfloat16(result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """An output, and a float32 state with the bits of bfloat16."""
    y, state = result
    if isinstance(state, MixerState):
        return y, state.map(lambda _, tensor: in_bfloat16((y, tensor))[1])
    return y, state.bfloat16().float() if state is not None and state.dtype == torch.float32 else state


def with_two_bits(x: Tensor) -> Tensor:
    """Numbers of bfloat16 rounded to two bits behind the point."""
    return x.to(torch.float8_e5m2).to(x.dtype) if x.dtype == torch.bfloat16 else x


def last_not_moved(rotate: Any, x: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> Tensor:
    """In bfloat16 the last of several tokens gets the angles of the one before."""
    if x.dtype != torch.bfloat16 or x.shape[2] == 1:
        return rotate(x, cos, sin, *rest)
    cos, sin = (torch.cat((table[..., :-1, :], table[..., -2:-1, :]), dim=-2) for table in (cos, sin))
    return rotate(x, cos, sin, *rest)


def norm_of_the_sum(block: Sandwich, stream: Tensor, branches: Any) -> Tensor:
    for name, branch in branches.items():
        stream = block.after[name](stream + block.drops[name](branch(block.norms[name](stream))))
    return stream


def dropped_before_the_norm(block: Reordered, stream: Tensor, branches: Any) -> Tensor:
    for name, branch in branches.items():
        stream = stream + block.norms[name](block.drops[name](branch(stream)))
    return stream


def dropped_in_one_stream(block: ResidualDual, streams: tuple[Tensor, Tensor], branches: Any) -> tuple[Tensor, Tensor]:
    x, dual = streams
    for name, branch in branches.items():
        y = branch(x)
        x, dual = block.norms[name](x + block.drops[name](y)), dual + y
    return x, dual


BATCH_STATISTICS = calls(
    layer_norm_reference,
    "layer_norm",
    lambda functional, x, *rest: functional.layer_norm(x - 0.1 * x.mean(0, keepdim=True), *rest),
)
PADDING_VISIBLE = mask_with(lambda mask: {"k_positions": mask.k_positions.clamp(min=0)})
DECAY_AT_PADDING = calls(DeltaRuleMixer._delta_rule, "without_padding", lambda _, x, layout: x)
ONE_AXIS = coordinates_of(lambda rope, xy: xy[..., :1].expand_as(xy))
KEYED_BY_ROW = calls(uniform, "to_device", lambda to_device, samples, device: torch.arange(len(samples), device=device))
LOSS_OVER_ROWS = wrapped(balance_loss, lambda loss, scores, *rest: loss(scores, *rest) / len(scores))

# fmt: off
BUGS = [
    # Temperatures of queries
    Bug("a temperature that counts from the start of the call", "chunked_decoding", "attention-temperature",
        calls(query_temperature, "clamp", lambda x, **limit: (x - x[:, :1]).clamp(**limit), nth=0)),
    Bug("a temperature of padding that is not a number", "padding_gradients", "attention-temperature",
        calls(query_temperature, "clamp", lambda x, **_: x, nth=0)),
    Bug("a temperature that nothing reads", "options_have_effect", "attention-temperature",
        condition(Attention.forward, "temperature_beta", False), option="temperature_beta"),
    Bug("a smooth temperature whose growth nothing reads", "options_have_effect", "attention-temperature-smooth",
        wrapped(query_temperature, lambda factors, *arguments: factors(*arguments[:4])), option="temperature_growth"),
    # Chunks, bounds and factors
    Bug("chunks that count from the start of the call", "chunked_decoding", "attention-chunked",
        wrapped(Layout.in_chunks, lambda cut, layout, mask, width: cut(layout, replace(
            mask, q_positions=mask.q_positions - mask.q_positions[:, :1],
            k_positions=mask.k_positions - mask.q_positions[:, :1]), width))),
    Bug("chunks that later documents share", "document_isolation", "attention-chunked",
        wrapped(AttentionMask.in_chunks, lambda cut, mask, *rest: cut(
            replace(mask, q_segment_ids=None, k_segment_ids=None), *rest))),
    Bug("a window in the place of chunks", "receptive_field", "attention-chunked-bidirectional",
        condition(Attention._attend, "chunked", False)),
    Bug("bounds that nothing reads", "options_have_effect", "attention-clip",
        condition(Attention.forward, "qkv_clip", False), option="qkv_clip"),
    Bug("a factor of the values that nothing reads", "options_have_effect", "attention-value-scale",
        condition(Attention.forward, "value_multiplier", True), option="value_scale"),
    # Biases by tokens: forget gates and relative logits
    Bug("gates of other documents", "document_isolation", "attention-forget",
        calls(TokenBias.__call__, "materialize", lambda mask: mask.k_positions[:, None] >= 0)),
    Bug("gates in the order of a ring buffer's slots", "chunked_ragged_batch", "attention-forget-window",
        reads(TokenBias.__call__, "ordered", lambda _: True)),
    Bug("gates that a state does not keep", "chunked_decoding", "attention-forget",
        calls(Attention._attend, "extend", lambda cache, logs, *rest: cache.extend(0.0 * logs, *rest), nth=0)),
    # PaTH attention, whose formula only its oracle knows (tests/parts/test_path_attention.py)
    Bug("rates that a state does not keep", "chunked_decoding", "path",
        calls(PathAttention._attend, "_extended", lambda extend, cache, x, *rest: extend(cache, 0.0 * x, *rest), 0)),
    Bug("gates of PaTH attention that a state does not keep", "chunked_decoding", "path-forget",
        calls(PathAttention._attend, "_extended", lambda extend, cache, x, *rest: extend(cache, 0.0 * x, *rest), 1)),
    Bug("vectors of earlier documents in the convolution of a state", "chunked_decoding", "path-own-widths",
        calls(PathAttention._attend, "next_state", lambda convolution, x, layout, last: last)),
    Bug("products over the documents before", "document_isolation", "path",
        reads(householder_products, "segment_ids", lambda _: None, 0)),
    # Compressed attention; tests/parts/test_compressed_attention.py has its oracles
    Bug("an entry that is seen before its block is finished", "causality", "compressed",
        calls(_call_blocks, "CallBlocks", lambda make, ends, *rest: make(ends - 2 * (ends > 0).long(), *rest))),
    Bug("an index that ranks unfinished blocks", "causality", "compressed-index",
        reads(block_mask, "ends", lambda ends: 0 * ends)),
    Bug("a tail that is lost at a cut", "chunked_decoding", "compressed",
        reads(extend_blocks, "last", lambda last: 0.0 * last)),
    Bug("a tail that keeps padding", "padding_not_cached", "compressed-overlap",
        condition(extend_blocks, "padding", True)),
    Bug("a tail that keeps removed tokens", "state_rollback", "compressed-overlap",
        calls(BlockCache.rolled_back, "freed", lambda freed, size: 0 * freed(size))),
    Bug("blocks of slots", "padding_invariance", "compressed",
        wrapped(_call_blocks, lambda make, layout, ratio: make(replace(
            layout, positions=torch.arange(layout.length).expand_as(layout.positions), has_padding=False), ratio))),
    Bug("entries of all documents in the first one", "document_packing", "compressed",
        reads(block_mask, "segments", lambda segments: 0 * segments)),
    Bug("a block before that is of another document", "document_isolation", "compressed-overlap",
        reads(_call_blocks, "theirs", lambda theirs, *, all_segments: all_segments[..., None].expand_as(theirs))),
    Bug("a loss of the index averaged over rows", "gradient_accumulation", "compressed-index",
        calls(CompressedAttention._shown, "index_loss", lambda loss, index, *rest: loss(index, *rest) / len(index.q))),
    Bug("logits by the distance from the call's first token", "chunked_decoding", "attention-relative",
        calls(TokenBias.__call__, "offsets", lambda mask: mask.offsets() - mask.q_positions[:, :1, None])),
    Bug("relative logits of earlier queries", "padding_invariance", "attention-relative-window",
        calls(Attention._token_bias, "relative_logits", lambda mixer, r: mixer.relative_logits(r).roll(1, 2))),
    # Exclusive self-attention
    Bug("the value of the call's first token in the place of a token's own", "chunked_decoding", "attention-exclusive",
        calls(Attention.forward, "without_own_values", lambda change, y, v: change(y, v[:, :, :1].expand_as(v)))),
    Bug("exclusive heads that nothing reads", "options_have_effect", "attention-exclusive-window",
        condition(Attention.forward, "exclusive", False), option="exclusive"),
    # Keys and values of another layer
    Bug("values of a state that are not handed over", "chunked_decoding", "attention-shared-keys-repeated",
        calls(Attention._attend, "SharedKeys", lambda make, k, v, mask, own: make(
            k, torch.cat((0.0 * v[:, :, : -own.shape[2]], v[:, :, -own.shape[2] :]), dim=2), mask, own))),
    Bug("a mask handed over that shows later tokens", "causality", "attention-shared-keys-repeated",
        calls(Attention._attend, "SharedKeys",
              lambda make, k, v, mask, own: make(k, v, replace(mask, causal=False), own))),
    Bug("keys handed over in another order of rows", "batch_position_invariance", "attention-shared-keys",
        calls(Attention._attend, "SharedKeys", lambda make, k, v, mask, own: make(k.flip(0), v, mask, own))),
    # Values of the first layer
    Bug("first values of another token", "chunked_decoding", "attention-value-residual",
        wrapped(Attention._mixed_values, lambda mix, mixer, v, over: mix(mixer, v, over) if over is None or
                mixer.value_source is None else mix(mixer, v, over) + over.by_layer[mixer.value_source].own_values[
                    :, :, :1])),
    Bug("first values of another row", "batch_position_invariance", "attention-value-residual-repeated",
        wrapped(Attention._mixed_values, lambda mix, mixer, v, over: mix(mixer, v, over) if over is None or
                mixer.value_source is None else mix(mixer, v, over) + over.by_layer[mixer.value_source].own_values.flip(
                    0))),
    Bug("first values that nothing reads", "options_have_effect", "attention-value-residual-bidirectional",
        condition(Attention._mixed_values, "value_source", True), option="value_residual"),
    # Rows of tables added to values
    Bug("rows of the next token", "causality", "attention-value-embedding",
        calls(ValueEmbedding._rows, "token_ids", lambda ids, *call: ids(*call).roll(-1, 1))),
    Bug("rows by the place in the call", "chunked_decoding", "value-embeddings-of-other-mixers",
        calls(ValueEmbedding._rows, "token_ids", lambda ids, *call: torch.arange(
            ids(*call).shape[1]).expand_as(ids(*call)))),
    Bug("rows handed over in another order of rows", "batch_position_invariance", "attention-value-embedding",
        wrapped(ValueEmbedding._rows, lambda rows, module, layout, source, target:
                rows(module, layout, source, target) if source is None else
                rows(module, layout, source, target).flip(0))),
    Bug("a bound that nothing reads", "options_have_effect", "attention-value-embedding",
        reads(ValueEmbedding.forward, "bound", lambda bound: 2.0, nth=1), option="gate_bound"),
    # Layers that are visited several times
    Bug("a later visit with weights of its own", "size_matches_model", "shared-layer",
        condition(Decoder.tie, "source", False)),
    Bug("one state for all visits of a layer", "chunked_decoding", "shared-layer",
        assigned(Decoder._empty_state, "states", lambda states: [states[0] for _ in states])),
    Bug("one adapter for all visits", "size_matches_model", "shared-adapters",
        condition(Decoder.tie, "VisitAdapter", False)),
    Bug("a rank that nothing reads", "options_have_effect", "shared-adapters",
        condition(Layer.__init__, "adapter_rank", False), option="adapter_rank"),
    # Keys that an indexer selects
    Bug("an index that ranks later tokens", "causality", "attention-indexer",
        calls(_block_scores, "masked_fill", lambda scores, *_: scores, nth=0)),
    Bug("a selection in the place of the mask", "selected_keys", "attention-indexer-window",
        calls(select_keys, "selecting", lambda mask, selected, _: replace(mask, window=None, selected=~selected))),
    Bug("one selected key too many", "selected_keys", "latent-indexer",
        wrapped(select_keys, lambda select, q, k, weights, mask, choice:
                select(q, k, weights, mask, choice._replace(top_k=choice.top_k + 1)))),
    Bug("all of equal scores selected", "selected_keys", "attention-indexer-bidirectional-window",
        operator(_selected, ast.LtE, ast.GtE)),
    Bug("a short text of which not all is seen", "selected_keys", "attention-indexer",
        wrapped(select_keys, lambda select, q, k, weights, mask, choice:
                select(q, k, weights, mask, choice._replace(top_k=choice.top_k - 1)))),
    Bug("keys of the index that a state does not hold", "chunked_decoding", "attention-indexer",
        calls(Indexer.extend, "_replace", lambda index, k: index._replace(k=torch.cat((
            0.0 * k[:, :, : k.shape[2] - index.k.shape[2]], k[:, :, k.shape[2] - index.k.shape[2] :]), dim=2)), nth=1)),
    Bug("index keys at the positions of the call", "all_chunkings", "latent-indexer",
        wrapped(Indexer.forward, lambda forward, indexer, x, queries, layout:
                forward(indexer, x, queries, Layout.causal(*x.shape[:2])))),
    Bug("equal scores by slot and not by position", "state_rollback", "attention-indexer-window",
        calls(blocks_of, "argsort", lambda positions, **_: torch.arange(positions.shape[1]).expand_as(positions),
              nth=0)),
    Bug("a part of a block", "selected_keys", "attention-indexer-blocks",
        calls(_selected, "gather", lambda taken, dim, of_key: taken.gather(dim, of_key).index_fill(
            3, torch.tensor([1]), value=False))),
    Bug("a local block that is not seen", "selected_keys", "attention-indexer-blocks-window",
        operator(_selected, ast.Lt, ast.Gt, nth=0)),
    Bug("a first block that is not seen", "selected_keys", "attention-indexer-nsa",
        operator(_selected, ast.Lt, ast.Gt, nth=1)),
    Bug("blocks of slots", "padding_invariance", "latent-indexer-blocks",
        wrapped(blocks_of, lambda make, mask, block: make(
            replace(mask, k_positions=torch.arange(mask.k_positions.shape[1]).expand_as(mask.k_positions)), block))),
    Bug("index keys of another order of rows", "batch_position_invariance", "attention-indexer",
        wrapped(Indexer.forward, lambda forward, *inputs: (lambda index: index._replace(k=index.k.flip(0)))(
            forward(*inputs)))),
    Bug("a pooled block that is seen before it is finished", "causality", "attention-indexer-pool",
        reads(block_mask, "ends", lambda ends: 0 * ends)),
    Bug("an unfinished block that is not seen", "selected_keys", "latent-indexer-pool",
        reads(show_blocks, "finished", torch.ones_like)),
    Bug("pooled keys at the positions of the last tokens", "selected_keys", "attention-indexer-pool-per-head",
        wrapped(finished_blocks, lambda make, layout, blocks, ratio: (make(layout, blocks, ratio) - 1).clamp(min=-1))),
    Bug("raw keys that a state does not hold", "chunked_decoding", "latent-indexer-pool",
        reads(extend_blocks, "last", lambda last: 0.0 * last)),
    Bug("removed tokens in the raw keys", "state_rollback", "attention-indexer-pool",
        calls(BlockCache.rolled_back, "freed", lambda freed, size: 0 * freed(size))),
    Bug("a rollback beyond the raw keys", "rollback_errors", "attention-indexer-pool",
        replaced(BlockCache.can_roll_back, lambda *_: True)),
    Bug("an index loss averaged over rows", "gradient_accumulation", "attention-indexer-bidirectional",
        calls(Indexer.select, "index_loss", lambda loss, index, *rest: loss(index, *rest) / len(index.q))),
    Bug("an index loss recorded twice", "activation_checkpointing", "attention-indexer",
        condition(record_index_loss, "closed", True)),
    # Windows, ring buffers and states
    Bug("a window one key too wide", "receptive_field", "attention-window-2",
        result(Band.keys_before, lambda keys: keys + 1)),
    Bug("a window one key too wide in the mask", "kernel_equivalence", "attention-window-7",
        operator(AttentionMask.materialize, ast.Lt, ast.LtE)),
    Bug("a bidirectional window one key too narrow", "receptive_field", "attention-bidirectional-window",
        result(Band.keys_after, lambda keys: keys - 1)),
    Bug("ring buffer slots off by one", "chunked_decoding", "attention-window-7",
        wrapped(SlotMapping.of, lambda of, table, *rest: of(replace(table, max_tokens=table.max_tokens + 1), *rest))),
    Bug("a ring buffer unrolled one step too far", "chunked_decoding", "attention-window-7",
        assigned(KVCache._in_order, "oldest", lambda oldest: oldest + 1)),
    Bug("a ring buffer overwritten before it is read", "chunked_decoding", "attention-window-2",
        condition(KVCache.extend, "length", False)),
    Bug("positions of a ring buffer rolled the wrong way", "all_chunkings", "attention-window-mixed",
        calls(_mask_of_ring_and_call, "roll", lambda x, shift, dim: x.roll(-shift, dim), nth=0)),
    Bug("a ragged ring buffer read as if its rows had equal lengths", "chunked_ragged_batch", "attention-window-2",
        condition(KVCache._in_order, "equal_lengths", False)),
    Bug("attention to unused slots beyond the text", "chunked_decoding", "attention-mha",
        calls(KVCache.extend, "min", lambda _, tokens, slots: slots)),
    Bug("a grown cache with its tokens moved to the end", "cache_growth", "attention-mha",
        calls(KVCache._grown, "cat", lambda torch, parts, dim: torch.cat(parts[::-1], dim=dim))),
    Bug("one token more than cache_length accepted", "state_errors", "attention-window-2",
        wrapped(PositionTable._check_capacity, lambda check, table, tokens: check(table, tokens - 1))),
    Bug("a state of another design accepted", "state_errors", "attention-mha",
        condition(Decoder.forward, "fingerprint", False)),
    Bug("a state that can be used twice", "state_errors", "attention-mha",
        assigned(State.consume, "consumed", lambda _: False)),
    Bug("a state for a bidirectional design", "chunked_decoding", "attention-bidirectional",
        condition(Decoder.init_state, "causal", False)),
    # Multi-token modules
    Bug("a document's last tokens predicted with the next document's", "multi_token_prediction", "attention-gqa",
        result(_tokens_ahead, lambda found: (torch.ones_like(found[0]), found[1]))),
    Bug("the embedding before the one that a depth reads", "multi_token_prediction", "attention-gqa",
        calls(predictions, "module",
              lambda module, hidden, embedding, *rest: module(hidden, embedding.roll(1, 1), *rest))),
    Bug("the embedding of the token to predict", "multi_token_prediction", "attention-gqa",
        calls(predictions, "module",
              lambda module, hidden, embedding, *rest: module(hidden, embedding.roll(-1, 1), *rest))),
    Bug("first weights that depend on whether there are modules", "multi_token_prediction", "attention-mha",
        wrapped(initialize_module, lambda draw, model, name, module, seed, *rest:
                draw(model, name, module, seed + (model.config.multi_token is not None), *rest))),
    Bug("a module's state that forgets which tokens it has", "multi_token_prediction", "attention-window-2",
        calls(MultiTokenModule.forward, "extend", lambda table, layout: (table, table.extend(layout)[1]))),
    Bug("modules of mixers that see later tokens", "multi_token_prediction", "attention-bidirectional",
        condition(Decoder._build_multi_token, "causal", False)),
    # States: forks, selected rows, rollback
    Bug("a fork that shares its keys with the original", "fork_isolation", "attention-gqa",
        calls(State.select, "map", lambda layer, change: layer)),
    Bug("a fork that copies everything but the keys", "fork_isolation", "attention-window-2",
        calls(State.select, "map",
              lambda layer, change: layer.map(lambda name, x: x if name == "keys" else change(name, x)))),
    Bug("selected rows of the cache in sorted order", "state_row_selection", "attention-mha",
        calls(State.select, "index_select", lambda x, dim, rows: x.index_select(dim, rows.sort().values))),
    Bug("a selected row with the token count of its batch's longest row", "state_row_selection", "attention-mha",
        calls(PositionTable.select, "counted", lambda table: table)),
    Bug("keys of joined states in another order than their rows", "changing_batch", "attention-gqa",
        calls(MixerState.join, "cat", lambda torch, tensors: torch.cat((*tensors[1:], tensors[0])))),
    Bug("joined rows with each other's token counts", "changing_batch", "attention-gqa",
        calls(join_tables, "replace", lambda replace, table, token_counts, **fields:
              replace(table, token_counts=token_counts.flip(0), **fields))),
    Bug("joined texts of unequal lengths assumed to be equal", "changing_batch", "attention-gqa",
        calls(join_tables, "counted", lambda table: table)),
    Bug("rows of equal length assumed to be contiguous", "state_rollback", "attention-gqa",
        result(PositionTable._with_lengths, lambda table: replace(table, contiguous=table.equal_lengths))),
    Bug("a ring buffer without the slots declared for rollback", "state_rollback", "attention-window-7",
        wrapped(Attention.init_state, lambda init, mixer, spec: init(mixer, replace(spec, rollback=0)))),
    Bug("a row that continues from its position before the rollback", "state_rollback", "attention-mha",
        calls(PositionTable.rolled_back, "where", lambda torch, *_, self: self.last_token)),
    Bug("every row rolled back by the first row's number of tokens", "state_rollback", "attention-window-2",
        wrapped(PositionTable.rolled_back,
                lambda roll_back, table, tokens, most: roll_back(table, tokens[:1].expand_as(tokens), most))),
    Bug("rows assumed to stay equally long through a rollback", "state_rollback", "attention-mqa",
        wrapped(PositionTable._with_lengths, lambda with_lengths, before, *lengths: replace(
            with_lengths(before, *lengths), equal_lengths=before.equal_lengths, contiguous=before.contiguous))),
    Bug("a ring buffer whose rollback slots can be used twice", "rollback_errors", "layers-nested",
        wrapped(KVCache.can_roll_back, lambda can, cache, tokens, table:
                can(cache, tokens, replace(table, rollback_left=table.rollback)))),
    Bug("a wrapped ring buffer treated as if it had never been full", "rollback_errors", "layers-nested",
        wrapped(KVCache.can_roll_back, lambda can, cache, tokens, table:
                can(cache, tokens, replace(table, peak_tokens=table.max_tokens)))),
    Bug("a refused rollback that consumes the state", "rollback_errors", "attention-window-2",
        calls(State.rollback, "check_not_consumed", lambda state: state.consume())),
    Bug("a state that stays usable after its rollback", "rollback_errors", "attention-mha",
        assigned(State.rollback, "consumed", lambda _: False)),
    Bug("a size without the slots for rollback", "rollback_size", "attention-window-7",
        calls(measure_size, "init_state", lambda model, batch, length, encoder_output, rollback:
              model.init_state(batch, length, encoder_output))),
    Bug("positions that depend on the row's index in the batch", "batch_position_invariance", "attention-gqa",
        calls(Layout.padded, "tensor_of", lambda tensor_of, lengths, *rest:
              tensor_of([lengths[0]] * len(lengths), *rest))),
    Bug("normalization statistics taken over the batch", "batch_position_invariance", "norm-layer", BATCH_STATISTICS),
    # Masks and positions
    Bug("a causal mask aligned to the first key instead of the last", "chunked_decoding", "attention-mha",
        wrapped(_query_tiles, lambda tiles, *sizes: ((tile, tile.stop) for tile, _ in tiles(*sizes)))),
    Bug("a causal mask left out", "causality", "attention-gqa", constant(_causal, True, False)),
    Bug("a causal mask off by one", "kernel_equivalence", "attention-gqa",
        mask_with(lambda mask: {"q_positions": mask.q_positions + (mask.q_positions >= 0)})),
    Bug("one later token visible within a causal window", "causality", "attention-window-2",
        result(Band.keys_after, lambda keys: keys + 1)),
    Bug("a causal mask in a bidirectional design", "causality", "attention-bidirectional-window",
        wrapped(Layout._attention_mask, lambda make, layout, window, causal: make(layout, window, True))),
    Bug("document boundaries left out of the mask", "document_packing", "attention-mha",
        mask_with(lambda mask: {"q_segment_ids": None})),
    Bug("the documents of a packed row attended to as one", "document_isolation", "attention-mha",
        wrapped(_per_document, lambda attend, q, k, v, mask, *rest, **options:
                attend(q, k, v, replace(mask, doc_lengths=tuple((sum(row),) for row in mask.doc_lengths)),
                       *rest, **options))),
    Bug("decoding after packing that continues the first document", "decoding_after_packing", "attention-gqa",
        table_with(PositionTable.next_layout, lambda table: {"last_token": table.last_token * torch.tensor([1, 0])})),
    Bug("positions that restart in every chunk", "chunked_decoding", "attention-mha",
        table_with(PositionTable.next_layout, lambda table: {"max_tokens": 0})),
    Bug("the first row's positions used for every row", "padding_invariance", "attention-mha",
        table_with(PositionTable.next_layout, lambda table: {"last_token": torch.stack(
            (table.last_token[:1, 0].expand(table.batch), table.last_token[:, 1]), dim=1)})),
    Bug("attention to padding", "padding_invariance", "attention-mha", PADDING_VISIBLE),
    Bug("attention to padding", "padding_gradients", "attention-mha", PADDING_VISIBLE),
    Bug("padding counted as tokens written to the cache", "padding_not_cached", "attention-window-7",
        calls(PositionTable._arrivals, "cumsum", lambda is_token, dim: torch.ones_like(is_token).cumsum(dim))),
    # NaN
    Bug("unused slots multiplied by weights of zero", "nan_in_unused_slots", "attention-mha",
        replaced(zero_unused_slots, lambda k, v, mask: (k, v))),
    Bug("padding embedded like a token", "nan_in_padding", "attention-mha",
        calls(Embedding.forward, "masked_fill", lambda x, *_: x, nth=1)),
    Bug("padding normed before it is hidden", "nan_in_padding", "token-types",
        calls(Embedding.forward, "masked_fill", lambda x, *_: x, nth=0)),
    Bug("a first norm that stays although it is left out", "options_have_effect", "residual-pre-norm-no-first",
        condition(PreNorm.__init__, "layer_index", False), option="first_norm"),
    Bug("normalization statistics taken over the batch", "nan_in_other_rows", "norm-layer", BATCH_STATISTICS),
    Bug("normalization statistics taken over the batch", "batch_invariance", "norm-layer", BATCH_STATISTICS),
    Bug("normalization statistics taken over the batch", "row_isolation", "norm-layer", BATCH_STATISTICS),
    # Heads
    Bug("query heads assigned to groups in strides", "chunked_decoding", "attention-sink",
        wrapped(_fold_heads, lambda attend, q, k, *rest: attend(in_strides(q, k.shape[1]), k, *rest))),
    Bug("query heads assigned to groups in strides in the unmasked kernel", "chunked_decoding", "attention-gqa",
        wrapped(unmasked_attention, lambda attend, q, k, *rest: attend(in_strides(q, k.shape[1]), k, *rest))),
    Bug("key heads tiled instead of repeated", "kernel_equivalence", "attention-gqa",
        wrapped(softmax_weights, lambda weights, q, k, *rest: weights(in_strides(q, k.shape[1]), k, *rest))),
    Bug("a softmax over queries instead of keys", "kernel_equivalence", "attention-mha",
        calls(softmax_weights, "softmax", lambda scores, dim: scores.softmax(-2))),
    # ALiBi
    Bug("a score bias with the wrong sign in the mask", "kernel_equivalence", "alibi",
        result(ScoreModifiers.bias, lambda bias: -bias)),
    Bug("a score bias with the wrong sign in the triangle kernel", "kernel_equivalence", "alibi-softcap",
        wrapped(_weights, lambda weights, q, k, hiding, modifiers:
                weights(q, k, hiding, modifiers._replace(bias=-modifiers.bias)))),
    Bug("a score bias shifted by one head", "kernel_equivalence", "alibi-mixed",
        result(ScoreModifiers.bias, lambda bias: None if bias is None else bias.roll(1, 1))),
    Bug("a score bias assigned to the heads of a group in strides", "chunked_decoding", "alibi",
        wrapped(unmasked_attention, lambda attend, q, k, v, scale, bias:
                attend(q, k, v, scale, in_strides(bias, k.shape[1])))),
    Bug("the score bias of the first group in all blocks", "kernel_equivalence", "alibi-window",
        calls(_part_modifiers, "len", lambda *_: 1)),
    Bug("offsets to later keys with the wrong sign in the blocks kernel", "kernel_equivalence",
        "relative-bias-bidirectional-window",
        calls(_edge, "Block", lambda block, offsets: block(-offsets))),
    Bug("distances instead of offsets in the mask", "kernel_equivalence", "relative-bias-bidirectional-window",
        result(AttentionMask.offsets, lambda offsets: offsets.abs())),
    Bug("a score bias whose gradient is summed over the wrong diagonals", "kernel_equivalence", "relative-bias",
        calls(_sum_by_offset, "reshape", lambda gradient, *shape: gradient.reshape(*shape).flip(1))),
    Bug("the gradient of a score bias from the first row of a batch alone", "kernel_equivalence", "relative-bias",
        calls(_CausalAttention.backward, "sum", lambda rows, dim: rows[0])),
    Bug("the gradient of a score bias after the softcap's", "kernel_equivalence", "relative-bias-softcap-sink-window",
        calls(_MaskedAttention.backward, "index_add_",
              lambda bias, dim, rows, gradient, *, tanh_scores, without_sink:
              bias.index_add_(dim, rows, _softcap_gradient(gradient, tanh_scores[:, :, without_sink])))),
    Bug("slots of a ring buffer used as positions", "chunked_decoding", "alibi-window",
        calls(_mask_of_cache, "ring", slots_as_positions)),
    Bug("distances between slots, padding included", "padding_invariance", "alibi",
        wrapped(AttentionMask.offsets, lambda offsets, mask: offsets(
            replace(mask, k_positions=torch.arange(mask.k_positions.shape[1]).expand_as(mask.k_positions))))),
    Bug("the score bias of one query for all queries of a tile", "kernel_equivalence", "alibi-sink-dropout",
        result(_bias_by_offset, lambda bias: bias[:, :, :1].expand_as(bias))),
    Bug("a softcap applied after the ALiBi bias", "kernel_equivalence", "alibi-softcap",
        calls(softmax_weights, "tanh", lambda scores, *, modifiers, mask, k:
              (scores + modifiers.bias(mask).unflatten(1, (k.shape[1], -1)) / modifiers.softcap).tanh())),
    # Differential attention, whose formula only its oracle knows (tests/parts/test_differential_attention.py)
    Bug("the second queries and keys of some heads not rotated", "position_shift_invariance", "differential",
        calls(DifferentialAttention._pairs, "position", lambda mixer, x, layout, *, heads:
              torch.cat((mixer.position(x[:, :heads], layout), x[:, heads:]), dim=1))),
    Bug("both keys of a head exchanged in the state", "chunked_decoding", "differential",
        calls(DifferentialAttention._attend, "extend", lambda state, k, *rest, self:
              state.extend(k.roll(self.head_dim, -1), *rest))),
    # Rotary scalings that depend on the text's length
    Bug("rotary frequencies chosen by the tokens read so far", "chunked_decoding", "rope-longrope",
        result(PositionTable.final_lengths, lambda lengths: (1,) * len(lengths))),
    Bug("a state without the cache_length that the design needs", "state_errors", "rope-ntk-dynamic",
        condition(Decoder._empty_state, "length_dependent", False, nth=0)),
    # Options of attention
    Bug("a sink added to the log-sum-exp instead of subtracted", "kernel_equivalence", "attention-sink",
        wrapped(with_sink, lambda with_sink, y, logsumexp, sink: with_sink(y, logsumexp, -sink))),
    Bug("a causal mask not shifted past the sink's key", "kernel_equivalence", "attention-sink",
        calls(sdpa, "pad", lambda functional, q, widths: functional.pad(q, (0, 0, 0, 1)), nth=0)),
    Bug("sinks assigned to the heads of a group in strides", "chunked_decoding", "attention-sink",
        wrapped(_fold_heads, lambda attend, q, k, v, scale, bias, sink:
                attend(q, k, v, scale, bias, in_strides(sink, k.shape[1])))),
    Bug("the gradient of a sink scaled like that of a score", "finite_differences", "attention-sink",
        assigned(_CausalAttention.backward, "grad_sink", lambda gradient, *, ctx: ctx.scale * gradient, nth=1)),
    Bug("a softcap that makes masked scores finite", "causality", "attention-softcap",
        wrapped(_weights, lambda weights, q, k, hiding, modifiers:
                weights(q, k, None if hiding is None else hiding.clamp(min=-modifiers.softcap), modifiers))),
    Bug("later keys hidden in order where a tile's queries are reversed", "kernel_equivalence", "alibi",
        wrapped(_hide_future, lambda hide, size, like, table: hide(size, like, None))),
    Bug("the gradient of queries without the scale", "kernel_equivalence", "attention-gqa",
        assigned(_CausalAttention.backward, "scaled_keys", lambda keys, *, ctx: keys / ctx.scale)),
    Bug("a softcap left out of the gradient", "finite_differences", "attention-softcap",
        replaced(_softcap_gradient, lambda gradient, tanh_scores: gradient)),
    Bug("a softcap without its division", "kernel_equivalence", "attention-softcap",
        calls(softmax_weights, "tanh", lambda scores, *, modifiers: (scores * modifiers.softcap).tanh())),
    Bug("an output gate that reads the mean of the whole row", "causality", "attention-gate-channel",
        calls(Attention.forward, "gate", lambda mixer, x: mixer.gate(x.mean(1, keepdim=True)))),
    # Rotations
    Bug("rotary angles computed in the model's bfloat16", "low_precision", "rope-half",
        calls(rotary_table, "angle_dtype", lambda angle_dtype, dtype: dtype)),
    Bug("one rotated head with two bits behind the point", "low_precision", "rope-partial",
        result(apply_rotary, lambda heads: torch.cat((with_two_bits(heads[:, :1]), heads[:, 1:]), dim=1))),
    Bug("the last token rotated like the one before in bfloat16", "low_precision", "rope-partial",
        wrapped(apply_rotary, last_not_moved)),
    Bug("positions of decoded tokens counted in float16", "low_precision_state", "attention-gqa",
        result(PositionTable.next_layout, lambda layout: replace(layout, positions=layout.positions.half().long()))),
    Bug("positions of decoded tokens that wrap around after 256", "low_precision_state", "alibi",
        result(PositionTable.next_layout, lambda layout: replace(layout, positions=layout.positions % 256))),
    Bug("rotary frequencies in a buffer that a dtype conversion rounds", "dtype_round_trip", "rope-half",
        wrapped(Rope._inv_freq, in_a_buffer)),
    Bug("a rotary table of one layout used with pairs of the other", "rotary_invariants", "rope-half",
        wrapped(apply_rotary, both_tables)),
    Bug("the last dims of a head rotated instead of the first", "rotary_invariants", "rope-partial",
        wrapped(apply_rotary, lambda rotate, x, cos, *rest: rotate(x.roll(2 * cos.shape[-1], -1), cos, *rest))),
    Bug("a wrong sign in the interleaved rotation", "rotary_invariants", "rope-interleaved",
        operator(rotate, ast.Sub, ast.Add, nth=1)),
    Bug("float64 heads rotated by a float32 table", "rotary_invariants", "rope-cast-after",
        calls(Rope._wide, "promote_types", lambda torch, *_: torch.float32)),
    Bug("queries left unrotated", "position_shift_invariance", "attention-gqa",
        calls(Attention._heads, "position", lambda mixer, x, layout, *, heads:
              mixer.position(x, layout) if heads == mixer.kv_heads else x)),
    Bug("absolute positions counted from the start of the call", "position_shift_invariance", "sinusoidal",
        calls(Sinusoidal.forward, "sinusoidal_embedding", lambda embedding, positions, *rest, **own:
              embedding(positions - positions[:, :1], *rest, **own))),
    Bug("rotary frequencies changed by a long text and not restored", "call_isolation", "attention-mha",
        wrapped(Rope._inv_freq, slower_for_good)),
    Bug("a sine without the attention factor of its scaling", "rotary_invariants", "rope-yarn",
        wrapped(rotary_table, lambda table, x, inv_freq, dtype, factor:
                (table(x, inv_freq, dtype, factor)[0], table(x, inv_freq, dtype)[1]))),
    # Latents
    Bug("a latent rotated before its up-projection", "position_shift_invariance", "latent-full-query",
        calls(LatentAttention.forward, "cat", lambda torch, parts, dim, *, self, layout:
              torch.cat((self.position(parts[0], layout), parts[1]), dim=dim), nth=1)),
    Bug("a latent cached before its norm", "chunked_decoding", "latent-low-rank-query",
        calls(LatentAttention.forward, "kv_norm", lambda mixer, latents, *, state:
              mixer.kv_norm(latents) if state is None else latents)),
    Bug("shared rotary keys cached before their rotation", "chunked_decoding", "latent-interleaved",
        calls(LatentAttention.forward, "position", lambda mixer, keys, layout, *, state:
              mixer.position(keys, layout) if state is None else keys, nth=1)),
    Bug("absorbed scores without the rotary dims", "chunked_decoding", "latent-yarn",
        wrapped(_absorbed_queries, lambda queries, q_nope, q_rope, *rest: queries(q_nope, 0.0 * q_rope, *rest))),
    Bug("absorbed scores scaled by the width of the other dims alone", "kernel_equivalence", "latent-full-query",
        wrapped(_absorbed, lambda attend, q_nope, *rest: attend(q_nope, *rest[:-1], q_nope.shape[3] ** -0.5))),
    Bug("absorbed values sliced from the wrong end", "all_chunkings", "latent-hybrid",
        calls(_absorbed, "online_attention", last_channels_as_values)),
    Bug("heads of an up-projection split in strides", "kernel_equivalence", "latent-bias-scale",
        calls(expand_latents, "unflatten", lambda x, dim, sizes: x.unflatten(dim, sizes[::-1]).mT)),
    Bug("unused slots of cached latents read", "nan_in_unused_slots", "latent-no-rope",
        replaced(_latent_tile, lambda latents, mask, keys: latents[:, :, keys])),
    Bug("absorbed scores of all keys without the scale", "kernel_equivalence", "latent-bias-scale",
        wrapped(_absorbed_untiled, lambda attend, *arguments: attend(*arguments[:-1], 1.0))),
    Bug("a sink that scores at once leave out", "kernel_equivalence", "latent-sink",
        condition(_absorbed_untiled, "sink", False)),
    Bug("a sink that tiles of keys leave out", "chunked_decoding", "latent-sink",
        calls(online_attention, "sink_per_query", lambda modifiers, q: None)),
    # Kernels of accelerators
    Bug("a block of rows given to the expert before", "kernel_equivalence", "moe",
        constant(_rows_in_blocks, True, False)),
    Bug("gradients of the other tokens of an expert's rows", "kernel_equivalence", "moe",
        calls(_MoveRows.backward, "sum", lambda copies, dim: copies.select(dim, 0))),
    Bug("a target without a gradient of its own in the fused loss", "kernel_equivalence", "attention-mha",
        assigned(_chunk_sums, "is_target", torch.zeros_like)),
    Bug("an offset forgotten by the fused norm", "kernel_equivalence", "norm-rms-offset-cast",
        wrapped(_normalized, lambda norm, x, weight, eps, offset, cast: norm(x, weight, eps, 0.0, cast))),
    # Norms and projections
    Bug("an epsilon outside the square root", "kernel_equivalence", "attention-mha",
        calls(rms_reference, "rsqrt", lambda torch, x, *, eps: 1.0 / ((x - eps).sqrt() + eps))),
    Bug("a norm without an epsilon", "extreme_inputs", "attention-mha",
        wrapped(_fused, lambda norm, x, weight, eps, *rest: norm(x, weight, 0.0, *rest))),
    Bug("scores rounded to bfloat16 before the softmax", "bfloat16_kernels", "attention-gqa",
        calls(_weights, "bmm", lambda torch, q, k: torch.bmm(q, k).bfloat16().to(q.dtype))),
    Bug("a kernel for later tokens too in half precision", "bfloat16_isolation", "attention-gqa",
        wrapped(_torch_sdpa, lambda attend, q, *rest: attend(q, *rest[:-1], rest[-1] and q.dtype != torch.bfloat16))),
    Bug("a projection without its bias", "kernel_equivalence", "attention-bias",
        wrapped(linear_reference, lambda linear, x, weight, bias: linear(x, weight, None))),
    # Training
    Bug("dropout active in eval", "dropout_off_in_eval", "attention-dropout",
        replaced(Dropout.active, lambda dropout: dropout.rate > 0.0)),
    Bug("dropout never active", "dropout_off_in_eval", "dropout-everywhere",
        replaced(Dropout.active, lambda dropout: False)),
    Bug("dropout keyed by the row's index in the batch", "gradient_accumulation", "dropout-everywhere", KEYED_BY_ROW),
    Bug("recomputed layers detached from the embedding", "activation_checkpointing", "attention-mha",
        calls(Decoder._call_layer, "checkpoint", lambda checkpoint, run, layer, stream, *rest, **options:
              checkpoint(run, layer, stream.detach().requires_grad_(), *rest, **options))),
    Bug("a norm weight without a gradient", "finite_differences", "norm-layer",
        wrapped(layer_norm_reference, lambda norm, x, weight, *rest: norm(x, weight.detach(), *rest))),
    # Coordinates
    Bug("coordinates ignored", "coordinate_shift_invariance", "axial-mha",
        condition(Layout.axial_positions, "coordinates", True)),
    Bug("token indices used instead of coordinates", "coordinate_shift_invariance", "axial-bidirectional",
        reads(AxialRope._table, "axial_positions", lambda _, *, layout:
              torch.arange(layout.length)[None, :, None].expand(layout.batch, -1, 2))),
    Bug("x used for both axes", "coordinate_shift_invariance", "axial-mha", ONE_AXIS),
    Bug("x used for both axes", "rotary_invariants", "axial-bidirectional", ONE_AXIS),
    Bug("frequencies of y that continue those of x", "rotary_invariants", "axial-partial-interleaved",
        coordinates_of(lambda rope, xy: xy * torch.tensor([1.0, rope.inv_freq[-1] * 0.1]))),
    Bug("x and y exchanged", "rotary_invariants", "axial-mha", coordinates_of(lambda rope, xy: xy.flip(-1))),
    Bug("the first row's coordinates used for every row", "coordinate_shift_invariance", "axial-mha",
        wrapped(rotary_table, lambda table, positions, *rest: table(positions[:1].expand_as(positions), *rest))),
    Bug("negative coordinates clamped to zero", "coordinate_shift_invariance", "axial-partial-interleaved",
        wrapped(rotary_table, lambda table, positions, *rest: table(positions.clamp(min=0), *rest))),
    Bug("padding rotated by its coordinates", "coordinate_shift_invariance", "axial-mha",
        condition(Layout.axial_positions, "padding", True)),
    Bug("coordinates lost in a call with a state", "coordinate_shift_invariance", "axial-window-beside-rope",
        result(PositionTable.extend, lambda pair: (pair[0], replace(pair[1], coordinates=None)))),
    # Gated delta
    Bug("a recurrent state that decays at padding", "padding_not_cached", "delta", DECAY_AT_PADDING),
    Bug("padding read by the convolution", "padding_invariance", "delta-convolution-2",
        calls(find_input_indices, "where", lambda torch, is_token, number, last: number, nth=0)),
    Bug("padding counted as a token of the convolution", "padding_invariance", "delta-key-heads",
        calls(find_input_indices, "cumsum", lambda is_token, dim: torch.ones_like(is_token).cumsum(dim))),
    Bug("a convolution state carried into the next document", "chunked_ragged_batch", "delta",
        calls(next_conv_state, "masked_fill", lambda recent, *_: recent)),
    Bug("a convolution state of the last slots, padding included", "chunked_ragged_batch", "delta-key-heads",
        wrapped(next_conv_state, lambda next_state, x, conv_state, taps: next_state(x, conv_state, None))),
    Bug("a convolution across documents", "document_isolation", "delta", replaced(_with_starts, lambda y, *_: y)),
    Bug("a convolution across documents of unknown lengths", "document_packing", "delta-convolution-2",
        assigned(find_input_indices, "same_document", torch.ones_like)),
    Bug("a convolution that starts anew in every call", "chunked_decoding", "delta",
        calls(_shifted, "cat", lambda torch, parts, dim: torch.cat((0 * parts[0], parts[1]), dim=dim))),
    Bug("a convolution that looks ahead", "causality", "delta",
        wrapped(_ShiftedSum.forward, lambda forward, ctx, x, weight: forward(ctx, x.flip(1), weight).flip(1))),
    Bug("a gradient of the convolution shifted the wrong way", "finite_differences", "delta",
        wrapped(_ShiftedSum.backward, lambda backward, ctx, gradient:
                (backward(ctx, gradient.flip(1))[0].flip(1), backward(ctx, gradient)[1]))),
    Bug("queries of single steps left unscaled", "chunked_decoding", "delta",
        inputs_with(delta_step, lambda inputs: {"q": inputs.q * inputs.q.shape[-1] ** 0.5})),
    Bug("a recurrent state that is corrected before it decays", "kernel_equivalence", "delta",
        inputs_with(delta_step, lambda inputs: {"beta": inputs.beta / inputs.log_decay.exp()[..., 0]})),
    Bug("values without beta", "kernel_equivalence", "delta-key-heads",
        inputs_with(delta_chunked, lambda inputs: {"v": inputs.v / inputs.beta[..., None]})),
    Bug("beta applied twice to the values", "chunked_decoding", "delta-hybrid",
        inputs_with(delta_chunked, lambda inputs: {"v": inputs.v * inputs.beta[..., None]})),
    Bug("a recurrent state that does not decay between chunks", "cache_growth", "delta",
        result(_decayed_pairs, lambda pairs:
               (*pairs[:2], pairs[2]._replace(whole_chunk=torch.ones_like(pairs[2].whole_chunk))))),
    Bug("keys that read the state without its decay", "cache_growth", "delta-key-heads",
        calls(delta_chunked, "cat", lambda torch, parts, dim, *, k, beta: torch.cat((parts[0], k * beta), dim=dim))),
    Bug("decays that leave out the token itself", "kernel_equivalence", "delta",
        reads(head_decays, "within", lambda within: within.tril(-1), nth=0)),
    Bug("documents that share a recurrent state", "document_isolation", "delta", replaced(_visible, lambda *_: None)),
    Bug("a recurrent state carried into the next document in single steps", "chunked_ragged_batch",
        "delta-convolution-1", inputs_with(delta_step, lambda inputs: {"call_segment_ids": None})),
    Bug("value heads assigned to key heads in strides", "chunked_decoding", "delta-hybrid",
        calls(delta_step, "expand", lambda x, batch, groups, repeats, dim:
              x.mT.expand(batch, groups, dim, repeats).permute(0, 3, 1, 2))),
    Bug("a gradient of the triangular solve outside the triangle", "finite_differences", "delta",
        calls(TriangularSolve.backward, "tril", lambda x, diagonal: x)),
    Bug("decays initialized alike for every seed", "seeded_initialization", "delta",
        calls(GatedDecay.init_weights, "uniform", lambda stream, start, stop:
              torch.linspace(0.1, 0.9, stop - start, dtype=torch.float64), nth=0)),
    Bug("a factor of β that nothing reads", "options_have_effect", "delta-negative-eigenvalues",
        condition(DeltaRuleMixer._delta_rule, "negative_eigenvalues", False), option="negative_eigenvalues"),
    Bug("a decay before each step of a single token", "chunked_decoding", "delta-steps",
        wrapped(one_step, lambda make, inputs, step:
                make(inputs, step)._replace(log_decay=inputs.log_decay[:, :, :1]))),
    Bug("a document that begins anew at each step of a token", "chunked_ragged_batch", "delta-steps",
        condition(one_step, "step", True, nth=0)),
    Bug("steps of a token that follow those of all tokens", "causality", "delta-steps",
        calls(in_steps, "movedim", lambda x, source, to: x.movedim(1, 2))),
    # Kimi Delta Attention
    Bug("channels that decay at padding", "padding_not_cached", "kda", DECAY_AT_PADDING),
    Bug("keys undecayed from one half of a chunk to the other", "kernel_equivalence", "kda",
        calls(channel_decays, "exp", torch.ones_like, nth=1)),
    Bug("documents that share a recurrent state of many rates", "document_isolation", "kda-own-widths",
        wrapped(mask_documents, lambda mask, products, *rest: (products, mask(products, *rest)[1]))),
    Bug("a bound of decays that nothing reads", "options_have_effect", "kda-decay-bound",
        reads(BoundedDecay.forward, "bound", lambda bound: 1.0), option="decay_bound"),
    Bug("channel gates that nothing reads", "options_have_effect", "kda-channel-gates",
        calls(DeltaRuleMixer._delta_rule, "split_heads", lambda split, x, heads: 0 * split(x, heads) + 1, nth=2),
        option="negative_eigenvalues"),
    Bug("a curvature that decays at padding", "padding_not_cached", "delta-preconditioned",
        calls(Preconditioner.forward, "without_padding", lambda _, x, layout: x)),
    Bug("a curvature that starts anew in every call", "chunked_decoding", "kda-preconditioned",
        calls(Preconditioner.forward, "_sums", lambda module, inputs, state: module._sums(inputs, None))),
    # RWKV-7
    # n-gram memory, whose formula only its oracle knows (tests/parts/test_ngram_memory.py)
    Bug("a memory of the documents before", "document_isolation", "ngram-memory",
        calls(NGramMemory._look_up, "cached_taps", lambda *_: None)),
    Bug("n-grams of the next token", "causality", "ngram-memory",
        reads(NGramMemory._look_up, "ids", lambda ids: ids.roll(-1, 1), 3)),
    # Experts by a hash of the token's id (tests/parts/test_hash_routing.py)
    Bug("experts of the token before in the call", "chunked_decoding", "moe-hash",
        calls(MoE._by_ids, "token_ids", lambda ids, *call: ids(*call).roll(1, 1))),
    Bug("a table that has the same experts for each seed", "seeded_initialization", "moe-table",
        reads(ExpertTable.init_weights, "draws", lambda _: ParameterDraws(0, ""), 0)),
    Bug("an RWKV-7 state that decays at padding", "padding_not_cached", "rwkv7",
        calls(RWKV7._recurrence, "without_padding", lambda _, x, layout: x, nth=2)),
    Bug("padding written into an RWKV-7 state", "padding_not_cached", "rwkv7",
        calls(RWKV7._recurrence, "without_padding", lambda _, x, layout: x, nth=0)),
    Bug("a shift that reads the document before", "document_isolation", "rwkv7",
        calls(token_before, "cached_taps", lambda *_: None)),
    Bug("a shift that reads the state's document in the next one", "chunked_ragged_batch", "rwkv7",
        calls(token_before, "masked_fill", lambda x, *_: x)),
    Bug("a shift that starts anew in every call", "chunked_decoding", "rwkv7-own-widths",
        wrapped(token_before, lambda before, x, layout, last: before(x, layout, None))),
    Bug("a last token that is that of the call's first", "chunked_decoding", "rwkv7",
        wrapped(last_token, lambda last, x, layout, old: last(x, layout, old) if x.shape[1] < 2 else x[:, :1])),
    Bug("an RWKV-7 state carried into the next document in single steps", "chunked_ragged_batch", "rwkv7-own-widths",
        inputs_with(general_step, lambda inputs: {"call_segment_ids": None})),
    Bug("a state that is read before its decay in single steps", "kernel_equivalence", "rwkv7",
        inputs_with(general_step, lambda inputs: {"c": inputs.c * inputs.log_decay.exp()})),
    Bug("a token that removes what it writes", "kernel_equivalence", "rwkv7-own-widths",
        calls(general_solved, "tril", lambda x, diagonal: x)),
    Bug("first values of RWKV-7 in another order of rows", "batch_position_invariance", "rwkv7-value-residual",
        assigned(RWKV7._recurrence, "v", lambda v, *, mix: v if mix is None else v.flip(0))),
    Bug("a value residual that nothing reads", "options_have_effect", "rwkv7-value-residual",
        condition(RWKV7._recurrence, "mix", False)),
    # Recurrences for accelerators
    Bug("decays of a state left out where all chunks are computed at once", "kernel_equivalence", "retention-plain",
        calls(batched_sums, "addcmul", lambda torch, within, reads, decay: within + reads)),
    Bug("an inverse of the other sign", "kernel_equivalence", "delta",
        calls(unit_triangular_inverse, "baddbmm", lambda torch, *matrices, alpha:
              torch.baddbmm(*matrices, alpha=-alpha))),
    Bug("channels that decay from the start to each token of a half", "kernel_equivalence", "kda-own-widths",
        assigned(_sum_ranges, "is_second", torch.ones_like)),
    Bug("a state in which a chunk's transition is left out", "kernel_equivalence", "delta-key-heads",
        calls(delta_batched, "addcmul", lambda torch, erased, *_: erased)),
    # Mamba
    Bug("a Mamba state that decays at padding", "padding_not_cached", "mamba",
        calls(Mamba._scan, "without_padding", lambda _, x, layout: x)),
    Bug("a Mamba convolution that forgets its last tokens", "chunked_decoding", "mamba-norms",
        calls(Mamba._scan, "next_state", lambda convolution, x, layout, last: 0 * last)),
    Bug("a time step left out of single steps of a scan", "chunked_decoding", "mamba",
        inputs_with(scan_step, lambda inputs: {"time_step": torch.ones_like(inputs.time_step)})),
    Bug("a Mamba state carried into the next document in single steps", "chunked_ragged_batch", "mamba-norms",
        inputs_with(scan_step, lambda inputs: {"call_segment_ids": None})),
    Bug("a Mamba state carried into the next document", "document_isolation", "mamba",
        reads(_stretch, "starts", lambda _: None, 0)),
    Bug("two neighbors of which the first does not decay", "kernel_equivalence", "mamba",
        operator(_by_halves, ast.Mult, ast.Add)),
    # Mamba-2
    Bug("a Mamba-2 state that decays at padding", "padding_not_cached", "mamba2",
        calls(Mamba2._scan, "without_padding", lambda _, x, layout: x)),
    Bug("the bias of a convolution read at padding", "padding_not_cached", "mamba2",
        calls(ShortConvolution.forward, "masked_fill", lambda y, *_: y)),
    Bug("a time step left out of single steps", "chunked_decoding", "mamba2",
        inputs_with(ssd_step, lambda inputs: {"time_step": torch.ones_like(inputs.time_step)})),
    Bug("a Mamba-2 state carried into the next document in single steps", "chunked_ragged_batch", "mamba2-groups",
        inputs_with(ssd_step, lambda inputs: {"call_segment_ids": None})),
    Bug("groups of heads in strides", "kernel_equivalence", "mamba2-groups",
        calls(ssd_reference, "repeat_interleave", lambda x, repeats, dim: x.repeat(1, repeats, 1, 1))),
    Bug("a Mamba-2 state that does not decay between chunks", "cache_growth", "mamba2",
        calls(ssd_chunked, "addcmul", lambda torch, addition, state, decay: addition + state, nth=0)),
    # Short convolutions of mixers and feed-forwards
    Bug("a convolution of a feed-forward that reads one token ahead", "causality", "short-convolution",
        wrapped(ShortConvolution.forward, lambda run, self, x, *rest: run(self, x.roll(-1, 1), *rest))),
    Bug("convolutions of keys and values across documents", "document_isolation", "short-convolution-window",
        calls(ShortConvolution.forward, "_convolve", lambda self, x, state, taps: self._convolve(x, state, None))),
    Bug("a feed-forward that begins anew in every call", "chunked_decoding", "short-convolution",
        calls(Layer.forward, "_run", lambda run, part, convolution, x, layout, state: run(
            part, convolution, x, layout,
            None if state is None else replace(state, conv_state=torch.zeros_like(state.conv_state))), nth=1)),
    Bug("a state of the convolutions that stays as it was", "chunked_decoding", "short-convolution-moe",
        calls(ShortConvolutions.forward, "replace", lambda change, state, **_: state)),
    Bug("convolutions of a window's keys that it does not declare", "receptive_field", "short-convolution-window",
        replaced(Attention._beyond_window, lambda self, convolutions: 0)),
    Bug("hidden channels convolved by a feed-forward without a window", "token_permutation", "short-convolution",
        assigned(Feedforward.convolve_hidden, "window", lambda window: 1)),
    Bug("a token shift that does not read its weights", "options_have_effect", "token-shift",
        calls(ShortConvolution._convolve, "stack", lambda torch, weights, dim: torch.ones(len(weights[0]), 2))),
    Bug("an activation that nothing reads", "options_have_effect", "short-convolution-window",
        condition(ShortConvolution.forward, "silu", False), option="activation"),
    # Short convolution
    Bug("products of a call that the state forgets", "chunked_decoding", "short-conv",
        calls(ShortConv._convolve, "next_state", lambda convolution, kv, *rest:
              convolution.next_state(0 * kv, *rest))),
    Bug("a gate of values that reads padding", "padding_invariance", "short-conv-biases",
        calls(find_input_indices, "cumsum", lambda is_token, dim: torch.ones_like(is_token).cumsum(dim))),
    # Building and configs
    Bug("a parameter left uninitialized", "complete_initialization", "norm-layer",
        replaced(LayerNorm.init_weights, lambda norm, std, draws: nn.init.ones_(norm.weight))),
    Bug("a tied head's bias left uninitialized", "complete_initialization", "head-tied-bias",
        wrapped(Head.init_weights, lambda init, head, *rest: None if head.tied else init(head, *rest))),
    Bug("initial weights drawn from the global generator", "seeded_initialization", "attention-mha",
        calls(fill_normal, "mul_", lambda numbers, std: torch.randn_like(numbers).mul_(std))),
    Bug("the same initial weights for every projection", "seeded_initialization", "attention-mha",
        replaced(ParameterDraws.__call__, lambda draws, parameter: RandomStream.of(draws.seed, parameter))),
    Bug("a tied head with a weight of its own", "tied_head", "attention-mha", condition(Decoder.tie, "tied", False)),
    Bug("a random scale that is not in the state dict", "state_dict_completeness", "attention-mha",
        wrapped(Embedding.init_weights, scaled_at_random)),
    Bug("false values left out of the written config", "config_round_trip", "attention-bidirectional",
        result(Config.dump, lambda data: {name: value for name, value in data.items() if value})),
    Bug("the state bytes of a longer text reported", "size_matches_model", "attention-mha",
        calls(measure_size, "init_state", lambda model, batch, length, *rest:
              model.init_state(batch, length + 1, *rest))),
    Bug("a softcap of the logits that nothing reads", "options_have_effect", "layers-feedforward-only",
        calls(Head.forward, "scale_and_cap", lambda change, logits, scale, softcap: change(logits, scale, None)),
        option="softcap"),
    Bug("a base accepted beside the frequencies that replace it", "options_have_effect", "rope-frequencies",
        replaced(check_base, lambda base, inv_freq: None), option="base"),
    Bug("a dropout of the embedding that nothing applies", "options_have_effect", "layers-feedforward-only",
        calls(Embedding.forward, "dropout", lambda embedding, x: x), option="dropout"),
    # Encoder outputs and pairs
    Bug("attention to padding of the encoder output", "cross_attention", "cross-grouped",
        calls(CrossAttention._project, "long", lambda is_token: torch.ones_like(is_token, dtype=torch.int64))),
    Bug("every encoder output assumed to have no padding", "cross_attention", "cross-own-widths",
        result(_full_mask, lambda mask: replace(mask, all_visible=True))),
    Bug("NaN in the padding of the encoder output projected", "cross_attention", "cross-alone",
        condition(EncoderOutput.clean, "is_token", True)),
    Bug("values projected from the sequence of the keys", "cross_attention", "pair-cross",
        wrapped(EncoderOutput.clean, lambda clean, output: clean(replace(output, values=None)))),
    Bug("the first row's encoder output used for every row", "cross_attention", "cross-grouped",
        calls(CrossAttention._project, "to", lambda x, dtype: x[:1].expand_as(x).to(dtype))),
    Bug("no gradient to the encoder output", "cross_attention", "cross-grouped",
        calls(CrossAttention._project, "to", lambda x, dtype: x.detach().to(dtype))),
    Bug("keys normalized over their dims", "cross_attention", "cross-double-softmax",
        calls(_normalize_keys, "softmax", lambda k, dim: k.softmax(3).nan_to_num(), nth=1)),
    Bug("padding of the encoder output in the softmax over its tokens", "cross_attention", "cross-double-softmax",
        calls(_normalize_keys, "masked_fill", lambda k, *_: k, nth=0)),
    Bug("padding of the encoder output lost in the state", "cross_attention", "cross-double-softmax",
        calls(CrossAttention.init_state, "summarize_keys_values", lambda summarize, keys, values, is_token:
              summarize(keys, values, None))),
    Bug("an encoder output accepted by a design that reads none", "cross_attention", "attention-mha",
        wrapped(Decoder._check_encoder_output, lambda check, decoder, output, batch:
                check(decoder, None if decoder.encoder_width is None else output, batch))),
    Bug("padding of the source not marked in the encoder output", "cross_attention", "encoder",
        result(Decoder.encode, lambda output: replace(output, is_token=None))),
    Bug("the second state of a pair discarded", "chunked_decoding", "pair-windows",
        calls(Pair.forward, "second", lambda pair, x, layout, state: pair.second(x, layout, None))),
    Bug("a position table sized for the first mixer of a pair", "chunked_decoding", "pair-windows",
        replaced(Pair.lookback, lambda pair: pair.first.lookback)),
    Bug("a pair that declares the narrower of its two windows", "receptive_field", "pair-windows",
        calls(_larger, "max", lambda _, a, b: min(a, b))),
    # Recurrences
    Bug("a chunk that ignores the chunks before it", "cache_growth", "linear-attention-elu",
        result(_states_before_chunks, lambda pair: (torch.zeros_like(pair[0]), pair[1]))),
    Bug("padding counted in the decay", "padding_not_cached", "retention-plain",
        wrapped(_token_counts, lambda count, layout, *rest: count(layout._replace(cumulative_tokens=None), *rest))),
    Bug("keys and values summed in half precision", "low_precision", "linear-attention-elu",
        result(_split_chunks, lambda chunks: chunks.half().to(chunks.dtype))),
    Bug("a state in the model's bfloat16", "low_precision_state", "rg-lru",
        calls(RGLRU._recurrence, "ConvRecurrentState", lambda make, h, conv, *, v: make(h.to(v.dtype), conv))),
    Bug("a state rounded to bfloat16 by each step", "low_precision_state", "rg-lru-own-width",
        result(diagonal_step, in_bfloat16)),
    Bug("a state that soon forgets how it was rounded", "low_precision_state", "mamba2", result(ssd_step, in_bfloat16)),
    Bug("a state rounded to bfloat16 after each call", "low_precision_state", "retention-plain",
        result(Retention._retain, in_bfloat16)),
    Bug("a sum of weights in bfloat16", "low_precision_state", "linear-attention-rope",
        calls(LinearAttention._sums, "causal_sums", lambda sums, *arguments: in_bfloat16(sums(*arguments)), nth=1)),
    Bug("documents summed together", "document_isolation", "linear-attention-elu",
        operator(decay_weights, ast.Eq, ast.GtE, nth=0)),
    Bug("a recurrent state carried into the next document", "chunked_ragged_batch", "retention-plain",
        operator(decay_weights, ast.Eq, ast.GtE, nth=1)),
    Bug("keys of every document summed in the state", "decoding_after_packing", "linear-attention-relu",
        operator(decay_weights, ast.Eq, ast.LtE, nth=2)),
    Bug("a sum that sees one token ahead", "causality", "retention-rope-gate",
        calls(decay_weights, "tril", lambda visible: visible.tril(1))),
    Bug("a step that reads the state before adding its token", "all_chunkings", "linear-attention-learned",
        wrapped(_recurrent, own_token_left_out)),
    Bug("a decay left out of single steps", "chunked_decoding", "retention-learned-decays",
        wrapped(_state_decay, lambda decay, layout, length, log_decay, like: decay(layout, length, None, like))),
    Bug("a gradient of a learned decay without its second term", "finite_differences", "retention-learned-decays",
        operand_dropped(_gradients, "chunk_grad_k", nth=1)),
    Bug("features of padding summed", "padding_invariance", "linear-attention-elu",
        replaced(without_padding, lambda x, layout: x)),
    Bug("a division of zero by zero", "extreme_inputs", "linear-attention-relu",
        replaced(safe_reciprocal, lambda x: x.reciprocal())),
    Bug("a token counted in both directions", "document_packing", "linear-attention-bidirectional",
        wrapped(_both_directions, lambda sums, q, k, v, ids:
                sums(q, k, v, ids) + (q * k).sum(-1, keepdim=True) * v)),
    Bug("a softmax over tokens that counts padding", "padding_invariance", "linear-attention-double-softmax",
        calls(softmax_over_tokens, "masked_fill", lambda k, padding, value: k.masked_fill(padding, 0.0), nth=0)),
    Bug("a softmax over the tokens of all documents", "document_packing", "linear-attention-double-softmax",
        wrapped(softmax_over_tokens, lambda softmax, k, padding, ids: softmax(k, padding, None))),
    Bug("float32 angles in a mixer without softmax", "low_precision", "retention-learned-decays",
        replaced(Rotation.table_dtype, lambda rotation, dtype, device: dtype)),
    # Residual connections
    Bug("a block that adds its input twice", "residual_identity", "residual-pre-norm-drop-path",
        wrapped(PreNorm.forward, lambda forward, block, stream, branches: stream + forward(block, stream, branches))),
    Bug("a parallel block that adds a part of its input again", "residual_identity", "residual-parallel-dropout",
        wrapped(Parallel.forward, lambda forward, block, stream, branches:
                forward(block, stream, branches) + 0.1 * stream)),
    Bug("a post-norm block without its norm", "residual_identity", "residual-post-norm",
        calls(PostNorm.forward, "norms", lambda norm, stream: stream)),
    Bug("an outer sum over the normalized input", "residual_identity", "residual-post-norm-outer-sum",
        wrapped(PostNorm.forward, lambda forward, block, stream, branches:
                forward(block, stream, branches) - stream + block.norms["mixer"](stream))),
    Bug("the second norm of a sandwich applied to the sum", "residual_identity", "residual-sandwich",
        replaced(Sandwich.forward, norm_of_the_sum)),
    Bug("ResiDual without its second stream", "residual_identity", "residual-dual",
        result(ResidualDual.forward, lambda streams: (streams[0], streams[0]))),
    Bug("streams mixed by a matrix that is not doubly stochastic", "residual_identity", "residual-hyper-apart",
        wrapped(sinkhorn, lambda sinkhorn, logits, iterations, *rest: sinkhorn(logits, 0, *rest))),
    Bug("streams mixed by rows that do not sum to 1", "drop_path_scaling", "residual-hyper",
        calls(sinkhorn, "logsumexp", lambda logs, dim, keepdim: 0.0, nth=1)),
    Bug("gates that read the next token's streams", "causality", "residual-hyper-gates",
        calls(GateMaps.forward, "norm", lambda maps, stream: maps.norm(stream.roll(-1, 1)))),
    Bug("one dropout module for both branches", "drop_path_rates", "residual-pre-norm-drop-path",
        calls(PreNorm.forward, "drops", lambda drop, y, *, self: self.drops["mixer"](y))),
    Bug("the same dropout in all layers", "drop_path_rates", "residual-hyper",
        assigned(Decoder.__init__, "site", lambda site: 0)),
    Bug("drop path rates that do not start at zero", "drop_path_rates", "residual-reordered",
        assigned(Layer.__init__, "drop_rate", lambda rate, *, model, layer_index:
                 model.residual.drop_path * (layer_index + 1) / model.depth)),
    Bug("dropout of elements without dropout of branches", "drop_path_rates", "residual-dual",
        replaced(BranchDropout.forward, lambda dropout, y: dropout.elements(y))),
    Bug("surviving branches that are not rescaled", "drop_path_scaling", "residual-post-norm",
        wrapped(Dropout.forward, lambda forward, dropout, x, keep=None:
                forward(dropout, x, keep) * (1.0 - dropout.rate if dropout.active else 1.0))),
    Bug("a dropped branch that stays in the softmax", "drop_path_scaling", "residual-attention",
        calls(AttentionResiduals.forward, "_written", lambda block, stream, name, y, keep:
              block._written(stream, name, y, None))),
    Bug("a softmax over tokens instead of sources", "causality", "residual-attention-blocks",
        calls(SourceMix.forward, "softmax", lambda logits, dim: logits.softmax(1))),
    Bug("an embedding that is forgotten", "residual_identity", "residual-attention-blocks-apart",
        result(AttentionResiduals.forward, lambda stream: (stream[0], *stream[2:]))),
    Bug("a branch dropped before its norm", "drop_path_scaling", "residual-reordered",
        replaced(Reordered.forward, dropped_before_the_norm)),
    Bug("a branch dropped in only one of two streams", "drop_path_scaling", "residual-dual",
        replaced(ResidualDual.forward, dropped_in_one_stream)),
    Bug("branch dropout keyed by the row's index in the batch", "gradient_accumulation", "residual-post-norm",
        KEYED_BY_ROW),
    # Experts
    Bug("an eps beside the sum that nothing reads", "options_have_effect", "moe-sigmoid-eps",
        condition(route, "eps", False, nth=2), option="renormalize_eps"),
    Bug("inputs that are weighted by the gates of other tokens", "token_permutation", "moe-weighted-inputs",
        wrapped(run_on_weighted_inputs, lambda run, x, assignment, *rest:
                run(x, assignment._replace(gates=assignment.gates.roll(1, 0)), *rest))),
    Bug("experts assigned to groups in strides", "expert_permutation", "moe-sigmoid-groups",
        calls(select_experts, "unflatten", lambda scores, dim, sizes: scores.unflatten(dim, sizes[::-1]).mT)),
    Bug("router scores that favor high expert indices", "expert_permutation", "moe",
        wrapped(select_experts, lambda select, scores, config:
                select(scores + 0.2 * torch.arange(scores.shape[-1]), config))),
    Bug("the gates of other tokens", "token_permutation", "moe",
        wrapped(_per_expert, lambda run, x, assignment, *rest:
                run(x, assignment._replace(gates=assignment.gates.roll(1, 0)), *rest))),
    Bug("gates in the reverse order of their rows", "batch_invariance", "moe",
        wrapped(_per_expert, lambda run, x, assignment, *rest:
                run(x, assignment._replace(gates=assignment.gates.flip(0)), *rest))),
    Bug("the weights of the neighboring expert", "top_k_routing", "moe-mlp-bias",
        result(_sort_by_expert, lambda rows:
               rows._replace(expert_rows=[(expert - 1, *slices) for expert, *slices in rows.expert_rows]))),
    Bug("expert counts doubled", "top_k_routing", "moe-sigmoid",
        result(compute_router_statistics, lambda entry: entry._replace(expert_counts=2 * entry.expert_counts))),
    Bug("one expert too few per token", "top_k_routing", "moe-topk-softmax",
        result(select_experts, lambda experts: experts[..., :-1])),
    Bug("every expert applied to every token with a weight of zero", "idle_experts", "moe",
        wrapped(run_experts, lambda run, x, assignment, weights, activation:
                run(x, assignment, weights, activation) + 0 * weights.up.sum())),
    Bug("a nonzero gradient for an idle expert", "idle_experts", "moe-group-max",
        calls(_empty_gradient, "zero_", lambda gradient: gradient.fill_(1e-3))),
    Bug("ties resolved to the highest index", "routing_ties", "moe-topk-softmax",
        wrapped(stable_topk, lambda topk, scores, k: scores.shape[-1] - 1 - topk(scores.flip(-1), k))),
    Bug("ties between groups resolved to the highest index", "routing_ties", "moe-sigmoid-groups",
        calls(select_experts, "stable_topk", lambda topk, scores, k:
              scores.shape[-1] - 1 - topk(scores.flip(-1), k), nth=0)),
    Bug("padding in the expert counts", "router_statistics", "moe-group-max",
        operand_dropped(compute_router_statistics, "is_token")),
    Bug("padding in the z-loss", "router_statistics", "moe-sigmoid-groups",
        calls(compute_router_statistics, "masked_fill", lambda squares, *_: squares, nth=1)),
    Bug("a balance loss over all documents of a row together", "router_statistics", "moe-sigmoid",
        wrapped(balance_loss, lambda loss, scores, chosen, ids: loss(scores, chosen, None))),
    Bug("a balance loss averaged over rows", "router_statistics", "moe-capacity", LOSS_OVER_ROWS),
    Bug("a balance loss that depends on the number of rows in a call", "gradient_accumulation", "moe-sigmoid",
        LOSS_OVER_ROWS),
    Bug("expert shares of the whole call", "gradient_accumulation", "moe-mlp-shared",
        wrapped(balance_loss, lambda loss, scores, chosen, ids:
                loss(scores.flatten(0, 1)[None], chosen.flatten(0, 1)[None], None))),
    Bug("recomputed layers recorded twice", "activation_checkpointing", "moe", condition(record, "closed", True)),
    Bug("the balancing bias added to the gates", "load_balancing", "moe-sigmoid",
        calls(route, "gather", lambda scores, dim, experts, *, balancing_bias:
              (scores if balancing_bias is None else scores + balancing_bias).gather(dim, experts), nth=1)),
    Bug("a balancing step toward the most used experts", "load_balancing", "moe-sigmoid-groups",
        calls(MoE.update_expert_bias, "sign", lambda torch, excess: -torch.sign(excess))),
    Bug("a balancing bias trained by gradients", "load_balancing", "moe-mlp-shared",
        constant(Router.__init__, False, True)),
    Bug("layers before the router in the model's dtype", "router_precision", "moe-router-layers",
        calls(RouterTrunk.forward, "router_logits",
              lambda _, x, weight, bias: x.to(weight.dtype) @ weight.T + bias, nth=0)),
    Bug("router logits in bfloat16", "router_precision", "moe",
        calls(router_logits, "at_least_float32", lambda widen, x: x, every=True)),
    Bug("router logits under autocast", "router_precision", "moe-sigmoid",
        calls(router_logits, "without_autocast", lambda without_autocast, x: contextlib.nullcontext())),
    Bug("expert capacity shared between rows", "token_isolation_in_training", "moe-capacity",
        calls(within_capacity, "cumsum", lambda assigned, dim:
              assigned.flatten(0, 1).cumsum(0).view(assigned.shape))),
    Bug("later tokens that displace earlier ones", "token_isolation_in_training", "moe-capacity",
        calls(within_capacity, "cumsum", lambda assigned, dim: assigned.flip(dim).cumsum(dim).flip(dim))),
    Bug("expert capacity computed with padding", "token_isolation_in_training", "moe-capacity",
        calls(within_capacity, "sum", lambda is_token, dim: torch.ones_like(is_token).sum(dim))),
    Bug("expert capacity accepted in a call with a state", "token_isolation_in_training", "moe-capacity",
        condition(MoE._accepted, "cache_view", False)),
    Bug("expert capacity limited in eval mode", "dropout_off_in_eval", "moe-capacity",
        condition(MoE._accepted, "training", False)),
    Bug("hidden rows not weighted by their gates in the backward pass", "finite_differences", "moe",
        calls(_hidden_gradients, "mul_", lambda hidden, gates: hidden, nth=1)),
    Bug("a gradient of the gates without the expert's bias", "finite_differences", "moe-mlp-bias",
        assigned(_backward, "grad_gates", lambda gradient: 0 * gradient, nth=2)),
    Bug("a gradient of the inputs without the gate projection's part", "kernel_equivalence", "moe",
        calls(_backward, "addmm_", lambda gradient, *_: gradient)),
    Bug("a sigmoid without a gradient", "finite_differences", "gated-clamped",
        calls(swiglu_clamped, "sigmoid", lambda gate: gate.detach().sigmoid())),
    Bug("up and gate exchanged", "kernel_equivalence", "moe-clamped",
        wrapped(hidden_activation, lambda hidden, up, gate, *rest:
                hidden(up, gate, *rest) if gate is None else hidden(gate, up, *rest))),
    Bug("padding rows left in the gradient", "kernel_equivalence", "moe",
        replaced(_gather_rows, lambda x, assignment, top_k, rows: x.index_select(0, assignment // top_k))),
]
# fmt: on
@each(BUGS)
def test_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(bug, monkeypatch)


@pytest.mark.nightly
def test_laws_hold_without_them() -> None:
    check_without_bugs(BUGS)


OF_OPTIONS = [bug for bug in BUGS if bug.option]


@pytest.mark.nightly
@pytest.mark.parametrize("bug", OF_OPTIONS, ids=[bug.description for bug in OF_OPTIONS])
def test_no_number_beside_a_field_hides_that_it_does_nothing(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(LawViolation):
        LAWS[bug.law].check(case(bug.case))


def test_every_law_catches_a_bug() -> None:
    assert {bug.law for bug in BUGS} == set(LAWS)
