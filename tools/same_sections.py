"""One side of tools/same.py: `same_sections.py SECTION CHECKOUT FILE OLD` writes a section's facts to FILE.

It uses `heddle.__all__`, the command line and files on disk, so that any layout of the sources answers. The working
folder takes what it writes; OLD is that of the other side, if this one is the new one, or empty.
"""

import hashlib
import inspect
import json
import random
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DESIGNS, MAP = HERE / "same_designs.json", HERE / "same_options.json"
MEASURED = re.compile(  # fields that hold time or memory, or a hash over these
    r"(wall_)?seconds|.*_per_second|.*speed_range|peak_memory.*|created|chain|head|prefill|decode|reading_share"
)
DURATION = re.compile(r"\b[\d.,–-]+ (ms|s|min|h|hours|minutes|seconds)\b")  # in a sentence
LAYOUTS: dict[str, dict[str, Any]] = {  # of JSON texts: arguments of json.dumps
    "line": {}, "short line": {"separators": (",", ":")}, **{f"indent {n}": {"indent": n} for n in (1, 2, 4)},
}  # fmt: skip
STYLES: dict[str, dict[str, Any]] = {
    f"{name}{' ascii' * is_ascii}": {**options, "ensure_ascii": is_ascii}
    for name, options in LAYOUTS.items()
    for is_ascii in (False, True)
}


def digest(*tensors: Any) -> str:
    """The first digits of the SHA-256 of dtypes, shapes and bits of tensors."""
    import torch

    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        sha.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def named_digest(tensors: dict[str, Any]) -> str:
    """As `digest`, with the names, in their order."""
    return text_digest(json.dumps({name: digest(tensor) for name, tensor in tensors.items()}))


