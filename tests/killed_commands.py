"""Commands that are killed or signalled at random moments and given again until they end, and what they must leave."""

import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from heddle.storage.run_log import first_difference
from tests import small
from tests.data import chats
from tests.forked import is_starter
from tools.kill_test import children, is_alive

TRAIN = "--out ~/out --steps 8 --save-every 2 --batch-size 4 --threads 1 --device cpu --quiet"
TEXT = f"--data @/text --sequence-length 16 {TRAIN}"
SIZE = "--sequence-length 16 --threads 1 --device cpu --quiet"
CONVERT = f"convert @/run ~/out --to kv_heads=1 --report-tokens 0 --calibration-tokens 512 --data @/text {SIZE}"
COMPARED = f"--data @/text --out ~/out --batch-size 4 {SIZE}"
LOCAL = "--threads 1 --device cpu --quiet"
COMPLETION = json.dumps({"model": "run", "prompt": "The", "max_tokens": 4, "temperature": 0}).encode()


class Command(NamedTuple):
    """A row of the table.

    words: @ is the workspace, ~ the command's own folder. stdin: what it reads. page, body: what is asked of a command
    that listens until a signal ends it, whose code is then `code`. has_own_cache: each trial begins with an empty one.
    given: a folder of the workspace that each trial begins with, as ~/out.
    """

    words: str
    stdin: str = ""
    page: str = ""
    body: bytes | None = None
    code: int = 0
    has_own_cache: bool = False
    given: str = ""


COMMANDS = {
    "train": Command(f"train @/dropping.yaml --schedule cosine --evaluate-every 3 {TEXT}"),
    "async-save": Command(f"train @/dropping.yaml --async-save --optimizer muon {TEXT}"),
    "conversations": Command(
        f"train @/good.yaml --data chat:@/chat.jsonl --tokenizer @/tokenizer.json --sequence-length 64 {TRAIN}"
    ),
    "tokenizing": Command(f"train @/good.yaml --data @/corpus --sequence-length 16 {TRAIN}", has_own_cache=True),
    "lora": Command(f"train --from @/run --lora 2 {TEXT}"),
    "distillation": Command(f"train @/good.yaml --distill @/run {TEXT}"),
    "healing": Command(f"{CONVERT} --heal 1024"),
    "convert": Command(CONVERT),
    "import": Command("import @/exported ~/out --quiet"),
    "export": Command("export @/run ~/out --quiet"),
    "gguf": Command("export @/run ~/out.gguf --format gguf --quiet"),
    "inspect": Command(f"inspect @/run --text weave --out ~/out.html {LOCAL}"),
    "compare": Command(f"compare @/good.yaml @/experts.yaml --tokens 600 --seeds 1 --recall none {COMPARED}"),
    "ladder": Command(f"ladder @/good.yaml --sizes 4 --tokens-per-parameter 1 --seeds 1 {COMPARED}"),
    "generate": Command("generate @/run --prompt The --max-new-tokens 40 --threads 1 --device cpu --quiet"),
    "chat": Command(f"chat @/run {LOCAL}", stdin="How many threads?\n"),
    "serve": Command(f"serve @/run --port 0 {LOCAL}", page="/completions", body=COMPLETION),
    "watch": Command("watch @/run", page="", code=128 + signal.SIGTERM),
    "judge": Command("judge submit @/wider.yaml --out ~/out --device cpu --threads 1 --quiet", code=3, given="ledger"),
}
LISTENING = ("serve", "watch")
PRINTING = ("generate", "chat")  # what they do is what they print
WHOLE_OR_ABSENT = ("convert", "import", "export", "gguf", "inspect")  # no run that goes on: what has its name is done
AGAIN = "exists already"  # what a command may say that was ended after its work was done

