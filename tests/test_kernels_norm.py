"""Norm kernels: interpreter with races, lowering, SASS, tiles, bad input."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import norm
from pallas_kernels.norm import mosaic_gpu, reference
from pallas_kernels.norm.api import check_norm
from pallas_kernels.norm.mosaic_gpu import Tile, tile_for
from pallas_kernels.norm.shapes import RAGGED, SHAPES, NormShape
from pallas_kernels.testing import assert_close
from tests.kernel_layers import assert_clean, has_cuda_plugin, interpreted, lowered, ptxas_reports

EPS = 1e-5


def names_of(shape: NormShape) -> list[str]:
    return ["x"] + ["residual"] * shape.residual + ["scale"] + ["bias"] * shape.bias


def specs_of(shape: NormShape, dtype=jnp.bfloat16, parameters=jnp.bfloat16):
    rows = {"x": shape.rows, "residual": shape.rows}
    return [
        jax.ShapeDtypeStruct((rows[name], shape.width), dtype)
        if name in rows
        else jax.ShapeDtypeStruct((shape.width,), parameters)
        for name in names_of(shape)
    ]


def inputs_of(shape: NormShape, dtype, parameters):
    specs = specs_of(shape, dtype, parameters)
    keys = jax.random.split(jax.random.key(shape.rows), len(specs))
    return [
        (3 * jax.random.normal(k, s.shape, jnp.float32) + 1).astype(s.dtype)
        for k, s in zip(keys, specs, strict=True)
    ]


def call(shape: NormShape, **options):
    kind = "layer_norm" if shape.centred else "rms_norm"
    function = getattr(norm, f"add_{kind}" if shape.residual else kind)
    return lambda *inputs: function(
        **dict(zip(names_of(shape), inputs, strict=True)), eps=EPS, **options
    )


def truth(shape: NormShape, inputs):
    """(normed, total), in f32."""
    named = {"bias": None, **dict(zip(names_of(shape), inputs, strict=True))}
    total = named["x"].astype(jnp.float32)
    if shape.residual:
        total = reference.add(named["x"], named["residual"])
    if shape.centred:
        return reference.layer_norm(total, named["scale"], named["bias"], eps=EPS), total
    return reference.rms_norm(total, named["scale"], eps=EPS), total


def launches():
    """Every width that ships, with its tile, for compilation ahead of time."""
    shapes = {s.name: s for s in [*SHAPES, *RAGGED]}
    found = {
        name: (call(s, implementation="mosaic_gpu"), specs_of(s)) for name, s in shapes.items()
    }
    f32 = SHAPES[0]
    found["f32 parameters"] = (
        call(f32, implementation="mosaic_gpu", sm_budget=48),
        specs_of(f32, parameters=jnp.float32),
    )
    return found


INTERPRETED = {
    "four narrow rows at a time": (
        NormShape(name="", rows=37, width=256, centred=True),
        {"warpgroups": 2, "pipeline_depth": 2, "chunk": 4},
    ),
    "two steps a chunk, no residual": (
        NormShape(name="", rows=23, width=192, centred=False, residual=False, bias=False),
        {"warpgroups": 1, "pipeline_depth": 3, "chunk": 8},
    ),
    "a wide row for each warpgroup": (
        NormShape(name="", rows=9, width=2_304, centred=True),
        {"warpgroups": 2, "pipeline_depth": 2, "chunk": 2},
    ),
    "fewer rows than warpgroups": (
        NormShape(name="", rows=1, width=1_280, centred=False, bias=False),
        {"warpgroups": 2, "pipeline_depth": 2, "chunk": 1},
    ),
}


@pytest.mark.parametrize("name", INTERPRETED)
def test_small_tiles_are_right_and_free_of_races(name):
    shape, fields = INTERPRETED[name]
    dtype = jnp.float16 if shape.centred else jnp.bfloat16
    inputs = inputs_of(shape, dtype, jnp.float32)
    tile = Tile(width=shape.width, arrays=1 + shape.residual, **fields)
    run = functools.partial(
        mosaic_gpu.normalise, eps=EPS, centred=shape.centred, tile=tile, ctas=2, name="norm"
    )
    named = {"residual": None, "bias": None, **dict(zip(names_of(shape), inputs, strict=True))}
    order = [named[n] for n in ("x", "residual", "scale", "bias")]
    results = interpreted(lambda *a: run(*a, emulated=True), *order)
    for actual, expected, terms in zip(
        results, truth(shape, inputs), (shape.width, 1), strict=False
    ):
        assert actual.dtype == dtype
        assert_close(actual, expected, reduction=terms)


@pytest.mark.parametrize("shape", [*SHAPES, *RAGGED], ids=lambda shape: shape.name)
def test_every_width_lowers_under_its_name(shape):
    text = lowered(call(shape, implementation="mosaic_gpu"), *specs_of(shape))
    assert text.count("@mosaic_gpu_v2") == 1
    assert f"{'layer' if shape.centred else 'rms'}_norm" in text


@pytest.mark.parametrize("width", [64, 704, 1_600, 2_048, 2_816, 5_120, 8_192, 12_288, 16_384])
@pytest.mark.parametrize("residual", [True, False])
def test_every_width_gets_a_tile_that_keeps_bytes_under_way(width, residual):
    tile = tile_for(width, residual=residual)
    ring = 2 * tile.chunk * tile.width * tile.arrays * tile.pipeline_depth * tile.warpgroups
    assert ring >= 64 << 10 or tile.pipeline_depth == 6


@pytest.mark.skipif(not has_cuda_plugin(), reason="needs jax's CUDA plugin, no GPU")
def test_shipped_launches_do_not_spill():
    reports = ptxas_reports("norm")
    assert set(reports) == set(launches())
    for report in reports.values():
        assert_clean(report)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4], SHAPES[7]], ids=lambda shape: shape.name)
def test_without_a_gpu_xla_answers(shape):
    small = NormShape(
        name="",
        rows=5,
        width=24,
        centred=shape.centred,
        residual=shape.residual,
        bias=shape.bias,
    )
    inputs = inputs_of(small, jnp.bfloat16, jnp.bfloat16)
    results = call(small)(*inputs)
    if not small.residual:
        results = (results,)
    for actual, expected in zip(results, truth(small, inputs), strict=False):
        assert_close(actual, expected, reduction=24)


def test_leading_axes_are_rows():
    x = jax.random.normal(jax.random.key(0), (2, 3, 64), jnp.bfloat16)
    scale = jnp.ones(64, jnp.bfloat16)
    both = norm.add_rms_norm(x, x, scale, eps=EPS)
    assert both.normed.shape == both.total.shape == x.shape


X, SCALE = jnp.ones((4, 64), jnp.bfloat16), jnp.ones(64, jnp.bfloat16)


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"x": SCALE}, "floating rows"),
        ({"x": X.astype(jnp.int32)}, "floating rows"),
        ({"scale": SCALE[:32]}, r"scale: bfloat16\(32,\)"),
        ({"bias": SCALE.astype(jnp.int32)}, "bias: int32"),
        ({"residual": X[:2]}, "residual"),
        ({"residual": X.astype(jnp.float32)}, "residual: float32"),
        ({"eps": -1e-5}, "at least 0"),
        ({"eps": float("nan")}, "at least 0"),
    ],
)
def test_operands_that_do_not_fit_are_named(operands, message):
    rest = {"x": X, "residual": None, "scale": SCALE, "bias": None, "eps": EPS}
    with pytest.raises(ValueError, match=message):
        check_norm("layer_norm", **rest | operands)


def test_a_budget_above_the_device_is_refused():
    with pytest.raises(ValueError, match="132 SMs"):
        norm.layer_norm(X, SCALE, eps=EPS, sm_budget=200)


@pytest.mark.parametrize(
    ("width", "dtype", "message"),
    [
        (64, jnp.float32, "bfloat16 and float16"),
        (96, jnp.bfloat16, "multiples of 64"),
        (2_112, jnp.bfloat16, "of 256"),
        (16_640, jnp.bfloat16, "16384"),
    ],
)
def test_what_the_kernel_cannot_do_it_refuses_by_name_and_leaves_to_xla(width, dtype, message):
    x, scale = jnp.ones((2, width), dtype), jnp.ones(width, dtype)
    with pytest.raises(NotImplementedError, match=message):
        norm.rms_norm(x, scale, eps=EPS, implementation="mosaic_gpu")
    assert norm.rms_norm(x, scale, eps=EPS).shape == x.shape


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk": 3}, "rows are normalised"),
        ({"pipeline_depth": 1}, "two slots"),
        ({"warpgroups": 5}, "4 warpgroups"),
        ({"width": 16_384, "chunk": 1, "warpgroups": 3}, "2 for rows wider"),
        ({"pipeline_depth": 40}, "shared memory"),
    ],
)
def test_tiles_state_the_hardware_limit(fields, message):
    base = {"width": 768, "arrays": 2, "warpgroups": 4, "pipeline_depth": 2, "chunk": 4}
    with pytest.raises(ValueError, match=message):
        Tile(**base | fields)
