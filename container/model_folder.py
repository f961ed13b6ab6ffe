"""What makes a folder a model that can be served, told by its file names and small JSON files.

Every failure is a `ModelFilesError` with one sentence: the file, where it was looked for, the
remedy. Must not know: settings, the hub, torch, what is inside weights.
"""

import json
import tarfile
import zlib
from pathlib import Path
from typing import Any

ARCHIVE = "model.tar.gz"
CONFIG = "config.json"
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""The names that transformers loads, in its order; other files are not found by it."""

_TOKENIZER_PATTERNS = (
    "tokenizer.json",
    "*.model",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack")
_LFS_POINTER = b"version https://git-lfs"


class ModelFilesError(Exception):
    """A model that cannot be served; the message is one sentence for the person who started us."""


def find_model(folder: Path) -> Path | None:
    """`folder`, or the one folder below it, that has config.json and weights; None without one."""
    if _looks_like_model(folder):
        return folder
    below = [path for path in _entries(folder) if path.is_dir() and path.name[0] != "."]
    models = [path for path in below if _looks_like_model(path)]
    if len(models) > 1:
        names = ", ".join(path.name for path in models)
        raise ModelFilesError(
            f"{folder} holds several models ({names}): choose one with --model-id {models[0]}."
        )
    return models[0] if models else None


def find_archive(folder: Path) -> Path | None:
    """A model.tar.gz that nobody has unpacked."""
    archive = folder / ARCHIVE
    return archive if archive.is_file() else None


def holds_adapter(folder: Path) -> bool:
    """Whether it is an adapter (LoRA) without the model that it adapts."""
    return (folder / "adapter_config.json").is_file() and not (folder / CONFIG).is_file()


def has_tokenizer(folder: Path) -> bool:
    """Whether a file with a vocabulary is in the folder; a tokenizer_config.json alone is none."""
    return any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_PATTERNS)


def require_complete(folder: Path, *, trust_pickles: bool) -> None:
    """Raise ModelFilesError unless `folder` has a config and all files of loadable weights."""
    _require_config(folder)
    weights = _weights(folder)
    if weights is None:
        raise ModelFilesError(_no_weights(folder))
    if weights.name in PICKLES and not trust_pickles:
        raise ModelFilesError(
            f"{folder} has only pickled weights ({weights.name}), which may run code when loaded: "
            "save the model as safetensors, or trust it with --trust-remote-code true."
        )
    files = [weights]
    if weights.name.endswith(".index.json"):
        files = _shards(weights)
    for path in files:
        _require_not_pointer(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ModelFilesError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelFilesError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} must hold a JSON object.")
    return content


def unpack(archive: Path, into: Path) -> None:
    """Unpack a tar, refusing members that would leave `into`, links out of it, and devices."""
    into.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(into, filter="data")
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise ModelFilesError(f"{archive} cannot be unpacked: {error}.") from error
    except OSError as error:
        raise ModelFilesError(f"{archive} cannot be unpacked to {into}: {error}.") from error


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise ModelFilesError(f"{folder} cannot be read: {error}.") from error


def _looks_like_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and _weights(folder) is not None


def _weights(folder: Path) -> Path | None:
    """The file with which transformers would begin: weights, or the index of their shards."""
    for name in (*SAFETENSORS, *PICKLES):
        if (folder / name).is_file():
            return folder / name
    config = folder / CONFIG
    named = read_json(config).get("transformers_weights") if config.is_file() else None
    if isinstance(named, str) and Path(named).name == named and (folder / named).is_file():
        return folder / named
    return None


def _require_config(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelFilesError(f"{folder} is not a folder on this machine: check the path.")
    if holds_adapter(folder):
        raise ModelFilesError(
            f"{folder} holds an adapter (adapter_config.json) without its model: merge the two "
            "(peft's merge_and_unload) and serve the result."
        )
    if not (folder / CONFIG).is_file():
        raise ModelFilesError(
            f"{CONFIG} is missing: looked in {folder} and the folders below it for a model saved "
            "by transformers (config.json, model.safetensors, tokenizer.json)."
        )
    if "model_type" not in read_json(folder / CONFIG):
        raise ModelFilesError(
            f"{folder / CONFIG} names no model_type: it is no model configuration of transformers."
        )


def _no_weights(folder: Path) -> str:
    others = sorted({path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern)})
    found = f" ({', '.join(others[:3])} there cannot be loaded)" if others else ""
    return (
        f"The weights are missing: {folder} has {CONFIG} but neither {SAFETENSORS[0]} nor "
        f"{SAFETENSORS[1]}{found}; copy them there, or save the model with save_pretrained."
    )


def _shards(index: Path) -> list[Path]:
    """The files an index names; ModelFilesError if one is not there."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFilesError(f"{index} names no weights: its weight_map is missing or empty.")
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelFilesError(
            f"{missing[0]}{more} of {len(names)} weight files is missing in {index.parent}, though "
            f"{index.name} names it: the model was copied only in part, copy it again."
        )
    return [index.parent / name for name in names]


def _require_not_pointer(path: Path) -> None:
    """A clone without Git LFS has a few lines of text in place of each large file."""
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
    if start == _LFS_POINTER:
        raise ModelFilesError(
            f"{path} is a Git LFS pointer and not weights: run git lfs pull in that folder."
        )
    if not start:
        raise ModelFilesError(f"{path} is empty: the model was copied only in part, copy it again.")
