"""What `serve` answers instead of serving: --help, --version, --print-config; and the reference.

`python -m container.command_line docs/configuration.md` writes that document's tables anew, so that
it and the help come from the one table of options. Must not know: the environment, any process.
"""

import sys
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import msgspec

from container.options import OPTIONS, Option
from container.settings import Resolved, Settings
from container.values import TEXT
from container.version import version

_BEGIN = "<!-- written by python -m container.command_line -->"
_END = "<!-- end of what is written by a program -->"
_USAGE = """Usage: serve [serve] [--option VALUE | --option=VALUE]...

Serves a language model: POST /invocations (SageMaker), OpenAI's API below /v1, TGI's routes.
Every option may also be given in the environment; the command line comes first. Names in
brackets are those of the environment, the earlier one wins.
"""


def answer(resolved: Resolved) -> str:
    """The text that `resolved.request` asks for."""
    if resolved.request == "--version":
        return f"invocant {version()}\n"
    return _configuration(resolved) if resolved.request == "--print-config" else _help()


def _help() -> str:
    lines = [_USAGE]
    for group, options in _groups():
        lines.append(f"{group}:")
        for option in options:
            lines.append(f"  {', '.join(option.flags)} [{', '.join(option.env)}]")
            takes = "" if option.kind is TEXT else f" It takes {option.kind.accepts}."
            text = f"{option.help}{takes} Default: {default(option)}."
            lines += textwrap.wrap(text, 92, initial_indent="      ", subsequent_indent="      ")
        lines.append("")
    lines += [
        "Instead of serving:",
        "  --help, -h        this text",
        "  --version         the version",
        "  --print-config    each setting with its value and where it came from",
    ]
    return "\n".join(lines) + "\n"


def _configuration(resolved: Resolved) -> str:
    """One line per option: value and source, secrets hidden; remarks as comments."""
    lines = []
    for option in OPTIONS:
        value = getattr(resolved.settings, option.field)
        shown = "(hidden)" if option.is_secret and value is not None else _shown(value)
        lines.append(f"{option.field} = {shown}  # {resolved.sources[option.field]}")
    lines += [f"# {remark}" for remark in resolved.remarks]
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()


def default(option: Option) -> str:
    """In words where there is no fixed value."""
    if option.shown_default is not None:
        return option.shown_default
    value = next(
        field.default for field in msgspec.structs.fields(Settings) if field.name == option.field
    )
    if isinstance(value, tuple):
        return ",".join(value)
    return value if isinstance(value, str) else _shown(value)


def _groups() -> Iterator[tuple[str, list[Option]]]:
    for group, options in groupby(OPTIONS, key=lambda option: option.group):
        yield group, list(options)


def markdown() -> str:
    """The tables of docs/configuration.md."""
    parts = []
    for group, options in _groups():
        parts.append(f"### {group}\n")
        parts.append("| Option | Environment | Takes | Default | |")
        parts.append("|---|---|---|---|---|")
        for option in options:
            flags = ", ".join(f"`{flag}`" for flag in option.flags)
            names = ", ".join(f"`{name}`" for name in option.env)
            cells = (flags, names, option.kind.accepts, default(option), option.help)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts)


def update(document: str) -> str:
    """The document with its tables between the two markers written anew."""
    before, begin, rest = document.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    return f"{before}{begin}\n\n{markdown()}\n{end}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
