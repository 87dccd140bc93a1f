"""`heddle serve` as a process of its own under a crowd with abusers: its texts, its statuses and its memory."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx

import heddle
from tests.serving.running import NAME, small_model
from tests.serving.test_service import crowd

SECONDS, CLIENTS, SAMPLE_SECONDS = 3600.0, 50, 30.0
GROWTH = 1.03  # of the last quarter's mean memory over that of the second one
ALLOWED = {0, 200, 400, 413, 429}  # 0: the client broke off


class ServerProcess:
    """What `crowd` needs of a server."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.client = httpx.Client(base_url=address, timeout=60.0)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": NAME, "prompt": "The weaver"} | fields)

    def resident_mib(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


@contextmanager
def server_process(folder: Path) -> Iterator[ServerProcess]:
    """Save the small model and serve it; ends with SIGTERM, which must end the process with 0."""
    model, tokenizer = small_model()
    heddle.save(model, folder / NAME, tokenizer=tokenizer)
    limits = ["--max-new-tokens", "1000", "--queue", "64"]
    command = [sys.executable, "-m", "heddle", "serve", str(folder / NAME), "--port", "0", "--threads", "1", *limits]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "http://" in line)
        running = ServerProcess(process, line.strip().removesuffix("/v1"))
        try:
            yield running
        finally:
            running.client.close()
            process.terminate()
        assert process.wait(60) == 0


def grown(samples: list[float]) -> str:
    """What the memory says, if it grew; nothing if it is flat."""
    quarter = len(samples) // 4
    if not quarter:
        return ""
    before, after = (sum(samples[start : start + quarter]) / quarter for start in (quarter, 3 * quarter))
    return (
        "" if after <= GROWTH * before else f"memory: {before:.1f} MiB in the second quarter, {after:.1f} in the last"
    )


def under_crowd(folder: Path, seconds: float, seed: int = 0) -> tuple[int, list[str], list[float]]:
    """(requests, what was wrong, MiB over time) of a server under a crowd."""
    samples, over = list[float](), threading.Event()
    with server_process(folder) as running:

        def sample() -> None:
            while not over.wait(min(SAMPLE_SECONDS, seconds / 20)):
                samples.append(running.resident_mib())

        sampler = threading.Thread(target=sample)
        sampler.start()
        statuses, wrong = crowd(running, CLIENTS, seconds, seed)
        over.set()
        sampler.join()
        refused = running.complete(max_tokens=1, temperature=0).status_code
    failures = [f"{wrong} wrong texts"] * bool(wrong) + [grown(samples)] * bool(grown(samples))
    failures += [f"status {status}" for status in sorted({*statuses, refused} - ALLOWED)]
    return len(statuses), failures, samples


def server(folder: Path, seed: int) -> tuple[int, list[str]]:
    """One round of requests: (how many, what was wrong)."""
    start = time.monotonic()
    requests, failures, samples = under_crowd(folder, SECONDS, seed)
    kept = samples[:: max(1, len(samples) // 12)]
    print(f"server: {time.monotonic() - start:.0f} s, MiB: {', '.join(f'{sample:.0f}' for sample in kept)}", flush=True)
    return requests, failures
