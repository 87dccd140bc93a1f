"""The server under load and abuse: who may ask, what waits, what a client that goes away leaves, how it ends."""

import asyncio
import contextlib
import gc
import json
import random
import re
import socket
import threading
import time

import pytest
from torch import Tensor

from heddle.errors import ConfigError
from heddle.generation.generate import generate
from heddle.generation.scheduler import BatchScheduler
from heddle.model.state import State
from heddle.serving import app
from heddle.serving import server as connections
from heddle.serving.app import Turns
from heddle.serving.chat_page import add_chat_page
from heddle.serving.limits import ServerLimits
from heddle.serving.requests import RequestError
from heddle.serving.server import host_names, listen
from heddle.tokenization.tokenizer import Tokenizer
from tests.laws.planting import Plant, assigned, calls, result
from tests.serving.running import NAME, Running, Served, running_server, small_model

PROMPTS = ("The weaver", "Another cloth", "La navette", "def weave")


def states_in_memory() -> int:
    gc.collect()
    return sum(type(item) is State for item in gc.get_objects())


def metric(server: Running, name: str) -> int:
    lines = server.client.get("/metrics").text.splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"heddle_{name} ")))


def test_only_its_own_host_and_origin_may_ask() -> None:
    with running_server() as server:
        own = server.address.removeprefix("http://")
        cases = [
            ({}, 200),
            ({"Host": own.replace("127.0.0.1", "localhost")}, 200),
            ({"Host": "evil.example"}, 403),
            ({"Host": own.replace("127.0.0.1", "127.0.0.1.evil.example")}, 403),
            ({"Origin": server.address}, 200),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
        ]
        for headers, status in cases:
            answer = server.client.get("/v1/models", headers=headers)
            assert answer.status_code == status, headers
            assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_token_is_asked_for() -> None:
    token = "a-token-of-many-letters"
    with running_server(token=token) as server:
        for given, status in (("", 401), ("Bearer wrong", 401), (f"Bearer {token}x", 401), (f"Bearer {token}", 200)):
            headers = {"Authorization": given} if given else {}
            assert server.client.get("/v1/models", headers=headers).status_code == status
            assert server.client.get("/metrics", headers=headers).status_code == status
        assert server.client.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
        assert server.client.get("/health").json() == {"status": "ok"}


def test_the_model_is_described_by_its_name_alone() -> None:
    with running_server() as server:
        (listed,) = server.client.get("/v1/models").json()["data"]
        assert server.client.get(f"/v1/models/{listed['id']}").json() == listed
        answer = server.client.get("/v1/models/org/another")
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
        for path in ("/v1/embeddings", "/v1/responses"):
            answer = server.client.post(path, json={"input": "Hi"})
            assert answer.status_code == 404
            assert "/v1/chat/completions" in answer.json()["error"]["message"]


def test_a_body_is_refused_while_it_is_read() -> None:
    with running_server(max_body=1000) as server:
        host, port = server.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 1000000000\r\n\r\n"
            connection.sendall(head.encode() + b"x" * 2000)  # and the rest never comes
            assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_without_a_length_is_refused_while_it_is_read() -> None:
    with running_server(max_body=1000) as server:
        answer = server.client.post("/v1/completions", content=iter([b"x" * 600] * 2))
        assert (answer.status_code, answer.json()["error"]["message"][:25]) == (413, "body: has more than 1,000")


def test_turns_take_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], []

    async def sleep(seconds: float) -> None:
        slept.append(round(seconds, 9))
        now[0] += max(0.0, seconds)

    async def take(turns: Turns, *seconds: float) -> None:
        for each in seconds:
            async with turns.turn():
                now[0] += each

    monkeypatch.setattr("heddle.serving.app.time.monotonic", lambda: now[0])
    monkeypatch.setattr("heddle.serving.app.asyncio.sleep", sleep)
    asyncio.run(take(Turns(0.25, 1), 2.0, 1.0, 0.0, 0.0))
    assert slept[1:] == [6.0, 3.0, 3 * app.LEAST_TURN]  # three times as long as each took


