"""Build a conformance kit: for each family, small models with drawn weights, cases, and the float64 logits.

A kit is plain files, described in docs/conformance.md; `reader.py`, which is copied into it, reads them without heddle.
A case is a way to feed token rows (whole, cut, padded, packed, rolled back, …). However a row is fed, the logits of its
tokens must be the same, so a kit stores one set of logits for each row.
"""

import json
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor, nn

from heddle import __version__
from heddle.errors import ConfigError, HeddleError
from heddle.exchange.export import export
from heddle.exchange.family import Family, families
from heddle.exchange.family_match import design_from_config
from heddle.exchange.load import load
from heddle.lab.conformance.bugs import CUTS, GOES_ON, ROLLBACK_FROM, ROLLBACK_TO, SHOWN, Bug, bugs_of, logits_of, shown
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.initialization import cast_parameters
from heddle.numerics.experts.mixture import route
from heddle.numerics.random import RandomStream
from heddle.parts.feedforwards.moe import MoE
from heddle.parts.positions import Rotation
from heddle.parts.scalings.llama3 import Llama3Config
from heddle.parts.scalings.yarn import YarnConfig
from heddle.progress import progress_bar, quiet
from heddle.storage.file_io import refuse_existing, write_file
from heddle.storage.tensor_file import write_tensor_file
from heddle.tokenization.tokenizer import TOKENIZER_FILE, BoundaryTokens, Tokenizer
from heddle.torch_private import LightDispatchMode

FORMAT = 1
CASES_FILE, GOLDENS_FILE, KIT_FILE = "cases.json", "goldens.safetensors", "kit.json"
LLAMA_CPP_FILE = "llama_cpp.mjs"
COPIED = ("reader.py", "reader.mjs", "reader.cpp", LLAMA_CPP_FILE)  # into a kit
GGUF_FILE, GGUF_KINDS = "model.gguf", ("float32", "q8_0")
Q8_0_BLOCK = 32
# Rows that are whole blocks of Q8_0, by the end of a config's field; rows of other lengths are float16 in such a file.
WIDER = {"intermediate_size": 64, "n_inner": 64, "ffn_hidden_size": 64, "hidden_size": 96, "n_embd": 96, "head_dim": 16}
END_TOKEN = "<|end|>"
ROW_LENGTHS = (48, 17, 5)  # of the rows that are padded and packed together
GREEDY = 24  # tokens of a greedy text
REORDERINGS = 20  # of the sums of each product, in the first row
REORDERINGS_OF_ALL = 4  # in the others
SAFETY = 4.0  # times the largest error of any reordering is the tolerance
ROUTER_NOISE = {
    "float32": 1e-5,
    "bfloat16": 0.05,
    "q8_0": 0.1,
}  # of router logits: what would choose otherwise is not compared
LONG = 272  # tokens of the last row: more positions than bfloat16 has integers
MAX_LONG = 640  # of it, where it passes the original length of a RoPE scaling
MIN_LEAD = 2.0  # tolerances, of a greedy token's logit over the next
SEEDS = 16  # drawn until a model has clear choices
FIXED = (YarnConfig, Llama3Config)  # scalings that are the same for each length, so that a cache stays valid
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@cache
def variants() -> dict[str, dict[str, dict[str, Any]]]:
    """The configs of the small models, by family and variant; together they reach every option of a family."""
    text = files("heddle.lab.conformance").joinpath("variants.json").read_text(encoding="utf-8")
    read: dict[str, dict[str, dict[str, Any]]] = json.loads(text)
    return read


@dataclass(frozen=True)
class Goldens:
    """What a model computes for some rows in float64. logits [T, vocab] and hidden [T, width] after each layer."""

    rows: list[list[int]]
    logits: list[Tensor]
    hidden: list[list[Tensor]]
    experts: list[dict[int, Tensor]]  # by layer, int64 [T, k]
    clear: dict[str, list[int]]  # for each row, how many tokens have no choice that rounding could turn


