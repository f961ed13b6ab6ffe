"""Threads follow what the container may use, not what its host has."""

import os
from pathlib import Path

import pytest

from handler.runner.threads import GPU_HOST_THREADS, num_threads

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("150000 100000", min(2, CORES)),
        ("max 100000", CORES),
        ("99900000 100000", CORES),
    ],
)
def test_a_quota_bounds_the_threads(quota: str, threads: int, tmp_path: Path) -> None:
    cgroup = tmp_path / "sys" / "fs" / "cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "cpu.max").write_text(quota + "\n")
    assert num_threads("cpu", tmp_path) == threads


@pytest.mark.parametrize(("quota", "threads"), [("100000", 1), ("-1", CORES)])
def test_the_older_cgroup_files_count_too(quota: str, threads: int, tmp_path: Path) -> None:
    cgroup = tmp_path / "sys" / "fs" / "cgroup" / "cpu"
    cgroup.mkdir(parents=True)
    (cgroup / "cpu.cfs_quota_us").write_text(quota + "\n")
    (cgroup / "cpu.cfs_period_us").write_text("100000\n")
    assert num_threads("cpu", tmp_path) == threads


def test_without_cgroup_files_the_cores_decide(tmp_path: Path) -> None:
    assert num_threads("cpu", tmp_path) == CORES
    assert num_threads("cuda", tmp_path) <= GPU_HOST_THREADS
