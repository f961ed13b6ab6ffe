"""The shape of the house, read from the source: who may import whom, and what each room may know.

Must not know: what any of it does.
"""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = ("container", "handler")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
SOURCES = [
    *MODULES.values(),
    *sorted((ROOT / "scripts").glob("*.py")),
    *sorted((ROOT / "tests").glob("*.py")),
    *(path for path in [ROOT / "serve"] if path.exists()),
]

RUNNER_DOORS = {
    "handler.runner",
    "handler.runner.protocol",
    "handler.runner.client",
    "handler.runner.config",
    "handler.runner.logging_setup",  # one form of log line for both processes
}
"""All of the runner that the rest of the house may import; none of it imports torch."""

POLICY = {"handler.runner.scheduler", "handler.runner.sequence", "handler.runner.kv_cache"}
"""Pure Python, so that it is tested in milliseconds."""

MAX_LINES = 400
LONG_FILES: dict[str, int] = {}
"""Files that may be longer, with their own limit and a reason beside each."""

ENVIRONMENT_READERS = {"container.settings"}
ZMQ_USERS = {"handler.runner.client", "handler.runner.process"}


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed source of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(module: str) -> set[str]:
    """Every module that `module` imports, lazily or not, as written or as resolved."""
    path = MODULES[module]
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; write the whole name"
            origin = node.module or ""
            for alias in node.names:
                whole = f"{origin}.{alias.name}"
                found.add(whole if whole in MODULES else origin)
    return found


def own_imports_of(module: str) -> set[str]:
    """Those of `imports_of` that are ours."""
    return {name for name in imports_of(module) if name in MODULES}


def uses(module: str, *libraries: str) -> set[str]:
    """Which of `libraries` the module imports."""
    return {name.split(".")[0] for name in imports_of(module)} & set(libraries)


def may_import(module: str, target: str) -> bool:
    """Whether the arrow from `module` to `target` runs downward."""
    if module.startswith("handler.runner"):
        return target.startswith("handler.runner")
    if target.startswith("handler.runner"):
        return target in RUNNER_DOORS
    if module.startswith("handler"):
        return target.startswith("handler")
    return module.startswith("container.web") or not target.startswith("container.web")


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downward(module: str) -> None:
    upward = {target for target in own_imports_of(module) if not may_import(module, target)}
    assert not upward, f"{module} must not import {sorted(upward)}"


def test_no_import_circle() -> None:
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module in done:
            return
        for target in sorted(own_imports_of(module)):
            visit(target, (*trail, module))
        done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", MODULES)
def test_each_room_knows_only_its_own_libraries(module: str) -> None:
    in_runner = module.startswith("handler.runner") and module not in RUNNER_DOORS | POLICY
    if not in_runner:
        assert not uses(module, "torch", "transformers", "safetensors", "numpy")
    if not module.startswith("container"):
        assert not uses(module, "flask", "gunicorn", "werkzeug")
    if not module.startswith("container") and module != "handler.runner.client":
        assert not uses(module, "gevent")
    if module not in ZMQ_USERS:
        assert not uses(module, "zmq"), "only the two ends of the socket import zmq"
    assert not uses(module, "pickle", "marshal", "shelve")


def environment_uses(tree: ast.Module) -> Iterator[int]:
    """Line numbers where the process environment is touched."""
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "os" and node.attr in names:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in names)


@pytest.mark.parametrize("module", [name for name in MODULES if name not in ENVIRONMENT_READERS])
def test_the_environment_is_read_in_one_place(module: str) -> None:
    lines = list(environment_uses(tree_of(MODULES[module])))
    assert not lines, f"{module} touches os.environ in lines {lines}"


@pytest.mark.parametrize("door", ["container.web.app", *sorted(RUNNER_DOORS)])
def test_a_worker_loads_no_torch(door: str) -> None:
    program = (
        f"import sys, {door}\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {sorted(heavy)}' if heavy else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_file_says_what_it_is_for_and_is_short(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    assert ast.get_docstring(tree_of(path)), f"{name} opens without a docstring"
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= LONG_FILES.get(name, MAX_LINES), f"{name} has {num_lines} lines"
    assert path.stem not in {"utils", "util", "helpers", "misc", "common"}


def test_every_package_is_declared() -> None:
    declared = PYPROJECT["tool"]["setuptools"]["packages"]
    present = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert set(declared) == present


def test_the_document_lists_every_module() -> None:
    spec = importlib.util.spec_from_file_location("table", ROOT / "scripts" / "module_table.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    document = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert program.updated(document) == document, "run: make docs"


def test_every_library_is_declared() -> None:
    project = PYPROJECT["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["cpu"]
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in requirements}
    brought_along = {"zmq": "pyzmq", "werkzeug": "flask", "pydantic_core": "pydantic"}
    for module in MODULES:
        for name in {name.split(".")[0] for name in imports_of(module)}:
            if name not in {*sys.stdlib_module_names, *PACKAGES}:
                assert brought_along.get(name, name) in declared, f"{module} imports {name}"


def test_this_test_sees_an_environment_read() -> None:
    assert list(environment_uses(ast.parse("import os\nx = os.environ['A']"))) == [2]
    assert list(environment_uses(ast.parse("from os import getenv"))) == [1]
    assert not list(environment_uses(ast.parse("import os\nx = os.path.sep")))
