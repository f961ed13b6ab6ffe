"""Where the model comes from: a folder, a model.tar.gz or the hub; and its tokenizer and template.

`locate` is quick and settles what can be known at once; `fetch` may unpack or download for minutes.

A place "holds a model" if config.json and weights lie in it, or in one folder below it, or in a
model.tar.gz in it. Which place, tokenizer and template are taken, for each of the eight states
(model local or not, tokenizer config given or not, revision set or not), is the table in
docs/configuration.md. Every failure is a `ModelFilesError` with one sentence: the file, where it
was looked for, the remedy.

Must not know: torch, transformers, what is inside weights or templates, the environment.
"""

import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from container import hub
from container.model_folder import (
    ModelFilesError,
    find_archive,
    find_model,
    has_tokenizer,
    holds_adapter,
    read_json,
    require_complete,
    unpack,
)
from container.settings import Settings

__all__ = ["Located", "ModelFiles", "ModelFilesError", "fetch", "locate"]

PLATFORM_FOLDERS = (Path("/opt/ml/model"), Path("/repository"))


@dataclass(frozen=True)
class Located:
    """Where the model is: exactly one of `folder`, `archive` and `hub_id`."""

    source: str
    """For the log, what and why."""
    task: str
    """For people, what `fetch` will be doing."""
    folder: Path | None = None
    archive: Path | None = None
    hub_id: str | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine, complete as far as file names tell."""

    model_dir: Path
    model_id: str
    """The name to report: the hub id, or the folder."""
    revision: str | None
    """On the hub: the commit. None for a local model."""
    tokenizer_dir: Path | None
    """The tokenizer's folder where it is not `model_dir`."""
    tokenizer_config_path: Path | None
    chat_template: str | None
    """The path of a file, or the template itself."""
    is_from_hub: bool
    source: str


def locate(settings: Settings, platform_folders: tuple[Path, ...] = PLATFORM_FOLDERS) -> Located:
    """Decide which model it is and check what is on this machine already. Changes nothing."""
    located = _locate_model(settings, platform_folders)
    if located.folder is not None:
        _describe(settings, located, located.folder)
    elif settings.tokenizer_config_path and Path(settings.tokenizer_config_path).is_absolute():
        _find_given("--tokenizer-config-path", settings.tokenizer_config_path, None)
    return located


def fetch(
    settings: Settings, located: Located, *, scratch: Path, report: Callable[[str], None]
) -> ModelFiles:
    """Unpack or download if need be. `scratch` is writable; `report` hears what takes long."""
    report(located.task)
    if located.folder is not None:
        return _describe(settings, located, located.folder)
    if located.archive is not None:
        unpacked = scratch / "model"
        unpack(located.archive, unpacked)
        return _describe(settings, located, find_model(unpacked) or unpacked)
    assert located.hub_id is not None  # one of the three is set
    cache = Path(settings.hub_cache) if settings.hub_cache else None
    if cache is None and not hub.default_cache_is_writable() and not settings.hub_offline:
        cache = scratch / "hub"
    snapshot = hub.fetch(
        hub.Source(
            located.hub_id,
            revision=settings.revision,
            token=settings.hf_token,
            cache=cache,
            offline=settings.hub_offline,
            with_code=settings.trust_remote_code,
        )
    )
    return _describe(settings, located, snapshot)


def _locate_model(settings: Settings, platform_folders: tuple[Path, ...]) -> Located:
    given = settings.model_id
    if given and (path := _path(given)).exists():
        # What is incomplete is told by _describe, in terms of the folder itself.
        return _in_place(settings, path.absolute(), "as --model-id says") or _as_folder(path)
    if given and not hub.is_hub_id(given):
        raise ModelFilesError(
            f"{given} is neither a folder on this machine nor a hub id (org/name): check "
            "--model-id, or mount the folder into the container."
        )
    remarks: list[str] = []
    for folder in platform_folders:
        found = _in_place(settings, folder, "where the platform puts it")
        if found is not None:
            if given:
                remarks.append(f"{given} is ignored because {folder} holds a model.")
            return replace(found, remarks=(*found.remarks, *remarks))
        if folder.is_dir() and any(folder.iterdir()):
            remarks.append(f"{folder} has files but holds no model (config.json and weights).")
    if given:
        task = f"downloading {given}"
        return Located(f"{given} from the hub", task, hub_id=given, remarks=tuple(remarks))
    raise ModelFilesError(_nothing_to_serve(platform_folders, remarks))


