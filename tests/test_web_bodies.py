"""Request bodies, right and wrong, over a real socket; the JSON reader against arbitrary input."""

import gzip
import io
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from container.web import body
from handler.contract import ApiError
from tests.fake_runner import FakeRunner, Script, make_card
from tests.web_server import Web, serving

LIMIT = 25 * 2**20
GOOD = b'{"ids": [[7, 8]], "inputs": "x"}'
PATHS = ["/v1/chat/completions", "/generate", "/invocations"]


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    with ExitStack() as stack:
        web = stack.enter_context(serving(tmp_path_factory.mktemp("web"), payload_limit=LIMIT))
        stack.enter_context(FakeRunner(Script(web.endpoint, make_card())))
        web.wait_for_ping(200)
        yield web


def send(web: Web, path: str, data: Any, content_type: str | None = None) -> requests.Response:
    headers = {} if content_type is None else {"Content-Type": content_type}
    return requests.post(web.url + path, data=data, headers=headers, timeout=30)


def message(answer: requests.Response) -> str:
    error = answer.json()["error"]
    return error["message"] if isinstance(error, dict) else error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "application/json",
        "Application/JSON; Charset=UTF-8",
        'application/json;charset="utf-8"',
        "application/vnd.api+json",
    ],
)
def test_json_in_every_usual_dress(web: Web, path: str, content_type: str | None) -> None:
    assert send(web, path, GOOD, content_type).json()["tokens"] == [[7, 8, 7]]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content_type", ["text/csv", "application/x-www-form-urlencoded", "image/png", ";", "json"]
)
def test_other_types_are_refused_with_what_is_accepted(
    web: Web, path: str, content_type: str
) -> None:
    answer = send(web, path, GOOD, content_type)
    assert answer.status_code == 415
    assert "application/json" in message(answer)


def packed(web: Web, path: str, data: bytes, encoding: str = "gzip") -> requests.Response:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    return requests.post(web.url + path, data=data, headers=headers, timeout=30)


@pytest.mark.parametrize("path", PATHS)
def test_gzip_bodies_are_unpacked(web: Web, path: str) -> None:
    members = gzip.compress(GOOD[:9]) + gzip.compress(GOOD[9:])
    for encoding, data in [("gzip", gzip.compress(GOOD)), ("X-GZIP", members), ("identity", GOOD)]:
        assert packed(web, path, data, encoding).json()["tokens"] == [[7, 8, 7]]


def test_other_packings_are_refused(web: Web) -> None:
    answer = packed(web, "/generate", GOOD, "br")
    assert answer.status_code == 415
    assert "'br'" in message(answer)
    assert "gzip" in message(answer)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD,
        gzip.compress(GOOD)[:-1],
        gzip.compress(GOOD)[:12],
        gzip.compress(GOOD) + b"x",
        gzip.compress(GOOD)[:-8] + bytes(8),
        gzip.compress(b"") * 2_000,
    ],
    ids=["empty", "plain", "no end", "head only", "more after it", "wrong sum", "many members"],
)
def test_broken_gzip_is_said_to_be_so(web: Web, data: bytes) -> None:
    answer = packed(web, "/generate", data)
    assert answer.status_code == 400
    assert "gzip" in message(answer)


def test_what_gzip_unpacks_to_is_within_the_limit(web: Web) -> None:
    fits = b'{"ids": [[7, 8]]' + b" " * (LIMIT - 17) + b"}"
    assert len(fits) == LIMIT
    assert packed(web, "/generate", gzip.compress(fits)).status_code == 200
    for too_much in (gzip.compress(fits + b" "), gzip.compress(fits) + gzip.compress(b" ")):
        answer = packed(web, "/generate", too_much)
        assert answer.status_code == 413
        assert str(LIMIT) in message(answer)


