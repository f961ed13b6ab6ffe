"""What a fresh machine meets first: set-up script, lock files, Makefile. Nothing is installed here.

Must not know: what the installed packages do.
"""

import os
import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SETUP = ROOT / "scripts" / "setup.sh"
with (ROOT / "pyproject.toml").open("rb") as _file:
    PROJECT = tomllib.load(_file)["project"]
EXTRAS = PROJECT["optional-dependencies"]


def locked(name: str) -> dict[str, list[Requirement]]:
    """The pinned requirements of a lock file, by package."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    pins: dict[str, list[Requirement]] = {}
    for line in re.findall(r"^[A-Za-z0-9].*", text, re.MULTILINE):
        requirement = Requirement(line.rstrip("\\ "))
        pins.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return pins


def run_setup(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SETUP), *arguments],
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def fake_python(folder: Path, body: str) -> str:
    """An interpreter that answers the questions of the set-up as `body` (shell) says."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("line", PROJECT["dependencies"])
@pytest.mark.parametrize("lock", ["runtime.txt", "dev.txt"])
def test_each_dependency_is_locked_within_its_range(line: str, lock: str) -> None:
    wanted = Requirement(line)
    pins = locked(lock)[canonicalize_name(wanted.name)]
    for pin in pins:
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert wanted.specifier.contains(specifier.version)


@pytest.mark.parametrize("line", EXTRAS["dev"] + EXTRAS["demo"])
def test_development_packages_are_locked_too(line: str) -> None:
    assert canonicalize_name(Requirement(line).name) in locked("dev.txt")


def test_both_locks_agree() -> None:
    runtime, dev = locked("runtime.txt"), locked("dev.txt")
    for name, pins in runtime.items():
        assert {str(pin.specifier) for pin in pins} == {str(pin.specifier) for pin in dev[name]}


@pytest.mark.parametrize("lock", ["runtime.txt", "dev.txt"])
def test_no_lock_brings_torch_or_cuda(lock: str) -> None:
    assert not [n for n in locked(lock) if n in ("torch", "triton") or n.startswith("nvidia-")]


def test_cpu_and_gpu_are_the_same_release_of_torch() -> None:
    (gpu,) = locked("torch-gpu.txt")["torch"]
    cpu = locked("torch-cpu.txt")["torch"]
    base = {str(pin.specifier).removesuffix("+cpu") for pin in cpu}
    assert base == {str(gpu.specifier)}
    on_linux = [
        pin for pin in cpu if pin.marker and pin.marker.evaluate({"platform_system": "Linux"})
    ]
    assert [str(pin.specifier) for pin in on_linux] == [f"{gpu.specifier}+cpu"]
    assert Requirement(EXTRAS["cpu"][0]).specifier.contains(version("torch"))


def test_an_unknown_build_is_refused() -> None:
    result = run_setup("tpu")
    assert result.returncode == 1
    assert "'cpu' or 'gpu', not 'tpu'" in result.stderr


def test_a_missing_python_gets_a_sentence() -> None:
    result = run_setup(PYTHON="no-such-python")
    assert result.returncode == 1
    assert "no-such-python was not found; install Python 3.11" in result.stderr


def test_an_old_python_gets_a_sentence(tmp_path: Path) -> None:
    old = fake_python(tmp_path, 'case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac')
    result = run_setup(PYTHON=old)
    assert result.returncode == 1
    assert "Python 3.9.2 is too old; Python 3.11 or newer is needed" in result.stderr


def test_a_python_without_venv_gets_a_sentence(tmp_path: Path) -> None:
    bare = fake_python(tmp_path, 'case "$2" in *ensurepip*) exit 1;; *) exit 0;; esac')
    result = run_setup(PYTHON=bare)
    assert result.returncode == 1
    assert "apt-get install python3-venv" in result.stderr


def test_make_alone_lists_the_targets() -> None:
    result = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    listed = {line.split()[0] for line in result.stdout.splitlines()}
    assert {"setup", "model", "run", "test", "check", "bench", "image", "clean"} <= listed
