"""Fixtures every test may use: models that exist as files, and the server as a real process.

Must not know: the inside of the product.
"""

import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

import scripted_model as scripted
from server_process import ROOT, Server, Servers

DEMO_MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers are `scripted_model.SCRIPTS`; byte-level tokenizer."""
    return scripted.build(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture(scope="session")
def scripted_bos_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same; its tokenizer puts BOS before a text on its own."""
    return scripted.build(tmp_path_factory.mktemp("models") / "scripted-bos", add_bos=True)


@pytest.fixture(scope="session")
def metaspace_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a SentencePiece-like tokenizer and `METASPACE_SCRIPTS`."""
    return scripted.build(tmp_path_factory.mktemp("models") / "metaspace", kind="metaspace")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct; `make test` has brought it, a bare pytest brings it if it can."""
    if not (DEMO_MODEL / "config.json").is_file():
        script = ROOT / "scripts" / "demo_model.py"
        made = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=False
        )
        if made.returncode != 0:
            pytest.skip(f"the demo model cannot be had: {made.stderr.strip().splitlines()[-1]}")
    return DEMO_MODEL


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Servers]:
    """Servers for one test: `server(folder, "--flag", "value")` is a running one."""
    servers = Servers(tmp_path)
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The same for a module-scoped fixture, whose server all tests of a module share."""
    servers = Servers(tmp_path_factory.mktemp("logs"))
    yield servers
    servers.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--fuzz-examples`: how many requests test_fuzz.py makes up."""
    parser.addoption("--fuzz-examples", type=int, help="requests that test_fuzz.py makes up")


def pytest_configure() -> None:
    """Tiny models gain nothing from more threads, and these crawl while something else runs."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failed test's report the log of each server it was given."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            servers = value.started if isinstance(value, Servers) else [value]
            for server in servers:
                if isinstance(server, Server):
                    lines = server.log.splitlines()[-40:]
                    report.sections.append((f"end of the log of {server.url}", "\n".join(lines)))
    return report
