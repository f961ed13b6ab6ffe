"""Measures tokens per second, time to first token and token gaps of OpenAI-compatible servers.

    make bench                                       # our server with the demo model
    python scripts/bench.py --target ours=http://127.0.0.1:8080 --target peer=http://127.0.0.1:8000

Several targets are measured in turn within each round, so that a change in the machine's speed
meets all of them; medians over the rounds are printed, and ratios against the first target. Every
request asks for exactly `--max-tokens` tokens through `ignore_eos`, counted from `usage` where the
server sends it. A server that takes the end of text away by another name is told so with
`--extra`, whose JSON takes the place of `ignore_eos`; for `transformers serve`:

    --extra 'peer={"model": "FOLDER", "generation_config": "{\\"eos_token_id\\": -1}"}'

The last line is one JSON object. Measure on a quiet machine: client and server share its cores.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
START_TIMEOUT_S = 120

QUESTIONS = (
    "What is the tallest mountain in Europe, and who climbed it first?",
    "Explain what a mutex is to a new programmer.",
    "Give me two ideas for a rainy Sunday with children.",
    "How do I read a file line by line in Python?",
    "Why do leaves turn red in autumn?",
    "Write a short note to a neighbour about a parcel.",
    "What does a central bank do?",
    "Name five vegetables that grow in the shade.",
)


@dataclass
class Outcome:
    """One request: tokens, and when its pieces arrived (seconds since it was sent)."""

    tokens: int = 0
    arrivals_s: list[float] = field(default_factory=list)


@dataclass
class Point:
    """One target at one concurrency in one round. Times in milliseconds."""

    tokens_per_s: float
    first_token_p50: float
    first_token_p95: float
    gap_p50: float
    gap_p99: float


def main() -> int:
    arguments = _arguments()
    with _targets(arguments) as targets:
        for name in targets:
            asyncio.run(_load(targets, name, arguments, 1))  # the first pays for first calls
        results = {
            concurrency: _measure(targets, arguments, concurrency)
            for concurrency in arguments.concurrency
        }
    _print_table(results)
    plain = {c: {n: asdict(p) for n, p in points.items()} for c, points in results.items()}
    print(json.dumps({"max_tokens": arguments.max_tokens, "results": plain}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=0, help="pad prompts to about this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--per-stream", type=int, default=2, help="requests of each stream")
    return parser.parse_args()


@contextmanager
def _targets(arguments: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Name to URL; without any, our own server on the demo model, started for the purpose."""
    if arguments.target:
        yield dict(target.split("=", 1) for target in arguments.target)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(ROOT / "serve"), "--model-id", str(DEMO_MODEL), "--port", str(port)]
    server = subprocess.Popen([*command, "--log-level", "warning"])
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}", server)
        yield {"invocant": f"http://127.0.0.1:{port}"}
    finally:
        server.terminate()
        server.wait()


def _wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/ping", timeout=2):
                return
        except OSError:  # refused, 503, or slow while it starts
            time.sleep(0.1)
    sys.exit("the server did not become ready")


def _measure(
    targets: dict[str, str], arguments: argparse.Namespace, concurrency: int
) -> dict[str, Point]:
    """Medians over the rounds, each of which visits every target."""
    rounds: dict[str, list[Point]] = {name: [] for name in targets}
    for _ in range(arguments.rounds):
        for name in targets:
            start = time.perf_counter()
            outcomes = asyncio.run(_load(targets, name, arguments, concurrency))
            rounds[name].append(_point(outcomes, time.perf_counter() - start))
    return {name: _median_point(points) for name, points in rounds.items()}


def _point(outcomes: list[Outcome], seconds: float) -> Point:
    first = [1e3 * o.arrivals_s[0] for o in outcomes if o.arrivals_s]
    gaps = [
        1e3 * (later - earlier)
        for o in outcomes
        for earlier, later in zip(o.arrivals_s, o.arrivals_s[1:], strict=False)
    ]
    return Point(
        sum(o.tokens for o in outcomes) / seconds,
        _quantile(first, 0.5),
        _quantile(first, 0.95),
        _quantile(gaps, 0.5),
        _quantile(gaps, 0.99),
    )


def _quantile(values: list[float], q: float) -> float:
    ordered = sorted(values) or [float("nan")]
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def _median_point(points: list[Point]) -> Point:
    columns = zip(*(asdict(point).values() for point in points), strict=True)
    return Point(*(statistics.median(column) for column in columns))


async def _load(
    targets: dict[str, str], name: str, arguments: argparse.Namespace, concurrency: int
) -> list[Outcome]:
    """`concurrency` streams at once, each sending its requests one after the other."""
    extras = dict(item.split("=", 1) for item in arguments.extra)
    extra = json.loads(extras.get(name, '{"ignore_eos": true}'))

    async def stream(number: int) -> list[Outcome]:
        first = number * arguments.per_stream
        return [
            await _request(targets[name], _body(arguments, extra, first + turn))
            for turn in range(arguments.per_stream)
        ]

    found = await asyncio.gather(*(stream(number) for number in range(concurrency)))
    return [outcome for outcomes in found for outcome in outcomes]


def _body(arguments: argparse.Namespace, extra: dict[str, Any], number: int) -> bytes:
    question = QUESTIONS[number % len(QUESTIONS)]
    padding = f" (Note {number}: the ferry was late again.)" * (arguments.prompt_tokens // 12)
    return json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": question + padding}],
            "max_tokens": arguments.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }
    ).encode()


async def _request(url: str, body: bytes) -> Outcome:
    """One streamed chat over a connection of its own. Raises RuntimeError on another status."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    head = (
        f"POST {parts.path or ''}/v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    start = time.perf_counter()
    writer.write(head.encode() + body)
    outcome, pieces = Outcome(), 0
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{url}: {status!r} {await reader.read(2000)!r}")
    async for payload in _payloads(reader):
        event = json.loads(payload)
        if any(c["delta"].get("content") for c in event.get("choices") or []):
            outcome.arrivals_s.append(time.perf_counter() - start)
            pieces += 1
        if event.get("usage"):
            outcome.tokens = event["usage"]["completion_tokens"]
    writer.close()
    outcome.tokens = outcome.tokens or pieces
    return outcome


async def _payloads(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The JSON of each event; chunk sizes and other lines between them are passed over."""
    async for line in reader:
        if line.startswith(b"data: {"):
            yield line[6:]


def _print_table(results: dict[int, dict[str, Point]]) -> None:
    print("streams  target        tokens/s  ratio  first p50/p95 ms   gap p50/p99 ms")
    for concurrency, points in results.items():
        base = next(iter(points.values())).tokens_per_s
        for name, p in points.items():
            print(
                f"{concurrency:>7}  {name:<12} {p.tokens_per_s:>9.1f} {base / p.tokens_per_s:>6.2f}"
                f"  {p.first_token_p50:>7.0f} / {p.first_token_p95:<7.0f}"
                f" {p.gap_p50:>6.1f} / {p.gap_p99:<6.1f}"
            )


if __name__ == "__main__":
    sys.exit(main())
