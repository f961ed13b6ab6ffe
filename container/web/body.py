"""The request body: read within its limit, checked for its type, decoded from JSON.

Everything wrong with a body as such is said here: 413 before it is read or unpacked whole, 415 for
a type that is not JSON, 400 with the position for malformed JSON. Must not know: routes, schemas.
"""

import codecs
import gc
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar

import gevent
import msgspec
from werkzeug.http import parse_options_header

from handler.contract import ApiError

BIG_BYTES = 16 * 1024
"""Bodies above this are worked on in a native thread, so that /ping need not wait for them."""
READ_STEP_BYTES = 256 * 1024
READ_TIMEOUT_S = 60.0
"""A client that sends nothing for this long in the middle of its body is given up."""
GZIP_WINDOW = 16 + zlib.MAX_WBITS
"""zlib's number for gzip's header and check sum around the data."""
MAX_GZIP_MEMBERS = 16
"""Parts a packed body may have. Few programs write more than one; each costs a copy of the rest."""
ACCEPTED = "application/json (charset UTF-8)"
_BOM = b"\xef\xbb\xbf"
_UNPAIRED_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_decode = msgspec.json.Decoder().decode

P = ParamSpec("P")
T = TypeVar("T")


class Readable(Protocol):
    """`wsgi.input`."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; fewer only at the end."""
        ...


def in_thread_if_big(num_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work` here, or in gevent's native thread pool when the body it works on is big."""
    if num_bytes <= BIG_BYTES:
        return work(*args, **kwargs)
    return in_thread(work, *args, **kwargs)


def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work` in gevent's native thread pool; other greenlets run meanwhile."""

    def outcome() -> tuple[T] | Exception:
        # The pool prints a traceback for whatever is raised in it, so nothing is.
        try:
            return (work(*args, **kwargs),)
        except Exception as error:  # noqa: BLE001 - raised again on the other side
            return error

    found: tuple[T] | Exception = gevent.get_hub().threadpool.apply(outcome)
    if isinstance(found, Exception):
        raise found
    return found[0]


def read(environ: Mapping[str, Any], limit_bytes: int) -> bytes:
    """The whole body, unpacked. The limit is on what was sent and on what it unpacks to.

    Raises ApiError: 413 above the limit, 400 broken, 408 stalled, 415 packed, but not with gzip.
    """
    encoding = environ.get("HTTP_CONTENT_ENCODING", "").strip().lower()
    if encoding in ("", "identity"):
        return _read_plain(environ, limit_bytes)
    if encoding in ("gzip", "x-gzip"):
        return in_thread(_unpacked, _read_plain(environ, limit_bytes), limit_bytes)
    raise ApiError(
        415, f"Content-Encoding {_shown(encoding)} is not supported; send it plain or with gzip."
    )


def _read_plain(environ: Mapping[str, Any], limit_bytes: int) -> bytes:
    declared = environ.get("CONTENT_LENGTH") or None
    if declared is not None and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    stream: Readable = environ["wsgi.input"]
    parts: list[bytes] = []
    num_bytes = 0
    while part := _read_part(stream):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        if len(part) == READ_STEP_BYTES:
            gevent.sleep(0)  # a sender that is always ahead must not keep others waiting
    if declared is not None and num_bytes < int(declared):
        raise ApiError(
            400, f"The request body ended after {num_bytes} of the {declared} bytes declared."
        )
    return b"".join(parts)


def _read_part(stream: Readable) -> bytes:
    try:
        with gevent.Timeout(READ_TIMEOUT_S):
            return stream.read(READ_STEP_BYTES)
    except gevent.Timeout as error:
        raise ApiError(
            408, f"The request body did not go on for {READ_TIMEOUT_S:.0f} seconds."
        ) from error
    except Exception as error:
        # A connection that broke, or the server's own exceptions for bad chunks.
        raise ApiError(400, f"The request body could not be read: {error}") from error


def _unpacked(raw: bytes, limit_bytes: int) -> bytes:
    """What gzip packed (RFC 1952: one member or several); never much more than the limit of it."""
    parts: list[bytes] = []
    num_bytes = 0
    for _ in range(MAX_GZIP_MEMBERS):
        unpacker = zlib.decompressobj(GZIP_WINDOW)
        try:
            part = unpacker.decompress(raw, limit_bytes - num_bytes + 1)
        except zlib.error as error:
            raise ApiError(400, f"The request body is not valid gzip: {error}.") from error
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        if not unpacker.eof:
            raise ApiError(400, "The request body is not valid gzip: it ends too early.")
        raw = unpacker.unused_data
        if not raw:
            return b"".join(parts)
    raise ApiError(400, f"The request body has more than {MAX_GZIP_MEMBERS} gzip members.")


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than the limit of {limit_bytes} bytes"
        " (option --payload-limit).",
    )


