"""Each program in examples/ runs as it stands and prints what it promises.

Must not know: the words of the answers; the model is a scripted one.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

import scripted_model as scripted
from server_process import ROOT, Server, Servers

EXAMPLES = sorted((ROOT / "examples").iterdir())
PRINTS = {
    "boto3_invoke.py": ("Chat: .", "Text: .", "Refused, .*400"),
    "curl.sh": ("200", r'"chat.completion"', r"data: \[DONE\]", r'"generated_text"', r'"start":0'),
    "huggingface_hub_client.py": ("Chat: .", "Text: .", "with seed 1", "Token by token", "after '"),
    "openai_async.py": (r"(.+ -> .*\n){4}",),
    "openai_stream.py": (
        "Ended by: (stop|length)",
        "Usage: .*completion_tokens=[1-9]",
        "Mean .*-?0",
    ),
    "openai_sync.py": ("Model: .", "Chat: .", "Completion: .", "Refused, .*messages"),
    "requests_sse.py": ("OpenAI's shape: .", "The whole: .", "Refused, .*`inputs` cannot be empty"),
}


TRIGGER = scripted.trigger("long")


@pytest.fixture(scope="module")
def talkative_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scripted model that has something to say after any prompt: the trigger ends every one."""
    folder = scripted.build(tmp_path_factory.mktemp("models") / "talkative")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {TRIGGER}", special_tokens=[(TRIGGER, tokenizer.token_to_id(TRIGGER))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    template = scripted.CHAT_TEMPLATE.replace("{{ messages[-1].content }}", TRIGGER)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def example_server(shared_server: Servers, talkative_model: Path) -> Server:
    return shared_server(talkative_model, "--num-threads", "1")


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_example_runs(example_server: Server, example: Path) -> None:
    interpreter = [sys.executable] if example.suffix == ".py" else ["bash"]
    result = subprocess.run(
        [*interpreter, str(example), example_server.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for pattern in PRINTS[example.name]:
        assert re.search(pattern, result.stdout), f"{pattern} not in:\n{result.stdout}"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_example_says_how_it_is_started(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    assert f"examples/{example.name} [BASE_URL]" in text
    assert "http://localhost:8080" in text
