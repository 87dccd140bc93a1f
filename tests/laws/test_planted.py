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
LATENT, LATENT_MIXER = "numerics.latent", "parts.mixers.latent_attention:LatentAttention"
DELTA, CONVOLUTION, MIXER = "numerics.delta", "numerics.convolution", "parts.mixers.gated_delta:GatedDelta"
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
    # States copied, cut into rows and taken back
    Bug("a fork that shares its keys", "fork_apart", "attention-gqa", "model.state:State.select",
        "layer.map(lambda _, x: x.index_select(0, index))", "layer"),
    Bug("a fork of the table alone that shares a ring", "fork_apart", "attention-window-2", "model.state:State.select",
        "lambda _, x: x.index_select(0, index)", "lambda name, x: x if name == 'keys' else x.index_select(0, index)"),
    Bug("rows of the keys in sorted order", "selected_rows", "attention-mha", "model.state:State.select",
        "lambda _, x: x.index_select(0, index)", "lambda _, x: x.index_select(0, index.sort().values)"),
    Bug("a chosen row as full as the fullest it stood beside", "selected_rows", "attention-mha",
        f"{TABLE}:Table.select", "._counted()", ""),
    Bug("rows of even length taken for texts in order", "selected_rows", "attention-gqa", f"{TABLE}:Table._counted",
        "ordered=self.ordered and level", "ordered=level"),
    Bug("a ring without the slack that was declared", "rewound", "attention-window-7",
        "parts.mixers.attention:Attention.init_state", "self.reach + rewind", "self.reach"),
    Bug("a row that goes on where it stood before", "rewound", "attention-mha", f"{TABLE}:Table.rewound",
        "torch.where((counts > 0)[:, None], held, torch.tensor([-1, 0], device=counts.device))", "self.last"),
    Bug("rows taken back as far as the first", "rewound", "attention-window-2", f"{TABLE}:Table.rewound",
        "counts, newest = self.counts - tokens,", "counts, newest = self.counts - tokens[0],"),
    Bug("uneven rows taken for even ones", "rewound", "attention-mqa", f"{TABLE}:Table._counted",
        "level = least == most", "level = self.level"),
    Bug("a ring whose slack is spent twice", "rewind_refusals", "layers-nested", "parts.cache:Cache.goes_back",
        "tokens <= table.spare", "tokens <= table.rewind"),
    Bug("a turned ring taken for one that was never full", "rewind_refusals", "layers-nested",
        "parts.cache:Cache.goes_back", "table.peak <=", "table.filled <="),
    Bug("a refusal that spoils the handle", "rewind_refusals", "attention-window-2", "model.state:State.rewind",
        "self.check()", "self.take()"),
    Bug("a state taken back and still in use", "rewind_refusals", "attention-mha", "model.state:State.rewind",
        "self.consumed = True", "pass"),
    Bug("a size that forgets the slack", "slack_told", "attention-window-7", "model.size:size", ", rewind=rewind", ""),
    Bug("positions that depend on where a row stands", "needle", "attention-gqa", "parts.layout:Layout.padded",
        "positions = index - (width - count) if", "positions = index - (width - count[:1]) if"),
    Bug("statistics over the batch: a needle", "needle", "norm-layer", "numerics.norms:layer_norm",
        "functional.layer_norm(wide,", "functional.layer_norm(wide - 0.1 * wide.mean(0, keepdim=True),"),
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
    # Options of attention
    Bug("a sink added to the log-sum-exp instead of set against it", "forms", "attention-sink",
        "numerics.fused:_rescaled", "total[..., None] - sink", "total[..., None] + sink"),
    Bug("a causal mask not moved behind the key of a sink", "forms", "attention-sink", "numerics.fused:fused",
        "q = functional.pad(q, (0, 0, 1, 0))", "q = functional.pad(q, (0, 0, 0, 1))"),
    Bug("sinks of a group taken in strides", "cut", "attention-sink", f"{ATTENTION}:_folded",
        "column.reshape(*folded.shape[:3], 1)",
        "column.unflatten(1, (-1, k.shape[1])).transpose(1, 2).reshape(*folded.shape[:3], 1)"),
    Bug("the slope of a sink scaled like that of a score", "true_gradients", "attention-sink",
        "numerics.triangle:_Triangle.backward", "to_sink[:, :, here] = slope",
        "to_sink[:, :, here] = ctx.scale * slope"),
    Bug("a cap that lifts what the mask hid", "later_tokens", "attention-softcap", "numerics.triangle:_weights",
        'masked_fill_(hidden, float("-inf"))', 'masked_fill_(hidden, -(cap or float("inf")))'),
    Bug("a cap that is flat in the gradient", "true_gradients", "attention-softcap", "numerics.triangle:_slope",
        "return slope if bent is None else torch.ops.aten.tanh_backward(slope, bent)", "return slope"),
    Bug("a cap without the division", "forms", "attention-softcap", f"{ATTENTION}:attention_weights",
        "(scores / extras.softcap).tanh()", "scores.tanh()"),
    Bug("a gate that sees the whole row", "later_tokens", "attention-gate-channel",
        "parts.mixers.attention:Attention.forward", "self.gate(x)", "self.gate(x.mean(1, keepdim=True))"),
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
    Bug("a sine without its scaling's amplitude", "rotation", "rope-yarn", "numerics.rotate:table",
        "(angle.sin() * amplitude)", "angle.sin()"),
    # Latents
    Bug("a latent turned before it is taken up", "shift", "latent-full-query", f"{LATENT_MIXER}.forward",
        "torch.cat((latents, k_rope)", "torch.cat((self.position(latents, layout), k_rope)"),
    Bug("a latent kept before its norm", "cut", "latent-low-rank-query", f"{LATENT_MIXER}.forward",
        "if self.kv_norm is not None:", "if self.kv_norm is not None and state is None:"),
    Bug("shared keys kept before they are turned", "cut", "latent-interleaved", f"{LATENT_MIXER}.forward",
        "self.position(k_rope, layout)", "(self.position(k_rope, layout) if state is None else k_rope)"),
    Bug("absorbed queries without the dims that are turned", "cut", "latent-yarn", f"{LATENT}:_absorbed",
        "(q, q_rope)", "(q, q_rope * 0.0)"),
    Bug("absorbed scores scaled by the dims not turned", "forms", "latent-full-query", f"{LATENT}:_absorbed",
        "* scale", "* q_nope.shape[3] ** -0.5"),
    Bug("absorbed values taken from the wrong end", "cut_everywhere", "latent-hybrid", f"{LATENT}:_absorbed",
        "wide[..., :rank]", "wide[..., -rank:]"),
    Bug("heads of an up-projection taken in strides", "forms", "latent-bias-scale", f"{LATENT}:expand",
        "linear(c, up).unflatten(-1, (heads, -1))", "linear(c, up).unflatten(-1, (-1, heads)).mT"),
    Bug("unused slots of latents read", "poison_in_slots", "latent-no-rope", f"{LATENT}:_held",
        "if seen.ragged", "if False"),
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
    # Gated delta
    Bug("padding makes the memory decay", "padding_is_not_kept", "delta", f"{MIXER}._recall",
        "log_decay.masked_fill(layout.padding[:, None], 0.0)", "log_decay"),
    Bug("padding enters the convolution", "padding", "delta-convolution-2", f"{CONVOLUTION}:find_taps",
        "torch.where(real, number, behind + length + 1)", "number"),
    Bug("padding counted as a token of the convolution", "padding", "delta-key-heads", f"{CONVOLUTION}:find_taps",
        "real.cumsum(1) - 1", "torch.arange(length + 1, device=device).expand_as(real)"),
    Bug("a tail that goes on into the next document", "cut_ragged", "delta", f"{CONVOLUTION}:next_tail",
        "kept.masked_fill((slots < 0)[..., None], 0.0)", "kept"),
    Bug("a tail of the last slots, padding or not", "cut_ragged", "delta-key-heads", f"{CONVOLUTION}:next_tail",
        "if taps is None:", "if True:"),
    Bug("a convolution across documents", "other_documents", "delta", f"{CONVOLUTION}:_mended",
        ".index_put((rows, places), anew)", ""),
    Bug("a convolution across documents of unknown lengths", "packing", "delta-convolution-2",
        f"{CONVOLUTION}:find_taps", "torch.where(same & real[..., None],", "torch.where(real[..., None],"),
    Bug("the start of a call taken for that of a document", "cut", "delta", f"{CONVOLUTION}:_shifted",
        "torch.cat((tail, x), dim=1)", "torch.cat((0 * tail, x), dim=1)"),
    Bug("a convolution that looks ahead", "later_tokens", "delta", f"{CONVOLUTION}:_Shifted.forward",
        "y[:, back:].addcmul_(x[:, :-back]", "y[:, :-back].addcmul_(x[:, back:]"),
    Bug("a gradient of the convolution shifted the wrong way", "true_gradients", "delta",
        f"{CONVOLUTION}:_Shifted.backward", "to_x[:, :-back].addcmul_(gradient[:, back:]",
        "to_x[:, back:].addcmul_(gradient[:, :-back]"),
    Bug("the scale of queries left out of steps", "cut", "delta", f"{DELTA}:_step",
        "torch.bmm(q, held)", "torch.bmm(q * d_k**0.5, held)"),
    Bug("a memory that is corrected before it decays", "forms", "delta", f"{DELTA}:_step",
        "alpha=-1).mul_(rule.beta.view(-1, 1, 1))", "alpha=-1).mul_((rule.beta / decay[..., 0]).view(-1, 1, 1))"),
    Bug("beta applied to what is read only", "forms", "delta-key-heads", f"{DELTA}:_chunked", "v * beta,", "v,"),
    Bug("beta applied twice", "cut", "delta-hybrid", f"{DELTA}:_chunked", "v * beta,", "v * beta * beta,"),
    Bug("the memory of a chunk carried on without decay", "growth", "delta", f"{DELTA}:_chunked",
        "held[-1] * keep", "held[-1]"),
    Bug("keys read from the memory as if it had not decayed", "growth", "delta-key-heads", f"{DELTA}:_chunked",
        "k * (since * beta)", "k * beta"),
    Bug("decays that leave their own token out", "forms", "delta", f"{DELTA}:_decays",
        "(log_decay.mT * within[:, :-1])", "(log_decay.mT * within[:, :-1].tril(-1))"),
    Bug("documents share a memory", "other_documents", "delta", f"{DELTA}:_decays", "if segments is None:", "if True:"),
    Bug("a memory that outlives its document in steps", "cut_ragged", "delta-convolution-1", f"{DELTA}:_step",
        "if rule.segments is not None:", "if False:"),
    Bug("heads take turns at the key heads", "cut", "delta-hybrid", f"{DELTA}:_step",
        "x.expand(batch, x.shape[1], heads // x.shape[1], d_k)",
        "x.mT.expand(batch, x.shape[1], d_k, heads // x.shape[1]).permute(0, 3, 1, 2)"),
    Bug("a gradient of the solve that forgets the triangle", "true_gradients", "delta", f"{DELTA}:_Solve.backward",
        ".tril(-1)", ""),
    Bug("decays that all start alike for every seed", "seeds", "delta", "parts.mixers.gated_delta:Decay.initialise",
        "torch.rand(2, *self.rate.shape, generator=generator", "torch.linspace(0.1, 0.9, 2 * len(self.rate)"
        ").view(2, -1) + 0 * torch.rand(2, *self.rate.shape, generator=generator"),
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
    Bug("a memory's padding lost when it is summarised", "memory", "cross-alone", f"{CROSS}:CrossAttention.init_state",
        "made.values, memory.real", "made.values, None"),
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