def decode(raw: bytes, content_type: str | None) -> Any:
    """The JSON value of a body. Duplicate keys: the last wins. Raises ApiError 415 or 400."""
    raw = _to_utf8(raw, content_type)
    if raw.startswith(_BOM):
        raw = raw[len(_BOM) :]
    if not raw.strip():
        raise ApiError(400, "The request body is empty; it must be a JSON object.")
    return in_thread_if_big(len(raw), _decode_json, raw)


def _decode_json(raw: bytes) -> Any:
    is_big = len(raw) > BIG_BYTES
    try:
        if is_big:
            gc.disable()  # collecting while millions of objects appear takes four times as long
        return _decode(raw)
    except RecursionError as error:
        raise ApiError(400, "The request body is nested too deeply.") from error
    except msgspec.DecodeError as error:
        raise ApiError(
            400, f"The request body is not valid JSON: {_describe(raw, error)}."
        ) from error
    finally:
        if is_big:
            gc.enable()


def _describe(raw: bytes, error: msgspec.DecodeError) -> str:
    """What is wrong and where, with line and column as editors count them."""
    text = str(error).removeprefix("JSON is malformed: ")
    position = re.search(r" \(byte (\d+)\)$", text)
    if position is not None:
        return f"{text[: position.start()]} at {_place(raw, int(position[1]))}"
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as broken:
        return f"not UTF-8 at {_place(raw, broken.start)}"
    surrogate = _UNPAIRED_SURROGATE.search(raw)
    if surrogate is not None:
        return f"half a surrogate pair at {_place(raw, surrogate.start())}"
    if "truncated" in text:
        return f"it ends too early, at {_place(raw, len(raw))}"
    return text


def _place(raw: bytes, index: int) -> str:
    line = raw.count(b"\n", 0, index) + 1
    column = index - raw.rfind(b"\n", 0, index)
    return f"line {line} column {column} (byte {index})"


def _to_utf8(raw: bytes, content_type: str | None) -> bytes:
    """Check the type, and bring a body in another charset to UTF-8."""
    if content_type is None or not content_type.strip():
        return raw  # boto3 sends none unless told to
    mimetype, options = parse_options_header(content_type)
    mimetype = mimetype.lower()
    if not (mimetype == "application/json" or mimetype.endswith("+json")):
        raise ApiError(
            415, f"Content-Type {_shown(content_type)} is not supported; send {ACCEPTED}."
        )
    charset = options.get("charset", "utf-8")
    try:
        codec = codecs.lookup(charset).name
    except LookupError as error:
        raise ApiError(415, f"Unknown charset {_shown(charset)}; send {ACCEPTED}.") from error
    if codec in ("utf-8", "ascii"):
        return raw
    try:
        return raw.decode(codec).encode()
    except (LookupError, UnicodeError) as error:
        raise ApiError(400, f"The request body is not valid {codec}.") from error


def _shown(text: str) -> str:
    return repr(text[:100])
