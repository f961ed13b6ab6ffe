"""docs/compatibility.md says of every field what the code does, and nothing of fields it has not.

Must not know: the answers; what a served field does is tested where it is done.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from container.settings import Settings
from container.web.app import create_app
from container.web.stream import SILENCE_S
from handler.contract import ApiError
from handler.generate import ADMITTED_NEW_TOKENS, SEED_BITS
from handler.runner.client import RunnerClient
from handler.schema.openai import (
    MAX_CHOICES,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    NOT_SERVED,
    NOT_SERVED_IN_CHAT,
    ChatBody,
    CompletionBody,
    GenerationFields,
    read_chat,
    read_completion,
)
from handler.schema.tgi import GenerateBody, Parameters, TokenizeBody, read_generate
from handler.schema.validation import read
from handler.schema.vllm import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from handler.served_model import ServingLimits
from server_process import ROOT

DOCUMENT = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
BOTH = "Fields of chat and completions"
CHAT = "Fields of chat only"
COMPLETIONS = "Fields of completions only"
TGI = "Parameters of TGI's routes"
TOKENISING = "Fields of tokenising"
FIELD_SECTIONS = (BOTH, CHAT, COMPLETIONS, TGI, TOKENISING)
OTHER_VERDICTS = {
    "Headers": {"read", "sent", "not looked at"},
    "Routes": {"served", "404 JSON"},
}
BAD_VALUES = ("no such value", 1.5, {"no such key": {}}, True)
"""Of these every field that is served refuses one at least."""
REFUSED_VALUE = "x"
ALLOWED_ELSEWHERE = {"modalities"}
"""Refused by a rule of its own, and not by the lists of fields that are not served."""


@dataclass(frozen=True)
class Row:
    """One name of a table's first column, with the first word of its last."""

    section: str
    name: str
    verdict: str


def _sections() -> Iterator[tuple[str, str]]:
    for part in DOCUMENT.split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        yield title, text


