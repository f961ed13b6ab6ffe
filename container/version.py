"""Which version of Invocant this is. Must not know anything else."""

import importlib.metadata
import tomllib
from pathlib import Path


def version() -> str:
    """Of the installed distribution, else of the checkout these files are in."""
    try:
        return importlib.metadata.version("invocant")
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parent.parent / "pyproject.toml"
        if not project.exists():
            return "unknown"
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
