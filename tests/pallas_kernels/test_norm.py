"""Norm kernels: interpreter with races, lowering, SASS, tiles, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import norm
from pallas_kernels.norm import mosaic_gpu, reference
from pallas_kernels.norm.api import check_norm
from pallas_kernels.norm.mosaic_gpu import Tile, tile_for
from pallas_kernels.norm.shapes import QUANTIZED, RAGGED, SHAPES, NormShape
from pallas_kernels.testing import assert_close
from tests.cases import long_but
from tests.kernel_layers import assert_clean, has_cuda_plugin, interpreted, lowered, ptxas_reports

EPS = 1e-5
INT8, FP8 = jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn)
# How far a code may lie from the value it stands for, beside the precision of fp8: half a step of
# integers, or of the smallest fp8 values.
ROUNDING = {INT8: 0.5, FP8: 2.0**-10}
LARGEST = {INT8: 127.0, FP8: 448.0}


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


def call_quantized(shape: NormShape, dtype, **options):
    function = norm.quantized_layer_norm if shape.centred else norm.quantized_rms_norm
    return lambda *inputs: function(
        **dict(zip(names_of(shape), inputs, strict=True)), dtype=dtype.name, eps=EPS, **options
    )


def assert_quantized(values, scales, expected, dtype, width):
    """Values and scales agree with a norm in f32."""
    assert values.dtype == dtype
    assert scales.dtype == jnp.float32
    want = reference.quantization_scales(expected, LARGEST[dtype])
    assert_close(scales, want, reduction=width)
    codes = reference.unrounded_codes(expected, want)
    assert_close(values, codes, reduction=width, function_error=ROUNDING[dtype])


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
    for shape in [*QUANTIZED, *RAGGED]:
        dtype = INT8 if shape.centred else FP8
        function = call_quantized(shape, dtype, implementation="mosaic_gpu")
        found[f"{shape.name}, {dtype.name}"] = (function, specs_of(shape))
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


def run_small(shape: NormShape, fields, dtype=None):
    """The kernel's results in the interpreter, and (normed, total) in f32."""
    inputs = inputs_of(shape, jnp.float16 if shape.centred else jnp.bfloat16, jnp.float32)
    tile = Tile(width=shape.width, arrays=1 + shape.residual, quantized=dtype is not None, **fields)
    static = {"eps": EPS, "centred": shape.centred, "tile": tile, "ctas": 2, "dtype": dtype}
    run = functools.partial(mosaic_gpu.normalise, **static, name="norm", emulated=True)
    named = {"residual": None, "bias": None, **dict(zip(names_of(shape), inputs, strict=True))}
    order = [named[n] for n in ("x", "residual", "scale", "bias")]
    return interpreted(run, *order), truth(shape, inputs)


@pytest.mark.parametrize("name", long_but(INTERPRETED))
def test_small_tiles_are_right_and_free_of_races(name):
    shape, fields = INTERPRETED[name]
    results, expected = run_small(shape, fields)
    assert len(results) == 1 + shape.residual
    for actual, want, terms in zip(results, expected, (shape.width, 1), strict=False):
        assert actual.dtype == (jnp.float16 if shape.centred else jnp.bfloat16)
        assert_close(actual, want, reduction=terms)


