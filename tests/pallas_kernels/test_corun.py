"""Co-run kernels: interpreter with races, lowering, SASS, bad input."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import corun
from pallas_kernels.corun import mosaic_gpu, reference
from pallas_kernels.corun.shapes import RAGGED, SHAPES, CorunShape
from pallas_kernels.gemm import mosaic_gpu as gemm_kernel
from pallas_kernels.gemm import reference as gemm_reference
from pallas_kernels.gemm.activations import GELU_ERROR
from pallas_kernels.norm import reference as norm_reference
from pallas_kernels.testing import assert_close
from tests.cases import long_but
from tests.kernel_layers import assert_clean, has_cuda_plugin, interpreted, lowered, ptxas_reports

EPS = 1e-5


def specs_of(shape: CorunShape, dtype=jnp.bfloat16):
    sizes = [(shape.m, shape.k), (shape.k, shape.n), (shape.rows, shape.width)]
    if shape.partner == "norm":
        sizes += [(shape.rows, shape.width), (shape.width,), (shape.width,)]
    return [jax.ShapeDtypeStruct(size, dtype) for size in sizes]


def inputs_of(shape: CorunShape, dtype=jnp.bfloat16):
    specs = specs_of(shape, dtype)
    keys = jax.random.split(jax.random.key(shape.m), len(specs))
    return [
        (jax.random.normal(k, s.shape, jnp.float32) * (0.2 if i == 1 else 1)).astype(dtype)
        for i, (k, s) in enumerate(zip(keys, specs, strict=True))
    ]


def call(shape: CorunShape, **options):
    options |= {"activation": shape.activation}
    if shape.partner == "sums":
        return lambda x, w, data: corun.gemm_beside_sums(x, w, data, **options)
    return lambda *inputs: corun.gemm_beside_norm(*inputs, eps=EPS, centred=True, **options)


def truth(shape: CorunShape, x, w, *partner):
    product = gemm_reference.gemm(x, w, activation=shape.activation)
    if shape.partner == "sums":
        return product, reference.column_sums(*partner)
    total = norm_reference.add(*partner[:2])
    return product, norm_reference.layer_norm(total, *partner[2:], eps=EPS), total


def reductions(shape: CorunShape):
    return (shape.k, shape.rows) if shape.partner == "sums" else (shape.k, shape.width, 1)


def launches():
    """Every pair that ships, and each norm width, for compilation ahead of time."""
    found = {
        s.name: (call(s, implementation="mosaic_gpu"), specs_of(s)) for s in [*SHAPES, *RAGGED]
    }
    data = jax.ShapeDtypeStruct((61_440 * 128, 128), jnp.bfloat16)
    found["column sums"] = (
        lambda data: corun.column_sums(data, implementation="mosaic_gpu"),
        [data],
    )
    return found


INTERPRETED = {
    "sums, uneven shares, odd rows": CorunShape(
        name="", m=261, k=128, n=192, rows=7 * 64, width=128, partner="sums"
    ),
    "sums, a CTA without a tile": CorunShape(
        name="", m=256, k=64, n=128, rows=64, width=128, partner="sums"
    ),
    "norm": CorunShape(
        name="", m=264, k=64, n=128, rows=37, width=256, partner="norm", activation="gelu"
    ),
}


@pytest.mark.parametrize("name", long_but(INTERPRETED, "norm"))
def test_pairs_are_right_and_free_of_races(name):
    shape = INTERPRETED[name]
    x, w, *rest = inputs_of(shape)

    def run(x, w, *rest):
        if shape.partner == "sums":
            return call(shape, implementation="mosaic_gpu", sm_budget=3)(x, w, *rest)
        partner = mosaic_gpu.norm_partner(*rest, eps=EPS, centred=True, emulated=True)
        epilogue = gemm_kernel.Epilogue(activation=shape.activation)
        return mosaic_gpu.gemm_beside(x, (w,), None, None, partner, epilogue=epilogue, ctas=3)

    results = interpreted(run, x, w, *rest)
    expected = truth(shape, x, w, *rest)
    for actual, want, terms in zip(results, expected, reductions(shape), strict=True):
        assert_close(actual.reshape(want.shape), want, reduction=terms, function_error=GELU_ERROR)


def test_column_sums_alone():
    data = jax.random.normal(jax.random.key(0), (7 * 64, 128), jnp.float16)
    sums = interpreted(
        lambda d: corun.column_sums(d, implementation="mosaic_gpu", sm_budget=2), data
    )
    assert_close(sums, reference.column_sums(data), reduction=7 * 64)


@pytest.mark.parametrize("shape", long_but([*SHAPES, *RAGGED]), ids=lambda shape: shape.name)
def test_every_pair_lowers_to_one_launch(shape):
    text = lowered(call(shape, implementation="mosaic_gpu"), *specs_of(shape))
    assert text.count("@mosaic_gpu_v2") == 1
    assert f"pbjax_gemm_beside_{shape.partner}" in text


@pytest.mark.parametrize("width", [64, 512, 768, 1_024, 1_280, 2_048, 4_096])
def test_every_norm_width_has_a_ring_of_two_slots_or_more(width):
    assert mosaic_gpu.norm_tile(width).pipeline_depth >= 2


@pytest.mark.long
@pytest.mark.skipif(not has_cuda_plugin(), reason="needs jax's CUDA plugin, no GPU")
def test_shipped_launches_neither_spill_nor_serialise():
    reports = ptxas_reports("corun")
    assert set(reports) == set(launches())
    for report in reports.values():
        assert_clean(report)


@pytest.mark.parametrize("shape", INTERPRETED.values(), ids=INTERPRETED)
def test_without_a_gpu_xla_runs_one_after_the_other(shape):
    inputs = inputs_of(shape, jnp.float32)
    for actual, want, terms in zip(
        call(shape)(*inputs), truth(shape, *inputs), reductions(shape), strict=True
    ):
        assert_close(actual, want, reduction=terms, function_error=GELU_ERROR)


X, W = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)


@pytest.mark.parametrize("rows", [63, 65])
def test_data_of_other_rows_is_refused(rows):
    data = jnp.ones((rows, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="blocks of 64 rows"):
        corun.gemm_beside_sums(X, W, data, implementation="mosaic_gpu")


def test_norms_wider_than_the_registers_left_are_refused():
    rows = jnp.ones((4, 8_192), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="registers"):
        corun.gemm_beside_norm(
            X, W, rows, rows, rows[0], eps=EPS, centred=False, implementation="mosaic_gpu"
        )


def test_rms_norm_with_a_bias_is_refused():
    with pytest.raises(ValueError, match="no bias"):
        corun.gemm_beside_norm(X, W, X, X, X[0], X[0], eps=EPS, centred=False)


def test_a_budget_above_the_device_is_refused():
    with pytest.raises(ValueError, match="132 SMs"):
        corun.gemm_beside_sums(X, W, jnp.ones((64, 128), jnp.bfloat16), sm_budget=133)


def test_clusters_are_refused_in_a_co_run():
    data = mosaic_gpu.reader_partner(jnp.ones((64, 128), jnp.bfloat16), ctas=4)
    tile = gemm_kernel.Tile(cluster="m")
    with pytest.raises(ValueError, match="clusters"):
        mosaic_gpu.gemm_beside(
            X, (W,), None, None, data, epilogue=gemm_kernel.Epilogue(), ctas=4, tile=tile
        )
