"""Starts `tests.kernels_aot` where the CUDA plugin is, or skips the test."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest


def ptxas_reports(shapes: list[str]) -> dict[str, dict]:
    """Registers, spilled bytes and warnings of each shape's kernel, by ptxas.

    The Python that PBJAX_AOT_PYTHON names is used where this one lacks the plugin.
    """
    here = importlib.util.find_spec("jax_cuda13_plugin")
    python = sys.executable if here else os.environ.get("PBJAX_AOT_PYTHON")
    if not python:
        pytest.skip("needs jax-cuda13-plugin with ptxas, here or in the Python of PBJAX_AOT_PYTHON")
    command = [python, "-m", "tests.kernels_aot", *shapes]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
