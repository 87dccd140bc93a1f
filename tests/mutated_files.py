"""Files from others, changed at random: each is read or refused in one sentence, within bounds of time and memory."""

import copy
import ctypes
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from heddle.data.chat_template import ChatTemplate
from heddle.data.documents import UnreadableError
from heddle.errors import HeddleError
from heddle.exchange.family import family_of
from heddle.exchange.load import original_design
from heddle.model.load_config import load_config
from heddle.storage.tensor_file import read_tensor_file, write_tensor_file
from heddle.tokenization.tokenizer import Tokenizer
from tests.cases import CASES
from tests.exchange import cases as exchange_cases
from tests.exchange.hf_models import config_of
from tests.exchange.tokenizer_cases import TOKENIZERS, tokenizer_json
from tests.model.test_fuzz import paths, with_value_at
from tests.model.test_hostile_designs import at, peak_kib

MAX_SECONDS, MAX_KIB, MAX_SENTENCE = 2.0, 64 * 1024, 400
ABSURD: tuple[Any, ...] = (
    0, -1, 10**9, 2**63, 10**4000, 1e308, float("nan"), float("inf"), True, None, "", "x" * 100_000, "\x1b[2J\u202e",
    [], {}, [[]], [0] * 50_000, {"kind": "attention"}, {str(key): 0 for key in range(20_000)}, "(a+)+$", "{% for %}",
)  # fmt: skip
TEMPLATES = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}{{ 'assistant: ' }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}"
    "{{ '<|' ~ m.role ~ '|>' ~ m.content | trim }}{% endif %}{% endfor %}{{ ns.n }}",
    "{% macro line(m) %}{{ m.role | upper }}{{ m.content[:10] * 3 }}{% endmacro %}"
    "{% for a in messages %}{% for b in messages %}{{ line(b) }}{% endfor %}{% endfor %}",
)
PIECES = (
    "{% for x in range(99999999) %}",
    "{% endfor %}",
    "{{",
    "}}",
    "* 9 ** 9",
    "| list",
    "[",
    "'x' * 10 ** 9",
    "{#",
)
MESSAGES = [{"role": "user", "content": "weave " * 20}, {"role": "assistant", "content": "yes"}]
TEXT = "def weave(threads):\n    return [1234567, 'naïve']   \t" + "a" * 200


def changed_data(data: Any, draw: random.Random) -> Any:
    """Plain data with one to three of its values exchanged, left out, repeated or nested."""
    data = copy.deepcopy(data)
    for _ in range(draw.randint(1, 3)):
        places = list(paths(data))
        if not places:
            return data
        place = draw.choice(places)
        value, owner = at(data, place), at(data, place[:-1])
        action = draw.randrange(6)
        if action == 0 and isinstance(owner, dict):
            del owner[place[-1]]
        elif action == 1:
            data = with_value_at(data, place, [value] * draw.choice((2, 50)))
        elif action == 2:
            data = with_value_at(data, place, at(data, draw.choice(places)))
        elif action == 3:
            for _ in range(draw.choice((1, 90))):
                value = {"a": value}
            data = with_value_at(data, place, value)
        else:
            data = with_value_at(data, place, draw.choice(ABSURD))
    return data