def text_digest(text: str | bytes) -> str:
    """The first digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def masked(value: Any, key: str = "") -> Any:
    """Plain data without what is measured: fields by their names, and durations in sentences."""
    if MEASURED.fullmatch(key) and not isinstance(value, dict):  # a table, as a design's head, is looked into
        return "measured"
    if isinstance(value, dict):
        return {name: masked(item, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item) for item in value]
    return DURATION.sub("a time", value) if isinstance(value, str) else value


def json_facts(text: str) -> dict[str, Any]:
    """A JSON table without what is measured, and without its own hash."""
    return {name: masked(item, name) for name, item in json.loads(text).items() if name != "sha256"}


def folder_facts(folder: Path, by_value: tuple[str, ...] = ()) -> dict[str, Any]:
    """The SHA-256 of every file of a folder by name; of JSON files named in `by_value`, their values and their style.

    What a manifest records of these is compared with the file.
    """
    facts: dict[str, Any] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        if file.name not in by_value:
            facts[name] = "any bytes" if file.name == ".lock" else hashlib.sha256(file.read_bytes()).hexdigest()
            continue
        text = file.read_text(encoding="utf-8")
        documents = text.splitlines() if file.suffix == ".jsonl" else [text]
        values = [json_facts(document) for document in documents]
        if file.name == "manifest.json":
            _check_records(file.parent, values[0]["files"], by_value)
        facts[name] = {"values": values, "style": sorted({style(document) for document in documents})}
    return facts


def _check_records(folder: Path, records: dict[str, Any], by_value: tuple[str, ...]) -> None:
    """Replace hash and size of each file that is compared by value by whether they are those of the file."""
    for name in records.keys() & set(by_value):
        content = (folder / name).read_bytes()
        facts = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        records[name] |= {key: "of the file" for key, fact in facts.items() if records[name][key] == fact}


def style(text: str) -> str:
    """How a JSON text is laid out, whatever its values: a name of STYLES if it is one of these byte for byte."""
    lines = text.removesuffix("\n")
    end = "newline" if lines != text else "no newline"
    names = (name for name, options in STYLES.items() if json.dumps(json.loads(text), **options) == lines)
    return f"{next(names, text_digest(text))}, {end}"


class Probe:
    """One side: its work folder, the folder of the other side if that ran before, and the fixed designs."""

    def __init__(self, work: Path, old: Path | None) -> None:
        self.work, self.old = work, old
        self.designs: dict[str, Any] = json.loads(DESIGNS.read_text(encoding="utf-8"))

    def run(self, *words: str | Path, expect: int | None = 0) -> dict[str, Any]:
        """Run a command line as `python -m heddle` does, in this process: its exit code and what it printed.

        Float32 products are torch's own after it, whatever it chose. Raises RuntimeError for another exit code than
        `expect`; None: any.
        """
        import torch

        argv, out, errors = sys.argv, StringIO(), StringIO()
        sys.argv = ["heddle", *map(str, words)]
        try:
            with redirect_stdout(out), redirect_stderr(errors):
                runpy.run_module("heddle", run_name="__main__", alter_sys=False)
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
        finally:
            sys.argv = argv
            torch.set_float32_matmul_precision("highest")
        if expect is not None and code != expect:
            raise RuntimeError(f"{' '.join(map(str, words))}: exit code {code}: {errors.getvalue()[-500:]}")
        return {"code": code, "out": out.getvalue()}

    def texts(self) -> Path:
        """A folder of short texts, the same on every machine."""
        words = [f"{head}{tail}" for head in ("wea", "thre", "loo", "shu", "ta") for tail in ("ve", "ad", "m", "ttle")]
        draw = random.Random(7)
        folder = self.work / "texts"
        folder.mkdir(exist_ok=True)
        for number in range(30):
            sentences = [" ".join(draw.choices(words, k=7)).capitalize() + ". 織 é\n" for _ in range(14)]
            (folder / f"{number:03d}.txt").write_text("".join(sentences), encoding="utf-8")
        return folder.relative_to(self.work)

    def design(self, name: str, *layers: dict[str, Any], **fields: Any) -> Path:
        """A small design as a file."""
        path = Path(f"{name}.json")
        path.write_text(json.dumps({"vocab_size": 300, "width": 16, "layers": list(layers), **fields}))
        return path


ROPE = {"kind": "rope"}
GATED = {"kind": "gated", "hidden": 24}
HEADS = {"kind": "attention", "heads": 4, "kv_heads": 2, "position": ROPE}
DELTA = {"kind": "gated_delta", "heads": 2, "head_dim": 8}
MOE = {
    "kind": "moe", "expert": "mlp", "experts": 4, "top_k": 2, "hidden": 8, "aux_loss": 0.5, "bias_update": 0.125,
}  # fmt: skip
DENSE = {"mixer": HEADS, "feedforward": GATED}
QUICK = ("--data", "texts", "--sequence-length", "16", "--device", "cpu", "--threads", "1", "--quiet")


# Sections: each returns plain data, key -> values.


def logits(probe: Probe) -> dict[str, Any]:
    """Draws, logits, gradients, decoding and costs."""
    import heddle

    facts = {}
    for name in probe.designs["presets"]:
        facts[f"preset:{name}"] = {"design": heddle.load_config(f"preset:{name}").dump()} | (
            numbers(f"preset:{name}", ["vocab_size=64"]) if name.endswith("-tiny") else {}
        )
    for group in ("cases", "covering"):
        for name, data in probe.designs[group].items():
            facts[f"{group}:{name}"] = numbers(data)
    return facts


def numbers(source: Any, overrides: list[str] | None = None) -> dict[str, Any]:
    """What a design draws, computes and costs; every dropout is off."""
    import torch

    import heddle

    config = heddle.load_config(source, overrides or [])
    size = heddle.size(config, context_length=64, batch=2)
    model = heddle.build(config, dtype=torch.float64, device="cpu", seed=3).eval()
    facts: dict[str, Any] = {
        "draws": named_digest(dict(model.named_parameters())),
        "costs": [size.parameters, size.active_parameters, size.flops_per_token, size.state_bytes],
    }
    shake(model)
    tokens, layout = batch_of(model)
    hidden, _ = model(tokens, layout)
    out = model.head(hidden)
    weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float64).view(out.shape)
    (out * weights).sum().backward()
    gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    facts |= {"logits": digest(out), "sum": float(out.detach().sum()), "gradients": named_digest(gradients)}
    with torch.no_grad():
        padded = heddle.Layout.padded([9, 5, 1], side="left")
        facts["padded"] = digest(model(*batch_of(model, padded))[0])
        if model.causal:
            state = model.init_state(batch=3, cache_length=9, encoder_output=layout.encoder_output)
            parts = []
            for start, end in ((0, 5), (5, 6), (6, 9)):
                part = heddle.Layout.causal(3, end - start, start=start)
                if layout.token_types is not None:
                    part = part.with_token_types(layout.token_types[:, start:end])
                hidden, state = model(tokens[:, start:end], part, state)
                parts.append(hidden)
            facts["decoding"] = digest(*parts)
    return facts


def shake(model: Any) -> None:
    """Add random numbers to every parameter, by name: at first gains are 1 and biases 0, which hides mistakes."""
    import torch

    for name, parameter in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(int(text_digest(name)[:8], 16))
        noise = torch.empty(parameter.shape, dtype=torch.float64).normal_(generator=generator)
        with torch.no_grad():
            parameter.add_((noise * (0.3 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5)).to(parameter.dtype))


def batch_of(model: Any, layout: Any = None) -> tuple[Any, Any]:
    """Random tokens [3, 9] and their layout, with what the design reads beside them."""
    import torch

    import heddle

    def draw(config: Any, rows: int, length: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, config.vocab_size, (rows, length), generator=generator)

    tokens = draw(model.config, 3, 9, 1)
    layout = heddle.Layout.causal(3, 9) if layout is None else layout
    if model.encoder is not None:
        layout = layout.with_encoder_output(model.encode(draw(model.encoder.config, 3, 5, 2)))
    elif model.encoder_width is not None:
        vectors = torch.empty(3, 5, model.encoder_width, dtype=torch.float64)
        vectors.normal_(generator=torch.Generator().manual_seed(4))
        layout = layout.with_encoder_output(heddle.EncoderOutput(vectors.to(model.embed.weight.dtype)))
    if types := model.config.embedding.token_types:
        layout = layout.with_token_types(tokens % types)
    return tokens, layout


def families(probe: Probe) -> dict[str, Any]:
    """Every variant of every family: exported, imported, and imported with the config.json of transformers."""
    import torch

    import heddle

    facts: dict[str, Any] = {}
    for name, variant in probe.designs["families"].items():
        shutil.rmtree("family", ignore_errors=True)
        family = name.partition(":")[0]
        model = heddle.build(heddle.load_config(variant["design"]), dtype=torch.float32, device="cpu", seed=3).eval()
        shake(model)
        heddle.save(model, "family/model")
        probe.run("export", "family/model", "family/hf", "--family", family, "--quiet")
        probe.run("import", "family/hf", "family/back", "--quiet")
        text = Path("family/hf/config.json").read_text(encoding="utf-8")
        written = folder_facts(Path("family/hf"), ("config.json", "manifest.json")) | {"config.json": style(text)}
        facts[name] = fact = {"config": dict(json.loads(text)), "files": written}
        fact["back"] = imported_facts("family/back")
        Path("family/hf/config.json").write_text(json.dumps(variant["config"]))
        fact["of transformers"] = {
            "code": probe.run("import", "family/hf", "family/own", "--quiet", expect=None)["code"]
        }
        if fact["of transformers"]["code"] == 0:
            fact["of transformers"] |= imported_facts("family/own")
    return facts


def imported_facts(folder: str) -> dict[str, Any]:
    """The design, the files and the logits of a folder."""
    import torch

    import heddle

    model, _ = heddle.load(folder)
    with torch.no_grad():
        out = digest(model.head(model(*batch_of(model))[0]))
    return {"design": text_digest(json.dumps(model.config.dump())), "logits": out, "files": folder_facts(Path(folder))}


TRAININGS: dict[str, tuple[tuple[dict[str, Any], ...], dict[str, Any], tuple[str, ...]]] = {
    "dense": (
        (DENSE, {"mixer": HEADS | {"dropout": 0.2}, "feedforward": GATED | {"dropout": 0.1}}),
        {"residual": {"kind": "pre_norm", "drop_path": 0.3}},
        ("--gradient-accumulation-steps", "2", "--evaluate-every", "3"),
    ),
    "moe": (({"mixer": HEADS | {"window": 5}, "feedforward": MOE},), {}, ("--schedule", "cosine")),
    "recurrent": (({"mixer": DELTA, "feedforward": GATED}, DENSE), {}, ("--optimizer", "muon")),
}
RUN_FILES = ("run.json", "log.jsonl", "manifest.json", "training.json", "final.json")


def training(probe: Probe) -> dict[str, Any]:
    """Three trainings, whole; and without their last checkpoint, resumed. NEW resumes those of OLD as well."""
    facts: dict[str, Any] = {}
    probe.texts()
    for name, (layers, fields, options) in TRAININGS.items():
        design = probe.design(name, *layers, **fields)
        words = ("train", design, *QUICK, "--batch-size", "4", "--steps", "7", "--save-every", "3", "--seed", "5")
        out = Path(f"runs/{name}")
        probe.run(*words, *options, "--out", out)
        facts[name] = run_facts(out)
        shutil.copytree(out, Path(f"whole/{name}"))
        cut_short = (probe.old or probe.work) / "whole" / name
        shutil.rmtree(out)
        shutil.copytree(cut_short, out)
        shutil.rmtree(sorted((out / "checkpoints").iterdir())[-1])
        probe.run(*words, *options, "--out", out)
        facts[f"{name} resumed"] = run_facts(out)
    return facts


def run_facts(folder: Path) -> dict[str, Any]:
    """The log and the files of the last checkpoint of a run."""
    lines = [json_facts(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    last = sorted((folder / "checkpoints").iterdir())[-1]
    return {"log": lines, "checkpoint": last.name, "files": folder_facts(last, RUN_FILES)}


def reports(probe: Probe) -> dict[str, Any]:
    """What three comparisons and a conversion report."""
    probe.texts()
    dense, delta = probe.design("dense", DENSE), probe.design("delta", {"mixer": DELTA, "feedforward": GATED})
    options = (*QUICK, "--tokens", "1000", "--batch-size", "4", "--speed-context-length", "16", "--workers", "1")
    plain = (*options, "--recall", "none")
    for name, words in {
        "two": (dense, delta, *plain, "--seeds", "2", "--extrapolate", "2"),
        "vary": (dense, "--vary", "layers.0.mixer.window=4,8", *plain, "--seeds", "1", "--extrapolate", "1"),
        "recall": (delta, *options, "--recall", "parity", "--seeds", "1", "--extrapolate", "1"),
    }.items():
        probe.run("compare", *words, "--out", name)
    probe.run("train", dense, *QUICK, "--batch-size", "4", "--steps", "5", "--out", "run")
    limits = ("--report-tokens", "64k", "--calibration-tokens", "256", "--speed-context-length", "4")
    probe.run("convert", "run", "converted", "--to", "kv_heads=1", *QUICK, *limits)
    written = {name: Path(name, "report.json") for name in ("two", "vary", "recall")}
    written["converted"] = Path("converted/convert.json")
    return {name: json_facts(path.read_text(encoding="utf-8")) for name, path in written.items()}


def files(probe: Probe) -> dict[str, Any]:
    """Names and bytes of a saved model folder and of a run folder; NEW loads those of OLD."""
    import torch

    import heddle

    probe.texts()
    design = probe.design("dense", DENSE)
    probe.run("train", design, *QUICK, "--batch-size", "4", "--steps", "4", "--save-every", "2", "--out", "run")
    model, tokenizer = heddle.load("run")
    heddle.save(model, "model", tokenizer=tokenizer)
    heddle.save(heddle.build(model.config, dtype=torch.bfloat16, seed=1), "narrow")
    heddle.save_state(state_of(model), "state")
    theirs = probe.old or probe.work
    facts: dict[str, Any] = {"run": folder_facts(Path("run"), RUN_FILES)}
    facts |= {name: folder_facts(Path(name)) for name in ("model", "narrow", "state")}
    facts["loaded"] = {name: digest(*heddle.load(theirs / name)[0].parameters()) for name in ("run", "model", "narrow")}
    facts["loaded"]["verify"] = [probe.run("verify", theirs / name)["code"] for name in ("run", "model", "narrow")]
    state = heddle.load_state(model, theirs / "state")
    with torch.no_grad():
        facts["loaded"]["state"] = digest(model(torch.tensor([[5, 6]]), state=state)[0])
    return facts


def state_of(model: Any) -> Any:
    """The state of a model after some tokens."""
    import torch

    with torch.no_grad():
        return model(torch.arange(1, 8)[None], state=model.init_state(batch=1, cache_length=12))[1]


def options(probe: Probe) -> dict[str, Any]:
    """What random command lines of OLD are read as, and the exit codes of whole commands that end at once."""
    from tools import same_commands

    declared = json.loads(MAP.read_text(encoding="utf-8"))
    Path("options.yaml").write_text("steps: 12\nlr: 0.01\ndata: [texts]\n", encoding="utf-8")
    drawn = (probe.old or probe.work) / "lines.json"
    if probe.old is None:
        lines = same_commands.random_lines(same_commands.described(), declared["samples"], number=200, seed=11)
        drawn.write_text(json.dumps(lines), encoding="utf-8")
    entries = declared["options"] if probe.old else []
    facts = same_commands.facts(json.loads(drawn.read_text(encoding="utf-8")), entries)
    return facts | {"run": {line: probe.run(*line.split(), expect=None)["code"] for line in declared["run"]}}


def api(probe: Probe) -> dict[str, Any]:
    """Public names, signatures, members, and the fields of every config class that the designs have."""
    import heddle

    facts: dict[str, Any] = {"__all__": sorted(heddle.__all__), "fields": {}}
    for name in sorted(set(heddle.__all__) - {"__version__"}):
        item = getattr(heddle, name)
        facts[name] = signature(item)
        if isinstance(item, type):
            members = {key: getattr(item, key) for key in dir(item) if not key.startswith("_") and owns(item, key)}
            facts[name] = {"": facts[name]} | {key: signature(member) for key, member in sorted(members.items())}
    for group in ("cases", "covering"):
        for data in probe.designs[group].values():
            for cls in config_classes(heddle.load_config(data)):
                kind = cls.model_fields.get("kind")
                title = f"{cls.__name__} ({kind.default})" if kind else cls.__name__
                facts["fields"][title] = {key: repr(field.default) for key, field in cls.model_fields.items()}
    return facts


def owns(cls: type, name: str) -> bool:
    """Whether heddle defines a member, not torch or Python."""
    return any(name in vars(base) for base in cls.__mro__ if base.__module__.startswith("heddle"))


def signature(item: Any) -> Any:
    """Parameters with kinds and defaults, or what else the item is."""
    if not callable(item):
        return type(item).__name__
    parameters = inspect.signature(item).parameters.values()
    return [f"{p.kind.description} {p.name}" + ("" if p.default is p.empty else f"={p.default!r}") for p in parameters]


def config_classes(value: Any) -> Iterator[Any]:
    """The class of a config and those of all configs in it."""
    if isinstance(value, tuple):
        for item in value:
            yield from config_classes(item)
    elif isinstance(getattr(type(value), "model_fields", None), dict):
        yield type(value)
        for name in type(value).model_fields:
            yield from config_classes(getattr(value, name))


SECTIONS: dict[str, Callable[[Probe], dict[str, Any]]] = {
    "logits": logits, "families": families, "training": training, "reports": reports, "files": files,
    "options": options, "api": api,
}  # fmt: skip


def probe_main(section: str, checkout: str, kept: str, old: str) -> None:
    """In the process of a side: write the facts of a section."""
    import heddle

    package = Path(heddle.__file__).resolve()
    if Path(checkout).resolve() not in package.parents:
        raise RuntimeError(f"heddle is {package}, not that of {checkout}")
    import torch

    torch.set_num_threads(1)
    work = Path.cwd().resolve()
    facts = SECTIONS[section](Probe(work, Path(old) / section if old else None))
    text = json.dumps(facts).replace(str(work), "WORK").replace(str(old and Path(old) / section) or "WORK", "WORK")
    Path(kept).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    probe_main(*sys.argv[1:])
