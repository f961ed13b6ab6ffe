"""Settings: what was asked for on the command line and in the environment, checked.

Built once, in `launch`; precedence is command line > environment > default. The only module that
reads `os.environ`: children get their settings as an argument and the environment that
`child_environment` makes for them.

Must not know: what a setting does, where the model is, any process.
"""

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from container.options import OPTIONS, UNSUPPORTED_ENVIRONMENT, Option
from container.values import boolean

COMMAND = "serve"
OPENMP_SPIN_COUNT = 10_000
"""How long an OpenMP thread of the runner spins at a barrier before it sleeps. Without a bound the
threads starve every neighbour, the web workers among them, and then each other; docs/decisions.md
has the figures."""
PLATFORM_GRACE_S = 25
"""SageMaker sends SIGKILL 30 s after SIGTERM; its guide asks supervisors to wait at most this."""
_FLAGS = {flag: option for option in OPTIONS for flag in option.flags}
HELP_FLAGS = ("--help", "-h", "--version")
REQUEST_FLAGS = (*HELP_FLAGS, "--print-config")
"""Flags that ask for a text instead of setting anything."""


def default_num_workers() -> int:
    """HTTP processes for this machine: two keep /ping quick while one reads a large body."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    has_gpu = Path("/dev/nvidiactl").exists()
    return max(2, min(8, num_cores // 4)) if has_gpu else min(2, num_cores)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every setting with its default; JSON-serialisable. Sizes in bytes, times in seconds."""

    model_id: str | None = None
    revision: str | None = None
    served_model_name: str | None = None
    tokenizer_config_path: str | None = None
    chat_template: str | None = None
    trust_remote_code: bool = False
    quantize: None = None
    hf_token: str | None = None
    hub_cache: str | None = None
    hub_offline: bool = False
    oai_chat_route: str | None = None
    messages_api_enabled: bool | None = None
    invocations_mode: Literal["auto", "chat", "generate"] = "auto"
    """`resolve` makes this "chat" when one of the two options above says so."""
    tgi_strict: bool = False
    api_key: str | None = None
    cors_allow_origin: tuple[str, ...] = ("*",)
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    max_batch_size: int | None = None
    max_concurrent_requests: int = 128
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 32
    """TGI allows 4, too few for the evaluation harnesses that send 8 to 32 prompts at once;
    memory is guarded by max_concurrent_requests, which counts every prompt."""
    payload_limit: int = 25 * 2**20
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    num_shard: int = 1
    num_threads: int | None = None
    kv_cache_memory_fraction: float = 0.9
    kv_cache_memory_bytes: int | None = None
    compute_type: str | None = None
    host: str = "0.0.0.0"
    port: int = 8080
    num_workers: int = msgspec.field(default_factory=default_num_workers)
    graceful_timeout_s: int = PLATFORM_GRACE_S
    max_runner_restarts: int = 5
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    json_output: bool | None = None
    print_examples: bool = False


class SettingsError(Exception):
    """A setting that cannot be used; the message is one sentence that names it."""


@dataclass(frozen=True)
class Resolved:
    """Settings, the source of each (`default`, a flag or `environment NAME`), remarks to log."""

    settings: Settings
    sources: Mapping[str, str]
    remarks: tuple[str, ...]
    request: str | None
    """The first of `REQUEST_FLAGS` given, if any."""