# What differs between two equal runs: times, memory, and what is computed from them.
MEASURED = {
    "seconds", "wall_seconds", "peak_memory_bytes", "chain", "head", "sha256", "log", "created", "train_speed_range",
    "train_tokens_per_second", "seconds_per_step", "prefill", "decode", "id", "address",
}  # fmt: skip
SAVED_AT_SIGNAL = re.compile(
    r".*/(checkpoints|runs)/.*"
)  # a save at the step of the signal, or of a worker's lost parent
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CPU_SECONDS = 5.0  # of work after a signal
POLL_SECONDS = 0.005


class Trials(NamedTuple):
    """What was done: kills, and other signals; failures: sentences."""

    kills: int
    signals: int
    failures: list[str]


class Ended(NamedTuple):
    """How a process has ended: its code, and what it printed."""

    code: int
    out: str
    err: str


def write_workspace(folder: Path, give: Callable[[Sequence[str]], object]) -> Path:
    """Designs, texts, conversations, a run and its export. give: runs `heddle ARGUMENTS`."""
    small.folder(folder / "text")
    small.folder(folder / "corpus", documents=60, size=4000)
    small.design_file(folder / "good.yaml", small.design(layers=[layer(small.design()["layers"][0]["feedforward"])]))
    small.design_file(folder / "dropping.yaml", small.dropping())
    small.design_file(folder / "experts.yaml", small.design(layers=[layer(small.MOE)]))
    (folder / "tokenizer.json").write_text(chats.train_tokenizer().to_json())
    chats.write_chat_file(folder / "chat.jsonl", [chats.conversation(seed) for seed in range(40)])
    (folder / "wider.yaml").write_text("overrides: [layers.*.feedforward.hidden=32]\n")
    run = COMMANDS["conversations"].words.replace("~/out", "@/run")
    ledger = "--out @/ledger --data @/text --vocab-size 300 --tokens 2k --pairs 3 --windows 4 --second 0 --batch-size 4"
    for words in (run, "export @/run @/exported --quiet", f"judge init @/good.yaml {ledger} {SIZE}"):
        give(words.replace("@/", f"{folder}/").split())
    return folder


def layer(feedforward: dict[str, Any]) -> dict[str, Any]:
    """A layer with two pairs of keys and values, of which a conversion makes one."""
    mixer = {"kind": "attention", "heads": 2, "kv_heads": 2, "position": {"kind": "rope"}}
    return {"mixer": mixer, "feedforward": feedforward}


def give(arguments: Sequence[str], **environment: str) -> None:
    """Run `heddle ARGUMENTS` in a process of its own. Raises if it fails."""
    command = [sys.executable, "-m", "heddle", *arguments]
    subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)


