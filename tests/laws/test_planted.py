"""Planted bugs, each of a kind that real projects had: the named law catches each of them."""

from typing import NamedTuple

import pytest

from heddle.laws import LAWS, Broken
from tests.cases import case
from tests.laws.planting import plant


class Bug(NamedTuple):
    """`old` becomes `new` in the function at `place`; `law` breaks on the case."""

    what: str
    law: str
    case: str
    place: str
    old: str
    new: str


ATTENTION, VISIBILITY, TABLE = "numerics.attention", "numerics.visibility", "parts.table"
CROSS, PAIR, DOUBLE = "parts.mixers.cross_attention", "parts.mixers.pair", "numerics.double_softmax"
MASK = f"{VISIBILITY}:Visibility.mask"

# fmt: off
BUGS = [
    # Windows, rings and states
    Bug("a window one key too wide", "receptive_field", "attention-window-2", "numerics.local:Band.before",
        "self.window - 1 if", "self.window if"),
    Bug("a window one key too wide in the mask", "forms", "attention-window-7", MASK, "i - j < self.window",
        "i - j <= self.window"),
    Bug("a bidirectional window one key too narrow", "receptive_field", "attention-bidirectional-window",
        "numerics.local:Band.after", "else self.window", "else self.window - 1"),
    Bug("ring slots off by one", "cut", "attention-window-7", f"{TABLE}:Destination.of", "layout.length - kept) %",
        "layout.length - kept + 1) %"),
    Bug("a ring unrolled one step too far", "cut", "attention-window-7", "parts.cache:Cache._in_order",
        "filled % slots", "(filled + 1) % slots"),
    Bug("a ring written before it is read", "cut", "attention-window-2", "parts.cache:Cache.extend",
        "if cache.ring and layout.length > 1:", "if False:"),
    Bug("positions of a ring rolled the wrong way", "cut_everywhere", "attention-window-mixed",
        "parts.cache:_seen_with_ring", "positions.roll(-turn, 1)", "positions.roll(turn, 1)"),
    Bug("a ragged ring read as if its rows were even", "cut_ragged", "attention-window-2",
        "parts.cache:Cache._in_order", "filled <= slots or not past.level", "filled <= slots"),
    Bug("slots beyond the text attended", "cut", "attention-mha", "parts.cache:Cache.extend",
        "held = min(past.after.filled, slots)", "held = slots"),
    Bug("a grown state moved to the end", "growth", "attention-mha", "parts.cache:Cache._grown",
        "(x, x.new_zeros(*x.shape[:2], slots - held, x.shape[3]))",
        "(x.new_zeros(*x.shape[:2], slots - held, x.shape[3]), x)"),
    Bug("one token more than the capacity", "state_refusals", "attention-window-2", f"{TABLE}:Table.extend",
        "filled > self.capacity", "filled > self.capacity + 1"),
    Bug("a state that can be used twice", "state_refusals", "attention-mha", "model.state:State.take",
        "self.consumed = True", "pass"),
    Bug("a state for a bidirectional design", "cut", "attention-bidirectional", "model.decoder:Decoder.init_state",
        "if not self.causal:", "if False:"),
    # Masks and positions
    Bug("a causal mask aligned to the top left on the tail of a text", "cut", "attention-mha",
        "numerics.triangle:_tiles", "keys - queries + stop", "stop"),
    Bug("a causal mask lost", "later_tokens", "attention-gqa", f"{ATTENTION}:_causal", "causal=True", "causal=False"),
    Bug("a causal mask off by one", "forms", "attention-gqa", MASK, "j <= i", "j <= i + 1"),
    Bug("one later token within a window", "later_tokens", "attention-window-2", "numerics.local:Band.after",
        "0 if self.causal", "1 if self.causal"),
    Bug("a causal mask in a bidirectional design", "later_tokens", "attention-bidirectional-window",
        "parts.layout:Layout._visibility", "causal=causal,", "causal=True,"),
    Bug("documents ignored", "packing", "attention-mha", MASK, "if self.q_documents is not None and", "if False and"),
    Bug("pieces of a packed row run together", "other_documents", "attention-mha", f"{ATTENTION}:_pieces",
        "[piece for row in seen.pieces for piece in row]", "[sum(row) for row in seen.pieces]"),
    Bug("decoding after packing goes on in the first document", "packing_continued", "attention-gqa",
        f"{TABLE}:Table.following", "self.last[:, 1:].expand", "torch.zeros_like(self.last[:, 1:]).expand"),
    Bug("positions that restart in every chunk", "cut", "attention-mha", f"{TABLE}:Table.following",
        "start=self.filled", "start=0"),
    Bug("one row of positions for a padded batch", "padding", "attention-mha", f"{TABLE}:Table.following",
        "self.last[:, :1] + ahead", "self.last[:1, :1].expand(self.batch, 1) + ahead"),
    Bug("padding attended", "padding", "attention-mha", MASK, "(j >= 0) & (i >= 0)", "(i >= 0)"),
    Bug("padding in gradients", "padding_gradients", "attention-mha", MASK, "(j >= 0) & (i >= 0)", "(i >= 0)"),
    Bug("padding counted as arrived", "padding_is_not_kept", "attention-window-7", f"{TABLE}:Table._arrivals",
        "real.cumsum(1) - 1", "torch.arange(layout.length)"),
    # NaN
    Bug("unused slots reach a result through zero weights", "poison_in_slots", "attention-mha", f"{ATTENTION}:_clean",
        "if not seen.ragged:", "if True:"),
    Bug("padding embedded like a token", "poison_in_padding", "attention-mha", "model.decoder:Embedding.forward",
        "if layout.padding is None", "if True"),
    Bug("statistics over the batch: NaN", "poison_in_rows", "norm-layer", "numerics.norms:layer_norm",
        "functional.layer_norm(wide,", "functional.layer_norm(wide - 0.1 * wide.mean(0, keepdim=True),"),
    Bug("statistics over the batch: rows alone", "rows_alone", "norm-layer", "numerics.norms:layer_norm",
        "functional.layer_norm(wide,", "functional.layer_norm(wide - 0.1 * wide.mean(0, keepdim=True),"),
    Bug("statistics over the batch: other rows", "other_rows", "norm-layer", "numerics.norms:layer_norm",
        "functional.layer_norm(wide,", "functional.layer_norm(wide - 0.1 * wide.mean(0, keepdim=True),"),
    # Heads
    Bug("heads of a group taken in strides", "cut", "attention-gqa", f"{ATTENTION}:_folded",
        "q.reshape(batch, k.shape[1], -1, q.shape[-1])",
        "q.unflatten(1, (-1, k.shape[1])).transpose(1, 2).flatten(2, 3)"),
    Bug("groups tiled instead of repeated", "forms", "attention-gqa", f"{ATTENTION}:attention_weights",
        "grouped = q.unflatten(1, (k.shape[1], -1))", "grouped = q.unflatten(1, (-1, k.shape[1])).transpose(1, 2)"),
    Bug("softmax over queries", "forms", "attention-mha", f"{ATTENTION}:attention_weights", "softmax(-1)",
        "softmax(-2)"),
    # Rotations
    Bug("angles in the model's bfloat16", "precision", "rope-half", "numerics.rotate:table",
        "torch.float64 if dtype == torch.float64 else torch.float32", "dtype"),
    Bug("frequencies in a buffer that a change of dtype rounds", "dtype_round_trip", "rope-half",
        "parts.positions.rope:Rope._table", "return layout.once(", "if not self._buffers:\n"
        "        self.register_buffer('kept', torch.tensor(self.thetas, dtype=dtype))\n"
        "    self.thetas = tuple(self.kept.tolist())\n"
        "    return layout.once("),
    Bug("a table of one layout with pairs of the other", "rotation", "rope-half", "numerics.rotate:rotate",
        "y = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)",
        "y = torch.cat((first * cosine - second * sine, second * cosine.flip(-1) + first * sine.flip(-1)), dim=-1)"),
    Bug("a sign of the interleaved rotation", "rotation", "rope-interleaved", "numerics.rotate:rotate",
        "torch.stack((first * cosine - second * sine", "torch.stack((first * cosine + second * sine"),
    Bug("queries left unrotated", "shift", "attention-gqa", "parts.mixers.attention:Attention._heads",
        "if self.position is None", "if self.position is None or heads != self.kv_heads"),
    Bug("absolute positions counted from the call", "shift", "sinusoidal",
        "parts.positions.sinusoidal:Sinusoidal.forward", "sinusoid(layout.positions,",
        "sinusoid(layout.positions - layout.positions[:, :1],"),
    Bug("a base changed by a long text and not set back", "no_memory", "attention-mha",
        "parts.positions.rope:Rope._table", "return layout.once(",
        "self.thetas = tuple(theta / max(1.0, layout.length / 16) for theta in self.thetas)\n    return layout.once("),
    # Norms and projections
    Bug("epsilon outside the root", "forms", "attention-mha", "numerics.norms:reference",
        "torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps)",
        "(torch.sqrt(wide.pow(2).mean(-1, keepdim=True)) + eps)"),
    Bug("no epsilon", "extremes", "attention-mha", "numerics.norms:_fused", "weight, eps)", "weight, 0.0)"),
    Bug("a bias lost", "forms", "attention-bias", "numerics.linear:reference",
        "return y if bias is None else y + bias", "return y"),
    # Training
    Bug("dropout active in eval", "dropout_off_in_eval", "attention-dropout", "parts.dropout:Dropout.active",
        "self.training and self.rate", "self.rate"),
    Bug("dropout never active", "dropout_off_in_eval", "dropout-everywhere", "parts.dropout:Dropout.active",
        "self.training and", "False and"),
    Bug("dropout keyed by the place in the batch", "split_batch", "dropout-everywhere", "numerics.noise:uniform",
        "key.samples.to(device=device, dtype=torch.int64)", "torch.arange(shape[0], device=device)"),
    Bug("recomputed layers cut from the embedding", "checkpointing", "attention-mha", "model.decoder:Decoder._run",
        "checkpoint(again, layer, stream,",
        "checkpoint(again, layer, stream.detach().requires_grad_(),"),
    Bug("a gain without gradient", "true_gradients", "norm-layer", "numerics.norms:layer_norm", "* weight.to(",
        "* weight.detach().to("),
    # Building
    Bug("a parameter that nothing fills", "nothing_unset", "norm-layer", "parts.norms.layer:LayerNorm.initialise",
        "nn.init.zeros_(self.bias)", "pass"),
    Bug("numbers of the global generator", "seeds", "attention-mha", "parts.leaf:fill_normal", "generator=generator",
        "generator=None"),
    Bug("the same numbers for every projection", "seeds", "attention-mha", "model.decoder:initialise",
        'f"{seed}/{name}"', 'f"{seed}"'),
    Bug("a tied head given a weight of its own", "tied_head", "attention-mha", "model.decoder:Decoder.tie",
        "if self.config.head.tied:", "if False:"),
    Bug("a number kept outside the weights", "weights_are_all", "attention-mha", "model.decoder:Embedding.initialise",
        "fill_normal(self.weight, std, generator)", "fill_normal(self.weight, std, generator)\n"
        "    self.scale = 1.0 + float(torch.rand((), generator=generator))"),
    Bug("false written as if it were the default", "round_trip", "attention-bidirectional", "config:Config.dump",
        "if value is not None", "if value"),
    Bug("the state of a longer text told", "true_size", "attention-mha", "model.size:size",
        "model.init_state(batch, context, ", "model.init_state(batch, context + 1, "),
    # Memories and pairs
    Bug("padding of a memory attended", "memory", "cross-grouped", f"{CROSS}:CrossAttention._project",
        "memory.real.long() - 1", "memory.real.long() * 0"),
    Bug("every memory taken for a full one", "memory", "cross-own-widths", f"{CROSS}:_seen", "not some and ", ""),
    Bug("NaN in the padding of a memory projected", "memory", "cross-alone", "parts.layout:Memory.clean",
        "if self.real is None:", "if True:"),
    Bug("values made of the keys' sequence", "memory", "pair-cross", "parts.layout:Memory.clean",
        "self.keys if self.values is None else self.values", "self.keys"),
    Bug("one memory for all rows", "memory", "cross-grouped", f"{CROSS}:CrossAttention._project", "x.to(",
        "x[:1].expand_as(x).to("),
    Bug("no gradient to the memory", "memory", "cross-grouped", f"{CROSS}:CrossAttention._project", "x.to(",
        "x.detach().to("),
    Bug("keys normalised over their dims", "memory", "cross-double-softmax", f"{DOUBLE}:_normalised",
        "masked_fill(empty, 0.0).softmax(2)", "masked_fill(empty, 0.0).softmax(3).nan_to_num()"),
    Bug("padding of a memory in the sum over it", "memory", "cross-double-softmax", f"{DOUBLE}:_normalised",
        'k.masked_fill(hidden, float("-inf"))', "k"),
    Bug("a memory's padding lost when it is summarised", "memory", "cross-double-softmax",
        f"{CROSS}:CrossAttention.init_state", "made.values, memory.real", "made.values, None"),
    Bug("a memory that nothing reads taken", "memory", "attention-mha", "model.decoder:Decoder._check_memory",
        "if memory is not None:", "if False:"),
    Bug("padding of a source not marked in the memory", "memory", "encoder", "model.encoder:encode",
        "if layout is None or layout.padding is None else ~layout.padding", ""),
    Bug("the second state of a pair thrown away", "cut", "pair-windows", f"{PAIR}:Pair.forward",
        "None if state is None else state.second", "None"),
    Bug("a table as short as the first of a pair needs", "cut", "pair-windows", f"{PAIR}:Pair.looks_back",
        "_farther(self.first.looks_back, self.second.looks_back)", "self.first.looks_back"),
    Bug("a pair that declares its narrower reach", "receptive_field", "pair-windows", f"{PAIR}:_farther", "max(",
        "min("),
]
# fmt: on


@pytest.mark.parametrize("bug", BUGS, ids=[f"{bug.law}: {bug.what}" for bug in BUGS])
def test_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    LAWS[bug.law].check(case(bug.case))
    plant(monkeypatch, bug.place, bug.old, bug.new)
    with pytest.raises(Broken):
        LAWS[bug.law].check(case(bug.case))


def test_every_law_catches_a_bug() -> None:
    assert {bug.law for bug in BUGS} == set(LAWS)