def test_more_waiting_for_a_turn_than_there_is_room_for_are_refused() -> None:
    async def wait_in_line() -> tuple[BaseException | None, ...]:
        turns = Turns(0.5, 2)

        async def take() -> None:
            async with turns.turn():
                await asyncio.sleep(0.01)

        return await asyncio.gather(take(), take(), take(), return_exceptions=True)

    first, second, third = asyncio.run(wait_in_line())
    assert (first, second) == (None, None)
    assert isinstance(third, RequestError)
    assert (third.status, third.retry_seconds) == (429, 1)


def test_large_bodies_and_looks_at_the_model_are_answered_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, turn = [], Turns.turn

    def counted(turns: Turns) -> contextlib.AbstractAsyncContextManager[None]:
        begun.append(turns.share)
        return turn(turns)

    monkeypatch.setattr(Turns, "turn", counted)
    with running_server() as server:
        add_chat_page(server.server.application, "")
        assert server.complete(max_tokens=1).status_code == 200
        assert server.complete(prompt="x" * app.LARGE_BODY).status_code == 400
        assert server.client.post("/v1/completions", content=b"x" * 2**21).status_code == 413
        request = {"model": NAME, "prompt": "The weaver"}
        look = {"kind": "completions", "request": request, "reply": "s"}
        assert server.client.post("/chat/attention", json=look).status_code == 200
    assert begun == [app.READING_SHARE, app.READING_SHARE, app.LOOKING_SHARE]


def test_streams_beyond_the_queue_get_429_and_cancelled_ones_free_their_state() -> None:
    with running_server(streams=2, queue=1, max_new_tokens=20_000, max_seconds=20) as server:
        before = states_in_memory()
        streams = []
        for _ in range(2):
            body = {"model": NAME, "prompt": "The", "max_tokens": 20_000, "stream": True, "temperature": 0}
            streams.append(server.client.stream("POST", "/v1/completions", json=body))
            assert streams[-1].__enter__().status_code == 200
        waiting = threading.Thread(target=server.complete, kwargs={"max_tokens": 1})
        waiting.start()
        while not server.engine.queue_length:
            time.sleep(0.005)
        refused = server.complete(max_tokens=1)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert metric(server, "states") == 2
        for stream in streams:
            stream.__exit__(None, None, None)
        waiting.join()
        server.wait_until_free()
        assert metric(server, "states") == metric(server, "queue_length") == 0
        assert metric(server, "cancelled_total") == 2
        assert metric(server, "new_tokens_total") < 40_000
        assert states_in_memory() == before


def test_a_full_queue_refuses_before_the_text_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(streams=1, queue=1, max_new_tokens=20_000) as server:
        encoded, encode = list[str](), Tokenizer.encode

        def recorded(self: Tokenizer, text: str) -> list[int]:
            encoded.append(text)
            return encode(self, text)

        monkeypatch.setattr(Tokenizer, "encode", recorded)
        body = {"model": NAME, "prompt": "The", "max_tokens": 20_000, "stream": True, "temperature": 0}
        with server.client.stream("POST", "/v1/completions", json=body):
            waiting = threading.Thread(target=server.complete, kwargs={"max_tokens": 1, "prompt": "second"})
            waiting.start()
            while not server.engine.queue_length:
                time.sleep(0.005)
            assert server.complete(max_tokens=1, prompt="third").status_code == 429
        waiting.join()
        assert encoded == ["The", "second"]


