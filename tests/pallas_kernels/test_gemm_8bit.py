"""GEMMs of 8 bits: interpreter with races, bit for bit, lowering, SASS, 8-bit results, refusals.

Sums in the interpreter are exact; what tensor cores drop is measured by scripts/check_kernels.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gemm import mosaic_gpu, quantized_gated_gemm, quantized_gemm, reference
from pallas_kernels.gemm.activations import GELU_ERROR
from pallas_kernels.gemm.plan import Epilogue, Tile
from pallas_kernels.gemm.quantized import check_accumulation, check_quantized
from pallas_kernels.gemm.shapes import BERT, BLOOM, DECODE, GPT2, LLAMA, RAGGED, SHAPES, GemmShape
from pallas_kernels.gemm.tiles import is_left_to_xla, tile_for
from pallas_kernels.quantization import LARGEST, Quantized, quantize, rounded
from pallas_kernels.testing import assert_close
from tests.cases import long_but
from tests.kernel_layers import assert_clean, has_cuda_plugin, interpreted, lowered, ptxas_reports

FP8, INT8 = "float8_e4m3fn", "int8"
small = functools.partial(Tile, operand_bytes=1, tile_k=128, tile_m=64, pipeline_depth=2)


def integers(shape: GemmShape, kind: str) -> dict:
    """Operands whose products, sums and scales round nothing."""
    keys = jax.random.split(jax.random.key(shape.m), 7)

    def rows(value_key, scale_key, count):
        values = jax.random.randint(value_key, (count, shape.k), -3, 4).astype(kind)
        return Quantized(values, jnp.exp2(jax.random.randint(scale_key, (count,), -3, 0)))

    operands = {"x": rows(*keys[:2], shape.m), "w": rows(*keys[2:4], shape.n)}
    if shape.gated:
        operands = {"x": operands["x"], "w_gate": rows(*keys[4:6], shape.n), "w": operands["w"]}
    if shape.bias:
        operands["bias"] = jax.random.randint(keys[4], (shape.n,), -8, 9).astype(jnp.bfloat16)
    if shape.residual:
        added = jax.random.randint(keys[5], (shape.m, shape.n), -8, 9)
        operands["residual"] = added.astype(jnp.bfloat16)
    return operands


def launch(operands: dict, shape: GemmShape, tile: Tile, dtype="bfloat16", result_scale=None):
    """The kernel with a tile of the test's choice."""
    weights = [operands[name] for name in ("w_gate", "w") if name in operands]
    x, residual = operands["x"], operands.get("residual")
    return mosaic_gpu.matmul(
        (x.values,),
        tuple(w.values for w in weights),
        operands.get("bias"),
        None if residual is None else (residual,),
        None if x.scales is None else (x.scales,),
        tuple(w.scales for w in weights),
        result_scale,
        epilogue=Epilogue(activation=shape.activation, gated=shape.gated, dtype=dtype),
        tile=tile,
        ctas=2,
        emulated=True,
    )[0]


def truth(operands: dict, shape: GemmShape):
    function = reference.quantized_gated_gemm if shape.gated else reference.quantized_gemm
    return function(**operands, activation=shape.activation)


INTERPRETED = {
    "pingpong, half a row of columns left over": (
        GemmShape(name="", m=72, k=192, n=64, bias=True, activation="relu"),
        small(tile_n=64),
        FP8,
    ),
    "narrow columns, one buffer": (
        GemmShape(name="", m=8, k=128, n=192, bias=True, residual=True),
        small(narrow_cols=1, store_slots=1),
        INT8,
    ),
    "cooperative, promoted by turns, a last turn of one step": (
        GemmShape(name="", m=72, k=384, n=64, residual=True),
        small(tile_n=64, schedule="cooperative", promotion=2),
        FP8,
    ),
    "gated, one piece of fewer columns than a slot": (
        GemmShape(name="", m=8, k=64, n=64, activation="relu", gated=True),
        small(tile_n=64, weights=2, store_slots=1),
        INT8,
    ),
}


