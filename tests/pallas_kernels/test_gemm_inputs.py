"""GEMM kernels: operands, tiles and budgets that are refused, and what is left to XLA."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gemm import gated_gemm, gemm, grouped_gemm
from pallas_kernels.gemm.api import check_gemm, check_groups
from pallas_kernels.gemm.mosaic_gpu import Tile
from pallas_kernels.gemm.shapes import SHAPES
from pallas_kernels.gemm.tiles import is_left_to_xla
from tests.kernel_layers import lowered

X, W = jnp.ones((16, 128), jnp.bfloat16), jnp.ones((128, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"x": X[0]}, "at least one axis of rows"),
        ({"w": W[:64]}, "input features first"),
        ({"w": W.astype(jnp.float16)}, "one floating dtype"),
        ({"x": X.astype(jnp.int32), "w": W.astype(jnp.int32)}, "one floating dtype"),
        ({"x": X[:0]}, "empty"),
        ({"bias": W[0, :32]}, r"bias: bfloat16\(32,\)"),
        ({"residual": X}, "residual"),
        ({"activation": "swish"}, "no such activation"),
    ],
)
def test_operands_that_do_not_fit_are_named(operands, message):
    absent = {"bias": None, "residual": None, "activation": None}
    with pytest.raises(ValueError, match=message):
        check_gemm(**{"x": X, "w": W} | absent | operands)


def test_a_budget_above_the_device_is_refused():
    with pytest.raises(ValueError, match="132 SMs"):
        gemm(X, W, sm_budget=133)


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (X.astype(jnp.float32), W.astype(jnp.float32), "bfloat16 and float16"),
        (X, W[:, :40], "K and N of 64"),
    ],
)
def test_what_the_kernel_cannot_do_it_refuses_by_name_and_leaves_to_xla(x, w, message):
    with pytest.raises(NotImplementedError, match=message):
        gemm(x, w, implementation="mosaic_gpu")
    assert gemm(x, w).shape == (x.shape[0], w.shape[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"xs": []}, "0 inputs"),
        ({"xs": [X] * 9}, "9 inputs"),
        ({"residuals": [X[:, :64]]}, "residuals: 1"),
        ({"residuals": [X[:, :64], X]}, "residual"),
        ({"xs": [X, X.astype(jnp.float16)]}, "one floating dtype"),
        ({"xs": [X, X[:, :64]]}, "input features first"),
        ({"w_gate": W.astype(jnp.float16)}, "w_gate"),
        ({"w_gate": W, "bias": W[0]}, "gated product has none"),
        ({"w_gate": W, "scale": 2.0}, "gated product has none"),
        ({"w_gate": W, "residuals": [X[:, :64]] * 2}, "gated product has none"),
    ],
)
def test_sub_batches_that_do_not_fit_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        grouped_gemm(**{"xs": [X, X], "w": W} | options)


def test_residuals_with_a_gap_are_named():
    # Not through grouped_gemm: beartype looks at one element of the list, drawn at random.
    with pytest.raises(ValueError, match="residuals: 1"):
        check_groups([X, X], [X, None], gated=False, plain=True)


def test_a_tile_with_too_many_narrow_columns_is_refused():
    tile = Tile(tile_n=192, pipeline_depth=4, narrow_cols=1)
    with pytest.raises(ValueError, match="leave no column"):
        gemm(X, W, implementation="mosaic_gpu", tile=tile)


def test_a_tile_for_another_number_of_weights_is_refused():
    with pytest.raises(ValueError, match="2 weights"):
        gemm(X, W, implementation="mosaic_gpu", tile=Tile(tile_m=64, weights=2, pipeline_depth=4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tile_n": 96}, "multiples of 64"),
        ({"tile_m": 256, "schedule": "cooperative"}, "256 rows"),
        ({"tile_n": 256}, "registers"),
        ({"pipeline_depth": 1}, "at least 2"),
        ({"pipeline_depth": 7}, "shared memory"),
        ({"in_flight": 2}, "0 or 1"),
        ({"narrow_cols": -1}, "or 0"),
        ({"tile_n": 64, "narrow_cols": 1}, "128 or 192"),
    ],
)
def test_tiles_state_the_hardware_limit(fields, message):
    with pytest.raises(ValueError, match=message):
        Tile(**fields)


@pytest.mark.parametrize(("rows", "launched"), [(1, False), (32, False), (33, True)])
def test_products_of_few_rows_are_left_to_xla_unless_the_kernel_is_named(rows, launched):
    x = jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16)
    assert ("mosaic_gpu" in lowered(gemm, x, w)) == launched
    assert ("mosaic_gpu" in lowered(gated_gemm, x, w, w)) == launched
    assert "mosaic_gpu" in lowered(functools.partial(gemm, implementation="mosaic_gpu"), x, w)


@pytest.mark.parametrize(("rows", "launched"), [(64, False), (128, False), (512, True)])
def test_products_of_too_few_tiles_are_left_to_xla(rows, launched):
    """LLaMA3-8B's down projection: 32 tiles of 128 columns up to 128 rows, for 132 SMs."""
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, 14336), (14336, 4096)))
    assert ("mosaic_gpu" in lowered(gemm, x, w)) == launched


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.m >= 512], ids=lambda s: s.name)
def test_no_product_of_a_benchmark_is_left_to_xla(shape):
    assert not is_left_to_xla((shape.m,), shape.n, shape.k, gated=shape.gated, num_sms=132)


# Of an H20, an H100 with PCIe, and a part of an H200.
@pytest.mark.parametrize("num_sms", [60, 78, 114])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.m >= 4096], ids=lambda s: s.name)
def test_a_gpu_with_fewer_sms_keeps_products_of_many_tiles(shape, num_sms):
    assert not is_left_to_xla((shape.m,), shape.n, shape.k, gated=shape.gated, num_sms=num_sms)
