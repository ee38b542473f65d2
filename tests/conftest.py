"""Settings of the test run: two CPU devices, strict ranks, no network, GPU tests only on a GPU."""

import gc
import os

# The kernel interpreter blocks one thread of the CPU client's pool for each warpgroup that waits:
# the pool must be larger than a CTA, whatever the machine, or a test hangs.
os.environ.setdefault("PJRT_NPROC", "16")

import jax
import pytest
from hypothesis import settings

from .fakes import FakeTimer

# What a test takes depends on what else the machine does. `make test` chooses the few examples.
settings.register_profile("untimed", deadline=None)
settings.register_profile("few", deadline=None, max_examples=25)
settings.load_profile("untimed")

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish():
    """Spares the garbage collector what is imported by now: it holds most objects, and stays."""
    gc.freeze()


@pytest.fixture
def timer(monkeypatch):
    return FakeTimer().install(monkeypatch)