@pytest.mark.parametrize(
    "name",
    long_but(
        INTERPRETED,
        "cooperative, promoted by turns, a last turn of one step",
        "gated, one piece of fewer columns than a slot",
    ),
)
def test_small_tiles_are_right_to_the_bit_and_free_of_races(name):
    shape, tile, kind = INTERPRETED[name]
    operands = integers(shape, kind)
    actual = interpreted(lambda operands: launch(operands, shape, tile), operands)
    expected = truth(operands, shape).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(expected, np.float32))


def test_a_result_of_8_bits_is_rounded_and_clipped():
    shape = GemmShape(name="", m=8, k=128, n=64)
    operands = integers(shape, FP8)
    operands["x"] = Quantized(operands["x"].values, None)
    scale = jnp.full(1, 0.0625, jnp.float32)
    run = functools.partial(launch, shape=shape, tile=small(tile_n=64), dtype=FP8)
    actual = interpreted(lambda operands, scale: run(operands, result_scale=scale), operands, scale)
    expected = rounded(truth(operands, shape) / 0.0625, FP8)
    assert np.max(np.abs(np.asarray(expected, np.float32))) == LARGEST[jnp.dtype(FP8)]
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def test_the_public_function_takes_leading_axes_and_any_rows():
    x = quantize(jax.random.normal(jax.random.key(0), (3, 1, 128)), INT8)
    w = quantize(jax.random.normal(jax.random.key(1), (64, 128)), INT8)
    run = functools.partial(quantized_gemm, dtype="float16", sm_budget=1)
    kernel = functools.partial(run, implementation="mosaic_gpu", tile=small(tile_n=64))
    actual = interpreted(kernel, x, w)
    assert actual.dtype == jnp.float16
    expected = reference.quantized_gemm(x, w)
    assert_close(actual, expected, reduction=128)
    assert_close(run(x, w), expected, reduction=128)


@pytest.mark.parametrize(
    ("shape", "kind"), [(BERT[2], FP8), (LLAMA[2], INT8)], ids=lambda value: str(value)[:3]
)
def test_plain_jax_agrees_with_the_dequantised_product(shape, kind):
    operands = integers(
        GemmShape(
            name="",
            m=24,
            k=64,
            n=40,
            bias=shape.bias,
            residual=shape.residual,
            activation=shape.activation,
            gated=shape.gated,
        ),
        kind,
    )
    function = quantized_gated_gemm if shape.gated else quantized_gemm
    actual = function(**operands, activation=shape.activation)
    assert_close(actual, truth(operands, shape), reduction=64, function_error=GELU_ERROR)
    small_codes = function(
        **{name: x for name, x in operands.items() if name != "residual"},
        activation=shape.activation,
        dtype=kind,
        result_scale=jnp.float32(0.25),
    )
    assert small_codes.dtype == kind


@pytest.mark.parametrize("kind", [FP8, INT8])
def test_quantised_rows_are_right_to_half_a_step(kind):
    x = jax.random.normal(jax.random.key(0), (16, 256)).at[3].set(0.0)
    found = quantize(x, kind)
    assert found.scales[3] == 0
    assert not np.any(np.asarray(found.values[3], np.float32))
    step = np.asarray(found.scales)[:, None] * (0.5 if kind == INT8 else 2.0**-10)
    error = np.abs(np.asarray(reference.dequantized(found) - x))
    relative = 0.0 if kind == INT8 else 2.0**-4
    rounding = np.finfo(np.float32).eps * np.abs(np.asarray(x))
    assert np.all(error <= step + (relative + 2 * rounding) * np.abs(np.asarray(x)) + 2 * rounding)


def test_rounding_to_int8_is_to_even_as_numpy_rounds():
    x = np.concatenate([np.arange(-130, 131) / 2, np.linspace(-300, 300, 997)]).astype(np.float32)
    expected = np.clip(np.round(x), -127, 127)
    np.testing.assert_array_equal(np.asarray(rounded(jnp.asarray(x), INT8)), expected)


def tile_of(shape: GemmShape, *, promoted: bool = False, ctas: int = 132) -> Tile:
    return tile_for(
        (shape.m,),
        shape.n,
        shape.k,
        gated=shape.gated,
        heavy=shape.residual or shape.activation is not None,
        ctas=ctas,
        num_sms=132,
        operand_bytes=1,
        promoted=promoted,
    )