@pytest.mark.parametrize("dtype", long_but([FP8, INT8]), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", long_but(INTERPRETED))
def test_small_quantized_tiles_are_right_and_free_of_races(name, dtype):
    shape, fields = INTERPRETED[name]
    results, (normed, total) = run_small(shape, fields, dtype)
    assert_quantized(results[0], results[-1], normed, dtype, shape.width)
    for actual in results[1:-1]:
        assert_close(actual, total, reduction=1)


@pytest.mark.parametrize("registers", long_but([0, 16, 200], 16))
@pytest.mark.parametrize("parameters", [jnp.float16, jnp.float32])
def test_scale_and_bias_are_the_same_from_registers_and_from_memory(
    monkeypatch, registers, parameters
):
    monkeypatch.setitem(mosaic_gpu.KEPT_REGISTERS, 1, registers)
    shape = NormShape(name="", rows=5, width=256, centred=True, residual=False)
    inputs = inputs_of(shape, jnp.float16, parameters)
    tile = Tile(width=256, arrays=1, warpgroups=1, pipeline_depth=2, chunk=4)

    def run(emulated, x, scale, bias):
        static = {"eps": EPS, "centred": True, "tile": tile, "ctas": 2, "name": "norm"}
        return mosaic_gpu.normalise(x, None, scale, bias, **static, emulated=emulated)[0]

    lowered(functools.partial(run, False), *specs_of(shape, jnp.float16, parameters))
    actual = interpreted(functools.partial(run, True), *inputs)
    assert_close(actual, truth(shape, inputs)[0], reduction=256)


@pytest.mark.parametrize("shape", long_but([*SHAPES, *RAGGED]), ids=lambda shape: shape.name)
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


@pytest.mark.parametrize("shape", long_but([*QUANTIZED, *RAGGED]), ids=lambda shape: shape.name)
@pytest.mark.parametrize("dtype", [INT8, FP8], ids=lambda dtype: dtype.name)
def test_every_quantized_width_lowers_under_its_name(shape, dtype):
    text = lowered(call_quantized(shape, dtype, implementation="mosaic_gpu"), *specs_of(shape))
    assert text.count("@mosaic_gpu_v2") == 1
    assert f"quantized_{'layer' if shape.centred else 'rms'}_norm" in text


@pytest.mark.parametrize("width", [64, 1_600, 4_096, 16_384])
@pytest.mark.parametrize("residual", [True, False])
def test_every_width_gets_a_tile_for_quantized_results(width, residual):
    assert tile_for(width, residual=residual, quantized=True).quantized


@pytest.mark.long
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


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("centred", [True, False])
def test_without_a_gpu_xla_quantizes(dtype, residual, centred):
    shape = NormShape(name="", rows=5, width=24, centred=centred, residual=residual, bias=centred)
    inputs = inputs_of(shape, jnp.bfloat16, jnp.bfloat16)
    result = call_quantized(shape, dtype)(*inputs)
    normed, total = truth(shape, inputs)
    assert_quantized(result.values, result.scales, normed, dtype, shape.width)
    assert (result.total is not None) == residual
    if residual:
        assert_close(result.total, total, reduction=1)


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=lambda dtype: dtype.name)
def test_a_row_of_zeros_quantizes_to_zeros(dtype):
    x = jnp.zeros((1, 2, 64), jnp.bfloat16).at[0, 1, 3].set(5.0)
    result = norm.quantized_rms_norm(x, SCALE, dtype=dtype.name, eps=EPS)
    assert result.values.shape == x.shape
    assert result.scales.shape == (1, 2)
    assert not np.any(np.asarray(result.values[0, 0], np.float32))
    assert result.scales[0, 0] == 0
    assert float(result.values[0, 1, 3]) == LARGEST[dtype]
    tile = Tile(width=64, arrays=1, warpgroups=1, pipeline_depth=2, chunk=4, quantized=True)
    static = {"eps": EPS, "centred": False, "tile": tile, "ctas": 1, "name": "norm"}
    values, scales = interpreted(
        lambda x: mosaic_gpu.normalise(x, None, SCALE, None, **static, dtype=dtype, emulated=True),
        x[0],
    )
    np.testing.assert_array_equal(np.asarray(values, np.float32), result.values[0])
    assert_close(scales, result.scales[0], reduction=64)


def test_an_unknown_quantized_type_is_refused():
    with pytest.raises((ValueError, TypeError), match="int4"):
        norm.quantized_layer_norm(X, SCALE, dtype="int4", eps=EPS)


def test_a_tile_for_another_kind_of_result_is_refused():
    tile = tile_for(64, residual=False)
    with pytest.raises(ValueError, match="tile of that kind"):
        norm.quantized_rms_norm(
            X, SCALE, dtype="int8", eps=EPS, tile=tile, implementation="mosaic_gpu"
        )


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