def resolve(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> Resolved:
    """Read `arguments` (without the program's name) and the environment.

    Raises SettingsError. `environ` None means the process's own.
    """
    environ = os.environ if environ is None else environ
    given, request = _read_arguments(arguments)
    if request in HELP_FLAGS:
        return Resolved(Settings(), {}, (), request)  # helps most where the rest is wrong
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    remarks: list[str] = []
    for option in OPTIONS:
        named = given.get(option.field) or _from_environment(option, environ, remarks)
        sources[option.field] = "default"
        if named is not None:
            origin, text = named
            found[option.field] = _read_value(option, origin, text)
            sources[option.field] = origin
    remarks += [
        f"{name} is not supported yet and is ignored."
        for name in UNSUPPORTED_ENVIRONMENT
        if environ.get(name, "").strip()
    ]
    return Resolved(_settle(found, sources, remarks), sources, tuple(remarks), request)


def _read_arguments(arguments: Sequence[str]) -> tuple[dict[str, tuple[str, str]], str | None]:
    """`field -> (flag, text)` of the command line. SageMaker passes the word "serve" first."""
    rest = list(arguments)
    while rest and rest[0] == COMMAND:
        rest.pop(0)
    given: dict[str, tuple[str, str]] = {}
    request: str | None = None
    while rest:
        flag, has_value, text = rest.pop(0).partition("=")
        if flag in REQUEST_FLAGS and not has_value:
            request = request or flag
            continue
        option = _FLAGS.get(flag)
        if option is None:
            raise SettingsError(_unknown(flag))
        if not has_value:
            text = _next_value(option, flag, rest)
        if option.field == "cors_allow_origin" and option.field in given:
            text = f"{given[option.field][1]},{text}"
        if text:
            given[option.field] = (flag, text)
    return given, request


def _next_value(option: Option, flag: str, rest: list[str]) -> str:
    """Take the value of `flag` from the arguments after it; a switch needs none."""
    following = rest[0] if rest else None
    if option.kind.is_switch:
        try:
            boolean(following or "")
        except ValueError:
            return "true"
    elif following is None or following.startswith("--"):
        raise SettingsError(f"{flag} needs a value: it takes {option.kind.accepts}.")
    return rest.pop(0)


def _unknown(flag: str) -> str:
    if not flag.startswith("-"):
        return f'"{flag}" is not understood: options begin with "--", see serve --help.'
    near = difflib.get_close_matches(flag.replace("_", "-"), [*_FLAGS, *REQUEST_FLAGS], 1)
    hint = f"did you mean {near[0]}?" if near else "see serve --help for the options."
    return f"{flag} is not an option: {hint}"


def _from_environment(
    option: Option, environ: Mapping[str, str], remarks: list[str]
) -> tuple[str, str] | None:
    """The first name that is set; an empty value counts as unset (as in docker's `-e NAME=`)."""
    names = [name for name in option.env if environ.get(name, "").strip()]
    if not names:
        return None
    value = environ[names[0]].strip()
    for other in names[1:]:
        if environ[other].strip() != value:
            remarks.append(f"{other} is ignored because {names[0]} is set too.")
    return f"environment {names[0]}", value


def _read_value(option: Option, origin: str, text: str) -> Any:
    try:
        return option.kind.read(text)
    except ValueError:
        shown = text if len(text) <= 60 else text[:57] + "..."
        where = origin
        if origin.startswith("environment "):
            where = f"{origin.removeprefix('environment ')} (environment, for {option.flag})"
        raise SettingsError(f'{where} got "{shown}": it takes {option.kind.accepts}.') from None


def _settle(found: dict[str, Any], sources: dict[str, str], remarks: list[str]) -> Settings:
    """Fold the options that stand for others, and check those that depend on each other."""
    asks_chat = [
        sources[name]
        for name, value in (("oai_chat_route", "/invocations"), ("messages_api_enabled", True))
        if found.get(name) == value
    ]
    if asks_chat and found.get("invocations_mode") == "generate":
        raise SettingsError(
            f"{sources['invocations_mode']} asks for generate on /invocations but {asks_chat[0]} "
            "asks for chat there: give only one of them."
        )
    if asks_chat:
        found["invocations_mode"] = "chat"
        sources["invocations_mode"] = asks_chat[0]
    if found.get("json_output"):
        if sources["log_format"] != "default" and found["log_format"] != "json":
            remarks.append(f"{sources['json_output']} is ignored because log_format is set too.")
        else:
            found["log_format"] = "json"
            sources["log_format"] = sources["json_output"]
    longest_input, longest = found.get("max_input_tokens"), found.get("max_total_tokens")
    if longest_input is not None and longest is not None and longest_input >= longest:
        raise SettingsError(
            f"{sources['max_input_tokens']} is {longest_input} but must be below "
            f"{sources['max_total_tokens']}, which is {longest}: an answer needs tokens too."
        )
    num_shard = found.get("num_shard", 1)
    if num_shard > 1:
        remarks.append(
            f"{sources['num_shard']} is {num_shard} but this version runs the model on one GPU; "
            "the others stay idle, and a model that does not fit one is refused."
        )
    grace_s = found.get("graceful_timeout_s", 0)
    if grace_s > PLATFORM_GRACE_S:
        remarks.append(
            f"{sources['graceful_timeout_s']} is {grace_s} but SageMaker kills 30 s after SIGTERM: "
            f"at most {PLATFORM_GRACE_S} leaves time to end in order there."
        )
    return Settings(**found)


_CACHE_VARIABLES = {
    "HF_HOME": "huggingface",
    "HF_MODULES_CACHE": "huggingface/modules",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "NUMBA_CACHE_DIR": "numba",
    "XDG_CACHE_HOME": "cache",
}


def child_environment(
    settings: Settings,
    *,
    project_root: Path,
    fallback_cache: Path,
    offline: bool,
    needs_token: bool = False,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of a child: ours without secrets it does not need, plus what libraries read.

    `fallback_cache` is where caches go when the home folder cannot be written (a read-only root, an
    unknown user); a variable that is set already is left alone. `offline`: the model is on this
    machine, so no library may look at the network.
    """
    child = dict(os.environ if environ is None else environ)
    for option in OPTIONS:
        if option.is_secret:
            for name in option.env:
                child.pop(name, None)
    if needs_token and settings.hf_token:
        child["HF_TOKEN"] = settings.hf_token
    if offline:
        child["HF_HUB_OFFLINE"] = child["TRANSFORMERS_OFFLINE"] = "1"
    if settings.hub_cache:
        child["HF_HUB_CACHE"] = settings.hub_cache
    if not _home_is_writable(child):
        for name, folder in _CACHE_VARIABLES.items():
            child.setdefault(name, str(fallback_cache / folder))
    if settings.num_threads:
        child["OMP_NUM_THREADS"] = str(settings.num_threads)
    if "OMP_WAIT_POLICY" not in child:
        child.setdefault("GOMP_SPINCOUNT", str(OPENMP_SPIN_COUNT))
    # -P keeps the working directory off sys.path; the project's own folder comes first instead.
    paths = [str(project_root), child.get("PYTHONPATH", "")]
    child["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    child["PYTHONUNBUFFERED"] = "1"
    child.setdefault("TOKENIZERS_PARALLELISM", "false")
    child.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    return child


def _home_is_writable(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the usual cache folder below the home folder can be written."""
    environ = os.environ if environ is None else environ
    folder = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/") / ".cache")
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)
