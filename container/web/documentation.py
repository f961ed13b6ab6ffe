"""`/api-doc/openapi.json` and `/docs`: the routes of this server, for programs and for people.

The page needs nothing from elsewhere, since many containers have no internet. Must not know: what
routes mean (the document says), the model.
"""

import json
import re
from functools import cache
from typing import Any

from flask import Flask, Response, render_template_string

from container.version import version
from container.web.answer import json_response
from handler.openapi import Route, document

_PARAMETER = re.compile(r"<(?:\w+:)?(\w+)>")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_PAGE = """<!doctype html>
{% macro linked(words) %}{% for word in words.split() %}
{% if word in components.schemas %}<a href="#{{ word }}">{{ word }}</a>
{% else %}{{ word }}{% endif %}{% endfor %}{% endmacro %}
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ info.title }} {{ info.version }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 14px/1.4 ui-monospace, monospace; background: #8882; border-radius: 3px }
pre { padding: .6rem; overflow-x: auto }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0;
  border-bottom: 1px solid #8884 }
</style>
<h1>{{ info.title }} {{ info.version }}</h1>
<p>{{ info.description }}</p>
<p>For programs: <a href="api-doc/openapi.json">api-doc/openapi.json</a> (OpenAPI 3.1).</p>
<h2>Routes</h2>
{% for path, methods in paths.items() %}{% for method, operation in methods.items() %}
<h3><code>{{ method.upper() }} {{ path }}</code></h3>
<p>{{ operation.summary }}</p>
<ul>
{% if operation.requestBody %}
<li>Body: {{ linked(operation.requestBody | contents) }}</li>
{% endif %}
{% for status, response in operation.responses.items() %}
<li>{{ status }}: {{ response.description }} {{ linked(response | contents) }}</li>
{% endfor %}
</ul>
{% for example in (operation.requestBody | examples) %}
<pre>curl -s http://HOST:PORT{{ path }} -H 'Content-Type: application/json' \\
  -d '{{ example }}'</pre>
{% endfor %}
{% endfor %}{% endfor %}
<h2>Bodies and answers</h2>
{% for name, schema in components.schemas.items() %}
<h3 id="{{ name }}">{{ name }}</h3>
{% if schema.description %}<p>{{ schema.description }}</p>{% endif %}
{% if schema.properties %}
<table>
<tr><th>Field<th>Type<th>Default<th>
{% for field, form in schema.properties.items() %}
<tr><td><code>{{ field }}</code>
<td>{{ linked(form | type) }}
<td>{% if field in schema.required %}required{% elif form.default is not none
  and form.default is defined %}<code>{{ form.default | json }}</code>{% endif %}
<td>{{ form.description }}{% if form.deprecated %} Older name.{% endif %}
{% endfor %}
</table>
{% else %}
<p>{{ linked(schema | type) }}</p>
{% endif %}
{% endfor %}
</html>
"""


def register(app: Flask) -> None:
    """Add both routes. Call it last: what is described are the routes that the app has."""

    @cache
    def described() -> dict[str, Any]:
        return document(_routes(app), version())

    @app.get("/api-doc/openapi.json")
    def openapi() -> Response:
        return json_response(described())

    @app.get("/docs")
    def docs() -> Response:
        headers = {"Content-Security-Policy": _POLICY}
        return Response(render_template_string(_PAGE, **described()), 200, headers)

    app.jinja_env.filters |= {
        "contents": _contents,
        "examples": _examples,
        "type": _type,
        "json": _json,
    }


def _routes(app: Flask) -> list[Route]:
    """The first word of an endpoint's name is the operation."""
    return [
        Route(method, _PARAMETER.sub(r"{\1}", rule.rule), rule.endpoint.split()[0])
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _examples(body: Any) -> list[str]:
    """Examples of a request body as text that can stand between single quotes."""
    content = body["content"]["application/json"] if body else {}
    examples = content.get("examples", {}).values()
    return [_json(example["value"]).replace("'", "\\u0027") for example in examples]


def _contents(body: Any) -> str:
    """The schemas that a body or an answer may have, in words."""
    schemas = [media["schema"] for media in body.get("content", {}).values()]
    return " or ".join(_type(schema) for schema in schemas)


def _type(schema: dict[str, Any]) -> str:
    """A schema in words; a named one as its name."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/")[-1]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type(choice) for choice in schema[key]))
    if "const" in schema or "enum" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return " or ".join(_json(value) for value in values)
    kinds = schema.get("type", "anything")
    words = [kinds] if isinstance(kinds, str) else kinds
    items = f" of {_type(schema['items'])}" if "items" in schema else ""
    return " or ".join(word + items if word == "array" else word for word in words)