def _rows(section: str, text: str) -> Iterator[Row]:
    table = [line for line in text.splitlines() if line.startswith("|")]
    for line in table[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`([^`]+)`", cells[0]):
            yield Row(section, name, cells[-1].partition(":")[0])


ROWS = [row for title, text in _sections() for row in _rows(title, text)]
FIELD_ROWS = [row for row in ROWS if row.section in FIELD_SECTIONS]


def _listed(section: str, *verdicts: str) -> set[str]:
    return {row.name for row in ROWS if row.section == section and row.verdict in verdicts}


def _chat(**fields: Any) -> Any:
    return read_chat({"messages": [{"role": "user", "content": "hi"}], **fields})


def _completion(**fields: Any) -> Any:
    return read_completion({"prompt": "hi", **fields})


def _generate(**fields: Any) -> Any:
    body: dict[str, Any] = {"inputs": "hi", "parameters": {}}
    for name, value in fields.items():
        (body if name in GenerateBody.model_fields else body["parameters"])[name] = value
    return read_generate(body, ServingLimits(), stream=None)


def _tokenise(**fields: Any) -> Any:
    if "messages" in fields:
        return read_chat(fields)
    if "inputs" in fields:
        return read(TokenizeBody, fields, "tgi")
    if "tokens" in fields:
        return read(DetokenizeBody, fields, "openai")
    return read(TokenizeTextBody, {"prompt": "hi", **fields}, "openai")


READERS: dict[str, list[Callable[..., Any]]] = {
    BOTH: [_chat, _completion],
    CHAT: [_chat],
    COMPLETIONS: [_completion],
    TGI: [_generate],
    TOKENISING: [_tokenise],
}


def _error(reader: Callable[..., Any], name: str, value: Any) -> ApiError | None:
    try:
        reader(**{name: value})
    except ApiError as error:
        return error
    return None


def of(*verdicts: str) -> Any:
    """Parametrise by the rows of fields with one of these verdicts."""
    rows = [row for row in FIELD_ROWS if row.verdict in verdicts]
    return pytest.mark.parametrize("row", rows, ids=lambda row: f"{row.section[10:16]}-{row.name}")


def test_every_row_says_one_of_the_words() -> None:
    for row in FIELD_ROWS:
        assert row.verdict in ("served", "refused", "accepted", "ignored"), row
    for row in ROWS:
        assert row.verdict in OTHER_VERDICTS.get(row.section, {row.verdict}), row
    for section in FIELD_SECTIONS:
        names = [row.name for row in FIELD_ROWS if row.section == section]
        assert len(names) == len(set(names)), f"{section} has a field twice"


def test_every_line_of_a_table_has_five_cells() -> None:
    for line in DOCUMENT.splitlines():
        if line.startswith("|"):
            assert line.count("|") == 6, line


def test_every_field_of_the_schemas_is_listed_and_every_listed_one_exists() -> None:
    shared = set(GenerationFields.model_fields)
    schemas = {
        BOTH: shared,
        CHAT: set(ChatBody.model_fields) - shared,
        COMPLETIONS: set(CompletionBody.model_fields) - shared,
        TGI: set(Parameters.model_fields) | set(GenerateBody.model_fields),
        TOKENISING: {"messages"}.union(
            set(TokenizeChatBody.model_fields) - set(ChatBody.model_fields),
            *(body.model_fields for body in (TokenizeBody, TokenizeTextBody, DetokenizeBody)),
        ),
    }
    for section, fields in schemas.items():
        assert fields - _listed(section, "served", "refused") == set(), section
        assert _listed(section, "served") - fields == set(), section


def test_every_field_that_is_not_served_is_listed_as_refused() -> None:
    assert _listed(BOTH, "refused") - ALLOWED_ELSEWHERE == set(NOT_SERVED)
    assert _listed(CHAT, "refused") == set(NOT_SERVED_IN_CHAT)


@of("served")
def test_a_served_field_is_read(row: Row) -> None:
    for reader in READERS[row.section]:
        errors = [_error(reader, row.name, value) for value in BAD_VALUES]
        assert any(error is not None and error.param == row.name for error in errors), row


@of("refused")
def test_a_refused_field_is_refused_by_name(row: Row) -> None:
    for reader in READERS[row.section]:
        error = _error(reader, row.name, REFUSED_VALUE)
        assert error is not None, row
        assert error.param == row.name
        assert f"`{row.name}`" in error.message
        assert error.status == (422 if row.section == TGI else 400)


@of("accepted", "ignored")
def test_a_field_that_is_not_looked_at_changes_nothing(row: Row) -> None:
    for reader in READERS[row.section]:
        for value in BAD_VALUES:
            assert reader(**{row.name: value}) == reader()


def test_the_routes_are_those_of_the_application(tmp_path: Path) -> None:
    app = create_app(Settings(), RunnerClient(f"ipc://{tmp_path}/runner"), tmp_path)
    routes = {
        f"{method} {rule.rule}"
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    assert _listed("Routes", "served") == routes


def test_the_numbers_are_those_of_the_code() -> None:
    settings = Settings()
    for sentence in (
        f"string or up to {MAX_STOPS} of up to {MAX_STOP_LENGTH:,} characters",
        f"served: 1 to {MAX_CHOICES}, greedy too",
        f"served: 0 to {MAX_TOP_LOGPROBS}, of the raw model",
        f"up to `max_client_batch_size` ({settings.max_client_batch_size}) prompts",
        f"1 to `max_best_of` ({settings.max_best_of})",
        f"up to `max_stop_sequences` ({settings.max_stop_sequences})",
        f"up to `max_top_n_tokens` ({settings.max_top_n_tokens})",
        f"only the first {ADMITTED_NEW_TOKENS:,} must fit",
        f"one that is drawn here has {SEED_BITS} bits",
        f"413 JSON above {settings.payload_limit // 2**20} MiB",
        f"the comment `:` after {SILENCE_S:.0f} s |\n",
        f"drained within {settings.graceful_timeout_s} s",
        f"default {CompletionBody.model_fields['max_tokens'].default}; 0 is accepted",
    ):
        assert sentence in DOCUMENT


def test_the_headers_are_in_the_source() -> None:
    source = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "container" / "web").glob("*.py")
    ).lower()
    for name in _listed("Headers", "read", "sent"):
        assert f'"{name.lower()}"' in source, name
    for name in _listed("Headers", "not looked at"):
        assert f'"{name.lower()}"' not in source, name
