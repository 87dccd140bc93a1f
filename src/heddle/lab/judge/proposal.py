"""A proposal: read from YAML, applied to the incumbent, and screened before any training.

Screening refuses what cannot be judged: a design that cannot be built or that breaks a law, code that fails, a copy of
an incumbent or an earlier proposal, weights from outside, and training text that contains evaluation text. A proposal
with its own code is screened in another process, with limits:
`python -m heddle.lab.judge.proposal REQUEST.json RESULT.json`.
"""

import ast
import hashlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from heddle import progress
from heddle.config import PARTS, load_part
from heddle.data.cache import json_sha256
from heddle.data.corpus import prepare_corpus
from heddle.data.token_file import TokenFile
from heddle.errors import ConfigError, HeddleError
from heddle.lab.compare.equal_size import resize_to
from heddle.lab.judge.ledger import TOKENIZER_FILE, Candidate, checked_file
from heddle.lab.workers import confine
from heddle.laws import LAWS, run, shrink
from heddle.laws.harness import forward_no_grad, model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config, parse_yaml, read_design, with_vocab_size
from heddle.model.size import flops_per_token, parameter_counts
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.settings import settings_of, shorten
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.training.run import parse_scales
from heddle.training.settings import Settings, TrainSettings

# Leaks: what a model must not know, found in the smallest case, with the part that lets it through.

# The laws that every design must keep before it is trained; code of a proposal's own must keep all.
LEAKS = (
    "causality", "document_isolation", "document_packing", "receptive_field", "row_isolation", "padding_invariance",
    "chunked_decoding", "call_isolation",
)  # fmt: skip
LONGEST = 12  # tokens of a case
TOLERANCE = 1e-9  # in float64; experts change the shape of products
OVERLAP = 32  # consecutive tokens that are not a coincidence


def smallest_leak(config: ModelConfig) -> str | None:
    """The fewest tokens with which a design sees a later token, or another document, and the part; None: none."""
    model = model_under_test(config)
    for length in range(2, LONGEST + 1):
        tokens = random_tokens(config, 1, length)
        for what, layout, changed, watched in _cases(length):
            moved = _moved(model, tokens, layout, changed, watched)
            if moved is not None:
                return f"{length} tokens{what}: changing token {changed} moves the output of token {moved[0]}{moved[1]}"
    return None


def _cases(length: int) -> Iterator[tuple[str, Layout | None, int, range]]:
    """(words, layout, the changed token, the tokens whose outputs must not change)."""
    for changed in range(length - 1, 0, -1):
        yield "", None, changed, range(changed)
    for first in range(1, length):
        layout = Layout.packed([[first, length - first]])
        yield f" in documents of {first} and {length - first}", layout, first - 1, range(first, length)


def _moved(
    model: Decoder, tokens: Tensor, layout: Layout | None, changed: int, watched: range
) -> tuple[int, str] | None:
    """The first watched token with a changed output, and the first module in which it changes."""
    others = tokens.clone()
    others[:, changed] = tokens[:, changed] % (model.embed.weight.shape[0] - 1) + 1
    before, after = (_streams(model, each, layout) for each in (tokens, others))
    indices = list(watched)

    def first_difference(name: str, side: int) -> int | None:
        pair = [streams[name][side][:, indices] for streams in (before, after)]
        differs = (pair[1] - pair[0]).abs().amax((0, 2)).nan_to_num(nan=1.0) > TOLERANCE
        return indices[int(differs.nonzero()[0])] if bool(differs.any()) else None

    token = first_difference("", 1)
    if token is None:
        return None
    lets = (
        name for name in after if name and first_difference(name, 0) is None and first_difference(name, 1) is not None
    )
    name = next(lets, "")
    return token, f", by {name}" if name else ""


