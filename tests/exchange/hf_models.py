"""Random models of transformers saved to disk, and the outputs of transformers and heddle for them."""

import copy
import json
import math
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

import heddle
from heddle.exchange.family import families
from heddle.exchange.imported_checkpoint import ImportedModel
from heddle.exchange.load import load
from heddle.numerics.attention.indexer import Choice, _block_scores, blocks_of, index_scores, select_keys
from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.experts import mixture
from heddle.parts.feedforwards import moe
from heddle.parts.modules import indexer
from tests.exchange.cases import BASE, CASES, FULL, Fields

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, GenerationMixin
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.emu3 import Emu3ForCausalLM, Emu3TextConfig
    from transformers.models.glm5_next import Glm5NextTextConfig, modeling_glm5_next
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

# The automatic class knows it by the config of the whole model alone.
AutoModelForCausalLM.register(Emu3TextConfig, Emu3ForCausalLM, exist_ok=True)


class Glm5NextForCausalLM(modeling_glm5_next.Glm5NextPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The text model with a head, for which transformers has a class only beside an encoder of images."""

    config_class = Glm5NextTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - as transformers writes it

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = modeling_glm5_next.Glm5NextTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        outputs = self.model(input_ids, attention_mask, **options)
        return CausalLMOutputWithPast(
            logits=self.lm_head(outputs.last_hidden_state), past_key_values=outputs.past_key_values
        )


AutoModelForCausalLM.register(Glm5NextTextConfig, Glm5NextForCausalLM, exist_ok=True)
VOCABULARY = BASE["vocab_size"]
FOLDERS = tempfile.TemporaryDirectory(prefix="heddle-exchange-")  # of all models, gone when the tests end
# Their faster experts refuse rows that are not whole multiples of 16 bytes; in older versions their faster attention
# leaves caps and sinks of scores out, where newer ones take the eager one by themselves.
PLAIN = {"experts_implementation": "eager"}
CAPPED = PLAIN | {"attn_implementation": "eager"}
EAGER = ("gemma2", "gpt_oss")


def plain(family: str) -> dict[str, str]:
    """How transformers is asked to compute the models of a family."""
    return CAPPED if family in EAGER else PLAIN


CLEAR = 2e-5  # scores of experts that are further apart are chosen alike in float32
LENGTH_DEPENDENT = ("longrope", "dynamic")
# A convolution of theirs reads the bias of the projection before it at padding, where ours reads nothing.
READS_PADDING = {
    "llama4_text": "attn_temperature_tuning",  # which counts padding
    "lfm2": "conv_bias",
    "lfm2_moe": "conv_bias",
    "lfm3": "conv_bias",
    "mamba": "use_bias",
    "falcon_mamba": "use_bias",
    "jamba": "mamba_proj_bias",
    "mamba2": "use_bias",
    "nemotron_h": "use_bias",
    "granitemoehybrid": "mamba_proj_bias",
    "bamba": "mamba_proj_bias",
    "falcon_h1": "mamba_proj_bias",
    "minimax_m3_vl_text": "index_block_size",  # whose blocks count padding
    "deepseek_v4": "compress_rates",  # the same
    "recurrent_gemma": "lru_width",  # whose convolution reads padding, too
}  # by model_type, if true
# Names that transformers writes, and those of published files, which an export writes.
WRITTEN_NAMES: dict[str, tuple[str, Any]] = {
    "kimi_linear": (r"block_sparse_moe\.(gate_proj|up_proj|down_proj)", r"mlp.\1"),
    "deepseek_v4": (r"^model\.(?:(embed)_tokens|(hc_head)\.hc)?", r"\1\2"),
    "hy_v4": (
        r"hc_pre\.(hc_head)|hc_pre\.(hc_\w+_layer)|(mlp\.(?:shared_experts\.)?)linear_gate",
        lambda found: found[1] or (f"{found[2]}.hc_pre" if found[2] else f"{found[3]}gate_proj"),
    ),
    "olmo_hybrid": (r"([13])\.feedforward_layer_norm", r"\1.post_attention_layernorm"),  # layers with attention
}
# What transformers writes, and computes anew where a file lacks it, so that an export leaves it out.
LEFT_OUT = {
    "roformer": r"^roformer\.encoder\.embed_positions\.weight$",
    "qwen4_exp_text": r"ple_embedding\.(layer_multipliers|ngram_heads_\w+)$",
}
LENGTHS = [41, 17, 1]  # of the rows that are padded together


MASKED = frozenset(name for name, family in families().items() if family.architecture.endswith("ForMaskedLM"))


def auto_class(family: str) -> Any:
    """The class of transformers that makes the models of a family."""
    return AutoModelForMaskedLM if family in MASKED else AutoModelForCausalLM


def their_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def config_of(family: str, variant: str, **changes: Any) -> Any:
    """The config of a variant, with some fields changed. A copy: some classes write into the tables they are given."""
    fields = (CASES[family].base or BASE) | CASES[family].variants[variant] | changes
    return AutoConfig.for_model(family, **copy.deepcopy(fields))


def with_config_limits(model: Any) -> Any:
    """Their model; older versions had gpt-oss's limit and alpha as constants, whatever the config says."""
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            config_fields = model.config.to_dict()
            module.limit, module.alpha = (
                config_fields.get("swiglu_limit", 7.0),
                config_fields.get("swiglu_alpha", 1.702),
            )
    return model


def leave_out_decays(model: Any) -> None:
    """No file holds the decays of MiniMax's layers, which follow from the config; transformers computes them anew."""
    for module in model.modules():
        if type(module).__name__ == "MiniMaxLightningAttention":
            module._non_persistent_buffers_set.update(name for name, _ in module.named_buffers(recurse=False))


def drawn(config: Any) -> Any:
    """A model with weights so wide that logits and choices are far from even, and no gain or bias at its start."""
    torch.default_generator.manual_seed(3)
    kind = auto_class(config.model_type)
    model = with_config_limits(kind.from_config(config, **plain(config.model_type)).float().eval())
    leave_out_decays(model)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            is_drawn = (tensor.dim() == 1 and "inv_freq" not in name) or ("norm" in name and "normalizer" not in name)
            if tensor.is_floating_point() and is_drawn:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            if name.endswith("position_bias"):
                tensor.normal_()
            if name.endswith("tid2eid"):
                tensor.copy_(torch.rand(len(tensor), config.n_routed_experts).topk(tensor.shape[1]).indices)
    return model


@cache
def saved(family: str, variant: str) -> tuple[Any, Path]:
    """Their model and the folder that it was saved in, cut into shards."""
    model = drawn(config_of(family, variant))
    return model, write(model)


def write(model: Any, max_shard_size: str = "40KB") -> Path:
    """A folder of their model."""
    folder = Path(tempfile.mkdtemp(dir=FOLDERS.name))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@cache
def imported(family: str, variant: str) -> ImportedModel:
    """The same model, read by us."""
    return load(saved(family, variant)[1])


def read_json(folder: Path, name: str = "config.json") -> Fields:
    """A file of a folder."""
    data: Fields = json.loads((folder / name).read_text(encoding="utf-8"), object_hook=_infinite)
    return data


def _infinite(table: Fields) -> Any:
    """What transformers writes in place of an infinite number."""
    return float(table["__float__"]) if table.keys() == {"__float__"} else table


def batch() -> tuple[Tensor, Tensor, heddle.Layout]:
    """Rows padded on the left, their mask and our layout."""
    layout = heddle.Layout.padded(LENGTHS, side="left")
    tokens = torch.randint(1, VOCABULARY, tuple(layout.positions.shape), generator=torch.Generator().manual_seed(9))
    real = layout.positions >= 0
    return torch.where(real, tokens, 0), real.long(), layout


def alone(model: Any) -> bool:
    """Whether rows must be read alone: padding changes them, or frequencies depend on the longest row's length."""
    text = model.config.to_json_string()
    return any(f'"{kind}"' in text for kind in LENGTH_DEPENDENT) or reads_padding(model)


def reads_padding(model: Any) -> bool:
    """Whether padding on the left changes the tokens after it; where every layer attends, none does."""
    attends = set(getattr(model.config, "layer_types", None) or ()) == {FULL}
    return not attends and bool(getattr(model.config, READS_PADDING.get(model.config.model_type, ""), False))


@torch.no_grad()
def their_logits(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits [B, T, vocab]. Where the other rows of a padded batch would change a row, rows are read alone."""
    if mask is not None and alone(model):
        rows = [their_logits(model, row[real][None]) for row, real in zip(tokens, mask.bool(), strict=True)]
        padded = rows[0].new_zeros(*tokens.shape, rows[0].shape[-1])
        padded[mask.bool()] = torch.cat([row[0] for row in rows])
        return padded
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    inputs: dict[str, Any] = {"attention_mask": mask, "position_ids": positions}
    if model.config.model_type in MASKED:
        inputs |= encoder_inputs(model.config, tokens, positions)
    else:
        inputs["use_cache"] = False
    if model.config.model_type == "heddle" and (types := model.config.load_design().embedding.token_types):
        inputs["token_type_ids"] = tokens % types
    logits: Tensor = model(tokens, **inputs).logits
    return logits


def encoder_inputs(config: Any, tokens: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
    """Each token's type, and its position as a row of the table, for classes that do not count from zero."""
    inputs = {}
    if types := getattr(config, "type_vocab_size", 0):
        inputs["token_type_ids"] = tokens % types
    if "roberta" in config.model_type or config.model_type in ("camembert", "data2vec-text", "mpnet"):
        rows = torch.arange(tokens.shape[1]).expand_as(tokens) if positions is None else positions
        inputs["position_ids"] = rows + (1 if config.model_type == "mpnet" else config.pad_token_id) + 1
    return inputs


@torch.no_grad()
def our_logits(model: heddle.Decoder, tokens: Tensor, layout: heddle.Layout | None = None) -> Tensor:
    if types := model.config.embedding.token_types:
        layout = (layout or heddle.Layout.causal(*tokens.shape)).with_token_types(tokens % types)
    logits: Tensor = model.head(model(tokens, layout)[0])
    return logits


class DoubtfulError(AssertionError):
    """Other weights or another field would show more."""


def distance(theirs: Any, ours: heddle.Decoder) -> float:
    """The largest difference of logits, rows padded together and the longest alone."""
    return max(distances(theirs, ours))


def distances(theirs: Any, ours: heddle.Decoder) -> tuple[float, float]:
    """The largest difference of logits of rows padded together, and of the longest alone.

    Where two experts were so close that rounding may choose either, that token and those after it are left out.
    """
    tokens, mask, layout = batch()
    with choices() as margins:
        got = our_logits(ours, tokens, layout)
    compared = mask.bool() & sure(margins, mask)
    want = their_logits(theirs, tokens, mask)
    if not float(want[compared].std()) > 0.3:
        raise DoubtfulError("logits this even would agree whatever the model does")
    has_indexer = any(indexer.indexer_field(layer.mixer) for _, layer in ours.config.expand())
    assert has_indexer or compared.sum() > mask.sum() / 2  # an indexer chooses in every layer, and for every token
    if compared.sum() <= mask.sum() / 4:
        raise DoubtfulError("too few tokens before which every choice was clear")
    with choices() as margins:
        longest = our_logits(ours, tokens[:1]) - their_logits(theirs, tokens[:1])
    clear = sure(margins, torch.ones_like(mask[:1]))
    return float((got - want)[compared].abs().max()), float(longest[clear].abs().max())


@contextmanager
def choices() -> Iterator[list[Tensor]]:
    """The list takes, of each mixture of experts and indexer that runs, by how much each token's choice was clear."""
    logits: list[Tensor] = []

    def watched(numbers: Tensor, balance: Tensor | None, rule: mixture.RoutingConfig, *chosen: Any) -> mixture.Route:
        if chosen and chosen[0] is not None:  # by ids
            return mixture.route(numbers, balance, rule, *chosen)
        functions = {"sigmoid": torch.sigmoid, "sqrt_softplus": lambda x: torch.nn.functional.softplus(x).sqrt()}
        scores = functions[rule.routing](numbers) if rule.routing in functions else numbers
        scores = scores if balance is None else scores + balance
        clear = torch.full(scores.shape[:-1], math.inf)
        if rule.groups > 1:
            inside = scores.unflatten(-1, (rule.groups, -1))
            best = inside.topk(2 if rule.routing == "sigmoid" else 1).values.sum(-1)
            clear = margin(best, rule.top_groups)
            least = best.topk(rule.top_groups).values[..., -1:]
            scores = inside.masked_fill((best < least)[..., None], -math.inf).flatten(-2)
        if rule.routing == "sparse_mixer":  # whether an expert is near another is a choice, too
            own, others = numbers.topk(rule.top_k).values[..., None], numbers[..., None, :]
            apart = (own - others) / torch.maximum(others.abs(), own)
            clear = (apart - rule.tolerance).abs().flatten(-2).amin(-1)
        logits.append(torch.minimum(clear, margin(scores, rule.top_k)))
        return mixture.route(numbers, balance, rule, *chosen)

    def watched_keys(
        q: Tensor, k: Tensor, weights: Tensor | None, mask: AttentionMask, choice: Choice
    ) -> AttentionMask:
        top_k, blocks, visible = choice.top_k, blocks_of(mask, choice.block), mask.materialize()[:, None]
        scores = index_scores(q, k, weights)
        of_block = _block_scores(scores, visible, blocks.of_key[:, None, None].expand_as(scores), blocks, choice)
        if of_block.shape[-1] <= top_k:
            return select_keys(q, k, weights, mask, choice)
        largest = of_block.masked_fill(of_block.isinf(), 0.0).abs().amax(-1) if choice.local else of_block.amax(-1)
        own = mask.q_positions.div(choice.block, rounding_mode="floor")[:, None, :, None]
        is_local = (own - blocks.numbers[:, None, None]).abs() < choice.local
        of_block = of_block.masked_fill(is_local & ~of_block.isinf(), math.inf)
        gap, best = margin(of_block, top_k).nan_to_num(nan=math.inf), of_block.topk(top_k).values
        last = best[..., -1].abs().clamp(1e-9, 1e9)  # ours compares its 16 first bits; both round the largest
        logits.append(torch.minimum(gap / last, 50 * gap / largest.abs().clamp(min=1e-9)).amin(1))
        return select_keys(q, k, weights, mask, choice)

    with patch.object(moe, "route", watched), patch.object(indexer, "select_keys", watched_keys):
        yield logits


def margin(scores: Tensor, number: int) -> Tensor:
    """By how much the last of the `number` best is better than the next."""
    best = torch.nn.functional.pad(scores, (0, 1), value=-math.inf).topk(number + 1).values
    return best[..., -2] - best[..., -1]


def sure(margins: list[Tensor], mask: Tensor) -> Tensor:
    """bool [B, T]: the tokens before which, and at which, every choice of real tokens was clear."""
    doubtful = torch.zeros_like(mask)
    for margin in margins:
        doubtful |= ((margin < CLEAR) & mask.bool()).long()
    return doubtful.cumsum(1) == 0