def _in_place(settings: Settings, place: Path, why: str) -> Located | None:
    """The model in a folder or archive on this machine; None if there is none.

    An adapter without its model counts, so that `_describe` refuses it: to serve another model
    instead would ignore it silently.
    """
    is_archive = place.is_file()
    if is_archive and not tarfile.is_tarfile(place):
        raise ModelFilesError(f"{place} is neither a folder nor a tar archive with a model.")
    folder = None if is_archive else find_model(place)
    if folder is None and not is_archive and holds_adapter(place):
        folder = place
    archive = place if is_archive else find_archive(place)
    remarks: tuple[str, ...] = ()
    if settings.revision:
        remarks = (f"--revision {settings.revision} means nothing for a model on this machine.",)
    if folder is not None:
        return Located(f"{folder}, {why}", "starting the runner", folder=folder, remarks=remarks)
    if archive is not None:
        task = f"unpacking {archive}"
        return Located(f"{archive}, {why}", task, archive=archive, remarks=remarks)
    return None


def _as_folder(path: Path) -> Located:
    return Located(str(path), "starting the runner", folder=path.absolute())


def _nothing_to_serve(platform_folders: tuple[Path, ...], remarks: list[str]) -> str:
    places = " and ".join(str(folder) for folder in platform_folders)
    seen = " ".join(remarks) or f"There is no model in {places}."
    return f"No model to serve: give a hub id or a folder with --model-id or HF_MODEL_ID. {seen}"


def _describe(settings: Settings, located: Located, folder: Path) -> ModelFiles:
    """Check the folder and settle which tokenizer, config and template go with it."""
    require_complete(folder, trust_pickles=settings.trust_remote_code)
    tokenizer_dir, tokenizer_config = _tokenizer(settings, folder)
    is_from_hub = located.hub_id is not None
    return ModelFiles(
        model_dir=folder,
        model_id=located.hub_id or str(located.archive or folder),
        revision=folder.name if is_from_hub else None,
        tokenizer_dir=tokenizer_dir,
        tokenizer_config_path=tokenizer_config,
        chat_template=_chat_template(settings, folder),
        is_from_hub=is_from_hub,
        source=located.source if folder == located.folder else f"{located.source}, in {folder}",
    )


def _tokenizer(settings: Settings, model_dir: Path) -> tuple[Path | None, Path | None]:
    """The tokenizer's folder if it is another one, and the config that replaces its own.

    A file given replaces the config alone, as in TGI: its folder may be another model's. Only where
    the model has no tokenizer is the one beside the file taken.
    """
    folder, config = None, None
    if settings.tokenizer_config_path:
        given = _find_given("--tokenizer-config-path", settings.tokenizer_config_path, model_dir)
        if given.is_dir():
            folder = given
        else:
            read_json(given)
            config = given
            if not has_tokenizer(model_dir):
                folder = given.parent
    place = folder or model_dir
    # Code that comes with a model may build its tokenizer from files of any name.
    if not has_tokenizer(place) and not settings.trust_remote_code:
        raise ModelFilesError(
            f"The tokenizer is missing: no tokenizer.json, vocab.json, *.model or the like in "
            f"{place}; copy it there, or name another folder with --tokenizer-config-path."
        )
    return folder, config


def _chat_template(settings: Settings, model_dir: Path) -> str | None:
    """The path of the template given, or the template itself if that is what was given."""
    given = settings.chat_template
    if given is None or "{{" in given or "{%" in given:
        return given
    path = _find_given("--chat-template", given, model_dir)
    if not path.is_file():
        raise ModelFilesError(f"--chat-template {path} must be a file or a Jinja template.")
    return str(path)


def _path(text: str) -> Path:
    """As the shell reads it; unlike Path.expanduser an unknown user is no error."""
    return Path(os.path.expanduser(text))  # noqa: PTH111


def _find_given(flag: str, text: str, model_dir: Path | None) -> Path:
    """An explicit path; a relative one is the shell's, or else one in the model's folder."""
    path = _path(text)
    places = [path.absolute(), *([model_dir / path] if model_dir else [])]
    for place in places:
        if place.exists():
            return place
    looked = " and ".join(str(place) for place in dict.fromkeys(places))
    raise ModelFilesError(f"{flag} {text} does not exist: looked for {looked}.")