def launches():
    """A launch of each shipped tile with each epilogue, for compilation ahead of time."""
    found, options = {}, {"implementation": "mosaic_gpu"}
    for kind in (FP8, INT8):
        for shape in [*SHAPES, *RAGGED]:
            key = (tile_of(shape), shape.activation, shape.bias, shape.residual, kind)
            found.setdefault(key, call(shape, kind, f"{shape.name}, {kind}", **options))
        for shape in (BERT[2], LLAMA[2]):
            name = f"{shape.name}, {kind} result"
            found[name] = call(shape, kind, name, dtype=kind, **options)
    for shape in (BLOOM[3], GPT2[3], LLAMA[2], LLAMA[3]):
        name = f"{shape.name}, promoted"
        found[name] = call(shape, FP8, name, accumulation="promoted", **options)
    found["84 SMs"] = call(BERT[2], FP8, "on 84 SMs", sm_budget=84, **options)
    return {name: (function, specs) for name, function, specs in found.values()}


def call(shape: GemmShape, kind: str, name: str, **options):
    """A name, the public function of flat arrays, and their shapes."""
    f32, half = jnp.float32, jnp.bfloat16
    result = options.get("dtype")
    rows = {"x": shape.m} | ({"w_gate": shape.n} if shape.gated else {}) | {"w": shape.n}
    sizes = [((count, shape.k), kind) for count in rows.values()]
    sizes += [((count,), f32) for count in rows.values()]
    plain = {"bias": ((shape.n,), half)} if shape.bias and not shape.gated else {}
    plain |= {"residual": ((shape.m, shape.n), half)} if shape.residual else {}
    plain |= {"result_scale": ((), f32)} if result else {}

    def run(*arrays):
        count = len(rows)
        pairs = zip(rows, arrays[:count], arrays[count : 2 * count], strict=True)
        given = {name: Quantized(values, scales) for name, values, scales in pairs}
        given |= dict(zip(plain, arrays[2 * count :], strict=True))
        function = quantized_gated_gemm if shape.gated else quantized_gemm
        scale = {} if shape.gated else {"scale": shape.scale}
        return function(**given, activation=shape.activation, **scale, **options)

    return name, run, [jax.ShapeDtypeStruct(*size) for size in [*sizes, *plain.values()]]


def lowered_here() -> dict:
    """One launch for each schedule, as lowering takes seconds; ptxas sees them all."""
    options = {"implementation": "mosaic_gpu"}
    calls = [
        call(dataclasses.replace(GPT2[1], n=576), FP8, "K no multiple of 128", **options),
        call(DECODE[3], INT8, "128 columns", **options),
        call(LLAMA[2], INT8, "gated, a result of 8 bits", dtype=INT8, **options),
        call(DECODE[3], FP8, "promoted", accumulation="promoted", **options),
    ]
    return {name: (function, specs) for name, function, specs in calls}


@pytest.mark.parametrize("name", long_but(lowered_here(), "128 columns", "promoted"))
def test_schedules_lower_under_their_name(name):
    function, specs = lowered_here()[name]
    text = lowered(function, *specs)
    assert text.count("@mosaic_gpu_v2") == 1
    assert "pbjax_quantized_gated_gemm" in text or "pbjax_quantized_gemm" in text


@pytest.mark.skipif(not has_cuda_plugin(), reason="needs jax's CUDA plugin, no GPU")
def test_shipped_launches_do_not_serialise():
    reports = ptxas_reports("gemm_8bit")
    assert set(reports) == set(launches())
    for name, report in reports.items():
        # Addresses kept over a tile, 4 bytes each, read again once a tile; sums spill nowhere.
        kept = [(r, max(0, spilled - ADDRESS_BYTES)) for r, spilled in report["kernels"]]
        assert_clean(report | {"kernels": kept}), name


