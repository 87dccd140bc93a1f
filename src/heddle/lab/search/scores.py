"""The possible replacements of each layer: what each saves, and how it alone changes the logits on a text.

A replacement is fitted once, to the source's activations, and saved; every score, check and model of a search is put
together from these files.
"""

import itertools
import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from heddle.config import DesignError
from heddle.conversion.convert import Conversion
from heddle.conversion.head_parameters import head_sizes
from heddle.conversion.mixer_replacement import FittedRewrite, MixerReplacement, NewMixers
from heddle.conversion.rewrite import Rewrite, naming_layers, replace_layers, rewrites
from heddle.conversion.rewrites.layerwise import assembled, check_only_layers
from heddle.conversion.targets import NOT_IN_A_FILE_NAME, parse_rewrite
from heddle.conversion.weights import LAYER_PREFIX, CalibrationText, Weights, build_model
from heddle.errors import ConfigError
from heddle.lab.search.solve import FloatArray
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.initialization import set_parameter
from heddle.model.size import build_distinct_layers, measure_size
from heddle.numerics.cross_entropy import OutputHead, scale_and_cap, token_losses
from heddle.numerics.dispatch import add_flops
from heddle.parts.feedforwards.gated import GatedConfig
from heddle.parts.feedforwards.mlp import MLPConfig
from heddle.parts.feedforwards.moe import MoEConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.positions.rope import RopeConfig
from heddle.progress import quiet
from heddle.storage.file_io import replace_file
from heddle.storage.tensor_file import read_tensor_file, write_tensor_file
from heddle.training.evaluation.loss_profile import position_edges

LATENT_SHARES = (0.5, 0.25)  # of a layer's state per token
KEPT_SHARES = (0.75, 0.5)  # of hidden channels, and of experts
WINDOW_SHARES = (2, 4)  # of a sequence: longer windows would show no cost
CHUNK_ELEMENTS = 2**25  # of changed logits in memory
TIMED_STEPS = 5  # of a fit, from which its time is expected
VOCABULARY_BLOCK = 2**12  # logits of each token in memory


@dataclass(frozen=True)
class Replacement:
    """A possible replacement of a layer. target: its rewrite's, without the layer.

    kv_source: the layer whose keys and values it newly reads; else None.
    """

    layer: int
    target: str
    config: LayerConfig
    kv_source: int | None

    @property
    def file_name(self) -> str:
        """Its fit in the folder of a search."""
        return f"{self.layer}-{NOT_IN_A_FILE_NAME.sub('-', self.target)}.safetensors"

    @property
    def needs(self) -> tuple[int, ...]:
        """The layers that must stay unchanged."""
        return () if self.kv_source is None else tuple(range(self.kv_source, self.layer))


