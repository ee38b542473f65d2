"""Depthwise convolution: the interpreter with its race detector, lowering, XLA, and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.depthwise import depthwise_convolution, depthwise_convolution_reference
from pallas_kernels.depthwise.api import check_depthwise_convolution
from pallas_kernels.depthwise.shapes import MODELS, RAGGED, SHAPES
from pallas_kernels.testing import assert_close
from tests import kernel_layers
from tests.cases import long_but
from tests.kernels_aot_process import ptxas_reports

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))


def operands(shape, dtype=jnp.bfloat16):
    """Random frames, weights and offset of a shape."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (shape.batch_size, shape.length, shape.features), dtype)
    kernel = jax.random.normal(keys[1], (shape.width, shape.features)) * shape.width**-0.5
    offset = jax.random.normal(keys[2], (shape.features,)) if shape.offset else None
    return x, kernel, offset


def by_hand(shape, x, kernel, offset):
    """The definition in f64, one weight after the other, without padding an array."""
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    y = np.zeros(x.shape)
    for k in range(shape.width):
        for t in range(shape.length):
            seen = t + k - (shape.width - 1) // 2
            if 0 <= seen < shape.length:
                y[:, t] += kernel[k] * x[:, seen]
    y = y if offset is None else y + np.asarray(offset, np.float64)
    return y / (1 + np.exp(-y)) if shape.activation == "silu" else y


def interpreted(shape, args, sms):
    """The kernel's result in the interpreter, which must see no race."""

    def run(*args):
        return depthwise_convolution(
            *args, activation=shape.activation, implementation="mosaic_gpu", sm_budget=sms
        )

    with use_abstract_mesh(H200):
        return kernel_layers.interpreted(run, *args)


@pytest.mark.parametrize("shape", long_but(RAGGED), ids=lambda shape: shape.name)
def test_interpreted_kernel_is_right_and_free_of_races(shape):
    args = operands(shape)
    actual = interpreted(shape, args, sms=2 if shape.name == "odd length" else 1)
    expected = depthwise_convolution_reference(*args, activation=shape.activation)
    assert_close(actual, expected, reduction=shape.width)


@pytest.mark.parametrize("shape", RAGGED, ids=lambda shape: shape.name)
def test_reference_and_xla_are_the_definition(shape):
    args = operands(shape, jnp.float32)
    expected = by_hand(shape, *args)
    reference = depthwise_convolution_reference(*args, activation=shape.activation)
    assert_close(reference, expected, reduction=shape.width)
    by_xla = depthwise_convolution(*args, activation=shape.activation, implementation="xla")
    assert_close(by_xla, expected, reduction=shape.width)


def test_default_is_xla_without_a_gpu():
    args = operands(RAGGED[1])
    assert "mosaic_gpu" not in jax.jit(depthwise_convolution).lower(*args).as_text()


@pytest.mark.parametrize("shape", long_but([RAGGED[1], MODELS[1]]), ids=lambda shape: shape.name)
def test_shape_lowers_to_one_kernel_of_its_name(shape):
    args = jax.eval_shape(lambda: operands(shape))
    with use_abstract_mesh(H200):
        run = jax.jit(depthwise_convolution, static_argnames="activation")
        traced = run.trace(*args, activation=shape.activation)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    assert "pbjax_depthwise" in text


@pytest.mark.long
def test_models_compile_without_spills():
    reports = ptxas_reports([f"depthwise {shape.name}" for shape in SHAPES])
    assert {name: report["spilled"] for name, report in reports.items()} == dict.fromkeys(
        reports, 0
    )


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((zeros(8, 256), zeros(3, 256)), ValueError, r"frames are \(B, T, D\)"),
        ((zeros(1, 0, 256), zeros(3, 256)), ValueError, "none of them 0"),
        ((zeros(1, 8, 256), zeros(3, 1, 256)), ValueError, r"a kernel is \(width, 256\)"),
        ((zeros(1, 8, 256), zeros(256, 3)), ValueError, "transpose it"),
        ((zeros(1, 8, 256), zeros(3, 256), zeros(1)), ValueError, "one a feature"),
        ((zeros(1, 8, 256), zeros(3, 256, dtype=jnp.int8)), TypeError, "kernel: int8"),
    ],
)
def test_operands_that_do_not_fit_are_refused(args, error, message):
    with pytest.raises(error, match=message):
        check_depthwise_convolution(*args, *(None,) * (4 - len(args)))


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="unknown activation; choices are gelu"):
        check_depthwise_convolution(zeros(1, 8, 256), zeros(3, 256), None, "swish")


def test_budget_above_the_device_is_refused():
    with pytest.raises(ValueError, match="the device has 132 SMs"):
        depthwise_convolution(zeros(1, 8, 256), zeros(3, 256), sm_budget=133)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((zeros(1, 8, 512, dtype=jnp.float32), zeros(3, 512)), "float16 and bfloat16"),
        ((zeros(1, 8, 640), zeros(3, 640)), "multiples of 256 from 512"),
        ((zeros(2, 8, 256), zeros(3, 256)), "multiples of 256 from 512"),
        ((zeros(1, 8, 512), zeros(34, 512)), "at most 33"),
    ],
)
def test_named_kernel_says_what_it_cannot_do(args, message):
    with pytest.raises(NotImplementedError, match=message):
        depthwise_convolution(*args, implementation="mosaic_gpu")


def test_more_sms_than_work_is_no_larger_grid():
    args = jax.eval_shape(lambda: operands(RAGGED[1]))
    with use_abstract_mesh(H200):
        run = functools.partial(depthwise_convolution, implementation="mosaic_gpu")
        text = str(jax.make_jaxpr(run)(*args))
    assert "'sm': 1" in text or "grid=(1," in text


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_kernel_on_the_gpu_is_right_and_repeats(shape):
    args = operands(shape)

    def run(*args):
        return depthwise_convolution(
            *args, activation=shape.activation, implementation="mosaic_gpu"
        )

    first = jax.jit(run)(*args)
    expected = depthwise_convolution_reference(*args, activation=shape.activation)
    assert_close(first, expected, reduction=shape.width)
    np.testing.assert_array_equal(np.asarray(jax.jit(run)(*args)), np.asarray(first))
