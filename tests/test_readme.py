"""The README's calls are run as they stand, against a server with the demo model.

Must not know: the answers' shapes; the clients that the README uses do.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_process import ROOT, Server, Servers

README = (ROOT / "README.md").read_text(encoding="utf-8")
LOCAL = "localhost:8080"


def examples() -> Iterator[tuple[str, str]]:
    """Language and text of each code block that calls a server on this machine."""
    for language, text in re.findall(r"```(sh|python)\n(.*?)```", README, re.DOTALL):
        if LOCAL in text:
            yield language, text


@pytest.fixture(scope="module")
def demo_server(shared_server: Servers, demo_model: Path) -> Server:
    # One thread: the default, one for each core, crawls while other tests use the cores.
    return shared_server(demo_model, "--num-threads", "1")


@pytest.mark.slow
@pytest.mark.parametrize(("language", "text"), list(examples()))
def test_the_example_prints_an_answer(demo_server: Server, language: str, text: str) -> None:
    program = text.replace(LOCAL, demo_server.url.removeprefix("http://"))
    interpreter = [sys.executable, "-c"] if language == "python" else ["bash", "-euc"]
    result = subprocess.run(
        [*interpreter, program], cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.strip()) > 20
    assert '"error"' not in result.stdout


def test_there_are_examples_for_each_client() -> None:
    text = "\n".join(text for _, text in examples())
    for client in ("curl", "openai", "huggingface_hub", "boto3"):
        assert client in text


def test_files_the_readme_names_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
