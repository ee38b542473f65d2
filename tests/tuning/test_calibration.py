"""Calibration: what is measured of the machine that the tests run on, and what may fail."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pbjax.device import find_device
from pbjax.errors import DeviceError
from pbjax.tuning import calibration
from pbjax.tuning.calibration import Sizes, calibrate

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
    assert device.pallas_launch_s is found.pallas_launch_s is None  # No kernel of ours runs here.


def test_a_rate_is_the_amount_over_the_seconds(monkeypatch):
    monkeypatch.setattr(calibration, "_sustained", lambda program, args, seconds: 0.5)
    found = calibrate("cpu", sizes=SMALL)
    assert found.tensor_flops_per_s["float32"] == pytest.approx(2 * 64**3 / 0.5, rel=1e-3)
    assert found.memory_bytes_per_s == pytest.approx(2 * 4 * (1 << 16) / 0.5, rel=1e-3)
    assert found.weight_bytes_per_s == pytest.approx(2 * 64 * 256 / 0.5, rel=1e-3)
    assert found.launch_s == pytest.approx(0.5 / calibration.CHAIN, rel=1e-3)


def test_a_launch_of_ours_is_a_norm_of_a_chain(monkeypatch):
    monkeypatch.setattr(calibration, "_norms", lambda x, scale: x * scale[None])
    monkeypatch.setattr(calibration, "_sustained", lambda program, args, seconds: 0.5)
    found = calibrate("cpu", sizes=SMALL)
    assert found.pallas_launch_s == pytest.approx(0.5 / calibration.CHAIN, rel=1e-3)
    device = found.applied_to(find_device("cpu", num_cores=2))
    assert device.pallas_launch_s == found.pallas_launch_s


def test_a_dtype_that_nothing_multiplies_is_left_out(monkeypatch):
    dot = jax.lax.dot_general

    def refuse(a, b, *args, **options):
        if a.dtype == jnp.int8:
            raise NotImplementedError("no products of int8")
        return dot(a, b, *args, **options)

    monkeypatch.setattr(jax.lax, "dot_general", refuse)
    sizes = replace(SMALL, products={"float32": 64, "int8": 64})
    assert set(calibrate("cpu", sizes=sizes).tensor_flops_per_s) == {"float32"}


def test_products_of_8_bits_multiply_whole_numbers_of_a_normal_distribution(monkeypatch):
    seen = {}

    def keep(program, args, seconds):
        out = program(*args)
        if out.dtype == jnp.int32:
            seen["product"] = [np.asarray(x, np.int64) for x in (*args, out)]
        return 1.0

    monkeypatch.setattr(calibration, "_sustained", keep)
    calibrate("cpu", sizes=replace(SMALL, products={"float32": 64, "int8": 64}))
    a, b, product = seen["product"]
    np.testing.assert_array_equal(product, a @ b.T)
    assert abs(a).max() > 64
    assert 28 < a.std() < 36


def test_of_two_programs_of_a_name_the_faster_counts(monkeypatch):
    plain = {name: jax.jit(lambda q, k, v: q + k + v) for name in ("_cudnn", "_kernel")}
    for name, function in plain.items():
        monkeypatch.setattr(calibration, name, function)
    taken = iter([1.0] * 2 + [0.5, 0.25] + [1.0] * 99)
    monkeypatch.setattr(calibration, "_sustained", lambda *_: next(taken))
    monkeypatch.setattr(calibration, "ATTENTION", (1, 8, 2))
    found = calibrate("cpu", sizes=replace(SMALL, heads=(64,)))
    assert found.attention_flops_per_s[64] == pytest.approx(4 * 2 * 8**2 * 64 / 0.25, rel=1e-3)


def test_where_nothing_fuses_attention_it_has_no_rate(monkeypatch):
    monkeypatch.setattr(calibration, "ATTENTION", (1, 8, 2))
    assert not calibrate("cpu", sizes=replace(SMALL, heads=(64,))).attention_flops_per_s


def test_what_every_device_does_and_this_one_fails_is_an_error(monkeypatch):
    def fail(x):
        raise RuntimeError("no such function")

    monkeypatch.setitem(calibration.FUNCTIONS, "exp", fail)
    with pytest.raises(DeviceError, match="functions/exp"):
        calibrate("cpu", sizes=SMALL)
