"""How a value that a person wrote (on the command line, in an environment variable) is read.

A `Kind` turns text into a value and says in words what it accepts, so that one sentence can refuse
anything else. A reader raises `ValueError` for text it does not accept.

Must not know: which options exist, where the text came from.
"""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}
_TAKEN_ROUTES = (
    "/ping",
    "/health",
    "/info",
    "/metrics",
    "/v1/models",
    "/tokenize",
    "/chat_tokenize",
    "/detokenize",
)
"""Routes that answer something which a chat cannot stand in for."""
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class Kind:
    """`read` raises ValueError for what it does not accept; `accepts` completes "it takes …"."""

    read: Callable[[str], Any]
    accepts: str
    is_switch: bool = False
    """Whether the bare flag, without a value, means true."""


def boolean(text: str) -> bool:
    """Read true/false, 1/0, yes/no in any case."""
    try:
        return _BOOLEANS[text.lower()]
    except KeyError:
        raise ValueError(text) from None


BOOLEAN = Kind(boolean, "true or false (also 1/0, yes/no)", is_switch=True)
TEXT = Kind(str, "any text")


def integer(minimum: int, maximum: int | None = None) -> Kind:
    """Whole numbers within bounds (both included)."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise ValueError(text)
        value = int(text)
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(text)
        return value

    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return Kind(read, f"a whole number {bounds}")


def fraction() -> Kind:
    """A share: above 0, at most 1."""

    def read(text: str) -> float:
        value = float(text)
        if not 0.0 < value <= 1.0:
            raise ValueError(text)
        return value

    return Kind(read, "a number above 0 and at most 1")


def choice(*names: str) -> Kind:
    """One of a few words, in any case."""

    def read(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(text)
        return text.lower()

    return Kind(read, f"{', '.join(names[:-1])} or {names[-1]}")


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError(text)
    size_bytes = int(float(match[1]) * _SIZE_UNITS[match[2]])
    if size_bytes < 1:
        raise ValueError(text)
    return size_bytes


SIZE = Kind(_size, "a number of bytes above 0, or a size such as 512MB or 4GiB")


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text.lower()):
        raise ValueError(text)
    return text.lower()


DEVICE = Kind(_device, "auto, cpu, cuda or cuda:N")


def _host(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", text):
            raise ValueError(text) from None
        return text


HOST = Kind(_host, "an IP address or a host name of this machine")


def _route(text: str) -> str:
    if not re.fullmatch(r"/[A-Za-z0-9._~:@+,/-]*", text) or "//" in text:
        raise ValueError(text)
    path = text.rstrip("/") or "/"
    if path in _TAKEN_ROUTES:
        raise ValueError(text)
    return path


ROUTE = Kind(
    _route,
    'a path that begins with "/" (such as /invocations) and is none of ' + ", ".join(_TAKEN_ROUTES),
)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ValueError(text)
    return names


NAMES = Kind(_names, "a value or a list of values separated by commas")


def _log_level(text: str) -> str:
    """Names in any case, and Python's numbers (SAGEMAKER_CONTAINER_LOG_LEVEL=20)."""
    if text.isdecimal() and len(text) < 4:
        # Round down to the next named level: 25 shows what 20 shows; 0 shows everything.
        return _LOG_LEVELS[min(max(int(text) // 10, 1), 5) - 1]
    name = {"warn": "warning", "trace": "debug", "fatal": "critical"}.get(
        text.lower(), text.lower()
    )
    if name not in _LOG_LEVELS:
        raise ValueError(text)
    return name


LOG_LEVEL = Kind(_log_level, ", ".join(_LOG_LEVELS) + " or Python's number for one (10 to 50)")


def _no_quantization(text: str) -> None:
    if text.lower() != "none":
        raise ValueError(text)


NO_QUANTIZATION = Kind(
    _no_quantization, "only none: quantizing at start is not supported yet, give a bfloat16 model"
)
