"""GEMMs of the six models: the product alone, with the model's epilogue, with norms folded in."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.gemm import (
    ScaledRows,
    gated_gemm,
    gemm,
    gemm_for_norm,
    grouped_gemm,
    normed_gemm,
    reference,
)
from pallas_kernels.gemm.activations import GELU_ERROR
from pallas_kernels.gemm.shapes import GROUPED, PRE_NORM, RAGGED, SHAPES, GemmShape
from pallas_kernels.norm import layer_norm, rms_norm

from . import Case

EPS = 1e-5


def cases() -> list[Case]:
    """Every shape with its epilogue, each product alone, sub-batches, ragged shapes on few SMs.

    Those of pre-norm layers also with the norm before or after them folded in.
    """
    plain = {(s.m, s.k, s.n): s for s in SHAPES if not s.gated}
    products = [
        GemmShape(name=f"{s.name}, product alone", m=s.m, k=s.k, n=s.n) for s in plain.values()
    ]
    found = [_case(shape, "bfloat16", None) for shape in [*products, *SHAPES]]
    found += [_grouped(ms, shape) for ms, shape in GROUPED]
    for shape in RAGGED:
        found += [_case(shape, "bfloat16", 50), _case(shape, "float16", 1)]
    for shape in PRE_NORM:
        found.append((_for_norm if shape.residual else _normed)(shape, "bfloat16", None))
    for shape in RAGGED:
        found += [_normed(shape, "bfloat16", 50), _normed(shape, "float16", 1)]
        if not shape.gated:
            found += [_for_norm(shape, "bfloat16", 50), _for_norm(shape, "float16", 1)]
    return found


def _case(shape: GemmShape, dtype: str, sm_budget: int | None) -> Case:
    options = {"activation": shape.activation}
    names = ["x", "w_gate", "w"] if shape.gated else ["x", "w"]
    if not shape.gated:
        options["scale"] = shape.scale
        names += ["bias"] * shape.bias + ["residual"] * shape.residual
    function, truth = (gated_gemm, reference.gated_gemm) if shape.gated else (gemm, reference.gemm)

    def call(f, extra):
        return lambda *inputs: f(**dict(zip(names, inputs, strict=True)), **options, **extra)

    small = sm_budget is not None
    weights = 2 if shape.gated else 1
    moved = shape.m * (shape.k + shape.n * (1 + shape.residual)) + weights * shape.k * shape.n
    return Case(
        kernel="gemm",
        name=f"{shape.name}, {sm_budget} SMs" if small else shape.name,
        dtype=dtype,
        make=functools.partial(_make, shape, tuple(names), dtype),
        run=call(function, {"implementation": "mosaic_gpu", "sm_budget": sm_budget}),
        reference=call(truth, {}),
        close=({"reduction": shape.k, "function_error": GELU_ERROR},),
        opponents={} if small else {"cublaslt": call(function, {"implementation": "xla"})},
        flops=2 * weights * shape.m * shape.k * shape.n,
        num_bytes=2 * moved,
    )


def _normed(shape: GemmShape, dtype: str, sm_budget: int | None) -> Case:
    """A product with factors of its rows against the norm and the product without them."""
    gate = ["w_gate"] * shape.gated
    bias = ["bias"] * (shape.bias and not shape.gated)
    names = ("x", "row_scale", "w", *gate, *bias)

    def given(inputs):
        return dict(zip(names, inputs, strict=True)) | {"activation": shape.activation}

    def run(*inputs):
        return normed_gemm(**given(inputs), implementation="mosaic_gpu", sm_budget=sm_budget)

    def alone(norm, *inputs):
        arrays = given(inputs)
        del arrays["row_scale"]
        if norm is not None:
            gain = jnp.ones(shape.k, dtype)
            arrays["x"] = norm(arrays["x"], gain, eps=EPS, implementation="mosaic_gpu")
        return (gated_gemm if shape.gated else gemm)(**arrays, implementation="mosaic_gpu")

    norm = rms_norm if shape.gated else layer_norm
    weights = 1 + shape.gated
    return Case(
        kernel="gemm",
        name=f"{shape.name}, norm before" + (f", {sm_budget} SMs" if sm_budget else ""),
        dtype=dtype,
        make=functools.partial(_make, shape, names, dtype),
        run=run,
        reference=lambda *inputs: reference.normed_gemm(**given(inputs)),
        close=({"reduction": shape.k, "function_error": GELU_ERROR},),
        opponents={}
        if sm_budget
        else {
            "norm and gemm": functools.partial(alone, norm),
            "gemm": functools.partial(alone, None),
        },
        flops=2 * weights * shape.m * shape.k * shape.n,
        num_bytes=2 * (shape.m * (shape.k + shape.n) + weights * shape.k * shape.n),
    )


def _for_norm(shape: GemmShape, dtype: str, sm_budget: int | None) -> Case:
    """A product that gives the factors of its rows against the same without them."""
    names = ("x", "w", *["bias"] * shape.bias, *["residual"] * shape.residual)
    centred = shape.bias

    def given(inputs):
        return dict(zip(names, inputs, strict=True)) | {"scale": shape.scale}

    def run(*inputs):
        options = {"implementation": "mosaic_gpu", "sm_budget": sm_budget}
        return gemm_for_norm(**given(inputs), **options, eps=EPS, centred=centred)

    def truth(*inputs):
        y = reference.gemm(**given(inputs))
        return ScaledRows(y, reference.row_scale(y, eps=EPS, centred=centred))

    # Of values before they are rounded: n of them, each off by half a step at most, change the
    # deviation by some 0.4 steps over the root of n, and here no factor is above 2.
    rounding = 6 * float(jnp.finfo(dtype).eps) * shape.n**-0.5
    return Case(
        kernel="gemm",
        name=f"{shape.name}, norm after" + (f", {sm_budget} SMs" if sm_budget else ""),
        dtype=dtype,
        make=functools.partial(_make, shape, names, dtype),
        run=run,
        reference=truth,
        close=({"reduction": shape.k}, {"reduction": shape.n, "function_error": rounding}),
        opponents={}
        if sm_budget
        else {"gemm": lambda *inputs: gemm(**given(inputs), implementation="mosaic_gpu")},
        flops=2 * shape.m * shape.k * shape.n,
        num_bytes=2 * (shape.m * (shape.k + shape.n * (1 + shape.residual)) + shape.k * shape.n),
    )


def _grouped(ms: tuple[int, ...], shape: GemmShape) -> Case:
    """Sub-batches in one launch against a launch, or a library call, for each."""
    shared = 1 + shape.bias
    options = {"activation": shape.activation, "scale": shape.scale}

    def given(arrays):
        w, *bias = arrays[:shared]
        rows = arrays[shared:]
        xs, residuals = rows[: len(ms)], rows[len(ms) :]
        return xs, w, bias[0] if bias else None, residuals or None

    def together(*arrays):
        xs, w, bias, residuals = given(arrays)
        sub_batches = {"bias": bias, "residuals": residuals, **options}
        return grouped_gemm(xs, w, **sub_batches, implementation="mosaic_gpu")

    def apart(function, *arrays):
        xs, w, bias, residuals = given(arrays)
        added = residuals or [None] * len(xs)
        return [
            function(x, w, bias=bias, residual=r, **options) for x, r in zip(xs, added, strict=True)
        ]

    def make(key):
        shapes = [(shape.k, shape.n), *([(shape.n,)] * shape.bias)]
        shapes += [(m, shape.k) for m in ms]
        shapes += [(m, shape.n) for m in ms] if shape.residual else []
        keys = jax.random.split(key, len(shapes))
        arrays = [jax.random.normal(k, s, jnp.float32) for k, s in zip(keys, shapes, strict=True)]
        arrays[0] *= shape.k**-0.5
        return tuple(a.astype("bfloat16") for a in arrays)

    moved = shape.m * (shape.k + shape.n * (1 + shape.residual)) + shape.k * shape.n
    by = {name: functools.partial(gemm, implementation=name) for name in ("mosaic_gpu", "xla")}
    return Case(
        kernel="gemm",
        name=f"{shape.name} as {len(ms)} sub-batches",
        dtype="bfloat16",
        make=make,
        run=together,
        reference=functools.partial(apart, reference.gemm),
        close=({"reduction": shape.k, "function_error": GELU_ERROR},) * len(ms),
        opponents={
            "cublaslt, one each": functools.partial(apart, by["xla"]),
            "our gemm, one each": functools.partial(apart, by["mosaic_gpu"]),
        },
        flops=2 * shape.m * shape.k * shape.n,
        num_bytes=2 * moved,
    )


def _make(shape: GemmShape, names, dtype, key):
    shapes = {
        "x": (shape.m, shape.k),
        "w": (shape.k, shape.n),
        "w_gate": (shape.k, shape.n),
        "bias": (shape.n,),
        "residual": (shape.m, shape.n),
        "row_scale": (shape.m,),
    }
    scales = {"w": shape.k**-0.5, "w_gate": 2 * shape.k**-0.5}
    keys = jax.random.split(key, len(names))
    return tuple(
        (jax.random.normal(k, shapes[name], jnp.float32) * scales.get(name, 1.0)).astype(
            "float32" if name == "row_scale" else dtype
        )
        for k, name in zip(keys, names, strict=True)
    )
