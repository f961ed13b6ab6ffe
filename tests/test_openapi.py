"""The API document and its page: complete, well formed, and true of the running routes."""

import html.parser
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from flask import Flask

from container.settings import Settings
from container.web.app import create_app
from handler.openapi import Route, document
from handler.openapi_operations import OPERATIONS
from handler.runner.client import RunnerClient
from handler.schema.openai import ChatBody, CompletionBody
from handler.schema.tgi import GenerateBody, Parameters
from json_schema import Json, Schemas, unknown_keywords
from server_process import Server, Servers


def app_of(folder: Path, **settings: Any) -> Flask:
    """An application without a runner; the document needs none."""
    return create_app(settings_with(**settings), RunnerClient(f"ipc://{folder}/none"), folder)


def settings_with(**chosen: Any) -> Settings:
    return Settings(**chosen)


def document_of(app: Flask) -> Json:
    found: Json = app.test_client().get("/api-doc/openapi.json").get_json()
    return found


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Flask:
    return app_of(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def described(app: Flask) -> Json:
    return document_of(app)


@pytest.fixture(scope="module")
def running(shared_server: Servers, scripted_model: Path) -> Server:
    return shared_server(scripted_model, "--dtype", "float32")


def operations(described: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def media(described: Json) -> Iterator[tuple[str, Json]]:
    """Every content type of a body or an answer, with its description."""
    for _, _, operation in operations(described):
        for part in [operation.get("requestBody", {}), *operation["responses"].values()]:
            yield from part.get("content", {}).items()


def test_every_route_of_the_server_is_described(app: Flask, described: Json) -> None:
    routes = {
        (rule.rule.replace("<path:name>", "{name}"), method.lower())
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    assert {(path, method) for path, method, _ in operations(described)} == routes
    assert {
        ("/invocations", "post"),
        ("/ping", "get"),
        ("/ping", "post"),
        ("/info", "get"),
    } < routes


def test_the_document_has_the_form_of_openapi_3_1(described: Json) -> None:
    assert described["openapi"] == "3.1.0"
    assert set(described) == {"openapi", "info", "paths", "components"}
    assert {"title", "version"} <= set(described["info"])
    for path, method, operation in operations(described):
        assert path.startswith("/")
        allowed = {"summary", "parameters", "security", "requestBody", "responses"}
        assert set(operation) <= allowed, path
        assert method == "post" or "requestBody" not in operation
        in_path = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        assert [p["name"] for p in operation.get("parameters", [])] == in_path
        assert operation["responses"]
        for status, response in operation["responses"].items():
            assert status in ("200", "4XX", "5XX")
            assert response["description"]
            assert set(response) <= {"description", "content"}
        for needed in operation.get("security", []):
            assert set(needed) <= set(described["components"]["securitySchemes"])


def test_schemas_use_known_keywords_and_names(described: Json) -> None:
    schemas = described["components"]["schemas"]
    whole = [*schemas.values(), *(content["schema"] for _, content in media(described))]
    for schema in whole:
        assert not unknown_keywords(schema)
    used = {name for name in schemas if f'"#/components/schemas/{name}"' in json.dumps(described)}
    assert used == set(schemas)
    for reference in json.dumps(described).split('"$ref": "')[1:]:
        assert reference.partition('"')[0].removeprefix("#/components/schemas/") in schemas


def test_examples_keep_their_schemas(described: Json) -> None:
    checker = Schemas(described, ["x"])
    num_examples = 0
    for _, content in media(described):
        for example in content.get("examples", {}).values():
            num_examples += 1
            assert checker.fault(content["schema"], example["value"]) is None
    assert num_examples >= len([one for one in OPERATIONS.values() if one.bodies])


@pytest.mark.parametrize("model", [ChatBody, CompletionBody, GenerateBody, Parameters])
def test_each_field_has_a_type_and_says_what_it_accepts(described: Json, model: Any) -> None:
    schema = described["components"]["schemas"][model.__name__]
    assert set(schema["properties"]) >= set(model.model_fields)
    never_served = {"grammar", "adapter_id"}
    for name, field in schema["properties"].items():
        if name not in never_served:
            assert {"type", "anyOf", "enum", "$ref"} & set(field), name


def test_defaults_keep_their_schemas(described: Json) -> None:
    checker = Schemas(described, ["x"])
    for name, schema in described["components"]["schemas"].items():
        for field, form in schema.get("properties", {}).items():
            if "default" in form:
                assert field not in schema.get("required", [])
                assert checker.fault(form, form["default"], f"{name}.{field}") is None


def test_optional_fields_take_null_and_required_ones_do_not(described: Json) -> None:
    checker = Schemas(described, ["x"])
    chat = described["components"]["schemas"]["ChatBody"]
    body = dict.fromkeys(chat["properties"]) | {"messages": [{"role": "user", "content": "Hi"}]}
    assert checker.fault(chat, body) is None
    assert checker.fault(chat, body | {"messages": None}) is not None
    assert checker.fault(chat, body | {"temperature": 2.5}) is not None
    assert checker.fault(chat, body | {"stop": "x"}) is None
    assert checker.fault(chat, body | {"stop": 5}) is not None


def test_older_names_and_defaults_are_told(described: Json) -> None:
    fields = described["components"]["schemas"]["Parameters"]["properties"]
    assert fields["stop_sequences"] == {**fields["stop"], "deprecated": True}
    assert fields["top_p"]["default"] == 1.0
    assert "> 0.0 and <= 1.0" in fields["top_p"]["description"]
    description = described["components"]["schemas"]["CompletionBody"]["description"]
    assert "`suffix`" in description
    assert "read_completion" not in description


def test_the_document_follows_the_settings(tmp_path: Path) -> None:
    def body_of(path: str, **settings: Any) -> Any:
        operation = document_of(app_of(tmp_path, **settings))["paths"][path]["post"]
        return operation["requestBody"]["content"]["application/json"]["schema"]

    chat = {"$ref": "#/components/schemas/ChatBody"}
    assert len(body_of("/invocations")["oneOf"]) == 3
    assert body_of("/invocations", messages_api_enabled=True) == chat
    assert body_of("/talk/here", oai_chat_route="/talk/here") == chat


def test_an_operation_that_nobody_described_is_an_error() -> None:
    with pytest.raises(KeyError):
        document([Route("GET", "/new", "new")], "0")


class Links(html.parser.HTMLParser):
    """Collects what a page loads, links to, and calls its parts; notices an unclosed text."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.ids: set[str] = set()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.targets |= {value or "" for name, value in attrs if name in ("href", "src")}
        self.ids |= {value or "" for name, value in attrs if name == "id"}


def test_the_page_lists_all_and_loads_nothing(app: Flask, described: Json) -> None:
    answer = app.test_client().get("/docs")
    assert answer.status_code == 200
    assert answer.content_type == "text/html; charset=utf-8"
    page = Links()
    page.feed(answer.text)
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert all(target.startswith("#") or "//" not in target for target in page.targets)
    linked = {target[1:] for target in page.targets if target.startswith("#")}
    assert {"ChatBody", "GenerateAnswer", "Parameters", "TgiError"} <= linked <= page.ids
    for path, method, _ in operations(described):
        assert f"<code>{method.upper()} {path}</code>" in answer.text
    for name, schema in described["components"]["schemas"].items():
        assert name in page.ids
        for field in schema.get("properties", {}):
            assert f"<code>{field}</code>" in answer.text
    assert "What is deep learning?" in answer.text
    assert len(answer.data) < 200_000


def test_answers_to_the_examples_are_as_described(running: Server) -> None:
    described = requests.get(f"{running.url}/api-doc/openapi.json", timeout=30).json()
    checker = Schemas(described, ["x"])
    for path, method, operation in operations(described):
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        for example in body.get("examples", {"none": {}}).values():
            url = running.url + path.replace("{name}", "scripted")
            answer = requests.request(method, url, json=example.get("value"), timeout=60)
            status = "200" if answer.status_code == 200 else f"{answer.status_code // 100}XX"
            content = operation["responses"][status].get("content", {})
            if not content:
                assert answer.content == b""
                continue
            kind = answer.headers["Content-Type"].partition(";")[0]
            assert kind in content
            if kind == "application/json":
                assert checker.fault(content[kind]["schema"], answer.json()) is None
            if body:
                assert answer.status_code == 200, answer.text
