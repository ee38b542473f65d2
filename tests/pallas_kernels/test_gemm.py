"""GEMM kernels: interpreter with races, lowering, SASS, activations, tiles.

What they refuse is in test_gemm_inputs.py.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gemm import gated_gemm, gemm, grouped_gemm, mosaic_gpu, reference
from pallas_kernels.gemm.activations import ACTIVATIONS, GELU_ERROR
from pallas_kernels.gemm.mosaic_gpu import Epilogue, Plan, Tile
from pallas_kernels.gemm.shapes import BERT, DECODE, GPT2, LLAMA, RAGGED, SHAPES, GemmShape
from pallas_kernels.testing import assert_close
from tests.cases import long_but
from tests.gemm_tiles import tile_of
from tests.kernel_layers import assert_clean, has_cuda_plugin, interpreted, lowered, ptxas_reports


def names_of(shape: GemmShape) -> list[str]:
    if shape.gated:
        return ["x", "w_gate", "w"]
    return ["x", "w"] + ["bias"] * shape.bias + ["residual"] * shape.residual


def specs_of(shape: GemmShape, dtype=jnp.bfloat16):
    m, k, n = shape.m, shape.k, shape.n
    sizes = {"x": (m, k), "w": (k, n), "w_gate": (k, n), "bias": (n,), "residual": (m, n)}
    return [jax.ShapeDtypeStruct(sizes[name], dtype) for name in names_of(shape)]


def inputs_of(shape: GemmShape, dtype):
    specs = specs_of(shape, dtype)
    keys = jax.random.split(jax.random.key(shape.m), len(specs))
    return [
        (jax.random.normal(k, s.shape, jnp.float32) * (0.2 if s.shape[0] == shape.k else 1)).astype(
            dtype
        )
        for k, s in zip(keys, specs, strict=True)
    ]


def call(shape: GemmShape, gated=gated_gemm, plain=gemm, **options):
    options |= {"activation": shape.activation}
    if not shape.gated:
        options["scale"] = shape.scale

    def run(*inputs):
        function = gated if shape.gated else plain
        return function(**dict(zip(names_of(shape), inputs, strict=True)), **options)

    return run


def launches():
    """One launch of each tile and epilogue that ships, for compilation ahead of time."""
    found = {}
    for shape in [*SHAPES, *RAGGED]:
        key = (tile_of(shape), shape.activation, shape.bias, shape.residual, shape.gated)
        found.setdefault(key, shape)
    options = {"implementation": "mosaic_gpu"}
    by_name = {s.name: (call(s, **options), specs_of(s)) for s in found.values()}
    first = SHAPES[1]
    by_name["on 84 SMs"] = (call(first, **options, sm_budget=84), specs_of(first))
    by_name["three sub-batches"] = grouped_launch()
    return by_name


def grouped_launch():
    """A layer's last GEMM for three sub-batches, one of odd rows."""
    ms, k, n = (4_096, 2_048, 1_001), 6_400, 1_600

    def run(w, bias, *rows):
        options = {"bias": bias, "residuals": rows[3:], "implementation": "mosaic_gpu"}
        return grouped_gemm(rows[:3], w, **options)

    shapes = [(k, n), (n,), *((m, k) for m in ms), *((m, n) for m in ms)]
    return run, [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]


INTERPRETED = {
    "pingpong": (
        GemmShape(name="", m=200, k=192, n=192, bias=True, activation="gelu"),
        Tile(tile_m=64, pipeline_depth=2),
    ),
    "pingpong in a cluster along n, residual": (
        GemmShape(name="", m=72, k=64, n=448, residual=True),
        Tile(tile_m=64, tile_n=192, pipeline_depth=3, cluster="n"),
    ),
    "pingpong in a cluster along m": (
        GemmShape(name="", m=200, k=128, n=128, bias=True, residual=True, scale=0.5),
        Tile(tile_m=64, tile_n=128, pipeline_depth=3, cluster="m"),
    ),
    "cooperative": (
        GemmShape(name="", m=136, k=128, n=192, bias=True, residual=True, activation="relu"),
        Tile(tile_m=64, schedule="cooperative", pipeline_depth=2, in_flight=0, store_slots=1),
    ),
    "cooperative in a cluster, a last tile beyond the result": (
        GemmShape(name="", m=200, k=128, n=192, activation="gelu_tanh"),
        Tile(tile_m=64, tile_n=64, schedule="cooperative", pipeline_depth=2, cluster="n"),
    ),
    "gated": (
        GemmShape(name="", m=136, k=128, n=192, activation="silu", gated=True),
        Tile(tile_m=64, weights=2, pipeline_depth=2, store_slots=1, cluster="m"),
    ),
    "six pieces through three slots": (
        GemmShape(name="", m=128, k=64, n=384, residual=True),
        Tile(tile_n=192, pipeline_depth=2, store_slots=3),
    ),
    "six pieces through four slots": (
        GemmShape(name="", m=256, k=64, n=384, bias=True, residual=True),
        Tile(tile_n=192, pipeline_depth=2, store_slots=4),
    ),
    "narrow columns, more slots than pieces": (
        GemmShape(name="", m=320, k=128, n=448, bias=True, residual=True, activation="silu"),
        Tile(tile_m=64, tile_n=192, pipeline_depth=3, narrow_cols=2, store_slots=4),
    ),
    "narrow columns in a cluster along m": (
        GemmShape(name="", m=200, k=64, n=320, bias=True),
        Tile(tile_m=64, tile_n=192, pipeline_depth=3, narrow_cols=1, cluster="m"),
    ),
    "narrow columns in a cluster along n, one beyond the result": (
        GemmShape(name="", m=136, k=128, n=320, residual=True),
        Tile(tile_m=64, tile_n=128, pipeline_depth=3, narrow_cols=1, cluster="n"),
    ),
}