ADDRESS_BYTES = 160


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (BERT[2], {"tile_n": 192, "narrow_cols": 0}),
        (GPT2[3], {"tile_n": 192, "narrow_cols": 5}),
        (LLAMA[3], {"tile_n": 128}),  # In long runs 4 % faster than 192 columns.
        (DECODE[1], {"tile_n": 128}),
        (LLAMA[2], {"tile_m": 64, "weights": 2, "schedule": "pingpong"}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_tile_is_the_one_that_was_fastest(shape, expected):
    tile = tile_of(shape)
    assert {name: getattr(tile, name) for name in expected} == expected


def test_a_budget_has_no_clusters():
    assert tile_of(BERT[2], ctas=84).cluster is None


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.m >= 512], ids=lambda s: s.name)
def test_no_product_of_a_benchmark_is_left_to_xla(shape):
    given = {"gated": shape.gated, "num_sms": 132, "operand_bytes": 1}
    assert not is_left_to_xla((shape.m,), shape.n, shape.k, **given)


X = Quantized(jnp.ones((16, 128), jnp.int8), jnp.ones(16, jnp.float32))
W = Quantized(jnp.ones((64, 128), jnp.int8), jnp.ones(64, jnp.float32))
BIAS, RESIDUAL = jnp.ones(64, jnp.bfloat16), jnp.ones((16, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"w": Quantized(W.values.T, W.scales)}, "output features first"),
        ({"x": Quantized(X.values[0], X.scales[0])}, "at least one axis of rows"),
        ({"x": Quantized(X.values[:0], X.scales[:0])}, "empty"),
        ({"w": Quantized(W.values.astype(FP8), W.scales)}, "both are of one of int8"),
        ({"x": Quantized(X.values, X.scales[:8])}, r"x.scales: float32\(8,\)"),
        ({"w": Quantized(W.values, BIAS)}, "w.scales: bfloat16"),
        ({"bias": BIAS[:32]}, r"bias: bfloat16\(32,\)"),
        ({"residual": RESIDUAL.astype(jnp.float16)}, "residual: float16"),
        ({"activation": "swish"}, "no such activation"),
        ({"dtype": "float32"}, "no such result"),
        ({"dtype": INT8}, "result of 8 bits has a scale"),
        ({"result_scale": jnp.float32(1)}, "result of 8 bits has a scale"),
        ({"dtype": INT8, "result_scale": jnp.ones(64)}, "one float32 holds"),
        ({"dtype": INT8, "result_scale": jnp.float32(1), "residual": RESIDUAL}, "of 16 bits"),
    ],
)
def test_operands_that_do_not_fit_are_named(given, message):
    absent = dict.fromkeys(("bias", "residual", "activation", "result_scale"))
    given = {"x": X, "w": W, "dtype": "bfloat16"} | absent | given
    with pytest.raises(ValueError, match=message):
        check_quantized("quantized_gemm", weights=(given.pop("w"),), **given)


@pytest.mark.parametrize(
    ("way", "message"), [("promoted", "sums of int8 are exact"), ("slow", "no such way")]
)
def test_ways_of_summing_that_do_not_fit_are_named(way, message):
    with pytest.raises(ValueError, match=message):
        check_accumulation("quantized_gemm", X, way)


def test_gates_of_another_shape_are_named():
    gate = Quantized(W.values[:32], W.scales[:32])
    with pytest.raises(ValueError, match="two shapes"):
        quantized_gated_gemm(X, gate, W)


def test_a_weight_without_scales_is_named():
    with pytest.raises(TypeError, match=r"w\.scales"):
        quantized_gemm(X, Quantized(W.values, None))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tile_k": 64}, "tile_k is 128"),
        ({"promotion": 4, "operand_bytes": 2, "tile_k": 64}, "kept in f32"),
        ({"promotion": 4, "tile_m": 128}, "registers"),
    ],
)
def test_tiles_state_the_limit(fields, message):
    with pytest.raises(ValueError, match=message):
        small(**fields)


@pytest.mark.parametrize("tile", [Tile(), small(tile_n=64, promotion=4)])
def test_tiles_of_another_type_are_refused(tile):
    with pytest.raises(ValueError, match="for this type"):
        quantized_gemm(X, W, implementation="mosaic_gpu", tile=tile)


def test_columns_that_no_tile_takes_are_refused_by_name_and_left_to_xla():
    w = Quantized(W.values[:40], W.scales[:40])
    with pytest.raises(NotImplementedError, match="K and N of 64"):
        quantized_gemm(X, w, implementation="mosaic_gpu")
    assert quantized_gemm(X, w).shape == (16, 40)