def test_a_refusal_says_when_the_queue_will_have_moved() -> None:
    with running_server(streams=2, queue=3, max_seconds=60) as server:
        engine = server.engine
        assert engine.retry_seconds == 1
        engine.metrics.running_seconds.observe(10.0)
        assert engine.retry_seconds == 5  # one of two running requests ends every 5 s
        with engine.entry(), engine.entry(), engine.entry(), engine.entry(), engine.entry():
            refused = server.complete(max_tokens=1)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        for _ in range(9):
            engine.metrics.running_seconds.observe(1000.0)
        assert engine.retry_seconds == 60  # no request runs longer


def test_a_piece_of_an_answer_does_not_wait_for_the_one_before() -> None:
    """As with Nagle's algorithm, where a client's kernel acknowledges a piece after 40 ms."""
    with running_server() as server:
        server.client.get("/health")
        [connection] = server.server.server_state.connections
        sent = connection.transport.get_extra_info("socket")
        assert sent.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_connections_and_slow_headers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    with running_server(connections=2) as server:
        host, port = server.address.removeprefix("http://").split(":")
        address = (host, int(port))
        with socket.create_connection(address, timeout=20) as slow, socket.create_connection(address, timeout=20):
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: ")
            with socket.create_connection(address, timeout=20) as refused:
                answer = b"".join(iter(lambda: refused.recv(1000), b""))
            assert answer.startswith(b"HTTP/1.1 503")
            assert len(answer.partition(b"\r\n\r\n")[2]) == int(answer.split(b"content-length: ")[1].split(b"\r")[0])
            assert slow.recv(100) == b""  # closed by the server
        with socket.create_connection(address, timeout=20) as later:  # again after a first request
            request = f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
            later.sendall(request)
            assert later.recv(1000).startswith(b"HTTP/1.1 200")
            later.sendall(request[:20])
            assert b"HTTP" not in b"".join(iter(lambda: later.recv(1000), b""))


def test_metrics_tell_the_seconds_of_requests_and_tokens() -> None:
    with running_server() as server:
        for count in (1, 5):
            assert server.complete(max_tokens=count, temperature=0).status_code == 200
        lines = server.client.get("/metrics").text.splitlines()
        for name, count in (("queue", 2), ("first_token", 2), ("token", 4), ("running", 2)):
            buckets = [int(line.split()[1]) for line in lines if line.startswith(f"heddle_{name}_seconds_bucket")]
            assert buckets == sorted(buckets)
            assert buckets[-1] == metric(server, f"{name}_seconds_count") == count
            assert float(next(line.split()[1] for line in lines if line.startswith(f"heddle_{name}_seconds_sum"))) >= 0


def families(text: str) -> dict[str, tuple[str, dict[str, float]]]:
    """Read Prometheus's text format, version 0.0.4: kind and samples by metric. Raises AssertionError."""
    found: dict[str, tuple[str, dict[str, float]]] = {}
    lines = iter(text.removesuffix("\n").split("\n"))
    assert text.endswith("\n")
    for line in lines:
        if line.startswith("#"):
            help_line, type_line = HELP.fullmatch(line), TYPE.fullmatch(next(lines))
            assert help_line, line
            assert type_line, line
            assert help_line["name"] == type_line["name"], "HELP and TYPE are together, before the samples"
            name = help_line["name"]
            assert name not in found, "the lines of a metric are one group"
            found[name] = type_line["kind"], {}
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample, line
        kind, samples = found[name]
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        assert sample["name"] in {name + suffix for suffix in suffixes}, line
        key = sample["name"].removeprefix(name) + (sample["labels"] or "")
        assert key not in samples, "a sample is given once"
        samples[key] = float(sample["value"])
    return found


METRIC_NAME = "(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\n"])*"'
HELP = re.compile(rf"# HELP {METRIC_NAME} (?:[^\\]|\\[\\n])+")
TYPE = re.compile(rf"# TYPE {METRIC_NAME} (?P<kind>counter|gauge|histogram)")
SAMPLE = re.compile(rf"{METRIC_NAME}(?P<labels>\{{{LABEL}(?:,{LABEL})*\}})? (?P<value>\S+)")


