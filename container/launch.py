"""PID 1: settings, then the model's files, then the web and the runner under a supervisor.

Exit codes: 0 stopped as asked; 1 the web ended, or the runner crashed too often; 2 a setting is
wrong; 3 the model cannot be served. Each failure is one sentence on stderr.

Must not know: torch, transformers, Flask; what is in a model's files.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from container import command_line, examples, logs, model_files
from container.model_files import ModelFiles, ModelFilesError
from container.settings import Resolved, Settings, SettingsError, child_environment, resolve
from container.supervisor import (
    EXIT_CANNOT_SERVE,
    CannotServeError,
    Command,
    RestartPolicy,
    Supervisor,
)
from container.version import version
from handler.runner.config import RunnerConfig

EXIT_BAD_SETTING = 2
PROJECT_ROOT = Path(__file__).resolve().parent.parent
_LONGEST_SOCKET_FOLDER = 80
"""Paths of Unix sockets end at 107 bytes; room for the names below the folder."""
_INVOCATIONS = {
    "auto": "chat, completions and generate",
    "chat": "chat only",
    "generate": "generate only",
}
_GUNICORN_S = 1.0
"""What gunicorn may take beyond its own grace, to kill workers and leave."""

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `serve` with these arguments (default: the program's own); returns the exit code."""
    try:
        resolved = resolve(sys.argv[1:] if arguments is None else arguments)
    except SettingsError as error:
        sys.stderr.write(f"serve: {error}\n")
        return EXIT_BAD_SETTING
    if resolved.request:
        sys.stdout.write(command_line.answer(resolved))
        return 0
    logs.configure(resolved.settings.log_level, resolved.settings.log_format, "launch")
    try:
        located = model_files.locate(resolved.settings)
    except ModelFilesError as error:
        sys.stderr.write(f"serve: {error}\n")
        return EXIT_CANNOT_SERVE
    try:
        run_dir = _make_run_dir()
    except OSError as error:
        sys.stderr.write(f"serve: No temporary folder can be written, set TMPDIR: {error}.\n")
        return EXIT_BAD_SETTING
    try:
        code = _serve(resolved, located, run_dir)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    if threading.active_count() > 1:
        # A download that was interrupted still has threads, and Python would wait for them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _serve(resolved: Resolved, located: model_files.Located, run_dir: Path) -> int:
    """Start everything and stay until it ends; the exit code."""
    settings = resolved.settings
    _log.info("invocant %s serves %s", version(), located.source)
    for remark in (*resolved.remarks, *located.remarks):
        _log.warning("%s", remark)
    _log.info(
        "Address %s, port %d; /invocations takes %s%s.",
        settings.host,
        settings.port,
        _INVOCATIONS[settings.invocations_mode],
        f", chat also at {settings.oai_chat_route}" if settings.oai_chat_route else "",
    )
    report = _phase_writer(run_dir / "phase")
    report(located.task)
    if settings.print_examples:
        examples.print_when_ready(settings)
    supervisor = Supervisor(
        _web_command(settings, run_dir),
        lambda: _runner_command(settings, _fetch(settings, located, run_dir, report), run_dir),
        report=report,
        graceful_timeout_s=settings.graceful_timeout_s + _GUNICORN_S,
        restarts=RestartPolicy(settings.max_runner_restarts),
    )
    return supervisor.run()


def _fetch(
    settings: Settings, located: model_files.Located, run_dir: Path, report: Callable[[str], None]
) -> ModelFiles:
    try:
        files = model_files.fetch(settings, located, scratch=run_dir, report=report)
    except ModelFilesError as error:
        raise CannotServeError(str(error)) from error
    _log.info("Model files: %s", files.source)
    return files


def _web_command(settings: Settings, run_dir: Path) -> Command:
    """gunicorn; see `container.web.server`. The hub's token is none of its business."""
    start = {
        "settings": msgspec.structs.replace(settings, hf_token=None),
        "endpoint": _endpoint(run_dir),
        "run_dir": str(run_dir),
    }
    environment = child_environment(
        settings, project_root=PROJECT_ROOT, fallback_cache=run_dir / "cache", offline=True
    )
    argument_file = _write(run_dir / "web.json", start)
    return Command(
        "web", "container.web.server", argument_file, environment, PROJECT_ROOT, signal.SIGTERM
    )


def _runner_command(settings: Settings, files: ModelFiles, run_dir: Path) -> Command:
    """The process that owns the model; see `handler.runner.process`."""
    scratch_dir = run_dir / "scratch"
    scratch_dir.mkdir(exist_ok=True)
    config = RunnerConfig(
        endpoint=_endpoint(run_dir),
        model_dir=str(files.model_dir),
        model_id=files.model_id,
        scratch_dir=str(scratch_dir),
        revision=files.revision,
        tokenizer_dir=None if files.tokenizer_dir is None else str(files.tokenizer_dir),
        tokenizer_config_path=(
            None if files.tokenizer_config_path is None else str(files.tokenizer_config_path)
        ),
        chat_template=files.chat_template,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
        max_input_tokens=settings.max_input_tokens,
        max_total_tokens=settings.max_total_tokens,
        max_batch_prefill_tokens=settings.max_batch_prefill_tokens,
        max_batch_size=settings.max_batch_size,
        max_concurrent_requests=settings.max_concurrent_requests,
        kv_cache_memory_fraction=settings.kv_cache_memory_fraction,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        num_threads=settings.num_threads,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    # Code that a hub model brings may lie in another repository, which only then is fetched.
    is_online = files.is_from_hub and settings.trust_remote_code and not settings.hub_offline
    environment = child_environment(
        settings,
        project_root=PROJECT_ROOT,
        fallback_cache=run_dir / "cache",
        offline=not is_online,
        needs_token=is_online,
    )
    # A runner that waits for the GPU would not look at a SIGTERM, and nobody is left to insist.
    argument_file = _write(run_dir / "runner.json", config)
    return Command(
        "runner", "handler.runner.process", argument_file, environment, PROJECT_ROOT, signal.SIGKILL
    )


def _write(path: Path, value: object) -> Path:
    """As JSON, in the folder that only we can enter."""
    path.write_bytes(msgspec.json.encode(value))
    return path


def _endpoint(run_dir: Path) -> str:
    return f"ipc://{run_dir}/runner.sock"


def _make_run_dir() -> Path:
    """A private folder for sockets, the phase, scratch files; removed at the end."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > _LONGEST_SOCKET_FOLDER:
        folder = "/tmp"
    return Path(tempfile.mkdtemp(prefix="invocant-", dir=folder))


def _phase_writer(path: Path) -> Callable[[str], None]:
    """Write what goes on where the web finds it; replaced as a whole, never half written."""

    def write(phase: str) -> None:
        draft = path.with_suffix(".new")
        with suppress(OSError):  # a full disk is no reason to stop serving
            draft.write_text(phase + "\n", encoding="utf-8")
            draft.replace(path)

    return write
