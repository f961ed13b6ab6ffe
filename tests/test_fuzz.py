"""Request bodies made from the API document, right and wrong, against the running server.

`--fuzz-examples 10000` sends more of them, each time others. Must not know: the inside of the
product.
"""

import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import scripted_model as scripted
from json_schema import Json, Schemas
from server_process import Server, Servers

TEXTS = [
    "Hello",
    "héllo 漢字 😀",
    "\u0000",
    "\u2028\ufeff",
    *map(scripted.trigger, scripted.TEXTS),
]
DEEP = "@deep@"
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400),
    *(0.5, -0.0, 1.0, 1e308, -1e308, 5e-324, float("inf"), float("nan")),
    *("", " ", "\u0000", "\ud800", "\udc00x", "😀" * 60, "a" * 5000, "true", "1", DEEP),
    *([], {}, [None], [[]], [{}], {"": {}}, ["a", 1], [[1], "a"], {"type": "json_object"}),
]
"""What takes the place of a value."""
NOISE = [
    b"\xff",
    b"\x00",
    b'"',
    b"{",
    b"]",
    b",",
    b"\\ud83d",
    b"1e999",
    b"\xef\xbb\xbf",
    b" " * 9000,
]


@dataclass(frozen=True)
class Asked:
    """One request."""

    path: str
    raw: bytes
    is_right: bool
    """Whether the body keeps the schema of the document."""


@pytest.fixture(scope="module")
def fuzzed(shared_server: Servers, scripted_model: Path) -> Server:
    return shared_server(scripted_model, "--dtype", "float32")


@st.composite
def bodies(draw: st.DrawFn, right: st.SearchStrategy[Any], names: list[str]) -> tuple[bytes, bool]:
    """A body as bytes, and whether it is right."""
    body = copy.deepcopy(draw(right))
    if draw(st.integers(0, 9)):  # or most of the time goes into long answers
        parameters = body.setdefault("parameters", {}) if "inputs" in body else body
        if isinstance(parameters, dict):
            parameters["max_new_tokens" if "inputs" in body else "max_tokens"] = draw(
                st.integers(1, 8)
            )
    num_faults = draw(st.sampled_from([0, 0, 0, 1, 1, 1, 2, 3]))
    for _ in range(num_faults):
        _spoil(draw, body, names)
    raw = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    raw = raw.replace(f'"{DEEP}"'.encode(), b"[" * 3000 + b"]" * 3000)
    if num_faults == 3:
        at = draw(st.integers(0, len(raw)))
        rest = at + draw(st.integers(0, 3))
        raw = raw[:at] + draw(st.sampled_from(NOISE)) + raw[rest:]
    return raw, num_faults == 0


def _spoil(draw: st.DrawFn, body: Any, names: list[str]) -> None:
    """Make one thing of the body wrong, or at least odd."""
    places = _places(body)
    holder, key = places[draw(st.integers(0, len(places) - 1))] if places else (body, None)
    deed = draw(st.sampled_from(["replace", "replace", "replace", "remove", "wrap", "many", "add"]))
    if deed == "add" or key is None:
        body[draw(st.sampled_from(names) | st.text(max_size=9))] = _odd(draw)
    elif deed == "replace":
        holder[key] = _odd(draw)
    elif deed == "remove":
        del holder[key]
    else:
        holder[key] = [holder[key]] * (300 if deed == "many" else 1)


def _odd(draw: st.DrawFn) -> Any:
    return copy.deepcopy(draw(st.sampled_from(ODD)))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a body that holds a value, as container and key."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    found = [(value, key) for key in keys]
    for key in keys:
        found += _places(value[key])
    return found[:200]


def requests_of(document: Json, schemas: Schemas) -> st.SearchStrategy[Asked]:
    """Requests to all routes that take a body."""
    chat = document["components"]["schemas"]["ChatBody"]
    # Fields that are refused are named in the description only.
    names = [*chat["properties"], *re.findall(r"`(\w+)`", chat["description"])]
    routes: list[st.SearchStrategy[Asked]] = []
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if content:
            right = schemas.values(content["application/json"]["schema"])
            routes.append(_asked(path, bodies(right, names)))
    return st.one_of(routes)