def _streams(model: Decoder, tokens: Tensor, layout: Layout | None) -> dict[str, tuple[Tensor, Tensor]]:
    """(input, output) of each module that maps one row for each token, inner modules first; of the model, as ""."""
    streams: dict[str, tuple[Tensor, Tensor]] = {}
    names = {module: f"{name} ({type(module).__module__.rpartition('.')[2]})" for name, module in model.named_modules()}

    def keep(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        result = output[0] if isinstance(output, tuple) and output else output
        pair = [x for x in (*arguments[:1], result) if isinstance(x, Tensor) and x.dim() == 3]
        if len(pair) == 2 and all(x.shape[:2] == tokens.shape for x in pair):
            streams.setdefault(names[module], (pair[0].detach().clone(), pair[1].detach().clone()))

    handles = [module.register_forward_hook(keep) for module in names if module is not model]
    try:
        logits = forward_no_grad(model, tokens, layout)
    finally:
        for handle in handles:
            handle.remove()
    return streams | {"": (logits, logits)}


def training_overlap(held_out: TokenFile, own: Sequence[TokenFile], texts: Sequence[Any]) -> str | None:
    """Where a text has `OVERLAP` consecutive tokens of the held-out text that the ledger's training text lacks."""
    secret = np.unique(_hashes(held_out.read(0, len(held_out))))
    secret = secret[~np.isin(secret, np.concatenate([_hashes(file.read(0, len(file))) for file in own]))]
    for index, text in enumerate(texts):
        found = np.flatnonzero(np.isin(_hashes(np.asarray(text, dtype=np.int64)), secret))
        if found.size:
            return f"tokens {int(found[0])} to {int(found[0]) + OVERLAP - 1} of part {index + 1}"
    return None


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """A hash of each OVERLAP consecutive tokens: a polynomial modulo 2^64."""
    count = max(0, len(tokens) - OVERLAP + 1)
    result = np.zeros(count, dtype=np.uint64)
    values = tokens.astype(np.uint64) + np.uint64(1)
    for offset in range(OVERLAP):
        result = result * np.uint64(0x9E3779B97F4A7C15) + values[offset : offset + count]
    return result


FIELDS = ("name", "design", "overrides", "part", "training", "data", "trainer")
TRAINING = {
    "lr": "learning_rate", "optimizer": "optimizer", "schedule": "schedule", "warmup": "warmup",
    "weight_decay": "weight_decay", "batch_size": "batch_size", "lr_scale": "lr_scale",
    "max_gradient_norm": "max_gradient_norm", "seed": "seed",
}  # fmt: skip
WEIGHTS = ("from", "init", "weights", "checkpoint", "lora", "distill")  # fields that would bring trained weights
MAX_CODE_BYTES = 2**18  # of a part, or of all files of a trainer: more may hold weights
TRAINER_FIELDS = ("train", "score", "files")


class Refused(Exception):
    """A proposal that is not judged. rule: the law or rule; case: the smallest case that fails."""

    def __init__(self, rule: str, case: str) -> None:
        super().__init__(f"{rule}: {case}")
        self.rule, self.case = rule, case


@dataclass(frozen=True)
class Submission:
    """A proposal as submitted. change: plain data, files by name. files: their content. refused: by the first look."""

    name: str
    text: bytes
    change: dict[str, Any]
    files: Mapping[str, bytes]
    refused: tuple[str, str] | None = None

    @property
    def content(self) -> str:
        """The SHA-256 of everything but the name."""
        files = {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}
        return json_sha256([self.change, files])


def read_proposal(file: Path) -> Submission:
    """Read a proposal. Raises ConfigError for a file that is not one; a refusal is returned."""
    try:
        text = file.read_bytes()
        data = parse_yaml(text.decode("utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); give a proposal, a YAML file") from None
    if not isinstance(data, dict) or not data:
        raise ConfigError(f"{file}: is not a table of fields; a proposal has some of {', '.join(FIELDS)}")
    name = str(data.pop("name", file.stem))
    brought = [field for field in data if field in WEIGHTS]
    if unknown := [field for field in data if field not in FIELDS and field not in WEIGHTS]:
        raise ConfigError(f"{file}: {unknown[0]}: unknown field; choices: {', '.join(FIELDS)}")
    if not data:
        raise ConfigError(f"{file}: changes nothing; give some of {', '.join(FIELDS[1:])}")
    change, files, refused = dict(data), dict[str, bytes](), None
    if brought:
        refused = ("initial_weights", f"{brought[0]}: weights from outside may have seen the held-out text")
        return Submission(name, text, {field: str(change[field]) for field in change}, files, refused)
    change["overrides"] = [str(override) for override in _list(file, data, "overrides")]
    change["data"] = [_source(file, source) for source in _list(file, data, "data")]
    change["training"] = _training(file, data.get("training") or {})
    try:
        if isinstance(data.get("design"), str):
            change["design"] = read_design(_beside(file, data["design"]))
        for source in map(str, _list(file, data, "part")):
            files[f"parts/{Path(source).name}"] = _code(file, source)
        if data.get("trainer") is not None:
            change["trainer"], sources = _trainer(file, data["trainer"])
            files |= {f"trainer/{Path(source).name}": _code(file, source) for source in sources}
    except Refused as error:
        refused = (error.rule, error.case)
    except ConfigError as error:
        refused = ("design", str(error))
    change.pop("part", None)
    return Submission(name, text, {field: value for field, value in change.items() if value}, files, refused)


def _list(file: Path, data: Mapping[str, Any], field: str) -> list[Any]:
    value = data.get(field)
    if isinstance(value, dict):
        raise ConfigError(f"{file}: {field}: expected a list, not a table; write one entry a line, after a dash")
    return value if isinstance(value, list) else [] if value is None else [value]


def _beside(file: Path, name: str) -> str:
    """A file named in a proposal, relative to the proposal."""
    path = file.parent / name
    return str(path.resolve()) if not name.startswith("preset:") and path.exists() else name


def _source(file: Path, source: Any) -> str:
    path, at, weight = str(source).partition("@")
    return _beside(file, path) + at + weight


def absolute_sources(sources: Sequence[str]) -> list[str]:
    """Sources of text, by default the standard library, with absolute paths."""
    return [_source(Path("sources"), source) for source in sources or ("stdlib",)]


def _training(file: Path, values: Any) -> dict[str, Any]:
    """Fields of `Settings`. A seed is dropped: it does not count as a change, and the judge chooses the seeds."""
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: training: expected a table of {', '.join(TRAINING)}")
    if unknown := [name for name in values if name not in TRAINING]:
        raise ConfigError(f"{file}: training.{unknown[0]}: cannot be proposed; choices: {', '.join(TRAINING)}")
    if "lr_scale" in values:
        values = values | {"lr_scale": [list(pair) for pair in parse_scales(_list(file, values, "lr_scale"))]}
    options = settings_of(TrainSettings)
    found = {name: value for name, value in values.items() if name != "seed" and value is not None}
    try:
        for name in found.keys() & options.keys() - {"lr_scale"}:
            found[name] = options[name].read(found[name])
        found = {TRAINING[name]: value for name, value in found.items()}
        Settings(steps=1, **found)
    except ConfigError as error:
        raise ConfigError(f"{file}: training: {error}") from None
    except TypeError:
        raise ConfigError(f"{file}: training: a value is of the wrong type; give numbers and words") from None
    return found


def _trainer(file: Path, data: Any) -> tuple[dict[str, Any], list[str]]:
    """The two commands, and the files that they need."""
    commands = [data.get(name) if isinstance(data, dict) else None for name in ("train", "score")]
    if not all(isinstance(command, str) and command for command in commands) or set(data) - set(TRAINER_FIELDS):
        raise ConfigError(f"{file}: trainer: expected a table with the commands train and score, and a list of files")
    return {"train": data["train"], "score": data["score"]}, list(map(str, _list(file, data, "files")))


def _code(file: Path, source: str) -> bytes:
    """The content of a file of code.

    Raises Refused for a file that may hold weights, ConfigError for a missing file.
    """
    path = Path(_beside(file, source))
    if not path.is_file():
        raise ConfigError(f"{path}: is not a file; name one beside the proposal")
    if path.stat().st_size > MAX_CODE_BYTES:
        raise Refused("initial_weights", f"{path.name} has over {MAX_CODE_BYTES} bytes, which may hold weights")
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("initial_weights", f"{path.name} is not text, so it may hold weights") from None
    return content


def apply_change(
    base: Candidate, change: Mapping[str, Any], files: Sequence[Sequence[str]], number: int, name: str
) -> Candidate:
    """The candidate that a change makes of another one, its design not yet resolved.

    files: (file below the ledger, SHA-256).
    """
    parts = tuple((file, digest) for file, digest in files if Path(file).parent.name == "parts")
    if "trainer" in change:
        trainer = change["trainer"] | {"files": [list(pair) for pair in files]}
        return Candidate(name, trainer=trainer, changed=(number,))
    return replace(
        base,
        name=name,
        design=change.get("design", base.design),
        training=base.training | change.get("training", {}),
        data=tuple(change.get("data", base.data)),
        parts=(*base.parts, *parts),
        changed=(*base.changed, number),
    )


# Screening.


def screen(request: Mapping[str, Any]) -> dict[str, Any]:
    """What is trained for a proposal, as plain data, or why it is refused: {"refused": [rule, case]}."""
    try:
        return _screened(request)
    except Refused as error:
        return {"refused": [error.rule, error.case]}
    except HeddleError as error:
        return {"refused": ["design", str(error)]}


def screen_apart(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """As `screen`, in a process with the request's limits. folder: for the request and the result."""
    asked, result = folder / "screen.request.json", folder / "screen.json"
    write_json_file(asked, request)
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "heddle.lab.judge.proposal", str(asked), str(result)]
    try:
        limit = request["limits"][1] + 60
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        if result.is_file():
            return read_json_file(result)
    except subprocess.TimeoutExpired:
        return {"refused": ["limits", f"its code takes more than {request['limits'][1]:g} seconds before training"]}
    finally:
        asked.unlink(missing_ok=True)
        result.unlink(missing_ok=True)
    last = (ended.stderr.strip().splitlines() or [f"it ended with code {ended.returncode}"])[-1]
    return {"refused": ["limits", f"its code ended the process of its tests: {shorten(last)}"]}


def _screened(request: Mapping[str, Any]) -> dict[str, Any]:
    folder, number = Path(request["folder"]), request["number"]
    base, change = Candidate.read(request["base"]), request["change"]
    tokenizer = folder / TOKENIZER_FILE
    candidate = apply_change(base, change, request["files"], number, request["name"])
    if candidate.trainer is not None:
        if set(change) != {"trainer"} and number:
            raise Refused("trainer", "a trainer of your own brings its own design and data; propose nothing beside it")
        identity = json_sha256(_trainer_code(folder, candidate))
        _refuse_known(request, identity)
        if number:
            _refuse_held_out_code(request, folder, candidate)
        return {"candidate": candidate.dump(), "identity": identity, "sizes": []}
    try:
        for file in candidate.part_files(folder):
            load_part(Path(file))
    except ConfigError as error:
        raise Refused("part", str(error).replace(str(folder.resolve()) + "/", "")) from None
    assert candidate.design is not None
    config = load_config(candidate.design, change.get("overrides", ()))
    config = with_vocab_size(config, request["vocab_size"])
    if (config.vocab_size or 0) < request["vocab_size"]:
        raise Refused(
            "design", f"vocab_size {config.vocab_size}: is below the {request['vocab_size']} tokens of the text"
        )
    if request["equal_to"] is not None:
        config = _resized(config, load_config(request["equal_to"]))
    candidate = replace(candidate, design=config.dump())
    corpus = prepare_corpus(
        list(candidate.data or request["data"]),
        vocab_size=None,
        max_train_tokens=request["budget"][2],
        tokenizer=tokenizer,
    )
    training = Settings(steps=1, **(request["training"] | candidate.training)).identity()
    identity = json_sha256([_resolved(config, candidate, folder), training, corpus.hash])
    _refuse_known(request, identity)
    if change.get("data"):
        _refuse_overlap(request, [file.read(0, len(file)) for file in corpus.train], "of its training text")
    _refuse_broken_laws(config, list(LAWS) if candidate.parts else LEAKS)
    sizes = [_size(config, request)]
    if request["second"]:
        second = resize_to(config, _parameters, request["second"] * _parameters(config))  # by width
        sizes.append(_size(second, request))
    return {"candidate": candidate.dump(), "identity": identity, "sizes": sizes}


def _refuse_known(request: Mapping[str, Any], identity: str) -> None:
    """Raise Refused for a copy of an incumbent or of an earlier proposal, whatever that one was judged against."""
    if identity in request["known"]:
        raise Refused("copy", f"resolves to the same as {request['known'][identity]}; change more than names or seeds")


def _refuse_broken_laws(config: ModelConfig, names: Sequence[str]) -> None:
    """Raise Refused naming the first law that a small version of the design breaks, and the smallest case."""
    small = shrink(config)
    model = build(small, device="meta")
    if not model.causal:
        raise Refused("causality", "a mixer sees later tokens, so the design cannot learn to predict them")
    if model.encoder_width is not None:
        raise Refused("design", "it reads an encoder's output, which text does not have")
    ordered = [*LEAKS, *(name for name in names if name not in LEAKS and name != "options_have_effect")]
    for result in run(small, ordered):
        if not result.passed:
            raise Refused(result.name, smallest_leak(small) or result.message)


def _refuse_overlap(request: Mapping[str, Any], texts: Sequence[Any], what: str) -> None:
    """Raise Refused for training tokens that are in the held-out text but not in the ledger's own training text."""
    folder = Path(request["folder"])
    own = prepare_corpus(
        request["data"], vocab_size=None, max_train_tokens=request["budget"][2], tokenizer=folder / TOKENIZER_FILE
    )
    case = training_overlap(own.validation, own.train, texts)
    if case is not None:
        raise Refused("evaluation_text_in_training", f"{case} {what} are in the held-out text")


def _refuse_held_out_code(request: Mapping[str, Any], folder: Path, candidate: Candidate) -> None:
    from heddle.tokenization.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder / TOKENIZER_FILE)
    assert candidate.trainer is not None
    files = [Path(checked_file(folder, *pair)).read_text(encoding="utf-8") for pair in candidate.trainer["files"]]
    _refuse_overlap(request, tokenizer.encode_documents(files), "of its files")


def _parameters(design: ModelConfig) -> float:
    return float(parameter_counts(build(design, device="meta"))[0])


def _resized(config: ModelConfig, target: ModelConfig) -> ModelConfig:
    """The design at the parameters of another one. Raises Refused where no width comes close."""
    wanted = _parameters(target)
    resized = config if _parameters(config) == wanted else resize_to(config, _parameters, wanted)
    reached = _parameters(resized)
    if abs(reached / wanted - 1) > 0.02:
        raise Refused("design", f"gets no closer to the incumbent's {wanted:,.0f} parameters than {reached:,.0f}")
    return resized


def _size(config: ModelConfig, request: Mapping[str, Any]) -> dict[str, Any]:
    """A design, its parameters, and the training tokens that its budget allows; None: to be timed."""
    model = build(config, device="meta")
    kind, value, tokens = request["budget"]
    if kind == "flops":
        # a backward pass costs twice a forward pass
        tokens = int(value / (3 * flops_per_token(model, request["sequence_length"], training=True)))
    elif kind == "seconds":
        tokens = None
    return {"design": config.dump(), "parameters": parameter_counts(model)[0], "tokens": tokens}


# Identity: what two candidates have in common if they are the same but for names.


def _resolved(config: ModelConfig, candidate: Candidate, folder: Path) -> Any:
    """The design with every layer and every default written out, and code in the place of the names of parts."""
    layers = []
    for index, (_, layer) in enumerate(config.expand()):
        data = layer.dump(with_later_fields=True) | {"repeat": 1}
        if layer.mixer is not None:
            context = BuildContext(config.width, config.norm, sum(1 for _ in config.expand()), index)
            data["mixer"] = layer.mixer.resolved(context).dump(with_later_fields=True)
        layers.append(data)
    data = config.dump(with_later_fields=True) | {"layers": layers}
    codes: dict[str, str] = {}
    for file in candidate.part_files(folder):
        code = code_hash(Path(file).read_text(encoding="utf-8"))
        codes[Path(file).stem] = _known_codes().get(code, code)
    return _with_codes(data, codes)


def _with_codes(data: Any, codes: Mapping[str, str]) -> Any:
    if isinstance(data, dict):
        return {
            name: codes.get(value, value) if name == "kind" else _with_codes(value, codes)
            for name, value in data.items()
        }
    return [_with_codes(value, codes) for value in data] if isinstance(data, list) else data


def _known_codes() -> dict[str, str]:
    """The kinds of the package by the hash of their code."""
    return {
        code_hash(file.read_text(encoding="utf-8")): file.stem
        for slot in ("feedforwards", "mixers", "norms", "positions", "residuals", "scalings")
        for file in (PARTS / slot).glob("*.py")
        if not file.stem.startswith("_")
    }


def code_hash(source: str, files: Mapping[str, str] | None = None) -> str:
    """The SHA-256 of code without comments, docstrings, and the names of what it defines, but for fields of configs.

    files: what stands for the name of each file beside it, where it is imported.
    """
    tree, places = ast.parse(source), {Path(file).stem: place for file, place in (files or {}).items()}
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in places:
            node.module = places[node.module]
        elif isinstance(node, ast.Import):
            names |= {each.name: places[each.name] for each in node.names if each.name in places}
    for node in ast.walk(tree):
        for name in _defined(node):
            names.setdefault(name, f"name{len(names)}")
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            del body[0]
        for field in ("name", "id", "attr", "arg", "value"):  # a value may be an annotation in quotes
            value = getattr(node, field, None)
            if isinstance(value, str):
                setattr(node, field, names.get(value, value))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _defined(node: ast.AST) -> Iterator[str]:
    """The names that a node defines: classes, functions, arguments, variables, and attributes of self."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.id if isinstance(node, ast.Name) else node.attr


def _trainer_code(folder: Path, candidate: Candidate) -> list[str]:
    """The commands, and the hashes of the files, in order: of Python without comments and names of what it defines.

    The names of files do not count either.
    """
    trainer = candidate.trainer
    assert trainer is not None
    places = {Path(file).name: f"file{index}" for index, (file, _) in enumerate(trainer["files"])}
    hashes = [" ".join(places.get(word, word) for word in trainer[name].split()) for name in ("train", "score")]
    for file, digest in trainer["files"]:
        path = Path(checked_file(folder, file, digest))
        try:
            is_code = path.suffix == ".py"
            hashes.append(code_hash(path.read_text(encoding="utf-8"), places) if is_code else digest)
        except (SyntaxError, ValueError, RecursionError):
            hashes.append(digest)
    return hashes


def main() -> None:
    """Screen the request of a file within its limits."""
    request = read_json_file(Path(sys.argv[1]))
    confine(*request["limits"])
    with progress.quiet():
        write_json_file(Path(sys.argv[2]), screen(request))


if __name__ == "__main__":
    main()