@pytest.mark.parametrize("name", long_but(INTERPRETED, "gated"))
def test_small_tiles_are_right_and_free_of_races(name):
    shape, tile = INTERPRETED[name]
    inputs = inputs_of(shape, jnp.bfloat16)
    epilogue = Epilogue(activation=shape.activation, gated=shape.gated, scale=shape.scale)

    def run(*inputs):
        given = dict(zip(names_of(shape), inputs, strict=True))
        weights = tuple(given[name] for name in ("w_gate", "w") if name in given)
        residuals = (given["residual"],) if shape.residual else None
        operands = ((given["x"],), weights, given.get("bias"), residuals)
        options = {"epilogue": epilogue, "tile": tile, "ctas": 4, "emulated": True}
        return mosaic_gpu.matmul(*operands, **options)[0]

    actual = interpreted(run, *inputs)
    expected = call(shape, reference.gated_gemm, reference.gemm)(*inputs)
    assert_close(actual, expected, reduction=shape.k, function_error=GELU_ERROR)


def test_sub_batches_share_one_launch():
    ms, k, n = (72, 13, 136), 128, 192
    keys = jax.random.split(jax.random.key(0), 8)
    xs = [jax.random.normal(key, (1, m, k), jnp.bfloat16) for key, m in zip(keys, ms, strict=False)]
    rs = [jax.random.normal(key, (1, m, n), jnp.bfloat16) for key, m in zip(keys, ms, strict=False)]
    w = (0.2 * jax.random.normal(keys[6], (k, n))).astype(jnp.bfloat16)
    bias = jax.random.normal(keys[7], (n,), jnp.bfloat16)
    tile = Tile(tile_m=64, tile_n=128, pipeline_depth=2)

    def run(xs, rs, w, bias):
        options = {"residuals": rs, "bias": bias, "tile": tile, "sm_budget": 2}
        return grouped_gemm(xs, w, **options, implementation="mosaic_gpu")

    results = interpreted(run, xs, rs, w, bias)
    plain = grouped_gemm(xs, w, residuals=rs, bias=bias)
    for actual, other, x, residual in zip(results, plain, xs, rs, strict=True):
        expected = reference.gemm(x, w, bias, residual)
        assert_close(actual, expected, reduction=k)
        assert_close(other, expected, reduction=k, roundings=2)


@pytest.mark.long
def test_gated_sub_batches_share_one_launch():
    xs = [jax.random.normal(jax.random.key(m), (m, 64), jnp.bfloat16) for m in (16, 72)]
    w_gate, w = (
        (0.2 * jax.random.normal(jax.random.key(i), (64, 64))).astype(jnp.bfloat16) for i in (0, 1)
    )
    options = {"activation": "silu", "sm_budget": 2}

    def run(xs, w_gate, w):
        return grouped_gemm(xs, w, w_gate=w_gate, **options, implementation="mosaic_gpu")

    for actual, x in zip(interpreted(run, xs, w_gate, w), xs, strict=True):
        expected = reference.gated_gemm(x, w_gate, w, activation="silu")
        assert_close(actual, expected, reduction=64)


@pytest.mark.parametrize("rows", long_but([1, 7, 77]))
def test_rows_need_not_be_a_multiple_of_eight(rows):
    shape = GemmShape(name="", m=rows, k=128, n=64, bias=True, residual=True)
    inputs = inputs_of(shape, jnp.bfloat16)
    actual = interpreted(call(shape, implementation="mosaic_gpu", sm_budget=2), *inputs)
    assert_close(actual, call(shape, plain=reference.gemm)(*inputs), reduction=128)


