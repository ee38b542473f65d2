"""The loop of generation as it is compiled for an H200: the kernel, and the cache in its place."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import flax
import pytest


@pytest.mark.long
def test_cache_is_written_where_it_lies_and_read_by_the_kernel():
    here = importlib.util.find_spec("jax_cuda13_plugin")
    python = sys.executable if here else os.environ.get("PBJAX_AOT_PYTHON")
    if not python:
        pytest.skip("needs jax-cuda13-plugin, here or in the Python of PBJAX_AOT_PYTHON")
    packages = str(Path(flax.__file__).parents[1])
    command = [python, "-m", "tests.generation_aot", packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["custom_calls"] == ["mosaic_gpu_v2"]
    assert found["cache_writes"] == 4
    assert found["cache_copies"] == 0
    # All but the lengths, which are a few bytes.
    assert found["cache_bytes"] - found["alias_bytes"] < 1024
    assert found["temporary_bytes"] < found["cache_bytes"] / 8
