"""JSON Schema as far as the API document uses it: what breaks a schema, and values that keep it.

Must not know: which schemas there are, the product.
"""

import itertools
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]
KEYWORDS = {
    *("$ref", "anyOf", "oneOf", "const", "enum", "type", "properties", "required", "items"),
    *("additionalProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "maxLength", "minItems", "maxItems"),
    *("title", "description", "default", "deprecated"),
}
"""All that is understood here; `unknown_keywords` finds what is not."""
_KINDS: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}
_TEXTS = st.text(max_size=30)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=5,
)


class Schemas:
    """The schemas of one document."""

    def __init__(self, document: Json, texts: list[str]) -> None:
        """`texts` are strings that values should hold often."""
        self._named: Json = document["components"]["schemas"]
        self._texts = st.sampled_from(texts) | st.sampled_from(texts) | _TEXTS

    def resolved(self, schema: Json) -> Json:
        """The schema that a reference means."""
        while "$ref" in schema:
            prefix, _, name = schema["$ref"].rpartition("/")
            assert prefix == "#/components/schemas"
            schema = self._named[name]
        return schema

    def fault(self, schema: Json, value: Any, where: str = "$") -> str | None:
        """What of `value` breaks the schema; None where nothing does."""
        schema = self.resolved(schema)
        for key in ("anyOf", "oneOf"):
            faults = [self.fault(choice, value, where) for choice in schema.get(key, [])]
            if faults and None not in faults:
                return f"{where}: none of {faults}"
        if value not in schema.get("enum", [value]) or value != schema.get("const", value):
            return f"{where}: {value!r} is not one of those allowed"
        kinds = schema.get("type", list(_KINDS))
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if type(value) not in [cls for kind in kinds for cls in _KINDS[kind]]:
            return f"{where}: {value!r} is not {kinds}"
        if isinstance(value, (int, float)) and not _in_range(schema, value):
            return f"{where}: {value} is out of range"
        return self._inner_fault(schema, value, where)

    def _inner_fault(self, schema: Json, value: Any, where: str) -> str | None:
        if isinstance(value, list) and "items" in schema:
            inner = [
                self.fault(schema["items"], item, f"{where}[{at}]") for at, item in enumerate(value)
            ]
            return next(filter(None, inner), None)
        if isinstance(value, dict):
            missing = [name for name in schema.get("required", []) if name not in value]
            if missing:
                return f"{where}: {missing} missing in {list(value)}"
            known = schema.get("properties", {})
            inner = [
                self.fault(known[name], item, f"{where}.{name}")
                for name, item in value.items()
                if name in known
            ]
            return next(filter(None, inner), None)
        return None

    def values(self, schema: Json) -> st.SearchStrategy[Any]:
        """Values that keep the schema."""
        schema = self.resolved(schema)
        choices = schema.get("anyOf") or schema.get("oneOf")
        if choices:
            return st.one_of([self.values(choice) for choice in choices])
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        kinds = schema.get("type")
        if kinds is None:
            return ANYTHING
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return st.one_of([self._of_kind(kind, schema) for kind in kinds])

    def _of_kind(self, kind: str, schema: Json) -> st.SearchStrategy[Any]:
        if kind == "null":
            return st.none()
        if kind == "boolean":
            return st.booleans()
        if kind in ("integer", "number"):
            return _numbers(kind, schema)
        if kind == "string":
            shortest = schema.get("minLength", 0)
            return self._texts.filter(lambda text: len(text) >= shortest)
        if kind == "array":
            longest = min(schema.get("maxItems", 4), 4)
            items = self.values(schema.get("items", {}))
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=longest)
        return self._objects(schema)

    def _objects(self, schema: Json) -> st.SearchStrategy[Json]:
        fields = {name: self.values(form) for name, form in schema.get("properties", {}).items()}
        if not fields:
            further = schema.get("additionalProperties")
            values = self.values(further) if isinstance(further, dict) else ANYTHING
            keys = st.integers(0, 300).map(str) | _TEXTS
            return st.dictionaries(keys, values, max_size=3)
        required = schema.get("required", [])
        optional = sorted(set(fields) - set(required))
        chosen: st.SearchStrategy[list[str]] = st.just([])
        if optional:
            chosen = st.lists(st.sampled_from(optional), unique=True, max_size=6)
        return chosen.flatmap(
            lambda names: st.fixed_dictionaries(
                {name: fields[name] for name in [*required, *names]}
            )
        )


def _numbers(kind: str, schema: Json) -> st.SearchStrategy[Any]:
    low, high = schema.get("minimum"), schema.get("maximum")
    over, under = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if kind == "integer":
        low = over + 1 if over is not None else low
        high = under - 1 if under is not None else high
        # Without a limit here there is one that depends on the model, as that of token ids.
        return st.integers(low, high) if high is not None else st.integers(low, (low or 0) + 200)
    return st.floats(
        low if over is None else over,
        high if under is None else under,
        exclude_min=over is not None,
        exclude_max=under is not None,
        allow_nan=False,
        allow_infinity=False,
    )


def _in_range(schema: Json, value: float) -> bool:
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and schema.get("exclusiveMinimum", value - 1) < value
        and value < schema.get("exclusiveMaximum", value + 1)
    )


def unknown_keywords(schema: Json) -> set[str]:
    """Keywords of a schema and the schemas within it that this module does not understand."""
    inner = [
        *schema.get("anyOf", []),
        *schema.get("oneOf", []),
        *schema.get("properties", {}).values(),
        *(
            schema[key]
            for key in ("items", "additionalProperties")
            if type(schema.get(key)) is dict
        ),
    ]
    return set(schema) - KEYWORDS | set(itertools.chain(*map(unknown_keywords, inner)))
