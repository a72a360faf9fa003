"""Starts the GPU kernels' suites, each in a process of its own: Triton decides when it is imported whether it interprets."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (extra `gpu`)"),
    pytest.mark.timeout(600),
]


def run(folder, tmp_path, *options, **environment):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            f"tests/gpu/{folder}",
            "-q",
            "-p",
            "no:cacheprovider",
            "--durations=5",
            *options,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"} | environment,
        timeout=590,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert " passed" in text
    print(text)


def test_kernels_equal_their_references_in_the_interpreter(tmp_path):
    run("interpret", tmp_path, "-k", "not priority", TRITON_INTERPRET="1")


def test_batches_on_a_device_are_those_of_the_cpu_in_the_interpreter(tmp_path):
    run("device", tmp_path, "-k", "batches or options or contract", TRITON_INTERPRET="1")


@pytest.mark.long
def test_draws_by_priority_equal_their_references_in_the_interpreter(tmp_path):
    run("interpret", tmp_path, "-k", "priority", TRITON_INTERPRET="1")


@pytest.mark.long
def test_draws_mirrors_and_makers_on_a_device_are_those_of_the_cpu_in_the_interpreter(tmp_path):
    run("device", tmp_path, "-k", "not (batches or options or contract)", TRITON_INTERPRET="1")


@pytest.mark.long
def test_every_kernel_compiles_within_its_budget_for_three_gpus_and_as_documented(tmp_path):
    run("aot", tmp_path, TRITON_INTERPRET="0")
