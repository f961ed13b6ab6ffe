"""Writes the table of modules in docs/architecture.md from the first sentences of the modules.

Must not know: what the modules do; they say it themselves.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules: make docs -->\n", "<!-- end of modules -->\n"
FOLDERS = {
    "container": "the box: processes, platform conventions",
    "container/web": "HTTP",
    "handler": "the meaning of a request",
    "handler/schema": "what bodies may hold",
    "handler/runner": "the process that owns the model",
    "scripts": "what people run",
}


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring, or of a shell script's opening comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        opening = text.splitlines()[1].lstrip("# ")
    else:
        opening = " ".join((ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].split())
    return opening.split(". ")[0].rstrip(".").replace("|", "\\|")


def table() -> str:
    """One Markdown table per folder."""
    parts: list[str] = []
    for folder, title in FOLDERS.items():
        rows = [
            f"| `{path.name}` | {purpose(path)} |\n"
            for path in sorted((ROOT / folder).iterdir())
            if path.suffix in (".py", ".sh") and path.name != "__init__.py"
        ]
        head = f"### {folder}/: {title}\n\n| Module | Responsible for |\n|---|---|\n"
        parts.append(head + "".join(rows))
    return "\n".join(parts)


def updated(document: str) -> str:
    """`document` with the table between its marks written anew."""
    before, rest = document.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    """Bring the document up to date."""
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