def build_kit(out: Path, names: Sequence[str], gguf: Sequence[str] = ()) -> dict[str, Any]:
    """Write a kit of these families (none: all) to a new folder; returns what kit.json says.

    gguf: which of GGUF_KINDS to write for models that llama.cpp runs: float32 beside each model, q8_0 as one more,
    wider model of each family. Raises ConfigError for an unknown family or kind, CheckpointError if `out` exists.
    """
    for kind in gguf:
        if kind not in GGUF_KINDS:
            raise ConfigError(f"--gguf {kind}: unknown; give {' or '.join(GGUF_KINDS)}, or both with a comma")
    known = variants()
    for name in names:
        if name not in known:
            raise ConfigError(f"--family {name}: unknown; choices: {', '.join(sorted(known))}")
    refuse_existing(out, "the kit")
    chosen = list(dict.fromkeys(names)) or sorted(known)
    work = out.with_name(out.name + ".building")
    shutil.rmtree(work, ignore_errors=True)
    entries = []
    with progress_bar("building", sum(len(known[name]) for name in chosen), "models") as bar:
        for name in chosen:
            quantized = "q8_0" not in gguf
            for variant, fields in known[name].items():
                family, head = families()[name], {"family": name, "variant": variant}
                entries.append(head | build_model(work / name / variant, family, fields, "float32" in gguf))
                if not quantized and (entry := build_quantized(work / name / f"{variant}-q8_0", family, fields)):
                    entries.append(head | {"variant": f"{variant}-q8_0"} | entry)
                    quantized = True
                bar.advance(1, name)
    summary = {"format": FORMAT, "heddle": __version__, "license": "Apache-2.0", "models": entries}
    write_file(work / KIT_FILE, json.dumps(summary, indent=1) + "\n", "free space")
    for file in COPIED:
        text = files("heddle.lab.conformance").joinpath(file).read_text(encoding="utf-8")
        write_file(work / file, text, "free space")
    work.rename(out)
    return summary


def build_model(folder: Path, family: Family, fields: Mapping[str, Any], gguf: bool = False) -> dict[str, Any]:
    """Write one small model with its cases and goldens; returns its line of kit.json. gguf: if llama.cpp runs it."""
    model = clearest_model(design(family, fields))
    export(model, folder, family=family.model_type)
    entry = _write_cases(folder, family, model.causal, tuple(DTYPES))
    return entry | ({"gguf": "float32"} if gguf and _write_gguf(model, folder, family) else {})


