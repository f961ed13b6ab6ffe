"""Log lines: both formats, levels, request ids. Must not know: other processes."""

import json
import logging
import re
from collections.abc import Iterator

import pytest

from container import logs


class Log:
    """What was written to stderr since the last look."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def text(self) -> str:
        return self._capsys.readouterr().err


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Iterator[Log]:
    """The log of this process; logging is put back afterwards."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in ("container", "handler", "__main__")}
    yield Log(capsys)
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_text(log: Log) -> None:
    logs.configure("info", "text", "web")
    logging.getLogger("container.web").info("%d done", 3, extra={"fields": {"status": 200}})
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO web: 3 done status=200\n", log.text()
    )


def test_json_is_one_object_on_one_line(log: Log) -> None:
    logs.configure("info", "json", "runner")
    logging.getLogger("handler.runner").warning("a\nb é", extra={"fields": {"n": 1, "level": 2}})
    (line,) = log.text().splitlines()
    record = json.loads(line)
    assert record.pop("timestamp").endswith("Z")
    assert record == {
        "level": "warning",
        "process": "runner",
        "logger": "handler.runner",
        "message": "a\nb é",
        "n": 1,
    }


@pytest.mark.parametrize("fmt", ["text", "json"])
def test_a_line_carries_the_id_of_its_request(log: Log, fmt: str) -> None:
    logs.configure("info", fmt, "web")
    token = logs.request_id.set("r-1")
    logging.getLogger("container").info("inside")
    logs.request_id.reset(token)
    logging.getLogger("container").info("outside")
    inside, outside = log.text().splitlines()
    assert ("request_id=r-1" if fmt == "text" else '"request_id": "r-1"') in inside
    assert "r-1" not in outside


def test_level_is_ours_and_libraries_only_warn(log: Log) -> None:
    logs.configure("debug", "text", "web")
    logging.getLogger("container.x").debug("ours")
    logging.getLogger("urllib3").info("theirs")
    logging.getLogger("urllib3").warning("their warning")
    text = log.text()
    assert "ours" in text
    assert "theirs" not in text
    assert "their warning" in text
    logs.configure("error", "text", "web")
    logging.getLogger("container.x").warning("not now")
    assert "not now" not in log.text()


@pytest.mark.parametrize("fmt", ["text", "json"])
def test_a_traceback_comes_with_its_line(log: Log, fmt: str) -> None:
    logs.configure("info", fmt, "web")
    try:
        raise RuntimeError("the cause")
    except RuntimeError:
        logging.getLogger("container").exception("failed")
    text = log.text()
    assert "RuntimeError: the cause" in text
    if fmt == "json":
        assert "the cause" in json.loads(text)["exception"]


def test_configuring_again_does_not_write_twice(log: Log) -> None:
    logs.configure("info", "text", "web")
    logs.configure("info", "text", "web")
    logging.getLogger("container").info("once")
    assert log.text().count("once") == 1