def test_a_zip_bomb_costs_no_more_than_the_limit() -> None:
    bomb = gzip.compress(bytes(64 * 2**20))
    environ = {"wsgi.input": io.BytesIO(bomb), "HTTP_CONTENT_ENCODING": "gzip"}
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            body.read(environ, 2**20)
        assert caught.value.status == 413
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_charsets(web: Web) -> None:
    text = '{"ids": [[7, 8]], "inputs": "é"}'
    for charset in ("utf-16", "latin-1"):
        content_type = f"application/json; charset={charset}"
        assert send(web, "/generate", text.encode(charset), content_type).status_code == 200
    assert send(web, "/generate", GOOD, "application/json; charset=klingon").status_code == 415
    assert send(web, "/generate", b"\xff", "application/json; charset=utf-16").status_code == 400
    assert send(web, "/generate", GOOD, "application/json; charset=base64").status_code == 400


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b" \n ", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"{", "ends too early"),
        (b'{"a": 1', "ends too early"),
        (b'{"a":\n 1,}', "line 2 column 4"),
        (b"{'a': 1}", "byte 1"),
        (b'{"a": NaN}', "column 7"),
        (b'{"a": Infinity}', "column 7"),
        (b'{"a": -Infinity}', "not valid JSON"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": 1} {}', "trailing"),
        (b'{"a": "\xff"}', "not UTF-8 at line 1 column 8"),
        (b'{"a": "\xed\xa0\xbd"}', "not UTF-8"),
        (b'{"a": "x \\ud83d y"}', "half a surrogate pair at line 1 column 10"),
        (b'{"a": "\\ude00"}', "surrogate pair"),
        (b'{"a": "\\x"}', "not valid JSON"),
        (b'{"a": "line\nbreak"}', "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, "nested too deeply"),
        (b"1" * 5_000, "out of range"),
        (b"inputs=hello", "byte 0"),
        (b"\x00", "byte 0"),
        (b"nul", "not valid JSON"),
    ],
)
def test_broken_json_is_400_with_the_place(web: Web, path: str, data: bytes, says: str) -> None:
    answer = send(web, path, data)
    assert answer.status_code == 400
    assert says in message(answer)


def test_a_byte_order_mark_and_repeated_keys_are_fine(web: Web) -> None:
    marked = send(web, "/generate", b"\xef\xbb\xbf" + GOOD)
    assert marked.json()["tokens"] == [[7, 8, 7]]
    repeated = send(web, "/generate", b'{"ids": [[1]], "ids": [[2]]}')
    assert repeated.json()["tokens"] == [[2, 2, 2]]


def test_recursion_in_a_handler_is_the_bodys_fault(web: Web) -> None:
    answer = web.post("/generate", {"boom": "recursion"})
    assert answer.status_code == 400
    assert "nested too deeply" in message(answer)


def test_chunked_bodies(web: Web) -> None:
    pieces = [b'{"ids": ', b"[[7", b', 8]], "inputs": "x"}']
    assert send(web, "/invocations", iter(pieces)).json()["tokens"] == [[7, 8, 7]]
    filler = iter([b'{"inputs": "'] + [b"x" * 2**20] * 26 + [b'"}'])
    assert send(web, "/invocations", filler).status_code == 413


@pytest.mark.parametrize("path", PATHS)
def test_bodies_at_and_above_the_limit(web: Web, path: str) -> None:
    padding = LIMIT - len(GOOD)
    assert send(web, path, GOOD + b" " * padding).status_code == 200
    for extra in (1, 30 * 2**20):
        answer = send(web, path, GOOD + b" " * (padding + extra))
        assert answer.status_code == 413
        assert str(LIMIT) in message(answer)


def raw(web: Web, data: bytes) -> bytes:
    """What the server says to these bytes, until it closes or is silent."""
    with socket.create_connection(("127.0.0.1", web.port), timeout=5) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answer:
            return answer.read()


