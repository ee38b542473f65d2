"""GEMMs with norms folded in: interpreter with races, lowering, SASS, statistics, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gemm import gemm_for_norm, mosaic_gpu, normed_gemm, reference, scale_rows
from pallas_kernels.gemm.activations import GELU_ERROR
from pallas_kernels.gemm.folded import check_normed_gemm, joined_scale
from pallas_kernels.gemm.mosaic_gpu import SMEM_BYTES, Epilogue, Tile
from pallas_kernels.gemm.shapes import PRE_NORM, RAGGED, GemmShape
from pallas_kernels.testing import assert_close
from tests.cases import long_but
from tests.gemm_tiles import tile_of
from tests.kernel_layers import assert_clean, has_cuda_plugin, interpreted, lowered, ptxas_reports

EPS = 1e-5


def specs_of(shape: GemmShape, dtype=jnp.bfloat16):
    """Operands by name; what adds a residual goes to a norm, what does not comes from one."""
    m, k, n = shape.m, shape.k, shape.n
    sizes = {"x": (m, k), "w": (k, n)}
    sizes |= {"w_gate": (k, n)} if shape.gated else {}
    sizes |= {"bias": (n,)} if shape.bias else {}
    specs = {name: jax.ShapeDtypeStruct(size, dtype) for name, size in sizes.items()}
    if shape.residual:
        return specs | {"residual": jax.ShapeDtypeStruct((m, n), dtype)}
    return specs | {"row_scale": jax.ShapeDtypeStruct((m,), jnp.float32)}


def inputs_of(shape: GemmShape, dtype=jnp.bfloat16):
    specs = specs_of(shape, dtype)
    keys = jax.random.split(jax.random.key(shape.m), len(specs))
    scales = {"w": shape.k**-0.5, "w_gate": shape.k**-0.5}
    return {
        name: (jax.random.normal(key, s.shape, jnp.float32) * scales.get(name, 1)).astype(s.dtype)
        for key, (name, s) in zip(keys, specs.items(), strict=True)
    }


def call(shape: GemmShape, **options):
    def run(operands):
        if shape.residual:
            norm = {"eps": EPS, "centred": shape.bias}
            return gemm_for_norm(**operands, **norm, scale=shape.scale, **options)
        return normed_gemm(**operands, activation=shape.activation, **options)

    return run


def launches():
    """One launch for each product beside a norm, for compilation ahead of time."""
    options, found = {"implementation": "mosaic_gpu"}, {}
    for s in [*PRE_NORM, *RAGGED]:
        found.setdefault((tile_of(s, moments=s.residual), s.activation, s.bias, s.gated), s)
    return {
        s.name: (
            lambda *arrays, s=s: call(s, **options)(dict(zip(specs_of(s), arrays, strict=True))),
            list(specs_of(s).values()),
        )
        for s in found.values()
    }


INTERPRETED = {
    "scaled, pingpong": (
        GemmShape(name="", m=200, k=192, n=192, bias=True, activation="gelu"),
        Tile(tile_m=64, pipeline_depth=2),
    ),
    "scaled, two pieces of rows in a cluster along m": (
        GemmShape(name="", m=200, k=128, n=128, bias=True),
        Tile(tile_m=128, tile_n=128, pipeline_depth=3, cluster="m"),
    ),
    "scaled, cooperative": (
        GemmShape(name="", m=136, k=128, n=192, activation="relu"),
        Tile(tile_m=64, schedule="cooperative", pipeline_depth=2, store_slots=1),
    ),
    "scaled, gated": (
        GemmShape(name="", m=136, k=128, n=192, activation="silu", gated=True),
        Tile(tile_m=64, weights=2, pipeline_depth=2, store_slots=1, cluster="m"),
    ),
    "moments, pingpong, a last tile half beyond the result": (
        GemmShape(name="", m=200, k=192, n=192, bias=True, residual=True),
        Tile(tile_m=64, tile_n=128, pipeline_depth=2),
    ),
    "moments, six pieces through three slots": (
        GemmShape(name="", m=128, k=64, n=384, bias=True, residual=True, scale=0.5),
        Tile(tile_n=192, pipeline_depth=2, store_slots=3),
    ),
    "moments, narrow columns": (
        GemmShape(name="", m=320, k=128, n=448, bias=True, residual=True),
        Tile(tile_m=64, tile_n=192, pipeline_depth=3, narrow_cols=2, store_slots=4),
    ),
    "moments, cooperative in a cluster along m": (
        GemmShape(name="", m=200, k=64, n=256, residual=True),
        Tile(tile_m=64, schedule="cooperative", pipeline_depth=2, cluster="m", store_slots=1),
    ),
    "moments, a tile in a cluster along n beyond the result": (
        GemmShape(name="", m=72, k=64, n=448, residual=True),
        Tile(tile_m=64, tile_n=192, pipeline_depth=3, cluster="n"),
    ),
    "moments, fewer columns than a tile": (
        GemmShape(name="", m=72, k=64, n=64, bias=True, residual=True),
        Tile(tile_m=64, pipeline_depth=2, store_slots=1),
    ),
}


def check(shape: GemmShape, result, operands, roundings: int = 0) -> None:
    """Compares a result with the reference; factors with those of the rows as they were stored."""
    if not shape.residual:
        expected = reference.normed_gemm(**operands, activation=shape.activation)
        assert_close(result, expected, reduction=shape.k, function_error=GELU_ERROR)
        return
    values, scale = result
    expected = reference.gemm(**operands, scale=shape.scale)
    assert_close(values, expected, reduction=shape.k, roundings=roundings)
    expected = reference.row_scale(values, eps=EPS, centred=shape.bias)
    assert scale.dtype == jnp.float32
    assert_close(scale, expected, reduction=shape.n)


@pytest.mark.parametrize("name", long_but(INTERPRETED, "scaled, gated"))
def test_small_tiles_are_right_and_free_of_races(name):
    shape, tile = INTERPRETED[name]
    operands = inputs_of(shape)

    def run(operands):
        weights = tuple(operands[name] for name in ("w_gate", "w") if name in operands)
        rows = [
            (operands[name],) if name in operands else None for name in ("residual", "row_scale")
        ]
        epilogue = Epilogue(
            activation=shape.activation,
            gated=shape.gated,
            scale=shape.scale,
            moments=shape.residual,
        )
        return mosaic_gpu.matmul(
            (operands["x"],),
            weights,
            operands.get("bias"),
            *rows,
            epilogue=epilogue,
            tile=tile,
            ctas=4,
            emulated=True,
        )

    result, *moments = interpreted(run, operands)
    if moments:
        result = (result, joined_scale(*moments, eps=EPS, centred=shape.bias))
    check(shape, result, operands)


@pytest.mark.parametrize("case", long_but([((3, 11), jnp.float16), ((7,), jnp.bfloat16)]))
@pytest.mark.parametrize("residual", [True, False])
def test_any_rows_and_leading_axes(case, residual):
    rows, dtype = case
    m = int(np.prod(rows))
    shape = GemmShape(name="", m=m, k=128, n=128, bias=True, residual=residual)
    operands = inputs_of(shape, dtype)
    shaped = {
        name: array.reshape(*rows, *array.shape[1:]) if array.shape[0] == m else array
        for name, array in operands.items()
    }
    result = interpreted(call(shape, implementation="mosaic_gpu", sm_budget=2), shaped)
    other = call(shape, implementation="xla")(shaped)
    assert jax.tree.map(jnp.shape, result) == jax.tree.map(jnp.shape, other)
    for found in (result, other):
        flat = jax.tree.map(lambda array: array.reshape(m, *array.shape[len(rows) :]), found)
        check(shape, flat, operands, roundings=2 * (found is other))


@pytest.mark.parametrize("gated", [True, False])
def test_plain_jax_scales_before_it_rounds(gated):
    # Products of 16 ones of 64 x 64 are beyond float16, scaled they are 1.
    x, w = jnp.full((2, 64), 64, jnp.float16), jnp.full((64, 64), 64, jnp.float16)
    scale = jnp.full(2, 2.0**-18, jnp.float32)
    y = normed_gemm(x, scale, w, w_gate=w if gated else None, implementation="xla")
    np.testing.assert_array_equal(y, np.ones((2, 64)))


@pytest.mark.parametrize("mean", [0.0, 30.0, 3_000.0])
@pytest.mark.parametrize("centred", [True, False])
def test_factors_are_right_where_the_mean_is_large(mean, centred):
    generator = np.random.default_rng(0)
    x = (mean + generator.normal(size=(64, 768))).astype(np.float32)
    exact = x.astype(np.float64)
    second = exact.var(axis=1) if centred else np.mean(exact * exact, axis=1)
    parts = x.reshape(64, 12, 64)
    means = parts.mean(axis=2)
    squares = np.square(parts - means[..., None]).sum(axis=2)
    moments = np.stack([means, squares], axis=2).reshape(64, 24).T
    expected = (second + EPS) ** -0.5
    found = joined_scale(jnp.asarray(moments), eps=EPS, centred=centred)
    assert_close(found, expected, reduction=768)
    assert_close(
        scale_rows(jnp.asarray(x), eps=EPS, centred=centred).scale, expected, reduction=768
    )


@pytest.mark.parametrize("name", long_but(launches()))
def test_every_launch_lowers_under_its_name(name):
    function, specs = launches()[name]
    text = lowered(function, *specs)
    assert text.count("@mosaic_gpu_v2") == 1
    assert "pbjax_gemm" in text or "pbjax_gated_gemm" in text


@pytest.mark.long
@pytest.mark.skipif(not has_cuda_plugin(), reason="needs jax's CUDA plugin, no GPU")
def test_shipped_launches_neither_spill_nor_serialise():
    reports = ptxas_reports("folded")
    assert set(reports) == set(launches())
    for report in reports.values():
        assert_clean(report)


@pytest.mark.parametrize("shape", [s for s in PRE_NORM if s.residual], ids=lambda shape: shape.name)
def test_moments_take_the_room_of_buffers_alone(shape):
    plain, tile = (tile_of(shape, moments=moments) for moments in (False, True))
    assert tile.smem_bytes + tile.moment_bytes <= SMEM_BYTES
    # A cooperative tile would be left with one buffer, and wait for each piece of its residual.
    if plain.schedule == "pingpong":
        assert plain == dataclasses.replace(tile, store_slots=plain.store_slots)
    assert tile.schedule == "pingpong"


X, W = jnp.ones((16, 128), jnp.bfloat16), jnp.ones((128, 64), jnp.bfloat16)
SCALE = jnp.ones(16, jnp.float32)
GIVEN = {"x": X, "row_scale": SCALE, "w": W, "w_gate": None, "bias": None, "activation": None}


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"row_scale": SCALE[:8]}, r"row_scale: float32\(8,\)"),
        ({"row_scale": SCALE.astype(jnp.bfloat16)}, "in float32"),
        ({"w_gate": W, "bias": W[0]}, "no bias"),
        ({"w_gate": W[:, :32]}, "one shape"),
        ({"w": W[:64]}, "input features first"),
        ({"bias": W[0, :32]}, "bias"),
    ],
)
def test_operands_that_do_not_fit_are_named(operands, message):
    with pytest.raises(ValueError, match=message):
        check_normed_gemm(**GIVEN | operands)


def test_what_is_no_array_is_named():
    with pytest.raises(TypeError, match="row_scale"):
        check_normed_gemm(**GIVEN | {"row_scale": [1.0] * 16})


def test_a_negative_epsilon_is_refused():
    with pytest.raises(ValueError, match="at least 0"):
        gemm_for_norm(X, W, eps=-1.0, centred=True)


def test_a_tile_without_room_for_moments_is_refused():
    tile = Tile(tile_n=192, pipeline_depth=4, store_slots=4)
    with pytest.raises(ValueError, match="with moments it needs"):
        gemm_for_norm(X, W, eps=0.0, centred=True, implementation="mosaic_gpu", tile=tile)


def test_what_the_kernel_cannot_do_is_left_to_xla():
    x, w = X.astype(jnp.float32), W.astype(jnp.float32)
    with pytest.raises(NotImplementedError, match="bfloat16 and float16"):
        normed_gemm(x, SCALE, w, implementation="mosaic_gpu")
    assert normed_gemm(x, SCALE, w).shape == (16, 64)
    assert gemm_for_norm(x, w, eps=0.0, centred=True).scale.shape == (16,)
