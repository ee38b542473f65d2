"""The tolerance rule itself, and the choice of an implementation."""

import importlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import dispatch
from pallas_kernels.testing import assert_close, tolerance
from tests.cases import long_but

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))


def test_tolerance_grows_with_the_reduction():
    short = tolerance(jnp.bfloat16, reduction=64, magnitude=1.0)
    long = tolerance(jnp.bfloat16, reduction=4096, magnitude=1.0)
    assert 0 < short.absolute < long.absolute < short.relative


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_rounded_product_passes(dtype):
    a, b = jax.random.normal(jax.random.key(0), (2, 96, 96), jnp.float32).astype(dtype)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    assert_close(jnp.asarray(exact, dtype), exact, reduction=96)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_three_eps_off_in_one_element_fails(dtype):
    exact = np.ones((8, 8))
    wrong = exact.copy()
    wrong[3, 5] += 3 * float(jnp.finfo(dtype).eps)
    with pytest.raises(AssertionError, match=r"1 of 64 elements .* worst at \(3, 5\)"):
        assert_close(jnp.asarray(wrong, dtype), exact, reduction=8)


def test_roundings_are_allowed_for_only_when_stated():
    exact, off = np.ones(4), jnp.full(4, 1.03125, jnp.bfloat16)
    with pytest.raises(AssertionError):
        assert_close(off, exact, reduction=1)
    assert_close(off, exact, reduction=1, roundings=4)


def test_nan_where_a_number_is_expected_fails():
    with pytest.raises(AssertionError, match="1 of 2"):
        assert_close(jnp.array([1.0, jnp.nan]), np.ones(2), reduction=1)


def test_infinities_must_agree_in_sign():
    assert_close(jnp.array([jnp.inf, 1.0]), np.array([np.inf, 1.0]), reduction=1)
    with pytest.raises(AssertionError):
        assert_close(jnp.array([-jnp.inf, 1.0]), np.array([np.inf, 1.0]), reduction=1)


def test_shapes_must_be_equal():
    with pytest.raises(AssertionError, match="shape"):
        assert_close(jnp.ones((2, 1)), np.ones(2), reduction=1)


@pytest.mark.parametrize("bad", [{"reduction": 0}, {"magnitude": np.inf}, {"roundings": -1}])
def test_nonsense_is_refused(bad):
    with pytest.raises(ValueError, match=r"tolerance\(\)"):
        tolerance(jnp.float16, **{"reduction": 1, "magnitude": 1.0} | bad)


@pytest.mark.long
def test_every_case_to_check_or_time_has_a_bound_for_each_result(monkeypatch):
    monkeypatch.syspath_prepend("scripts")
    kernel_cases = importlib.import_module("benchmarks.kernel_cases")
    cases = kernel_cases.load_cases(kernel_cases.MODULES)
    assert {case.kernel for case in cases} == set(kernel_cases.MODULES)
    assert len({(case.kernel, case.name, case.dtype) for case in cases}) == len(cases)
    for case in cases:
        inputs = jax.eval_shape(case.make, jax.random.key(0))
        results = jax.tree.leaves(jax.eval_shape(case.reference, *inputs))
        assert len(results) == len(case.close)
        assert case.bound_s > 0


def square(x):
    if x == 3:
        raise ValueError("three")
    return x * x


def describe(x, prepared):
    return f"{x}: {prepared}"


@pytest.mark.parametrize("quiet", long_but([True, False]))
def test_worker_processes_return_each_item_and_name_what_failed(monkeypatch, quiet):
    monkeypatch.syspath_prepend("scripts")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    pool = importlib.import_module("benchmarks.pool")
    found = dict(pool.run(square, describe, [1, 2, 3], workers=2, quiet=quiet))
    assert found == {1: "1: 1", 2: "2: 4", 3: "ValueError: three"}


def hang(x):
    if x == 2:
        time.sleep(60)
    return x


@pytest.mark.long
def test_worker_that_is_not_ready_in_time_says_where_it_is_and_the_others_go_on(monkeypatch, capfd):
    monkeypatch.syspath_prepend("scripts")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    pool = importlib.import_module("benchmarks.pool")
    found = dict(pool.run(hang, describe, [1, 2, 3], workers=3, quiet=True, prepare_within_s=1.0))
    assert found.pop(2).startswith("its process ended before it was ready")
    assert found == {1: "1: 1", 3: "3: 3"}
    assert "in hang" in capfd.readouterr().err


def refuse():
    raise NotImplementedError("cannot")


@pytest.mark.parametrize("kernel", [refuse, lambda: 7])
def test_xla_answers_where_no_kernel_can(kernel):
    candidates = {"mosaic_gpu": kernel, "xla": lambda: 7}
    assert dispatch.dispatch("op", None, candidates) == 7
    with use_abstract_mesh(H200):
        assert dispatch.dispatch("op", None, candidates) == 7


def test_a_named_implementation_fails_loudly():
    with pytest.raises(NotImplementedError, match="cannot"):
        dispatch.dispatch("op", "mosaic_gpu", {"mosaic_gpu": refuse, "xla": lambda: 7})


def test_an_implementation_the_kernel_lacks_is_named():
    with pytest.raises(ValueError, match=r"op\(implementation='xla'\)"):
        dispatch.dispatch("op", "xla", {"mosaic_gpu": refuse})


def test_a_cpu_is_no_hopper_gpu_but_a_described_h200_is():
    with pytest.raises(NotImplementedError, match="Hopper"):
        dispatch.require_hopper("op")
    with use_abstract_mesh(H200):
        dispatch.require_hopper("op")
        assert dispatch.num_sms() == 132


@pytest.mark.parametrize("budget", [0, 133, -4])
def test_a_budget_the_device_lacks_is_refused(budget):
    with use_abstract_mesh(H200), pytest.raises(ValueError, match="132 SMs"):
        dispatch.check_sm_budget("op", budget)


@pytest.mark.parametrize("budget", [True, 48.0])
def test_a_budget_that_is_no_integer_is_refused(budget):
    with pytest.raises(TypeError, match="sm_budget"):
        dispatch.check_sm_budget("op", budget)


def test_scripts_that_need_a_gpu_say_so_where_there_is_none(monkeypatch):
    monkeypatch.syspath_prepend("scripts")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    pool = importlib.import_module("benchmarks.pool")
    with pytest.raises(SystemExit, match="no NVIDIA GPU"):
        pool.require_gpu()