def _asked(path: str, drawn: st.SearchStrategy[tuple[bytes, bool]]) -> st.SearchStrategy[Asked]:
    return drawn.map(lambda body: Asked(path, *body))


class Judge:
    """Holds answers against the document."""

    def __init__(self, document: Json, schemas: Schemas) -> None:
        self._document = document
        self._schemas = schemas
        self.statuses: Counter[tuple[bool, int]] = Counter()

    def check(self, asked: Asked, answer: requests.Response) -> None:
        """Raises AssertionError where the answer is not one that the document allows."""
        status = answer.status_code
        self.statuses[asked.is_right, status] += 1
        # TGI's 424 is a fault of the generation, so it is ours.
        assert status < 500, answer.text
        assert status != 424, answer.text
        responses = self._document["paths"][asked.path]["post"]["responses"]
        content = responses["200" if status == 200 else "4XX"]["content"]
        kind = answer.headers["Content-Type"].partition(";")[0]
        assert kind in content
        schema = content[kind]["schema"]
        for part in [answer.json()] if kind == "application/json" else _events(answer.text):
            assert self._schemas.fault(schema, part) is None
            assert not _is_our_fault(part), part


def _events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line and line != ":"]
    assert lines, "a stream without an event"
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _is_our_fault(part: Any) -> bool:
    """Whether an event says that the server failed."""
    if not isinstance(part, dict) or "error" not in part:
        return False
    error = part["error"]
    kind = error["type"] if isinstance(error, dict) else part["error_type"]
    return kind in ("server_error", "internal", "generation", "unavailable")


def known_answers(server: Server) -> list[Any]:
    """What must be the same before and after."""
    found: list[Any] = []
    for name in scripted.TEXTS:
        text = scripted.trigger(name)
        chat = {"messages": [{"role": "user", "content": text}], "temperature": 0}
        answer = requests.post(f"{server.url}/invocations", json=chat, timeout=60).json()
        found.append(answer["choices"])
        body = {"inputs": text, "parameters": {"details": True, "max_new_tokens": 64}}
        answer = requests.post(f"{server.url}/generate", json=body, timeout=60).json()
        found.append(answer["generated_text"])
    assert found[1::2] == list(scripted.TEXTS.values())
    return found


@pytest.mark.parametrize("top_k", [2**63, 10**30])
def test_a_top_k_beyond_all_integers_is_all_tokens(fuzzed: Server, top_k: int) -> None:
    sampled = {"top_k": top_k, "temperature": 0.1}
    for path, body in {
        "/v1/completions": {"prompt": "Hello", "max_tokens": 2, **sampled},
        "/generate": {"inputs": "Hello", "parameters": {"max_new_tokens": 2, **sampled}},
    }.items():
        answer = requests.post(f"{fuzzed.url}{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text


def test_no_body_breaks_the_server(fuzzed: Server, request: pytest.FixtureRequest) -> None:
    count: int | None = request.config.getoption("--fuzz-examples")
    document = requests.get(f"{fuzzed.url}/api-doc/openapi.json", timeout=30).json()
    schemas = Schemas(document, TEXTS)
    judge = Judge(document, schemas)
    session = requests.Session()
    before = known_answers(fuzzed)

    def check(asked: Asked) -> None:
        answer = session.post(fuzzed.url + asked.path, data=asked.raw, timeout=60)
        judge.check(asked, answer)

    run: Callable[[], None] = settings(
        max_examples=count or 600,
        derandomize=count is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )(given(requests_of(document, schemas))(check))
    try:
        run()
    finally:
        print(f"(kept the schema, status): {judge.statuses}")
    assert known_answers(fuzzed) == before
    assert requests.get(f"{fuzzed.url}/ping", timeout=5).status_code == 200
    assert "Traceback" not in fuzzed.log
    # Were all refused, this would show nothing.
    assert judge.statuses[True, 200] > sum(judge.statuses.values()) / 5
