"""Brings a model from the Hugging Face hub, or from its cache, and explains why it could not.

Must not know: settings, torch, what the files mean beyond their names.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from container.model_folder import SAFETENSORS, ModelFilesError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_FILES = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja")
_WEIGHTS = ("*.safetensors",)
_PICKLED_WEIGHTS = ("pytorch_model*.bin*",)
_CODE = ("*.py",)
# Folders below a model repository hold other formats of the same weights; `*` matches "/" too.
_NOT_WANTED = ("*/*.safetensors", "*/*.bin", "*/*.json", "*/*.model", "*/*.txt", "consolidated*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """What to bring. `cache` None: the library's own folder. `endpoint` None: the public hub."""

    hub_id: str
    revision: str | None
    token: str | None
    cache: Path | None
    offline: bool
    with_code: bool
    """Bring Python files too, and pickled weights where there are no others."""
    endpoint: str | None = None
    patience_s: float = 15.0
    """How long the hub may take to answer at all."""


def is_hub_id(text: str) -> bool:
    """Whether this has the form `name` or `org/name`."""
    return _HUB_ID.fullmatch(text) is not None


def default_cache_is_writable() -> bool:
    """Whether the library's cache folder is, or can be made, writable."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)


def fetch(source: Source) -> Path:
    """The folder of the snapshot; its name is the commit. Raises ModelFilesError."""
    patterns = [*_FILES, *_WEIGHTS, *(_CODE if source.with_code else ())]
    folder = _download(source, patterns)
    if any((folder / name).is_file() for name in SAFETENSORS) or not source.with_code:
        return folder
    return _download(source, list(_PICKLED_WEIGHTS))


def _download(source: Source, patterns: list[str]) -> Path:
    # Imported here: PID 1 needs the library only when there is something to bring.
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    unreachable = None if source.offline else _unreachable(source)
    try:
        return Path(
            snapshot_download(
                source.hub_id,
                revision=source.revision,
                token=source.token,
                cache_dir=source.cache,
                local_files_only=source.offline or unreachable is not None,
                allow_patterns=patterns,
                ignore_patterns=list(_NOT_WANTED),
                endpoint=source.endpoint,
            )
        )
    except errors.LocalEntryNotFoundError as error:
        raise ModelFilesError(_not_reached(source, unreachable or error.__cause__)) from error
    except errors.HfHubHTTPError as error:
        raise ModelFilesError(_refused(source, error)) from error
    except Exception as error:
        # The library's HTTP client and its storage raise many types of their own.
        problem = f"{type(error).__name__}: {_first_line(error)}"
        raise ModelFilesError(f"{source.hub_id} could not be downloaded: {problem}.") from error


def _unreachable(source: Source) -> Exception | None:
    """Why no hub answers, or None if one does, be it with a refusal.

    The library's own first call waits for ever, which is what a network without a way out looks
    like (a private subnet without a gateway).
    """
    from huggingface_hub import HfApi, errors

    try:
        HfApi(endpoint=source.endpoint).model_info(
            source.hub_id, revision=source.revision, token=source.token, timeout=source.patience_s
        )
    except errors.HfHubHTTPError:
        return None
    except Exception as error:  # noqa: BLE001 - the HTTP client's many types
        return error
    return None


def _first_line(error: BaseException) -> str:
    """The library adds lines of advice to its messages."""
    return str(error).partition("\n")[0].rstrip(". ")


def _not_reached(source: Source, cause: BaseException | None) -> str:
    at = f" at revision {source.revision}" if source.revision else ""
    if source.offline:
        return (
            f"{source.hub_id}{at} is not in the hub cache and the network is switched off "
            "(--hub-offline): mount the model into the container, or allow the network."
        )
    reason = f" ({_first_line(cause)})" if cause is not None else ""
    return (
        f"The hub could not be reached for {source.hub_id}{at}{reason}: allow the network, or "
        "mount the model into the container and give its folder as --model-id."
    )


def _refused(source: Source, error: "HfHubHTTPError") -> str:
    from huggingface_hub import errors

    page = f"https://huggingface.co/{source.hub_id}"
    if isinstance(error, errors.GatedRepoError):
        remedy = (
            "ask for access there with the account of the token given"
            if source.token
            else "accept its terms there and give a token in HF_TOKEN"
        )
        return f"{source.hub_id} is gated, see {page}: {remedy}."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{source.hub_id} has no revision {source.revision}: check --revision at {page}."
    status = error.response.status_code
    if isinstance(error, errors.RepositoryNotFoundError):
        private = "the token given may not see it" if source.token else "give a token in HF_TOKEN"
        return (
            f"There is no model {source.hub_id} on the hub and no such folder on this machine: "
            f"check --model-id; if it is private, {private}."
        )
    if status in (401, 403):
        return f"The hub refused {source.hub_id} (HTTP {status}): check the token in HF_TOKEN."
    return f"The hub could not give {source.hub_id} (HTTP {status}): try again later."