def test_metrics_are_in_the_text_format_of_prometheus() -> None:
    with running_server() as server:
        assert server.complete(max_tokens=3, temperature=0).status_code == 200
        assert server.client.get("/nothing").status_code == 404
        answer = server.client.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        found = families(answer.text)
    assert found["heddle_answers_total"] == ("counter", {'{status="200"}': 1, '{status="404"}': 1})
    assert found["heddle_new_tokens_total"] == ("counter", {"": 3})
    assert found["heddle_states"] == ("gauge", {"": 0})
    for name, (kind, samples) in found.items():
        assert name.endswith("_total") == (kind == "counter"), name
        if kind == "histogram":
            bounds = [key.split('"')[1] for key in samples if key.startswith("_bucket")]
            buckets = [samples[f'_bucket{{le="{bound}"}}'] for bound in bounds]
            assert [float(bound) for bound in bounds] == sorted(map(float, bounds))
            assert buckets == sorted(buckets)
            assert bounds[-1] == "+Inf"
            assert buckets[-1] == samples["_count"], name
    assert {kind for kind, _ in found.values()} == {"counter", "gauge", "histogram"}


@pytest.mark.parametrize(
    "text",
    [
        "# TYPE a gauge\na 1\n",
        "# HELP a Of a.\na 1\n",
        "# HELP a Of a.\n# TYPE b gauge\nb 1\n",
        "# HELP a Of a.\n# TYPE a gauge\na 1\na 2\n",
        "# HELP a Of a.\n# TYPE a gauge\nb 1\n",
        "# HELP a Of a.\n# TYPE a gauge\na 1",
        '# HELP a Of a.\n# TYPE a gauge\na{b="c"d"} 1\n',
    ],
)
def test_another_text_is_not_in_the_format_of_prometheus(text: str) -> None:
    with pytest.raises((AssertionError, StopIteration)):
        families(text)


def test_states_have_a_bounded_number_of_slots() -> None:
    with running_server(streams=8, slots=100, max_new_tokens=200) as server:
        most = 0

        def ask() -> None:
            assert server.complete(max_tokens=30, temperature=0).status_code == 200

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            most = max(most, server.engine.states)
            time.sleep(0.001)
        assert most == 2  # of 34 slots or more each


def test_a_client_that_waits_for_a_whole_answer_and_goes_away_frees_its_state() -> None:
    with running_server(max_new_tokens=100_000) as server:
        host, port = server.address.removeprefix("http://").split(":")
        body = json.dumps({"model": NAME, "prompt": "The", "max_tokens": 100_000, "temperature": 0}).encode()
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            while not server.engine.states:
                time.sleep(0.005)
        server.wait_until_free()
        assert metric(server, "cancelled_total") == 1


def test_the_time_limit_ends_a_text() -> None:
    with running_server(max_new_tokens=1_000_000, max_seconds=1) as server:
        answer = server.complete(max_tokens=1_000_000, temperature=0).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert 0 < answer["usage"]["completion_tokens"] < 1_000_000