def test_too_large_is_said_before_the_body_is_sent(web: Web) -> None:
    head = b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
    with socket.create_connection(("127.0.0.1", web.port), timeout=5) as connection:
        connection.sendall(head)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_bodies_that_break_off_and_broken_chunks_do_no_harm(web: Web) -> None:
    head = b"POST /invocations HTTP/1.1\r\nHost: x\r\n"
    assert b" 400 " in raw(web, head + b"Content-Length: 50\r\n\r\n" + GOOD)
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    for broken in (b"zz\r\n{}\r\n0\r\n\r\n", b"5\r\n{}", b"2\r\n{}XX0\r\n\r\n", b"-1\r\n"):
        assert b" 500 " not in raw(web, chunked + broken)
    for length in (b"-5", b"1x", b"9" * 400):
        assert b" 500 " not in raw(web, head + b"Content-Length: " + length + b"\r\n\r\n" + GOOD)
    assert web.ping() == 200
    assert "Traceback" not in web.log.read_text()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /ping HTTP/1.1\r\nHost: x\r\nb\xe9d name: 1\r\n\r\n", 400),
        (b"GET /ping HTTP/1.1\r\nX: " + b"y" * 8_300 + b"\r\n\r\n", 431),
        (b"GET /" + b"y" * 5_000 + b" HTTP/1.1\r\n\r\n", 414),
    ],
)
def test_what_is_no_http_is_told_so_in_json(web: Web, data: bytes, status: int) -> None:
    head, _, payload = raw(web, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"application/json" in head
    assert json.loads(payload)["error_type"] == "http"


def test_expect_100_continue(web: Web) -> None:
    with socket.create_connection(("127.0.0.1", web.port), timeout=5) as connection:
        length = str(len(GOOD)).encode()
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: "
            + length
            + b"\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(GOOD)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_a_connection_survives_refusals(web: Web) -> None:
    with requests.Session() as session:
        for _ in range(3):
            answer = session.post(f"{web.url}/nothing", data=b"x" * 2**21, timeout=10)
            assert answer.status_code == 404
            assert session.post(f"{web.url}/generate", data=b"{", timeout=10).status_code == 400
            assert session.post(f"{web.url}/generate", data=GOOD, timeout=10).status_code == 200


BIG_BODIES = {
    "text": json.dumps({"inputs": "lorem ipsum " * 1_700_000}).encode(),
    "messages": json.dumps(
        {"messages": [{"role": "user", "content": "hello there"}] * 450_000}
    ).encode(),
}


@pytest.mark.parametrize("kind", BIG_BODIES)
def test_ping_does_not_wait_for_a_20_mb_body(web: Web, kind: str) -> None:
    data = BIG_BODIES[kind]
    assert len(data) > 19_000_000
    statuses: list[int] = []
    sender = threading.Thread(
        target=lambda: statuses.append(send(web, "/invocations", data).status_code)
    )
    slowest = 0.0
    with requests.Session() as session:
        session.get(f"{web.url}/ping", timeout=5)
        sender.start()
        while sender.is_alive():
            start = time.monotonic()
            assert session.get(f"{web.url}/ping", timeout=5).status_code == 200
            slowest = max(slowest, time.monotonic() - start)
    print(f"slowest ping while 20 MB of {kind} arrived: {slowest * 1000:.1f} ms")
    assert statuses == [200]
    assert slowest < 1.0  # the goal is 0.1 s; a test machine that is busy must not fail it


def read_json(data: bytes) -> Any:
    """As the server reads a body of JSON."""
    environ = {"wsgi.input": io.BytesIO(data), "CONTENT_LENGTH": str(len(data))}
    return body.decode(body.read(environ, LIMIT), None)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(json_values, st.booleans())
def test_reads_what_json_writes(value: Any, ascii_only: bool) -> None:
    assert read_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=80) | st.text('{}[]":,\\ud8c0.eE+-1 \n\tntf', max_size=40).map(str.encode)
)
def test_arbitrary_bytes_are_json_or_a_400(data: bytes) -> None:
    found: ApiError | None = None
    try:
        read_json(data)
    except ApiError as error:
        found = error
    assert found is None or (found.status == 400 and found.message)
