"""The jinja2 environment that chat templates run in: transformers' options, functions and filters.

It is jinja2's immutable sandbox with bounds on what one operation may build and how long a
rendering may take, because a template is code from whoever uploaded the weights.

Must not know: messages, which templates there are.
"""

import json
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_OUTPUT_CHARACTERS = 64 * 1024 * 1024
"""More than any context holds; a template that writes more is broken or hostile."""
MAX_INTEGER_BITS = 4096
MAX_RENDER_S = 10.0
"""A conversation that fills any context takes a fraction of it, on a busy machine too."""
TIMED = "timed loop"
"""Name of a filter that no template can write."""


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` only marks words for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


_DEADLINE: ContextVar[float] = ContextVar("deadline", default=float("inf"))


def start_clock() -> None:
    """Call before rendering: what this context renders must end within MAX_RENDER_S."""
    _DEADLINE.set(time.monotonic() + MAX_RENDER_S)


def _check_time() -> None:
    if time.monotonic() > _DEADLINE.get():
        raise SecurityError(f"it ran for more than {MAX_RENDER_S} seconds")


def _timed(items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, for as long as the template may run."""
    for item in items:
        _check_time()
        yield item


class _TimedLoops(CodeGenerator):
    """Compiles each loop so that it looks at the clock."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        for loop in list(node.find_all(nodes.For)):
            timed = nodes.Filter(loop.iter, TIMED, [], [], None, None, lineno=loop.lineno)
            loop.iter = timed.set_environment(self.environment)
        super().visit_Template(node, frame)


class _Sandbox(ImmutableSandboxedEnvironment):
    """transformers' options, and bounds on what an operation may build and how long all may take.

    Time can be lost in loops and in macros that call themselves; both look at the clock.
    """

    code_generator_class = _TimedLoops
    intercepted_binops = frozenset(["*", "**", "+"])

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        return super().call(context, callee, *args, **kwargs)

    def call_binop(self, _: Context, operator_: str, left: Any, right: Any) -> Any:
        size = _result_size(operator_, left, right)
        if size > MAX_OUTPUT_CHARACTERS:
            raise SecurityError(f"`{operator_}` would build a value of {size} elements")
        return _OPERATORS[operator_](left, right)


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "*": operator.mul,
    "**": operator.pow,
    "+": operator.add,
}


def _result_size(operator_: str, left: Any, right: Any) -> int:
    if operator_ == "**":
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0)
            return MAX_OUTPUT_CHARACTERS + bits if bits > MAX_INTEGER_BITS else 0
        return 0
    sizes = [len(side) for side in (left, right) if isinstance(side, (str, list, tuple))]
    if operator_ == "+":
        return sum(sizes)
    times = [side for side in (left, right) if isinstance(side, int)]
    return sizes[0] * times[0] if sizes and times else 0


class _PlainDict:
    """`dict(…)` and `dict.fromkeys` for templates, without the class itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _PlainNamespace(Namespace):
    """`namespace(…)` that holds no underscore names, the way out of a sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=…)` works
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot store the underscore name {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)  # noqa: DTZ005 - local and naive, as in transformers


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters[TIMED] = _timed
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _PlainDict()
    environment.globals["namespace"] = _PlainNamespace
    return environment


_ENVIRONMENT = _environment()


@lru_cache(maxsize=64)
def compiled(source: str) -> Template:
    """The template, compiled once. Raises jinja2's TemplateSyntaxError."""
    return _ENVIRONMENT.from_string(source)