@pytest.mark.parametrize("workers", [5, 66])
def test_workers_take_every_tile_once_and_narrow_ones_last(workers):
    tile = Tile(tile_n=192, pipeline_depth=4, narrow_cols=5)
    plan = Plan(ms=(1_000, 520), n=1_600, k=64, ctas=workers, tile=tile, epilogue=Epilogue())
    every, taken, done = jnp.arange(workers), [], np.zeros(workers, int)
    for segment in plan.segments:
        start, stop = (
            np.asarray(
                jax.vmap(lambda me, s=segment, end=end: mosaic_gpu.span(plan, s, me)[end])(every)
            )
            for end in (0, 1)
        )
        np.testing.assert_array_equal(start, done)
        done = stop
        mine = np.array([(me, i) for me in range(workers) for i in range(start[me], stop[me])])
        place = jax.vmap(lambda me, i, s=segment: mosaic_gpu.origin(plan, s, me, i))
        rows, cols = place(*jnp.asarray(mine, jnp.int32).T)
        taken += [(segment.group, int(r), int(c)) for r, c in zip(rows, cols, strict=True)]
    columns = [*range(0, 960, 192), *range(960, 1_600, 128)]
    rows = [(group, row) for group, m in enumerate(plan.ms) for row in range(0, m, 128)]
    assert sorted(taken) == sorted((g, row, col) for g, row in rows for col in columns)


def test_nothing_is_stored_beyond_a_result_of_one_block_of_columns():
    plan = Plan(ms=(8,), n=64, k=64, ctas=1, tile=Tile(), epilogue=Epilogue())
    assert plan.pieces(128) == [(0, 0), (64, 0)]


def test_float16_and_leading_axes():
    x = jax.random.normal(jax.random.key(0), (2, 8, 64), jnp.float16)
    w = jax.random.normal(jax.random.key(1), (64, 64), jnp.float16) * 0.2
    actual = interpreted(lambda x, w: gemm(x, w, implementation="mosaic_gpu", sm_budget=1), x, w)
    assert actual.dtype == jnp.float16
    assert_close(actual, reference.gemm(x, w), reduction=64)


@pytest.mark.parametrize("name", long_but(launches(), "on 84 SMs"))
def test_every_launch_lowers_under_its_name(name):
    function, specs = launches()[name]
    text = lowered(function, *specs)
    assert text.count("@mosaic_gpu_v2") == 1
    assert "pbjax_gemm" in text or "pbjax_gated_gemm" in text


@pytest.mark.parametrize("budget", long_but([1, 47, 84, 131]))
def test_every_budget_lowers_without_clusters(budget):
    shape = SHAPES[1]
    lowered(call(shape, implementation="mosaic_gpu", sm_budget=budget), *specs_of(shape))
    assert tile_of(shape, ctas=budget).cluster is None


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (GPT2[3], {"tile_n": 192, "narrow_cols": 5}),  # 8.33 tiles of 192 are 4.4 waves.
        (BERT[0], {"tile_n": 192, "narrow_cols": 0}),
        (LLAMA[3], {"tile_n": 256, "schedule": "cooperative"}),  # A long K, one residual.
        (DECODE[1], {"tile_n": 128, "schedule": "pingpong"}),  # 128 tiles for 132 SMs.
        (LLAMA[2], {"weights": 2, "schedule": "cooperative"}),
        (DECODE[2], {"weights": 2, "schedule": "pingpong"}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_tile_is_the_one_that_was_fastest(shape, expected):
    tile = tile_of(shape)
    assert {name: getattr(tile, name) for name in expected} == expected


@pytest.mark.long
@pytest.mark.skipif(not has_cuda_plugin(), reason="needs jax's CUDA plugin, no GPU")
def test_shipped_launches_neither_spill_nor_serialise():
    reports = ptxas_reports("gemm")
    assert set(reports) == set(launches())
    for report in reports.values():
        assert_clean(report)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_agree_with_jax_nn(name):
    x = np.linspace(-12, 12, 20_001, dtype=np.float32)
    actual = np.asarray(ACTIVATIONS[name](jnp.asarray(x)))
    expected = np.asarray(reference.activate(jnp.asarray(x), name))
    # Eight operations in f32, each rounded, on values as large as those of x.
    assert_close(actual, expected, reduction=1, roundings=8, function_error=GELU_ERROR)


def test_gelu_keeps_its_stated_error():
    x = np.linspace(-12, 12, 200_001, dtype=np.float32)
    exact = np.array([v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x.astype(np.float64)])
    error = np.abs(np.asarray(ACTIVATIONS["gelu"](jnp.asarray(x)), np.float64) - exact)
    rounding = np.finfo(np.float32).eps * np.abs(x)
    assert np.all(error <= GELU_ERROR + rounding)


@pytest.mark.parametrize("shape", SHAPES[:4], ids=lambda shape: shape.name)
def test_without_a_gpu_xla_answers(shape):
    small = GemmShape(
        name="", m=24, k=64, n=40, bias=shape.bias, residual=shape.residual, activation="gelu"
    )
    inputs = inputs_of(small, jnp.float32)
    expected = call(small, reference.gated_gemm, reference.gemm)(*inputs)
    assert_close(call(small)(*inputs), expected, reduction=64, roundings=2)
