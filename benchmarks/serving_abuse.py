"""How long do four clients of `heddle serve` wait while others abuse it?

Each asks in turn for 32 tokens after a prompt of 64. Beside them, by scenario, 4 clients send prompts of 8,000 tokens,
8 send bodies that are refused (too large, or too many tokens), or 4 ask for the attention of a text. Times are of the
four, from a request to its whole answer. All clients run on the server's machine.

    python -m benchmarks.serving_abuse RUN [--heddle COMMAND] [--seconds 20]
"""

import argparse
import http.client
import json
import random
import subprocess
import threading
import time
from collections.abc import Callable
from statistics import median, quantiles
from urllib.parse import urlsplit

PROMPT, NEW, LONG, VOCABULARY = 64, 32, 8_000, 250
Ask = Callable[[random.Random], tuple[str, bytes]]


def completion(draw: random.Random, prompt: int, new: int) -> tuple[str, bytes]:
    """A request of random tokens, none of which is a special one."""
    tokens = [draw.randrange(10, VOCABULARY) for _ in range(prompt)]
    body = {"model": "model", "prompt": tokens, "max_tokens": new, "temperature": 0}
    return "/v1/completions", json.dumps(body).encode()


def text_of(count: int) -> Ask:
    """A request whose prompt is a text of so many characters."""
    body = json.dumps({"model": "model", "prompt": "a weaver " * (count // 9), "max_tokens": 1}).encode()
    return lambda draw: ("/v1/completions", body)


def attention(draw: random.Random) -> tuple[str, bytes]:
    """The attention that the last token of a text pays to the others."""
    request = {"model": "model", "prompt": "the weaver " * 60, "max_tokens": 1}
    return "/chat/attention", json.dumps({"kind": "completions", "request": request, "reply": "and the river"}).encode()


SCENARIOS: dict[str, tuple[int, Ask | None]] = {
    "nobody else": (0, None),
    "4 clients of 8,000 tokens": (4, lambda draw: completion(draw, LONG, 1)),
    "8 clients of 2 MB, refused while they are read": (8, text_of(2 * 2**20)),
    "8 clients of 1 MB, refused by their length": (8, text_of(2**20 - 200)),
    "4 clients that look at attention": (4, attention),
}


class Clients:
    """Clients of a server that ask again as soon as they are answered."""

    def __init__(self, address: str) -> None:
        self.host = urlsplit(address).netloc
        self.is_over = threading.Event()
        self.seconds: list[float] = []
        self.statuses: dict[str, dict[int, int]] = {"clients": {}, "others": {}}

    def ask(self, path: str, body: bytes) -> int:
        """The status of the answer; 0 where the server closed the connection before it had read the body."""
        connection = http.client.HTTPConnection(self.host, timeout=120)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except OSError:
            return 0
        finally:
            connection.close()

    def run(self, who: str, ask: Ask, seed: int) -> None:
        """Ask until it is over."""
        draw, statuses = random.Random(seed), self.statuses[who]
        while not self.is_over.is_set():
            started = time.perf_counter()
            status = self.ask(*ask(draw))
            statuses[status] = statuses.get(status, 0) + 1
            if who == "clients" and status == 200:
                self.seconds.append(time.perf_counter() - started)

    def measure(self, count: int, ask: Ask | None, seconds: float) -> dict[str, object]:
        """The times of four clients beside `count` others."""
        work = [("clients", lambda draw: completion(draw, PROMPT, NEW))] * 4
        work += [("others", ask)] * count if ask is not None else []
        threads = [threading.Thread(target=self.run, args=(*each, seed)) for seed, each in enumerate(work)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        self.is_over.set()
        for thread in threads:
            thread.join()
        times = self.seconds
        ninth = quantiles(times, n=10)[-1] if len(times) > 1 else float("nan")
        return {"answers": len(times), "median_s": median(times or [float("inf")]), "p90_s": ninth, **self.statuses}


def main() -> None:
    """Print a line for each scenario."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--heddle", default="heddle")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    command = [options.heddle, "serve", options.run, "--port", "0", "--name", "model"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        Clients(address).measure(0, None, 3.0)  # a warm-up
        alone = 0.0
        for name, (count, ask) in SCENARIOS.items():
            result = Clients(address).measure(count, ask, options.seconds)
            alone = alone or float(str(result["median_s"]))
            times = float(str(result["median_s"])) / alone
            print(json.dumps({"beside": name, "times_alone": round(times, 2)} | result), flush=True)
        server.terminate()


if __name__ == "__main__":
    main()