def build_quantized(folder: Path, family: Family, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Write a wider model with the weights of its GGUF in Q8_0; returns its line of kit.json, None if there is none."""
    from heddle.exchange.gguf import load_gguf

    wide = {name: _wider(name, value) for name, value in fields.items()}
    try:
        model = clearest_model(design(family, wide), "q8_0").float()
    except (HeddleError, RuntimeError):
        return None
    folder.mkdir(parents=True)
    if not _write_gguf(model, folder, family, q8_0=True):
        folder.rmdir()
        return None
    with quiet():
        stored = dict(load_gguf(folder / GGUF_FILE, dequantize=torch.float32).model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[name])
    file = (folder / GGUF_FILE).rename(folder.with_suffix(".gguf"))
    folder.rmdir()
    export(model, folder, family=family.model_type)
    file.rename(folder / GGUF_FILE)
    return _write_cases(folder, family, model.causal, ("q8_0",)) | {"gguf": "q8_0"}


def _wider(name: str, value: Any) -> Any:
    width = next((width for end, width in WIDER.items() if name.endswith(end)), None)
    return width if isinstance(value, int) and width is not None else value


def design(family: Family, fields: Mapping[str, Any]) -> ModelConfig:
    """The design of a family's config."""
    config = {"model_type": family.model_type, "architectures": [family.architecture], **fields}
    return design_from_config(config, family)


def _write_cases(folder: Path, family: Family, causal: bool, dtypes: Sequence[str]) -> dict[str, Any]:
    """The cases and goldens of an exported model."""
    wide = load(folder, dtype=torch.float64).model
    goldens = goldens_of(wide)
    tolerances = {name: tolerance(folder, goldens, name) for name in dtypes}
    bugs, unseen = bugs_of(wide, goldens.rows, goldens.logits, tolerances[dtypes[0]])
    cases = list(_cases(wide, goldens, tolerances))
    document = {
        "format": FORMAT,
        "family": family.model_type,
        "vocab_size": wide.config.vocab_size,
        "layers": wide.config.depth,
        "causal": causal,
        "tolerances": tolerances,
        "rows": goldens.rows,
        "clear": goldens.clear,
        "cases": cases,
        "bugs": [{"name": each.name, "property": each.property, "row": each.row} for each in bugs],
        "unobservable": unseen,
        "shown": SHOWN,
    }
    write_file(folder / CASES_FILE, json.dumps(document) + "\n", "free space")
    write_tensor_file(folder / GOLDENS_FILE, _tensors(goldens, bugs))
    write_file(folder / TOKENIZER_FILE, tokenizer().to_json(), "free space")
    return {"cases": len(cases), "bugs": len(bugs), "unobservable": len(unseen), "tolerances": tolerances}


def _write_gguf(model: Decoder, folder: Path, family: Family, q8_0: bool = False) -> bool:
    """Whether llama.cpp runs the design. The file is then written."""
    from heddle.exchange.gguf import export_gguf

    model.imported_config = {"model_type": family.model_type}
    with suppress(ConfigError):
        export_gguf(model, folder / GGUF_FILE, tokenizer(), dtype=torch.float32, q8_0=q8_0)
    return (folder / GGUF_FILE).exists()


@cache
def tokenizer() -> Tokenizer:
    """97 tokens: the end token, then each printable character of ASCII from the space on, and one pair of them."""
    tokens = [END_TOKEN, "\u0120", *map(chr, range(33, 127)), "th"]  # a space as byte-level BPE spells it
    backend = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, [("t", "h")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([END_TOKEN])
    return Tokenizer(backend, TOKENIZER_FILE, backend.to_str(), BoundaryTokens((), (0,), {}))


def clearest_model(design: ModelConfig, dtype: str = "bfloat16") -> Decoder:
    """Random weights, representable in bfloat16, of the seed with the fewest expert choices near a rounding error.

    dtype: the coarsest dtype that the model is for.
    """
    best, most = None, -1
    for seed in range(SEEDS):
        model = drawn_model(design, seed)
        found = goldens_of(model)
        clear = sum(found.clear["float32"]) * 1000 + sum(found.clear[dtype])
        if clear > most:
            best, most = model, clear
        if not found.experts[0] or found.clear[dtype][0] >= len(found.rows[0]) / 2:
            break
    assert best is not None
    cast_parameters(best, torch.bfloat16)
    return best


def drawn_model(design: ModelConfig, seed: int) -> Decoder:
    """A float64 model whose gains and biases are drawn, too; equal on every machine."""
    model = build(design, torch.float64, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "norm" in name:
                noise = RandomStream.of("conformance", seed, name).normal(0, parameter.numel())
                parameter.add_(0.2 * noise.view(parameter.shape))
            parameter.copy_(parameter.bfloat16())
    return model.eval()


def rows_of(model: Decoder) -> list[list[int]]:
    """The token rows: three of different lengths, one that continues the first one's start differently, a long one.

    The long one, absent where a table of positions ends too early, passes the original length of a scaling if MAX_LONG
    tokens do.
    """
    limit = model.config.position_limit or MAX_LONG
    vocabulary = int(model.config.vocab_size or 0)
    first = 1 if model.causal else 4  # some encoders count no position where a token is that of padding

    def row(name: str, length: int) -> list[int]:
        words = RandomStream.of("conformance", name).words(0, min(length, limit))
        return [int(word) for word in first + words % (vocabulary - first)]

    rows = [row(f"row {index}", length) for index, length in enumerate(ROW_LENGTHS)]
    rows.append([*rows[0][:ROLLBACK_TO], *row("another end", 9)])
    beyond = [scaling.original_length + 8 for scaling in _scalings(model.config)]
    longest = max([LONG, *(length for length in beyond if length <= MAX_LONG)])
    if limit > len(rows[0]):
        rows.append(row("long", longest))
    return rows


def _scalings(design: ModelConfig) -> Iterator[Any]:
    for _, layer in design.expand():
        scaling = getattr(getattr(layer.mixer, "position", None), "scaling", None)
        if getattr(scaling, "original_length", None):
            yield scaling


@torch.no_grad()
def goldens_of(model: Decoder) -> Goldens:
    """Run the rows one by one, and record what each layer gives."""
    found = Goldens(rows_of(model), [], [], [], {name: [] for name in ROUTER_NOISE})
    for row in found.rows:
        hidden: list[Tensor] = []
        experts: dict[int, Tensor] = {}
        clear = dict.fromkeys(ROUTER_NOISE, len(row))
        with _recorded(model, hidden, experts, clear):
            found.logits.append(logits_of(model, row))
        found.hidden.append(hidden)
        found.experts.append(experts)
        for name, tokens in clear.items():
            found.clear[name].append(tokens)
    return found


@contextmanager
def _recorded(
    model: Decoder, hidden: list[Tensor], experts: dict[int, Tensor], clear: dict[str, int]
) -> Iterator[None]:
    """Append each layer's stream and experts; lower `clear` to the first token that rounding may route differently."""
    handles = []

    def keep_stream(module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output[0], Tensor) and output[0].dim() == 3:
            hidden.append(output[0][0])

    def keep_choice(index: int, mixture: MoE) -> Any:
        def keep(module: nn.Module, arguments: Any, logits: Tensor) -> None:
            bias, rule = mixture.router.expert_bias, mixture.routing_config
            chosen = route(logits, bias, rule).expert_indices[0].sort(-1).values
            experts[index] = chosen
            numbers = [RandomStream.of("noise", draw).normal(0, logits.numel()) for draw in range(8)]
            draws = torch.stack(numbers).view(-1, *logits.shape[1:])
            for name, noise in ROUTER_NOISE.items():
                other = route(logits + noise * draws, bias, rule).expert_indices.sort(-1).values
                turned = (other != chosen).any(-1).any(0).nonzero()
                if len(turned):
                    clear[name] = min(clear[name], int(turned[0]))

        return keep

    for index, layer in enumerate(model.layers):
        handles.append(layer.register_forward_hook(keep_stream))
        for module in layer.modules():
            if isinstance(module, MoE):
                handles.append(module.router.register_forward_hook(keep_choice(index, module)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Reordered(LightDispatchMode):
    """Products whose terms are summed in another order.

    quantized: as llama.cpp multiplies by weights of Q8_0, what they are multiplied by is rounded, to blocks of Q8_0 or,
    in rows that are not whole blocks, to float16. exact: addresses of the weights that are not quantized.
    """

    def __init__(self, seed: int, quantized: bool = False, exact: Container[int] = ()) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.quantized, self.exact = quantized, exact

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Permute the summed dimension of both factors."""
        names = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}
        positions = names.get(func._schema.name)
        if positions is not None:
            first, second = (args[position] for position in positions)
            order = torch.randperm(first.shape[-1], generator=self.generator)
            quantized = self.quantized and func._schema.name != "aten::bmm" and second.data_ptr() not in self.exact
            args, first = list(args), first[..., order]
            args[positions[0]], args[positions[1]] = rounded(first) if quantized else first, second[..., order, :]
        return func(*args, **(kwargs or {}))


def rounded(x: Tensor) -> Tensor:
    """Rows as blocks of Q8_0: 32 signed bytes with one scale, float16; rows of other lengths as float16."""
    if x.shape[-1] % Q8_0_BLOCK:
        return x.half().float()
    blocks = x.unflatten(-1, (-1, Q8_0_BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    numbers: Tensor = (blocks / scale).round() * scale.half().float()
    return numbers.flatten(-2)


def tolerance(folder: Path, goldens: Goldens, name: str) -> float:
    """SAFETY times the largest error of the logits of REORDERINGS runs in a dtype."""
    model, largest = load(folder, dtype=DTYPES.get(name, torch.float32)).model, 0.0
    exact = {each.data_ptr() for key, each in model.named_parameters() if ".router." in key}
    for seed in range(REORDERINGS):
        last = 1 if seed >= REORDERINGS_OF_ALL else len(goldens.rows)
        rows = list(zip(goldens.rows, goldens.logits, goldens.clear[name], strict=True))[:last]
        with Reordered(seed, name == "q8_0", exact):
            for row, want, clear in rows:
                errors = (logits_of(model, row).double() - want)[:clear].abs()
                largest = max(largest, float(errors.max()) if clear else 0.0)
    return float(f"{SAFETY * largest:.3g}")


def _cases(model: Decoder, goldens: Goldens, tolerances: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Ways to feed the rows; docs/conformance.md says what each means."""
    for index in range(len(goldens.rows)):
        what = "long positions" if index > len(ROW_LENGTHS) else "logits"
        yield {"property": what, "way": "whole", "rows": [index]}
    for side in ("left", "right"):
        yield {"property": "padding", "way": "padded", "side": side, "rows": [0, 1, 2]}
    yield {"property": "packing", "way": "packed", "rows": [1, 0, 2]}
    if not model.causal:
        return
    length = len(goldens.rows[0])
    # Where angles depend on a text's length, an engine that knows the final length rotates its beginning differently.
    of_length = any(module.length_dependent for module in model.modules() if isinstance(module, Rotation))
    if not of_length:
        yield {"property": "padding", "way": "padded", "side": "left", "rows": [0, 1, 2], "cuts": [length - GOES_ON]}
    for cuts in CUTS:
        yield {"property": "cuts", "way": "cut", "rows": [0], "cuts": [cut for cut in cuts if cut < length]}
    switches = [each.original_length for each in _scalings(model.config)]
    fixed = all(isinstance(each, FIXED) for each in _scalings(model.config))
    if switches and fixed and len(goldens.rows) > len(ROW_LENGTHS) + 1:
        switch, long = max(switches), len(goldens.rows) - 1
        yield {"property": "long positions", "way": "cut", "rows": [long], "cuts": [switch - 1, switch, switch + 1]}
    if not of_length:
        for then, kept in ((3, ROLLBACK_TO), (1, 0)):
            yield {"property": "rollback", "way": "rollback", "rows": [0, then], "read": ROLLBACK_FROM, "keep": kept}
    yield {"property": "batch change", "way": "dropped", "rows": [1, 0], "read": len(goldens.rows[1]) - 4}
    tokens, leads = _greedy(model, goldens.rows[1], MIN_LEAD * min(tolerances.values()))
    sure = {
        name: next((index for index, lead in enumerate(leads) if lead < MIN_LEAD * tolerance), len(leads))
        for name, tolerance in tolerances.items()
    }
    if tokens and not of_length:
        yield {"property": "greedy text", "way": "greedy", "rows": [1], "tokens": tokens, "sure": sure}


def _greedy(model: Decoder, row: Sequence[int], min_lead: float) -> tuple[list[int], list[float]]:
    """The greedy text after a row, up to the first token whose lead is small, and the leads of its tokens."""
    text, leads = list(row), list[float]()
    while len(text) < len(row) + GREEDY and len(text) < (model.config.position_limit or MAX_LONG):
        best = logits_of(model, text)[-1].topk(2)
        lead = float(best.values[0] - best.values[1])
        if lead < min_lead:
            break
        text.append(int(best.indices[0]))
        leads.append(lead)
    return text[len(row) :], leads


def _tensors(goldens: Goldens, bugs: Sequence[Bug]) -> dict[str, Tensor]:
    tensors = {}
    for index, logits in enumerate(goldens.logits):
        tensors[f"rows.{index}.logits"] = logits
        for layer, hidden in enumerate(goldens.hidden[index] if index <= len(ROW_LENGTHS) else ()):
            tensors[f"rows.{index}.hidden.{layer}"] = hidden
        for layer, experts in goldens.experts[index].items():
            tensors[f"rows.{index}.experts.{layer}"] = experts
    for index, bug in enumerate(bugs):
        tensors[f"bugs.{index}.logits"] = shown(bug.logits).float()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
