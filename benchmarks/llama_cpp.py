"""How fast are a prompt and a token beside llama.cpp, which reads a GGUF of the same weights?

llama.cpp runs from its npm build (`tools/llama_cpp`), with our number of threads and its own cache of half floats; with
and without its flash attention. It measures its own seconds, so that no pipe counts. Q8_0 is made from the float32 GGUF
by the package gguf, and stands beside our 8-bit weights. It has no float64: before it is timed, both compute the logits
of the float32 weights with a float32 cache, and without flash attention, which rounds to half floats within.
"""

import json
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import decode, peers, prefill, quantized_weights
from benchmarks.harness import Case, Measured, main
from benchmarks.machine import THREADS
from heddle.exchange.gguf import export_gguf
from heddle.model.load_config import load_config
from heddle.model.size import size
from heddle.tokenization.tokenizer import Tokenizer
from tools.llama_cpp import runner

PEERS = ("llama.cpp", "llama.cpp flash")


def heddle_side(arguments: dict[str, Any]) -> Measured:
    """heddle, as its own benchmarks measure it."""
    if arguments["context"] == 0:
        return prefill.heddle_side(arguments)
    if arguments["precision"] == "int8":
        return quantized_weights.decoding(8, arguments["context"])
    return decode.heddle_side(arguments | {"rows": 1})


def llama_cpp_side(flash: bool, arguments: dict[str, Any]) -> Measured:
    """llama.cpp in a process of its own."""
    runner.install()
    is_exact = bool(arguments.get("exact"))
    with tempfile.TemporaryDirectory() as folder:
        prompt = peers.tokens(1, arguments["context"] or prefill.LENGTH)[0].tolist()
        request = {
            "model": str(write_gguf(arguments["precision"], Path(folder))),
            "prompt": prompt,
            "tokens": peers.tokens(1, 1)[0].tolist() if arguments["context"] else None,
            "n": decode.STEPS,
            "threads": THREADS,
            "flashAttention": flash and not is_exact,
            "cacheType": "F32" if is_exact else "F16",
            "batchSize": 512,
        }
        command = ["node", str(runner.HERE / "bench.mjs")]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ask(process, json.dumps(request) + "\n")
        values = ask(process, answers=True)["logits"]  # by now it has read the file

    return Measured(lambda: float(ask(process, answers=True)["seconds"]), lambda: values)


def ask(process: subprocess.Popen[str], line: str = "\n", answers: bool = False) -> dict[str, Any]:
    """Send a line, and read the answer where there is one. Raises RuntimeError if the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    if not answers:
        return {}
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"llama.cpp ended with exit status {process.wait()}")
    content: dict[str, Any] = json.loads(answer)
    return content


def write_gguf(precision: str, folder: Path) -> Path:
    """A GGUF of the weights of `peers.ours`: float32, bfloat16, or Q8_0 for int8."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    file = folder / f"{precision}.gguf"
    tokenizer = Tokenizer.train([str(__doc__)], 300)  # never used, but llama.cpp wants one with merges
    export_gguf(peers.ours(), file, tokenizer, dtype=dtype)
    return write_q8(file, folder / "q8.gguf") if precision == "int8" else file


def write_q8(source: Path, file: Path) -> Path:
    """The same GGUF with matrices in Q8_0."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
    from gguf.quants import quantize

    reader = GGUFReader(source)
    writer = GGUFWriter(file, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        item = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], item)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        data = tensor.data
        if data.ndim > 1:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def case(precision: str, context: int, goal: float | None, figure: str = "") -> Case:
    """One precision; a token after `context` tokens, or a prompt (0)."""
    work = None
    if context and precision != "int8":
        dtype = peers.DTYPES[precision]
        sizes = size(load_config("preset:gqa-medium"), context, dtype=dtype)
        work = ("read", float(sizes.parameters * dtype.itemsize + sizes.state_bytes))
    return Case(
        f"token {precision} after {context}" if context else f"prompt of {prefill.LENGTH}, {precision}",
        {"precision": precision, "context": context},
        goal,
        pairs=15 if context else 7,
        against=PEERS,
        figure=figure,
        work=work,
        has_float64=False,
    )


if __name__ == "__main__":
    main(
        "benchmarks.llama_cpp",
        "How fast are a prompt of 2,048 tokens and a token beside llama.cpp, with a GGUF of the same weights?",
        {
            "heddle": heddle_side,
            "llama.cpp": partial(llama_cpp_side, False),
            "llama.cpp flash": partial(llama_cpp_side, True),
        },
        [
            case("bf16", 0, 1.2, "prefill llama.cpp"),
            case("fp32", 0, None),
            case("bf16", 128, 0.9, "token llama.cpp"),
            case("bf16", 2000, 0.9, "token llama.cpp 2000"),
            case("fp32", 128, 0.9),
            case("fp32", 2000, 0.9),
            case("int8", 128, 0.9, "token int8 llama.cpp"),
            case("int8", 2000, 0.9),
        ],
    )