def changed_bytes(content: bytes, draw: random.Random) -> bytes:
    """Bytes with some exchanged, cut off, repeated or put in."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(changed) + 1)
        action = draw.randrange(4)
        if action == 0:
            changed[start : start + 1] = draw.randbytes(1)
        elif action == 1:
            del changed[start : start + draw.choice((1, 10, len(changed)))]
        elif action == 2:
            changed[start:start] = changed[start : start + 30] * draw.choice((1, 100))
        else:
            changed[start:start] = draw.choice((b"[", b"{", b'"', b"\x00", b"\xff\xfe", b"9" * 30, b"\xe2\x80\xae"))
    return bytes(changed)


def changed_text(text: str, draw: random.Random) -> str:
    """A template with pieces of others put in, or characters left out."""
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(text) + 1)
        text = text[:start] + draw.choice((*PIECES, "", text[start:])) + text[start + draw.randrange(3) :]
    return text


@cache
def config_files() -> list[dict[str, Any]]:
    return [
        json.loads(config_of(family, variant).to_json_string(use_diff=False))
        for family, case in exchange_cases.CASES.items()
        for variant in list(case.variants)[:2]
    ]


@cache
def tensor_file(folder: Path) -> bytes:
    path = folder / "tensors.safetensors"
    write_tensor_file(path, {"a": torch.ones(3, 4), "b": torch.zeros(7, dtype=torch.bfloat16)})
    return path.read_bytes()


def read_design(folder: Path, draw: random.Random) -> None:
    data = CASES[draw.choice(sorted(CASES))]
    suffix = draw.choice((".json", ".yaml"))
    path = folder / f"design{suffix}"
    changed = changed_data(data, draw) if draw.random() < 0.7 else data
    text = json.dumps(changed) if suffix == ".json" else yaml.safe_dump(changed)
    content = text.encode(errors="replace")
    path.write_bytes(content if draw.random() < 0.6 else changed_bytes(content, draw))
    load_config(path)


def read_config_file(folder: Path, draw: random.Random) -> None:
    config = changed_data(draw.choice(config_files()), draw)
    original_design(config, family_of(config, "config.json"), "config.json")


def read_tokenizer(folder: Path, draw: random.Random) -> None:
    text = tokenizer_json(draw.choice(sorted(TOKENIZERS)))
    changed = json.dumps(changed_data(json.loads(text), draw)) if draw.random() < 0.7 else text
    content = changed.encode(errors="replace")
    path = folder / "tokenizer.json"
    path.write_bytes(content if draw.random() < 0.7 else changed_bytes(content, draw))
    Tokenizer.load(path).encode(TEXT)


def read_tensors(folder: Path, draw: random.Random) -> None:
    path = folder / "changed.safetensors"
    path.write_bytes(changed_bytes(tensor_file(folder), draw))
    read_tensor_file(path)


def render_template(folder: Path, draw: random.Random) -> None:
    try:
        ChatTemplate(changed_text(draw.choice(TEMPLATES), draw)).render(messages=MESSAGES, add_generation_prompt=True)
    except UnreadableError as error:
        raise HeddleError(str(error)) from error


READERS: tuple[Callable[[Path, random.Random], None], ...] = (
    read_design, read_config_file, read_tokenizer, read_tensors, render_template,
)  # fmt: skip


def import_readers(folder: Path) -> None:
    """Import what the readers need, so that it counts as nobody's memory."""
    for config in config_files():
        original_design(config, family_of(config, "config.json"), "config.json")
    for name in CASES:
        load_config(CASES[name])
    for name in TOKENIZERS:
        with suppress(HeddleError):  # some are read only with the model that they came with
            Tokenizer.from_json(tokenizer_json(name)).encode(TEXT)
    tensor_file(folder)
    ChatTemplate(TEMPLATES[0]).render(messages=MESSAGES)


def refusals(folder: Path, count: int, seed: int) -> Iterator[str]:
    """Read `count` changed files; yields what broke a bound or raised something else than a sentence."""
    libc = ctypes.CDLL(None)
    import_readers(folder)
    for number in range(count):
        draw = random.Random(seed * 10_000_000 + number)
        reader = draw.choice(READERS)
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before, start = peak_kib(), time.process_time()
        sentence = ""
        try:
            reader(folder, draw)
        except HeddleError as error:
            sentence = str(error)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            yield f"seed {seed}, {number}, {reader.__name__}: {type(error).__name__}: {str(error)[:200]}"
        seconds, kib = time.process_time() - start, peak_kib() - before
        said = re.sub(r"choices: [\w, -]*", "", sentence)  # a list grows with the kinds that there are
        words = sum(len(word) for word in said.split() if "/" not in word)
        if seconds > MAX_SECONDS or kib > MAX_KIB or words > MAX_SENTENCE or "\x1b" in sentence or "\n" in sentence:
            yield f"seed {seed}, {number}, {reader.__name__}: {seconds:.1f} s, {kib} KiB: {sentence[:300]!r}"
