"""Run an engine on a conformance kit: how far each case's logits are from the golden ones, and which bug they show."""

import importlib
import inspect
import json
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any, Protocol
from xml.etree import ElementTree

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from heddle.errors import CheckpointError, ConfigError, HeddleError
from heddle.exchange.load import load
from heddle.lab.conformance.bugs import shown
from heddle.lab.conformance.build import CASES_FILE, DTYPES, GOLDENS_FILE, KIT_FILE, LLAMA_CPP_FILE
from heddle.lab.conformance.reader import requests
from heddle.model.decoder import Decoder
from heddle.parts.layout import Layout
from heddle.progress import progress_bar
from heddle.storage.tensor_file import read_tensor_file
from heddle.tokenization.tokenizer import TOKENIZER_FILE

RIGHT, WRONG, NOT_SEEN = "right", "wrong", "not seen"
UNCLEAR = "rounding may choose others"
PROPERTIES = (
    "logits", "long positions", "padding", "packing", "cuts", "rollback", "batch change", "greedy text",
)  # fmt: skip
# Ways to run transformers besides its attentions, and the attention of each: a static cache; greedy text with a draft.
MODES = {"static": "sdpa", "assisted": "sdpa"}
STATIC_LENGTH = 768  # of a static cache
SERVER_STARTS_IN = 300  # seconds, at most
SCORES = 20  # tokens whose log probabilities are asked for at each place; OpenAI's own server tells 5
# What an engine that fails raises.
FAILURES = (HeddleError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class NotSeenError(Exception):
    """The engine cannot be fed in this way."""


@dataclass(frozen=True)
class Answer:
    """Logits [n, vocab] of the tokens of a row from `start` on.

    scores: these are log probabilities, nan where the engine returns none.
    """

    row: int
    start: int
    logits: Tensor
    scores: bool = False


@dataclass(frozen=True)
class Finding:
    """The result of one case. distance: the largest difference of a logit. layer: the first whose output is wrong."""

    family: str
    variant: str
    property: str
    way: str
    status: str
    distance: float = 0.0
    tolerance: float = 0.0
    layer: int | None = None
    bug: str | None = None
    reason: str = ""


class Model(Protocol):
    """A model that an engine has opened."""

    def answer(self, case: Mapping[str, Any], rows: Sequence[Sequence[int]]) -> list[Answer]:
        """Feed the rows as the case says. Raises NotSeenError if the engine cannot."""

    def hidden(self, row: Sequence[int]) -> list[Tensor]:
        """The stream after each layer, [T, width]; [] if the engine does not show it, and for heddle's golden ones."""
        return []

    def greedy(self, row: Sequence[int], tokens: int) -> list[int]:
        """The greedy text after a row. Raises NotSeenError if the engine cannot."""


Engine = Callable[[Path], AbstractContextManager[Model]]

LOCAL = ("http://127.0.0.1:", "http://localhost:")  # where servers are asked


def run_kit(kit: Path, engine: Engine, dtype: str = "float32", families: Sequence[str] = ()) -> Iterator[Finding]:
    """Every case of a kit, with an engine that computes in this dtype."""
    try:
        entries = json.loads((kit / KIT_FILE).read_text(encoding="utf-8"))["models"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{kit}: is not a conformance kit; build one with heddle conformance build") from error
    unknown = sorted(set(families) - {entry["family"] for entry in entries})
    if unknown:
        raise ConfigError(f"--family {unknown[0]}: is not in {kit}; build the kit with it")
    chosen = [
        entry for entry in entries if (not families or entry["family"] in families) and dtype in entry["tolerances"]
    ]
    if not chosen:
        raise ConfigError(f"--precision {dtype}: no model of {kit} is for it; build the kit with --gguf q8_0")
    with progress_bar("running", len(chosen), "models") as bar:
        for entry in chosen:
            yield from _run_model(kit / entry["family"] / entry["variant"], engine, dtype)
            bar.advance(1, entry["family"])


def _run_model(folder: Path, engine: Engine, dtype: str) -> Iterator[Finding]:
    document = json.loads((folder / CASES_FILE).read_text(encoding="utf-8"))
    goldens = dict(read_tensor_file(folder / GOLDENS_FILE))
    tolerance, clear = document["tolerances"][dtype], document["clear"][dtype]
    rows, name = document["rows"], (document["family"], folder.name)
    with engine(folder) as model:
        for case in document["cases"]:
            head = (*name, case["property"], case["way"])
            try:
                if case["way"] == "greedy":
                    row, sure = case["rows"][0], case["sure"][dtype]
                    if clear[row] < len(rows[row]) or not sure:
                        raise NotSeenError(UNCLEAR)
                    written = model.greedy(rows[row], sure)
                    right = written[:sure] == case["tokens"][:sure]
                    yield Finding(*head, RIGHT if right else WRONG, reason="" if right else f"wrote {written}")
                    continue
                answers = model.answer(case, rows)
                if not any(_is_seen(answer, clear[answer.row]) for answer in answers):
                    raise NotSeenError(UNCLEAR)
            except NotSeenError as error:
                yield Finding(*head, NOT_SEEN, reason=str(error))
                continue
            except FAILURES as error:
                yield Finding(*head, WRONG, float("inf"), tolerance, reason=shorten(str(error).partition("\n")[0], 200))
                continue
            distances = [_distance(each, goldens[f"rows.{each.row}.logits"], clear[each.row]) for each in answers]
            worst = max(distances)
            wrong = [each for each, distance in zip(answers, distances, strict=True) if distance > tolerance]
            if not wrong:
                yield Finding(*head, RIGHT, worst, tolerance)
            else:
                bug = _named(wrong, case["property"], document["bugs"], goldens, clear, tolerance)
                layer = _first_wrong_layer(model, rows[0], goldens) if case["way"] == "whole" else None
                yield Finding(*head, WRONG, worst, tolerance, layer, bug)


def _is_seen(answer: Answer, clear: int) -> bool:
    """Whether any of its numbers can be compared."""
    told = answer.logits[: max(0, clear - answer.start)]
    return bool(told.numel()) and not (answer.scores and bool(told.isnan().all()))


def _distance(answer: Answer, golden: Tensor, clear: int) -> float:
    """The largest difference of the answer's clear tokens; infinite where it is not a number.

    A log probability is off by at most twice as much as logits are, so that half of its difference counts.
    """
    want = golden[answer.start : answer.start + len(answer.logits)].double()
    if answer.logits.shape != want.shape:
        return float("inf")
    errors = (answer.logits.double() - want)[: max(0, clear - answer.start)].abs()
    if answer.scores:
        errors = (answer.logits.double() - want.log_softmax(-1))[: max(0, clear - answer.start)].abs() / 2
        errors = errors[~errors.isnan()]
    return float(errors.nan_to_num(nan=torch.inf).max()) if errors.numel() else 0.0


def _named(
    answers: Sequence[Answer],
    what: str,
    bugs: Sequence[Mapping[str, Any]],
    goldens: Mapping[str, Tensor],
    clear: Sequence[int],
    tolerance: float,
) -> str | None:
    """The planted bug with the logits of a case's wrong answers: of the bugs within the tolerance, the nearest.

    A mistake of feeding need only explain one answer, since others depend on where an engine cuts.
    """
    found: dict[str, float] = {}
    for index, bug in enumerate(bugs):
        golden, own = goldens[f"bugs.{index}.logits"], bug["property"] == what != "logits"
        if bug["property"] not in (what, "logits") or any(each.row != bug["row"] for each in answers if not own):
            continue
        distances = [_from_bug(each, golden, clear[each.row]) for each in answers if each.row == bug["row"]]
        if distances:
            found[bug["name"]] = min(distances) if own else max(distances)
    nearest = min(found, key=found.__getitem__, default=None)
    if nearest is not None and found[nearest] <= tolerance:
        return nearest
    return None if all(bool(each.logits.isfinite().all()) for each in answers) else "logits are not numbers"


def _from_bug(answer: Answer, golden: Tensor, clear: int) -> float:
    """As `_distance`, from what a kit holds of a bug's logits."""
    if not answer.scores:
        return _distance(replace(answer, logits=shown(answer.logits.double())), golden, clear)
    want, told = golden[:, :-1] - golden[:, -1:], answer.logits[:, : golden.shape[1] - 1]
    part = want[answer.start : answer.start + len(told)]
    if part.shape != told.shape:
        return float("inf")
    return _distance(Answer(answer.row, answer.start, torch.where(told.isnan(), part, (told + part) / 2)), want, clear)


def _first_wrong_layer(model: Model, row: Sequence[int], goldens: Mapping[str, Tensor]) -> int | None:
    """The first layer whose output is off by more than a thousandth of its size."""
    for index, hidden in enumerate(model.hidden(row)):
        golden = goldens.get(f"rows.0.hidden.{index}")
        if golden is None or hidden.shape != golden.shape:
            continue
        if float((hidden.double() - golden).abs().max()) > 1e-3 * float(golden.abs().max()):
            return index
    return None


# Engines.


def engine_of(name: str, dtype: str) -> Engine:
    """The engine of a name. Raises ConfigError for an unknown one.

    heddle; transformers, or transformers:MODE (MODES, or another attention); llama.cpp, or llama.cpp:FOLDER, where
    node_modules is; module:function of Python; or a command that holds {model}, as `reader.py` of the kit describes.
    `URL COMMAND`, as `http://127.0.0.1:8000/v1 vllm serve {model} --port 8000`, starts an OpenAI-compatible server.
    dtype: q8_0 is float32 where an engine reads the dequantized weights.
    """
    if name.startswith("http://"):
        if "{model}" not in name:
            raise ConfigError(f"--engine {name}: lacks its command; give the URL, then the command with {{model}}")
        if not name.startswith(LOCAL):
            raise ConfigError(f"--engine {name}: is not on this machine; give a URL of 127.0.0.1 or localhost")
        return lambda folder: _server(name, folder)
    if "{model}" in name:
        return lambda folder: _command(name, folder)
    kind, _, rest = name.partition(":")
    if kind == "llama.cpp":
        script = files("heddle.lab.conformance").joinpath(LLAMA_CPP_FILE)
        return lambda folder: _command(f"node {shlex.quote(str(script))} {{model}} {shlex.quote(rest or '.')}", folder)
    if name == "heddle":
        return lambda folder: nullcontext(HeddleModel(folder, DTYPES.get(dtype, torch.float32)))
    if kind == "transformers":
        return lambda folder: nullcontext(TransformersModel(folder, DTYPES.get(dtype, torch.float32), rest or "sdpa"))
    if rest.isidentifier():
        try:
            function = getattr(importlib.import_module(kind), rest)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"--engine {name}: {error}; name a module that can be imported, and its function"
            ) from None
        return lambda folder: nullcontext(OneText(function(folder)))
    raise ConfigError(
        f"--engine {name}: unknown; give heddle, transformers, transformers:eager, llama.cpp, module:function, or a "
        "command with {model}"
    )


def _started(name: str, command: str, folder: Path, **pipes: Any) -> subprocess.Popen[Any]:
    """Start an engine's command for a model. Raises ConfigError if it does not start. name: of the engine."""
    arguments = [part.replace("{model}", str(folder)) for part in shlex.split(command)]
    try:
        return subprocess.Popen(arguments, **pipes)
    except OSError as error:
        raise ConfigError(f"--engine {name}: does not start ({error.strerror}); give a command that does") from None


@contextmanager
def _command(command: str, folder: Path) -> Iterator[Model]:
    process = _started(command, command, folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(tokens: list[int], keep: int) -> list[list[float]]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"tokens": tokens, "keep": keep}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        except BrokenPipeError:
            answer = {"error": "it ended"}
        except ValueError:
            raise ConfigError(f"--engine {command}: answered with a line that is not JSON") from None
        if "error" in answer:
            raise NotSeenError(str(answer["error"]))
        logits: list[list[float]] = answer["logits"]
        return logits

    with process:
        try:
            yield OneText(read)
        finally:
            process.kill()


class OneText(Model):
    """An engine that reads one text at a time. read: tokens and how many of the text so far they follow -> logits."""

    def __init__(self, read: Callable[[list[int], int], Any]) -> None:
        self.read = read

    def _logits(self, tokens: Sequence[int], keep: int) -> Tensor:
        return torch.as_tensor(self.read(list(tokens), keep))

    def answer(self, case: Mapping[str, Any], rows: Sequence[Sequence[int]]) -> list[Answer]:
        """Whole rows, cuts and rollbacks; one text at a time has no batches."""
        found = [Answer(row, keep, self._logits(tokens, keep)) for tokens, keep, row in requests(case, rows)]
        if found:
            return found
        raise NotSeenError("it reads one text at a time")

    def greedy(self, row: Sequence[int], tokens: int) -> list[int]:
        """One token after the other."""
        text, logits = list(row), self._logits(row, 0)
        while len(text) < len(row) + tokens:
            text.append(int(logits[-1].argmax()))
            logits = self._logits(text[-1:], len(text) - 1)
        return text[len(row) :]


@contextmanager
def _server(name: str, folder: Path) -> Iterator[Model]:
    """A server that is started for the model, and ended after it. name: its URL and its command."""
    url, _, command = name.partition(" ")
    process = _started(name, command, folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with process:
        try:
            yield _when_it_answers(url, folder, process, name)
        finally:
            process.terminate()


def _when_it_answers(url: str, folder: Path, process: subprocess.Popen[bytes], name: str) -> Model:
    for _ in range(SERVER_STARTS_IN):
        with suppress(OSError):
            return ServerModel(url, folder)
        if process.poll() is not None:
            break
        time.sleep(1)
    raise ConfigError(f"--engine {name}: does not answer at {url}; give the port of its command")


class ServerModel(Model):
    """An OpenAI-compatible server of one model.

    It returns log probabilities of some tokens; the others are not seen.
    """

    def __init__(self, url: str, folder: Path) -> None:
        """Raises OSError if nothing answers at the URL, such as http://127.0.0.1:8000/v1."""
        self.url, self.echoes = url.rstrip("/"), True
        with urllib.request.urlopen(f"{self.url}/models", timeout=10) as answer:
            self.name = json.load(answer)["data"][0]["id"]
        backend = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self.ids = {
            backend.decode([index], skip_special_tokens=False): index for index in range(backend.get_vocab_size())
        }
        self.vocab_size = len(self.ids)

    def _ask(self, prompts: Sequence[Sequence[int]], tokens: int, **fields: Any) -> list[dict[str, Any]]:
        body = {"model": self.name, "prompt": list(prompts), "max_tokens": tokens, "temperature": 0, "logprobs": SCORES}
        request = urllib.request.Request(
            f"{self.url}/completions", json.dumps(body | fields).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                choices: list[dict[str, Any]] = json.load(answer)["choices"]
        except urllib.error.HTTPError as error:
            raise NotSeenError(f"it answers {error.code}: {error.read(200).decode(errors='replace')}") from None
        return sorted(choices, key=lambda choice: int(choice["index"]))

    def _scores(self, choice: Mapping[str, Any]) -> list[tuple[int | None, dict[int, float]]]:
        """The id of each returned token, and the log probabilities at its place, by id."""
        told = choice.get("logprobs") or {}
        if "content" in told:  # as in chats; llama.cpp's server
            entries = [[each, *each["top_logprobs"]] for each in told["content"]]
            return [
                (one[0].get("id"), {each["id"]: each["logprob"] for each in one if "id" in each}) for one in entries
            ]
        found, tokens = [], told.get("tokens") or []
        scores, best = (told.get(name) or [None] * len(tokens) for name in ("token_logprobs", "top_logprobs"))
        for token, score, others in zip(tokens, scores, best, strict=True):
            named = {token: score} | (others or {})
            by_id = {self._id(text): value for text, value in named.items() if value is not None}
            found.append((self._id(token), {index: value for index, value in by_id.items() if index is not None}))
        return found

    def _id(self, text: str) -> int | None:
        """vLLM can name tokens by their ids."""
        start, _, number = text.partition("token_id:")
        return int(number) if not start and number.isdigit() else self.ids.get(text)

    def _rows(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log probabilities [T, vocab] of rows that are asked for together."""
        if self.echoes:
            try:
                told = [self._scores(choice) for choice in self._ask(rows, 1, echo=True)]
                self.echoes = [len(one) for one in told] == [len(row) + 1 for row in rows]
            except NotSeenError:
                self.echoes = False
        if not self.echoes:  # the token after each beginning of each row
            starts = [row[:length] for row in rows for length in range(1, len(row) + 1)]
            after = [self._scores(choice)[:1] or [(None, {})] for choice in self._ask(starts, 1)]
            ends = [sum(map(len, rows[:index])) for index in range(len(rows) + 1)]
            told = [[(None, {}), *(one[0] for one in after[a:b])] for a, b in pairwise(ends)]
        found = []
        for row in told:
            scores = torch.full((len(row) - 1, self.vocab_size), torch.nan, dtype=torch.float64)
            for position, (_, values) in enumerate(row[1:]):
                for index, value in values.items():
                    scores[position, index] = value
            found.append(scores)
        if all(bool(scores.isnan().all()) for scores in found):
            raise NotSeenError("it returns no log probabilities")
        return found

    def answer(self, case: Mapping[str, Any], rows: Sequence[Sequence[int]]) -> list[Answer]:
        """Whole rows, alone or together."""
        if case["way"] not in ("whole", "padded"):
            raise NotSeenError("a server does not show how it feeds a text")
        chosen = case["rows"]
        found = self._rows([rows[index] for index in chosen])
        return [Answer(index, 0, scores, scores=True) for index, scores in zip(chosen, found, strict=True)]

    def greedy(self, row: Sequence[int], tokens: int) -> list[int]:
        """The tokens with returned log probabilities."""
        written = [token for token, _ in self._scores(self._ask([row], tokens)[0])]
        if len(written) < tokens or None in written:
            raise NotSeenError("it does not return its tokens, or ends at one")
        return [token for token in written if token is not None]


class HeddleModel(Model):
    """heddle itself."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model: Decoder = load(folder, dtype=dtype).model

    @torch.no_grad()
    def _run(self, tokens: Tensor, layout: Layout | None, state: Any = None) -> tuple[Tensor, Any]:
        hidden, state = self.model(tokens, layout, state)
        return self.model.head(hidden), state

    def answer(self, case: Mapping[str, Any], rows: Sequence[Sequence[int]]) -> list[Answer]:
        """Every way."""
        way, chosen = case["way"], case["rows"]
        if way in ("whole", "packed"):
            texts = [rows[index] for index in chosen]
            layout = Layout.packed([[len(text) for text in texts]])
            logits, _ = self._run(torch.tensor([[token for text in texts for token in text]]), layout)
            pieces = logits[0].split([len(text) for text in texts])
            return [Answer(index, 0, piece) for index, piece in zip(chosen, pieces, strict=True)]
        if way == "padded":
            lengths = [len(rows[index]) for index in chosen]
            layout = Layout.padded(lengths, side=case["side"])
            tokens = padded(rows, chosen, case["side"])[0]
            if "cuts" in case:  # the batch continues from its padded start
                read = case["cuts"][0]
                state = self.model.init_state(len(lengths), cache_length=tokens.shape[1])
                begun, state = self._run(tokens[:, :read], Layout.of(layout.positions[:, :read]), state)
                logits = torch.cat((begun, self._run(tokens[:, read:], None, state)[0]), 1)
            else:
                logits, _ = self._run(tokens, layout)
            return [
                Answer(index, 0, row[positions >= 0])
                for index, row, positions in zip(chosen, logits, layout.positions, strict=True)
            ]
        if way == "dropped":
            read, second = case["read"], rows[chosen[1]]
            state = self.model.init_state(2, cache_length=len(second))
            logits, state = self._run(torch.tensor([rows[index][:read] for index in chosen]), None, state)
            after, _ = self._run(torch.tensor([second[read:]]), None, state.select([1]))
            return [Answer(chosen[1], 0, logits[1]), Answer(chosen[1], read, after[0])]
        try:
            return self._pieces(case, rows)
        except HeddleError as error:
            raise NotSeenError(str(error)) from None

    def _pieces(self, case: Mapping[str, Any], rows: Sequence[Sequence[int]]) -> list[Answer]:
        """Cuts and rollbacks: pieces that are read with the state of the text before them."""
        removed = case["read"] - case["keep"] if case["way"] == "rollback" else 0
        state = self.model.init_state(1, cache_length=len(rows[case["rows"][0]]), rollback=removed)
        found: list[Answer] = []
        for tokens, keep, row in requests(case, rows):
            if found and removed:
                state = state.rollback(removed)
            logits, state = self._run(torch.tensor([tokens]), None, state)
            found.append(Answer(row, keep, logits[0]))
        return found

    def greedy(self, row: Sequence[int], tokens: int) -> list[int]:
        """By `heddle.generate`."""
        from heddle.generation.generate import generate

        return generate(self.model, [list(row)], max_new_tokens=tokens)[0]


def padded(rows: Sequence[Sequence[int]], chosen: Sequence[int], side: str) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] with zeros at padding, and the mask [B, T], 1 at tokens."""
    texts = [torch.tensor(rows[index]) for index in chosen]
    tokens, mask = (
        pad_sequence(each, batch_first=True, padding_side=side) for each in (texts, list(map(torch.ones_like, texts)))
    )
    return tokens, mask


class TransformersModel(Model):
    """transformers. mode: one of MODES, or the name of an attention."""

    def __init__(self, folder: Path, dtype: torch.dtype, mode: str) -> None:
        from heddle.exchange.transformers.peer import opened

        self.problem, self.mode, self.counts = "", mode, False
        try:
            self.model = opened(folder, dtype, MODES.get(mode, mode))
        except ConfigError as error:
            self.problem = str(error)
            return
        self.causal = not type(self.model).__name__.endswith("ForMaskedLM")

    def _start(self) -> dict[str, Any]:
        """The cache that a text begins with, where it is not the model's own."""
        from heddle.exchange.transformers.cache import CACHE_NAME
        from heddle.exchange.transformers.peer import static_cache

        try:
            return {CACHE_NAME: static_cache(self.model, STATIC_LENGTH)} if self.mode == "static" else {}
        except ConfigError as error:
            raise NotSeenError(str(error)) from None

    @torch.no_grad()
    def _run(self, tokens: Sequence[int], start: int = 0, **inputs: Any) -> Any:
        """One row of tokens from position `start` on, which the class counts itself or is told."""
        if self.causal and not self.counts and "position_ids" in inspect.signature(self.model.forward).parameters:
            inputs["position_ids"] = torch.arange(start, start + len(tokens))[None]
        return self.model(torch.tensor([list(tokens)]), **inputs)

    def answer(self, case: Mapping[str, Any], rows: Sequence[Sequence[int]]) -> list[Answer]:
        """Every way; packing only in classes that tell documents apart by positions."""
        if self.problem:
            raise NotSeenError(self.problem)
        if self.mode == "assisted":
            raise NotSeenError("a draft shows in greedy text only")
        way, chosen = case["way"], case["rows"]
        self.counts = way in ("whole", "cut") and len(case.get("cuts", [0])) == 1
        first, start = rows[chosen[0]], self._start()
        plain: dict[str, Any] = start or ({"use_cache": False} if self.causal else {})
        if way == "whole":
            return [Answer(chosen[0], 0, self._run(first, **plain).logits[0])]
        if way == "padded":
            if not self.causal and case["side"] == "left":
                raise NotSeenError("encoders of transformers count positions from the start of a padded row")
            tokens, mask = padded(rows, chosen, case["side"])
            logits = self._padded(tokens, mask, start, *case.get("cuts", ()))
            return [Answer(index, 0, row[real.bool()]) for index, row, real in zip(chosen, logits, mask, strict=True)]
        if way == "packed":
            raise NotSeenError("its classes disagree on which rows are packed")
        if way in ("cut", "rollback"):
            found: list[Answer] = []
            cache = start
            for piece, keep, row in requests(case, rows):
                if found and way == "rollback":
                    try:
                        next(iter(cache.values())).crop(case["keep"] - case["read"])
                    except (AttributeError, RuntimeError, ValueError) as error:
                        raise NotSeenError(f"its cache cannot be cropped ({shorten(str(error), 80)})") from None
                result = self._run(piece, keep, use_cache=True, **cache)
                cache = self._cache(result)
                found.append(Answer(row, keep, result.logits[0]))
            return found
        return self._dropped(case, rows, start)

    @torch.no_grad()
    def _padded(self, tokens: Tensor, mask: Tensor, cache: Mapping[str, Any], read: int = 0) -> Tensor:
        """Logits of a padded batch [B, T]; after `read` columns it continues from its cache, at first `cache`."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        found: list[Tensor] = []
        inputs: dict[str, Any] = {**cache, **({"use_cache": read > 0 or bool(cache)} if self.causal else {})}
        for start, stop in ((0, read), (read, tokens.shape[1])) if read else ((0, tokens.shape[1]),):
            if self.causal:
                inputs["position_ids"] = positions[:, start:stop]
            result = self.model(tokens[:, start:stop], attention_mask=mask[:, :stop], **inputs)
            found.append(result.logits)
            inputs |= self._cache(result) if stop == read else {}
        return torch.cat(found, 1)

    def _dropped(
        self, case: Mapping[str, Any], rows: Sequence[Sequence[int]], start: Mapping[str, Any]
    ) -> list[Answer]:
        """Two rows are read together, then only the second continues."""
        _, second = case["rows"]
        read = case["read"]
        with torch.no_grad():
            together = torch.tensor([list(rows[index][:read]) for index in case["rows"]])
            result = self.model(together, use_cache=True, **start)
        cache = self._cache(result)
        try:
            next(iter(cache.values())).batch_select_indices(torch.tensor([1]))
        except (AttributeError, RuntimeError) as error:
            raise NotSeenError(f"its cache has no rows to select ({shorten(str(error), 80)})") from None
        after = self._run(rows[second][read:], read, use_cache=True, **cache)
        return [Answer(second, 0, result.logits[1]), Answer(second, read, after.logits[0])]

    def _cache(self, result: Any) -> dict[str, Any]:
        """The cache of a result, by its argument name in the next call."""
        for name in ("cache", "past_key_values", "cache_params"):
            if getattr(result, name, None) is not None:
                return {name: getattr(result, name)}
        raise NotSeenError("it returns no cache")

    def hidden(self, row: Sequence[int]) -> list[Tensor]:
        """Its hidden states but for the last, which is normed."""
        states = self._run(row, output_hidden_states=True).hidden_states
        return [] if states is None else [state[0] for state in states[1:-1]]

    def greedy(self, row: Sequence[int], tokens: int) -> list[int]:
        """By its `generate`."""
        if self.problem:
            raise NotSeenError(self.problem)
        if self.mode == "assisted" and self.model._is_stateful:
            raise NotSeenError(f"{type(self.model).__name__} takes no draft")
        mode = {"assistant_model": self.model} if self.mode == "assisted" else self._start()
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        written = self.model.generate(torch.tensor([list(row)]), do_sample=False, num_beams=1, **lengths, **mode)
        return [int(token) for token in written[0, len(row) :]]


# Results.


def statuses(findings: Sequence[Finding]) -> dict[str, dict[str, str]]:
    """For each model the worst status of each property, in the order of PROPERTIES."""
    found: dict[str, dict[str, str]] = {}
    for name in PROPERTIES:
        for each in findings:
            if each.property == name:
                own = found.setdefault(f"{each.family}/{each.variant}", {})
                own[name] = min(own.get(name, RIGHT), each.status, key=(WRONG, NOT_SEEN, RIGHT).index)
    return found


def table(findings: Sequence[Finding]) -> list[str]:
    """A line for each model: how each property is, and below it what is wrong."""
    lines = []
    for model, own in statuses(findings).items():
        cells = [f"{name} {status.upper() if status == WRONG else status}" for name, status in own.items()]
        lines.append(f"{model}: {', '.join(cells)}")
        for each in findings:
            if each.status == WRONG and f"{each.family}/{each.variant}" == model:
                layer = "" if each.layer is None else f", first in layer {each.layer}"
                bug = f": {each.bug}" if each.bug else f" {each.reason}".rstrip()
                lines.append(f"    {each.property}, {each.way}: off by {each.distance:.3g}{layer}{bug}")
    return lines


def conformance_page(engine: str, precision: str, findings: Sequence[Finding]) -> str:
    """The page as one HTML document; the same findings give the same bytes."""
    from heddle.lab.pages.render import render

    return render(
        "conformance.html",
        title=f"Conformance of {engine}",
        engine=engine,
        precision=precision,
        cases=len(findings),
        properties=[name for name in PROPERTIES if any(each.property == name for each in findings)],
        models=statuses(findings),
        wrong=[each for each in findings if each.status == WRONG],
        reasons=Counter(each.reason for each in findings if each.status == NOT_SEEN),
    )


def junit(findings: Sequence[Finding], name: str) -> str:
    """The findings as JUnit XML."""
    suite = ElementTree.Element("testsuite", name=name, tests=str(len(findings)))
    suite.set("failures", str(sum(each.status == WRONG for each in findings)))
    suite.set("skipped", str(sum(each.status == NOT_SEEN for each in findings)))
    for number, each in enumerate(findings):
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"{each.family}.{each.variant}", name=f"{each.property} {each.way} {number}"
        )
        if each.status == WRONG:
            text = f"off by {each.distance:.3g}, tolerance {each.tolerance:.3g}"
            ElementTree.SubElement(case, "failure", message=f"{text}{f': {each.bug}' if each.bug else ''}")
        if each.status == NOT_SEEN:
            ElementTree.SubElement(case, "skipped", message=each.reason)
    return ElementTree.tostring(suite, encoding="unicode") + "\n"