def default_targets(design: ModelConfig, sequence_length: int) -> list[str]:
    """The targets of rewrites that could lower the costs of a design's layers."""
    mixers = [layer.mixer for layer in design.layers if isinstance(layer.mixer, AttentionConfig)]
    sizes = [(*head_sizes(mixer), mixer.position) for mixer in mixers]
    heads = {count for kv_heads, *_ in sizes for count in (kv_heads // 2, kv_heads // 4, 1)}
    targets = [f"kv_heads={count}" for count in sorted(heads - {0}, reverse=True)]
    for kv_heads, head_dim, value_dim, position in dict.fromkeys(sizes):
        for share in LATENT_SHARES:
            size = int(share * kv_heads * (head_dim + value_dim))
            rope = min(head_dim, size // 4) // 2 * 2 if isinstance(position, RopeConfig) else 0
            options = f"kv_rank={size - rope}" + (f",rope_dim={rope}" if rope else "")
            targets.append(f"latent_attention,{options}")
    targets += [f"window={sequence_length // share}" for share in WINDOW_SHARES if sequence_length >= share]
    for count, dim in dict.fromkeys((mixer.heads, mixer.head_dim) for mixer in mixers):
        options = f"top_k={max(1, sequence_length // 4)},heads={max(1, count // 4)},head_dim={dim}"
        targets.append(f"sparse_index,{options}")
    targets += ["shared_kv", *(name for name, cls in rewrites().items() if issubclass(cls, MixerReplacement))]
    feedforwards = dict.fromkeys(layer.feedforward for layer in design.layers)
    for part, share in itertools.product(feedforwards, KEPT_SHARES):
        if isinstance(part, MLPConfig | GatedConfig):
            targets.append(f"hidden={max(1, int(share * part.hidden))}")
        elif isinstance(part, MoEConfig):
            left = max(part.top_k, int(share * part.experts))
            targets += [f"merge_experts={left}", f"keep_experts={left}"]
    return [*dict.fromkeys(targets), "remove=feedforward", "remove=mixer"]


def chosen_targets(design: ModelConfig, sequence_length: int, only: Sequence[str]) -> list[str]:
    """The default targets; or, with `only`, those of the rewrites that it names, and the targets that it spells out."""
    defaults = default_targets(design, sequence_length)
    if not only:
        return defaults
    targets: list[str] = []
    for entry in only:
        named = [target for target in defaults if re.split("[=,]", target)[0] == entry]
        if not named:
            _rewrite(entry, (0,))
        targets += named or [entry]
    return list(dict.fromkeys(targets))


def _rewrite(target: str, layers: Sequence[int]) -> Rewrite:
    return parse_rewrite(f"layers.{','.join(map(str, layers))}.{target}")


class Replacements:
    """All replacements of a model's layers.

    text: that they are fitted to. keep: layers that stay unchanged. left_out: why a target replaces no layer.
    """

    def __init__(
        self, source: Weights, text: CalibrationText, targets: Sequence[str], keep: Sequence[int] = ()
    ) -> None:
        self.source, self.text = source, text
        self.items: list[Replacement] = []
        self.left_out: dict[str, str] = {}
        self._reasons: dict[str, dict[str, str]] = {}
        self._converted: dict[str, list[Weights]] = {}
        layers = [index for index in range(source.design.depth) if index not in keep]
        for target in targets:
            one_by_one = target.startswith(("shared_kv", "remove"))  # what others become decides whether they can
            groups = [(index,) for index in layers] if one_by_one else [tuple(layers)]
            self._converted[target] = [made for group in groups for made in self._apply(target, group)]
            own = {item.layer: item for made in self._converted[target] for item in self._changed(target, made)}
            self.items += own.values()
            if own:
                self.left_out.pop(target, None)
        self.items.sort(key=lambda item: item.layer)  # stable: in the order of targets
        self._check_any()

    def _check_any(self) -> None:
        if not self.items:
            reasons = "; ".join(f"{target}: {reason}" for target, reason in self.left_out.items())
            raise ConfigError(f"--search: no layer has a replacement ({reasons}); give others with --only")

    def keep_only(self, useful: Sequence[int]) -> None:
        """Leave out the items that are not numbered here, since they save nothing that a goal limits."""
        self.items = [self.items[number] for number in useful]
        for target in self._converted:
            if all(item.target != target for item in self.items):
                self.left_out.setdefault(target, "saves nothing that the goals limit")
        self._check_any()

    def _apply(self, target: str, layers: tuple[int, ...]) -> Iterator[Weights]:
        """The model with a target in all of these layers that it can convert; nothing if there are none."""
        try:
            yield self._convert(target, layers)
        except DesignError as error:
            alone = {index: self._obstacle(target, index) for index in layers} if len(layers) > 1 else {}
            reasons = self._reasons.setdefault(target, {})
            for each in (found for found in (alone or {0: error}).values() if found is not None):
                reasons.setdefault(each.reason, str(each))  # of the first layer that it is about
            self.left_out[target] = "; ".join(reasons.values()) or str(error)
            possible = [index for index, obstacle in alone.items() if obstacle is None]
            if possible:
                yield self._convert(target, possible)

    def _convert(self, target: str, layers: Sequence[int]) -> Weights:
        rewrite, design = _rewrite(target, layers), self.source.design
        with naming_layers(design):
            rewrite.check_layers(design)
            converted = rewrite.apply(self.source, self.text)
        check_only_layers(target, design, converted.design)
        build(converted.design, device="meta")
        return converted

    def _obstacle(self, target: str, layer: int) -> DesignError | None:
        try:
            self._convert(target, (layer,))
        except DesignError as error:
            return error
        return None

    def _changed(self, target: str, converted: Weights) -> Iterator[Replacement]:
        new, old = converted.design, self.source.design
        for index, (layer, before) in enumerate(zip(new.layers, old.layers, strict=True)):
            if layer != before:
                kv_source = new.kv_sources[index] if old.kv_sources[index] is None else None
                yield Replacement(index, target, layer, kv_source)

    def fit_all(self, folder: Path) -> Iterator[Replacement]:
        """Fit and save the missing ones, target by target, with one layer's activations in memory; yield each."""
        wanted = {(item.layer, item.target) for item in self.items}
        for target, made in self._converted.items():
            for converted in made:
                for item in self._changed(target, converted):
                    if (item.layer, target) in wanted and not (folder / item.file_name).is_file():
                        _save(converted, item, folder)
                        yield item
            made.clear()  # with their activations


def fit_seconds(source: Weights, item: Replacement, text: CalibrationText, tokens: int) -> float:
    """About how long it takes to fit a replacement on so many tokens, from a few steps on a shorter text."""
    rewrite, steps = _rewrite(item.target, (item.layer,)), 0
    if isinstance(rewrite, FittedRewrite):
        rewrite, steps = rewrite.replace(fit_steps=min(rewrite.fit_steps, TIMED_STEPS)), rewrite.fit_steps
    began = time.monotonic()
    with quiet():
        converted = rewrite.apply(source, text)
        converted.layer(item.layer)
    seconds, stepping = time.monotonic() - began, 0.0
    if isinstance(converted, NewMixers) and (fit := converted.results.get(item.layer)) is not None:
        seconds, stepping = max(0.0, seconds - fit.steps * fit.seconds), steps * fit.seconds
    return seconds * tokens / text.tokens + stepping


def _save(converted: Weights, item: Replacement, folder: Path) -> None:
    with replace_file(folder / item.file_name) as path:
        write_tensor_file(path, converted.layer(item.layer))


def put_together(source: Weights, items: Sequence[Replacement], folder: Path) -> Weights:
    """The source with replaced layers, from the files of a search."""
    configs = {item.layer: item.config for item in items}
    made = {item.layer: (lambda file=folder / item.file_name: dict(read_tensor_file(file))) for item in items}
    return assembled(source, configs, made, {item.layer: item.kv_source for item in items})


@dataclass(frozen=True)
class SearchedConversion(Conversion):
    """A conversion that reads its fits from the files of a search, instead of fitting again."""

    items: tuple[Replacement, ...] = ()
    folder: Path = Path()

    def plan(self) -> Weights:
        """As `Conversion.plan`."""
        return put_together(self.source.weights, self.items, self.folder)


def costs_of(design: ModelConfig, lengths: Sequence[int], dtype: torch.dtype) -> dict[str, float]:
    """`parameters`; at each context length N bytes of state `state@N`, FLOPs per token `flops@N`, and `reads@N`.

    reads: the bytes of weights and state that are read to decode a token after N, which limit its speed.
    """
    shapes = build_distinct_layers(design, dtype)
    costs: dict[str, float] = {}
    for length in lengths:
        measured = measure_size(shapes, length)
        costs[f"state@{length}"] = measured.state_bytes - measured.position_table_bytes
        costs[f"flops@{length}"] = measured.flops_per_token
        costs["parameters"] = measured.parameters
        read = measured.active_parameters - (0 if design.head.tied else measured.embedding_parameters)
        costs[f"reads@{length}"] = read * dtype.itemsize + costs[f"state@{length}"]
    return costs


def saved_costs(
    source: Weights, items: Sequence[Replacement], lengths: Sequence[int]
) -> tuple[dict[str, FloatArray], dict[str, float]]:
    """What each replacement alone adds to each cost, and the costs of the source."""
    design, dtype = source.design, source.dtype
    totals = costs_of(design, lengths, dtype)
    known: dict[tuple[LayerConfig, LayerConfig], dict[str, float]] = {}
    rows = []
    for item in items:
        key = (design.layers[item.layer], item.config)
        if key not in known:
            known[key] = costs_of(replace_layers(design, {item.layer: item.config}), lengths, dtype)
        rows.append(known[key])
    return {name: np.array([row[name] - total for row in rows]) for name, total in totals.items()}, totals


# What replacements do to the logits.


class Evaluator:
    """The source in memory, and what replaced layers do to its logits on a text; its parameters are shared."""

    def __init__(self, source: Weights, text: CalibrationText, folder: Path, model: Decoder | None = None) -> None:
        """model: the source in memory; None: it is read."""
        self.source, self.text, self.folder = source, text, folder
        dtype = torch.promote_types(source.dtype, torch.float32)
        self.model = build_model(source).to(text.device, dtype) if model is None else model
        self.reference = self.hidden(self.model)
        counts = [int(count) for layout in text.layouts for count in (layout.positions >= 0).sum(1)]
        self.rows = np.repeat(np.arange(len(counts)), counts)  # of each token
        self.row_count = len(counts)
        self.longest = max(batch.shape[1] for batch in text.batches)

    @torch.no_grad()
    def hidden(self, model: Decoder) -> Tensor:
        """The final hidden states of all tokens [N, width]."""
        pairs = zip(self.text.batches, self.text.layouts, strict=True)
        return torch.cat([model(batch, layout)[0][layout.positions >= 0] for batch, layout in pairs])

    def replaced(self, items: Sequence[Replacement]) -> Decoder:
        """The source with some layers replaced."""
        design = put_together(self.source, items, self.folder).design
        layers = {item.layer: dict(read_tensor_file(self.folder / item.file_name)) for item in items}
        model, own = build(design, device="meta").eval(), dict(self.model.named_parameters())
        for name, _ in list(model.named_parameters()):
            number, _, relative = name.removeprefix(LAYER_PREFIX).partition(".")
            is_new = name.startswith(LAYER_PREFIX) and int(number) in layers
            value = layers[int(number)][relative].to(self.reference) if is_new else own[name]
            set_parameter(model, name, value.detach(), requires_grad=False)
        model.tie()
        return model

    def divergence(self, items: Sequence[Replacement]) -> FloatArray:
        """KL(source ‖ replaced) in nats, the mean over the tokens of each sequence [S]."""
        kl: FloatArray = self.measure([self.hidden(self.replaced(items)).cpu().numpy()])[0][0]
        return kl

    @torch.no_grad()
    def losses(self, items: Sequence[Replacement], byte_lengths: np.ndarray, token_groups: np.ndarray) -> FloatArray:
        """The bits and bytes of next tokens within documents, with some layers replaced [1 + P + F, S, 2].

        For each sequence: all tokens, the tokens in each of P ranges of positions, and the tokens of each of F groups.
        byte_lengths: of each token; tokens of 0 or -1 bytes (end tokens) are not counted. token_groups: int64 [vocab].
        """
        hidden, start, first, edges = self.hidden(self.replaced(items)), 0, 0, position_edges(self.longest)
        found = np.zeros((len(edges) + int(token_groups.max()) + 1, self.row_count, 2))
        for batch, layout in zip(self.text.batches, self.text.layouts, strict=True):
            is_token, ids = layout.positions >= 0, layout.dense_segment_ids
            own = torch.full((*batch.shape, hidden.shape[1]), 0.0).to(hidden)
            own[is_token] = hidden[start : start + int(is_token.sum())]
            start += int(is_token.sum())
            lengths = torch.from_numpy(np.asarray(byte_lengths)).to(batch.device)[batch[:, 1:]]
            scored = is_token[:, :-1] & is_token[:, 1:] & (ids[:, 1:] == ids[:, :-1]) & (lengths > 0)
            targets, rows = batch[:, 1:][scored], first + scored.nonzero()[:, 0].cpu().numpy()
            losses = token_losses(own[:, :-1][scored], self.model.head.output_head, targets)
            values = torch.stack((losses.double() / math.log(2), lengths[scored].double()), dim=1).cpu().numpy()
            positions = np.searchsorted(edges, layout.positions[:, :-1][scored].cpu().numpy(), side="right")
            for group in (np.zeros_like(positions), positions, len(edges) + token_groups[targets.cpu().numpy()]):
                np.add.at(found, (group, rows), values)
            first += len(batch)
        return found

    @cached_property
    @torch.no_grad()
    def log_sums(self) -> Tensor:
        """log Σ exp(logits) of the source for each token, float64 [N]."""
        hidden, head = self.model.head.output_head.apply_transform(self.reference)
        parts = hidden.split(max(1, CHUNK_ELEMENTS // _block_size(head)))
        return torch.cat([_log_sums(_logits(part, head, block) for block in _blocks(head)) for part in parts])

    @torch.no_grad()
    def measure(self, changed: Sequence[np.ndarray]) -> tuple[FloatArray, FloatArray]:
        """The KL of each model by sequence [m, S], and the Gram matrix of the changes of the logits [m, m].

        changed: final hidden states [N, width] of m models. The Gram matrix is E_tokens[Cov_p(D_a, D_b)], p: of the
        source. Reads some tokens of all models at a time, and a block of the vocabulary, so that a large one is read
        once for all of them:

            KL = log Σ_v p_v exp(D_v) − E_p[D],  Cov_p(D_a, D_b) = Σ_v p_v D_a D_b − E_p[D_a] E_p[D_b]

        Both are the same for D plus a constant; the mean over the first block is taken away, so that little cancels.
        """
        count, own = len(changed), self.model.head.output_head
        kl, gram = np.zeros((count, len(self.rows))), np.zeros((count, count))
        reference, head = own.apply_transform(self.reference)
        tokens = max(1, CHUNK_ELEMENTS // (count * _block_size(head)))
        for start in range(0, len(self.rows), tokens):
            part = slice(start, start + tokens)
            given = torch.stack([torch.from_numpy(np.array(hidden[part])) for hidden in changed])
            hidden, log_sums = own.apply_transform(given.to(reference)).hidden, self.log_sums[part, None]
            means = torch.zeros(given.shape[:2], dtype=torch.float64, device=hidden.device)
            shift: Tensor | None = None
            new_sums: list[Tensor] = []
            for block in _blocks(head):
                logits, new = (_logits(states, head, block) for states in (reference[part], hidden))
                new_sums.append(_log_sums([new]))
                p = (logits - log_sums).exp().to(logits)
                change = new.sub_(logits)
                shift = change.mean(-1, keepdim=True) if shift is None else shift
                change -= shift
                means += (change * p).sum(-1).double()
                rows = change.mul_(p.sqrt()).flatten(1)
                gram += (rows @ rows.T).double().cpu().numpy()
            assert shift is not None
            sums = torch.stack(new_sums).logsumexp(0) - log_sums[:, 0] - shift[..., 0].double()
            kl[:, part] = (sums - means).cpu().numpy()
            gram -= (means @ means.T).cpu().numpy()
        by_row: FloatArray = np.stack([np.bincount(self.rows, row, self.row_count) for row in kl])
        by_row /= np.bincount(self.rows, minlength=self.row_count)
        return by_row, gram / len(self.rows)


def _block_size(head: OutputHead) -> int:
    return min(len(head.weight), VOCABULARY_BLOCK)


def _blocks(head: OutputHead) -> list[slice]:
    return [slice(start, start + VOCABULARY_BLOCK) for start in range(0, len(head.weight), VOCABULARY_BLOCK)]


def _logits(hidden: Tensor, head: OutputHead, block: slice) -> Tensor:
    """hidden [..., width] -> logits [..., block]."""
    bias = None if head.bias is None else head.bias[block]
    add_flops(2 * hidden.numel() * len(head.weight[block]))
    return scale_and_cap(functional.linear(hidden, head.weight[block], bias), head.scale, head.softcap)


def _log_sums(blocks: Iterable[Tensor]) -> Tensor:
    """log Σ exp over the last dimension of all blocks, in float64."""
    sums = []
    for logits in blocks:
        largest = logits.amax(-1, keepdim=True)
        sums.append((logits - largest).exp().sum(-1).double().log() + largest[..., 0].double())
    return torch.stack(sums).logsumexp(0)


def single_scores(evaluator: Evaluator, items: Sequence[Replacement], folder: Path) -> Iterator[Replacement]:
    """Save the final hidden states with each replacement alone, where they are missing; yield each."""
    for item in items:
        path = hidden_path(item, folder)
        if not path.is_file():
            save_array(path, evaluator.hidden(evaluator.replaced([item])).cpu().numpy())
            yield item


def save_array(path: Path, values: np.ndarray) -> None:
    """Write an array atomically."""
    with replace_file(path) as temporary, temporary.open("wb") as file:
        np.save(file, values)


def hidden_path(item: Replacement, folder: Path) -> Path:
    """The final hidden states with a replacement alone."""
    return (folder / item.file_name).with_suffix(".npy")


def measure_singles(evaluator: Evaluator, items: Sequence[Replacement], folder: Path) -> tuple[FloatArray, FloatArray]:
    """The KL of each replacement alone by sequence [m, S], and their Gram matrix [m, m]."""
    return evaluator.measure([np.load(hidden_path(item, folder), mmap_mode="r") for item in items])
