"""Calibration: what is measured of the machine that the tests run on, and what may fail."""

import jax
import jax.numpy as jnp
import pytest

from pbjax import calibration
from pbjax.calibration import Sizes, calibrate
from pbjax.device import find_device
from pbjax.errors import DeviceError

SMALL = Sizes(
    products={"float32": 64, "bfloat16": 64},
    thin=(16, 64, 256),
    elements=1 << 10,
    copied=1 << 16,
    heads=(),
    seconds=0.001,
)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Few functions and short programs, which compile at once."""
    monkeypatch.setattr(calibration, "FUNCTIONS", {"exp": jax.lax.exp, "tanh": jax.lax.tanh})
    monkeypatch.setattr(calibration, "MULTIPLY_ADDS", 4)
    monkeypatch.setattr(calibration, "EVALUATIONS", 2)
    monkeypatch.setattr(calibration, "CHAIN", 4)


def test_every_rate_is_measured_and_makes_a_device():
    seen = []
    found = calibrate("cpu", lambda *state: seen.append(state), sizes=SMALL)
    assert set(found.tensor_flops_per_s) == {"float32", "bfloat16"}
    assert set(found.functions_per_s) == {"exp", "tanh"}
    assert found.provenance.jax == jax.__version__
    assert {state[0] for state in seen} == {"compile", "measure"}
    device = found.applied_to(find_device("cpu", num_cores=2))
    assert device.memory_bytes_per_s == found.memory_bytes_per_s
    assert device.launch_s == found.launch_s < 1e-3


def test_a_rate_is_the_amount_over_the_seconds(monkeypatch):
    monkeypatch.setattr(calibration, "_sustained", lambda program, args, seconds: 0.5)
    found = calibrate("cpu", sizes=SMALL)
    assert found.tensor_flops_per_s["float32"] == pytest.approx(2 * 64**3 / 0.5, rel=1e-3)
    assert found.memory_bytes_per_s == pytest.approx(2 * 4 * (1 << 16) / 0.5, rel=1e-3)
    assert found.weight_bytes_per_s == pytest.approx(2 * 64 * 256 / 0.5, rel=1e-3)
    assert found.launch_s == pytest.approx(0.5 / calibration.CHAIN, rel=1e-3)


def test_a_dtype_that_nothing_multiplies_is_left_out(monkeypatch):
    dot = jnp.dot

    def refuse(a, b, **options):
        if a.dtype == jnp.int8:
            raise NotImplementedError("no products of int8")
        return dot(a, b, **options)

    monkeypatch.setattr(jnp, "dot", refuse)
    sizes = Sizes(
        products={"float32": 64, "int8": 64},
        thin=SMALL.thin,
        elements=SMALL.elements,
        copied=SMALL.copied,
        heads=(),
        seconds=SMALL.seconds,
    )
    assert set(calibrate("cpu", sizes=sizes).tensor_flops_per_s) == {"float32"}


def test_what_every_device_does_and_this_one_fails_is_an_error(monkeypatch):
    def fail(x):
        raise RuntimeError("no such function")

    monkeypatch.setitem(calibration.FUNCTIONS, "exp", fail)
    with pytest.raises(DeviceError, match="functions/exp"):
        calibrate("cpu", sizes=SMALL)