class Process:
    """A started command whose words go to files."""

    def __init__(self, command: Command, arguments: Sequence[str], cache: Path, output: Path, plant: str = "") -> None:
        self.command, self.output = command, output
        output.mkdir(parents=True, exist_ok=True)
        begin = ["-c", f"{plant}\nfrom heddle.__main__ import main\nmain()"] if plant else ["-m", "heddle"]
        environment = os.environ | {"HEDDLE_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.cpu_before = _cpu_of_children()
        with (output / "out").open("wb") as out, (output / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *begin, *arguments], env=environment, stdin=subprocess.PIPE, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(command.stdin.encode())
        self.process.stdin.close()

    def end(self, number: int, worker: random.Random | None = None) -> float:
        """Send a signal, to one of its workers if `worker` draws one, and wait until it and they have ended.

        Returns the seconds of processor time that it took after the signal.
        """
        if self.process.poll() is not None:  # it had ended already, and its processor time can no longer be read
            return 0.0
        below = descendants(self.process.pid)
        before = sum(map(_cpu_of, [self.process.pid, *below]))
        victim = worker.choice(below) if worker and below else self.process.pid
        if self.process.poll() is None and is_alive(victim):
            os.kill(victim, number)
        self.process.wait()
        while any(map(is_alive, below)):
            time.sleep(POLL_SECONDS)
        return _cpu_of_children() - self.cpu_before - before

    def handles_signals(self) -> bool:
        """Whether Python runs heddle's handlers yet; before, the system's default ends the process."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        except OSError:
            return True
        caught = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt")), 0)
        return bool(caught >> (signal.SIGHUP - 1) & 1) or self.process.poll() is not None

    def ended(self) -> Ended:
        """Wait until it has ended."""
        code = self.process.wait()
        out, err = ((self.output / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
        return Ended(code, out, err)

    def answer(self) -> Any:
        """Wait until it listens; what it answers, without what was measured."""
        while not (line := re.search(r"(http://\S+)\n", (self.output / "out").read_text())):
            assert self.process.poll() is None, self.ended()
            time.sleep(POLL_SECONDS)
        request = urllib.request.Request(
            line[1] + self.command.page, self.command.body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            content = response.read()
        return _without_measured(json.loads(content)) if self.command.body else b"<html" in content


class KilledCommand:
    """One command of the table: undisturbed first, then killed. plant: Python that each process runs before."""

    def __init__(self, name: str, workspace: Path, folder: Path, plant: str = "") -> None:
        self.name, self.command, self.plant = name, COMMANDS[name], plant
        self.out, self.output = folder / name, folder / f"{name}.words"
        self.given = workspace / self.command.given if self.command.given else None
        words = self.command.words.replace("@/", f"{workspace}/").replace("~/", f"{self.out}/")
        self.arguments = words.split()
        self.cache = (self.out if self.command.has_own_cache else workspace) / "cache"

    def begin(self, plant: str = "") -> Process:
        """Start it."""
        return Process(self.command, self.arguments, self.cache, self.output, plant or self.plant)

    def clear(self) -> None:
        """Begin anew: remove what it has written."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        if self.given is not None:
            shutil.copytree(self.given, self.out / "out")

    def done(self) -> tuple[Ended, dict[str, Any]]:
        """Let it end by itself, or by a signal after its answer; its ending, by path."""
        process = self.begin()
        answer = process.answer() if self.name in LISTENING else None
        if self.name in LISTENING:
            process.end(signal.SIGTERM)
        ended = process.ended()
        printed = {
            "printed": bool(ended.out) if self.name == "chat" else ended.out
        }  # a chat draws another seed each time
        printed = printed if self.name in PRINTING else {}
        return ended, ending(self.out) | printed | ({"answer": answer} if answer is not None else {})

    def undisturbed(self) -> tuple[dict[str, Any], float]:
        """Its ending, and the seconds that it took. The first one fills the shared cache."""
        seconds, whole = 0.0, dict[str, Any]()
        for _ in range(2):
            self.clear()
            began = time.monotonic()
            ended, whole = self.done()
            seconds = time.monotonic() - began
            assert ended.code == self.command.code, f"{self.name}: {ended}"
        return whole, seconds

    def tried(self, count: int, seed: int) -> Trials:
        """Kill it so often, and send as many other signals; compare each of its endings with the undisturbed one.

        A command that ends before the next signal begins anew.
        """
        whole, seconds = self.undisturbed()
        draw = random.Random(f"{self.name} {seed}")
        fallen, failures = [0, 0], list[str]()
        while min(fallen) < count and not failures:
            self.clear()
            signals = list[int]()
            for _ in range(3):
                number = draw.choice((signal.SIGKILL, draw.choice(STOP_SIGNALS)))
                failures += [*self.signalled(draw, seconds, number), *self.halves(whole)]
                fallen[number != signal.SIGKILL] += 1
                signals.append(number)
            failures += self.differences(whole)
            failures = [f"{self.name}, seed {seed}, signals {signals}: {each}" for each in failures]
        return Trials(fallen[0], fallen[1], failures)

    def signalled(self, draw: random.Random, seconds: float, number: int) -> Iterator[str]:
        """Start it, and send it a signal at a random moment; tell what was wrong. One in two falls while it works."""
        process = self.begin()
        if draw.random() < 0.5:
            while process.process.poll() is None and not (any(self.out.iterdir()) or self._has_printed()):
                time.sleep(POLL_SECONDS)
            time.sleep(draw.uniform(0, 0.4 * seconds))
        else:
            time.sleep(draw.uniform(0, seconds))
        while number != signal.SIGKILL and not process.handles_signals():
            time.sleep(POLL_SECONDS)
        kills_worker = number == signal.SIGKILL and draw.random() < 0.3
        cpu = process.end(number, draw if kills_worker else None)
        ended = process.ended()
        if number == signal.SIGKILL:
            return
        if cpu > CPU_SECONDS:
            name = signal.Signals(number).name
            yield f"{cpu:.1f} seconds of work after {name}, code {ended.code}: {ended.err[-500:]}"
        if "Traceback" in ended.err or "Traceback" in ended.out:
            yield f"a traceback: {ended.err[-1500:]}"
        codes = {0} if self.name == "serve" else set[int]()
        if ended.code == 128 + number and not (ended.err or ended.out).strip().endswith(_last_sentence(ended.err)):
            yield f"no sentence: {ended}"
        if ended.code not in codes | {128 + number, 0, self.command.code} and AGAIN not in ended.err:
            yield f"code {ended.code}: {ended.err[-500:]}"

    def _has_printed(self) -> bool:
        return self.name in (*LISTENING, *PRINTING) and (self.output / "out").stat().st_size > 0

    def halves(self, whole: Mapping[str, Any]) -> Iterator[str]:
        """Tell which files have their names and are not whole, after a kill."""
        for path, content in ending(self.out).items() if self.name in WHOLE_OR_ABSENT else ():
            is_hidden = any(part.startswith(".") for part in Path(path).parts)
            if not is_hidden and whole.get(path) != content:
                yield f"{path} is not whole"

    def differences(self, whole: Mapping[str, Any]) -> Iterator[str]:
        """Give the command until it has ended well, then tell how its ending differs."""
        ended, now = self.done()
        if ended.code != self.command.code and AGAIN not in ended.err:
            yield f"ended with code {ended.code}: {ended.err[-500:]}"
            return
        for path in sorted({*whole, *now}):
            if path not in now:
                yield f"{path} is missing"
            elif path not in whole and not SAVED_AT_SIGNAL.fullmatch(path):
                yield f"{path} was left behind"
            elif path in whole and whole[path] != now[path]:
                yield f"{path} differs: {first_difference(whole[path], now[path])}"


def _last_sentence(err: str) -> str:
    """The last line, if it is a sentence of heddle."""
    last = ["", *err.strip().splitlines()][-1]
    return last if last.startswith("heddle: ") else "heddle: (a sentence)"


def descendants(process: int) -> list[int]:
    """The processes below a process that run, but those that only start others."""
    below = [each for child in children(process) for each in (child, *descendants(child))]
    return [each for each in below if not is_starter(each)]


def _cpu_of(process: int) -> float:
    """The seconds of processor time that a process took so far, and those of its ended children."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ending(folder: Path) -> dict[str, Any]:
    """What equal commands leave, by path: the SHA-256 of tensors and other bytes, JSON without what was measured."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): _content(path) for path in sorted(files)}


def _content(path: Path) -> Any:
    if path.name.endswith(".lock"):
        return "lock"
    if path.suffix == ".json" and "-speed-" not in path.name:
        return _without_measured(json.loads(path.read_text()))
    if path.suffix == ".jsonl":
        return [_without_measured(json.loads(line)) for line in path.read_text().splitlines()]
    if path.name in ("report.html", "ladder.html", "index.html") or "-speed-" in path.name:  # shows what was measured
        return "measured"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _without_measured(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_measured(each) for name, each in value.items() if name not in MEASURED}
    return [_without_measured(each) for each in value] if isinstance(value, list) else value