def test_a_draining_server_ends_running_streams_and_refuses_new_ones() -> None:
    with running_server(max_new_tokens=2000) as server:
        model, tokenizer = small_model()
        body = {"model": NAME, "prompt": "The", "max_tokens": 300, "temperature": 0, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            server.server.handle_exit(15, None)
            refused = server.complete(max_tokens=1)
            assert refused.status_code == 503
            assert server.client.get("/health").json() == {"status": "draining"}
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        text = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
        assert lines[-1] == "[DONE]"
        assert text == generate(model, "The", tokenizer, max_new_tokens=300)
        assert server.server.interrupted_by is None


def test_a_request_that_the_time_to_finish_cuts_off_is_refused_in_a_sentence() -> None:
    with running_server(max_new_tokens=1_000_000, drain_seconds=1) as server:
        answers = []
        client = threading.Thread(target=lambda: answers.append(server.complete(max_tokens=1_000_000, temperature=0)))
        client.start()
        while not server.engine.states:
            time.sleep(0.005)
        server.server.handle_exit(15, None)
        client.join()
    assert answers[0].status_code == 503
    assert "shut down before it finished" in answers[0].json()["error"]["message"]


def test_the_only_model_need_not_be_named() -> None:
    with running_server() as server:
        answer = server.client.post("/v1/completions", json={"prompt": "The weaver", "max_tokens": 1})
        assert (answer.status_code, answer.json()["model"]) == (200, NAME)


def abuse(server: Served, draw: random.Random) -> int:
    """One abusive request; returns its status, 0 for a connection that was broken off."""
    kind = draw.randrange(5)
    if kind == 0:
        return int(server.complete(stop=["x"] * 100_000).status_code)
    if kind == 1:
        return int(server.client.post("/v1/completions", content=b"[" * 50_000).status_code)
    if kind == 2:
        return int(server.complete(max_tokens=10**9).status_code)
    if kind == 3:
        return int(server.complete(prompt="\x00\u202e" * 50_000).status_code)
    body = {"model": NAME, "prompt": "The", "max_tokens": 500, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body):
        return 0


def crowd(server: Served, clients: int, seconds: float, seed: int = 0) -> tuple[list[int], int]:
    """The statuses that `clients` clients saw, a twentieth of their requests abusive; and how many texts were wrong."""
    model, tokenizer = small_model()
    expected = {prompt: generate(model, prompt, tokenizer, max_new_tokens=6) for prompt in PROMPTS}
    statuses, wrong, until = list[int](), list[str](), time.monotonic() + seconds

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < until:
            if draw.random() < 0.05:
                statuses.append(abuse(server, draw))
                continue
            prompt = draw.choice(PROMPTS)
            answer = server.complete(prompt=prompt, max_tokens=6, temperature=0)
            statuses.append(answer.status_code)
            if answer.status_code == 200 and answer.json()["choices"][0]["text"] != expected[prompt]:
                wrong.append(prompt)

    threads = [threading.Thread(target=ask, args=(1000 * seed + client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses, len(wrong)


def check_crowd(clients: int, seconds: float) -> int:
    """Right texts, no server error and no state left behind; the number of texts."""
    with running_server(max_new_tokens=1000) as server:
        before = states_in_memory()
        statuses, wrong = crowd(server, clients, seconds)
        server.wait_until_free()
        assert wrong == 0
        assert set(statuses) <= {0, 200, 400, 413, 429}
        assert states_in_memory() == before
    return statuses.count(200)


def test_a_crowd_with_abusers_gets_right_texts_and_no_server_error() -> None:
    """`tools/soak.py --name server` takes an hour, and a process of its own, whose memory must stay flat."""
    assert check_crowd(50, 2.0) > 50


leaked: list[State] = []


def leak(pair: tuple[Tensor, State]) -> tuple[Tensor, State]:
    leaked.append(pair[1])
    return pair


@pytest.mark.parametrize(
    "plant",
    [
        calls(BatchScheduler._choose, "zip", lambda _, rows, chosen, strict: zip(rows, chosen[::-1], strict=strict)),
        assigned(BatchScheduler._choose, "is_damaged", lambda is_damaged, *, row: row.newest % 2 == 0),
        result(BatchScheduler._forward, leak),
    ],
    ids=["tokens of other rows", "rows that fail", "states that stay"],
)
def test_planted_faults_are_seen(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    try:
        with pytest.raises(AssertionError):
            check_crowd(20, 1.0)
    finally:
        leaked.clear()


def test_limits_and_addresses_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^streams 0:"):
        ServerLimits(streams=0)
    with listen("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match="cannot be used"):
        listen("127.0.0.1", listener.getsockname()[1])
    assert "[::1]:80" in host_names("127.0.0.1", 80)
