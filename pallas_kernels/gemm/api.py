"""GEMMs with fused epilogues: the public functions, their checks, the implementation chosen."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.arguments import check_arrays, number
from pallas_kernels.gemm import mosaic_gpu, xla
from pallas_kernels.gemm.activations import ACTIVATIONS, Activation
from pallas_kernels.gemm.mosaic_gpu import Epilogue, Tile
from pallas_kernels.gemm.tiles import is_left_to_xla, tile_for

ROWS = 8  # A swizzled copy takes rows in multiples of 8.
MAX_GROUPS = 8


def gemm(
    x: Float[Array, "*B K"],
    w: Float[Array, "K N"],
    *,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "*B N"] | None = None,
    activation: Activation | None = None,
    scale: float = 1.0,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> Float[Array, "*B N"]:
    """Multiplies and finishes in one pass: residual + scale * activation(x @ w + bias).

    Products are summed in f32 and stay there until the result is rounded once. The kernel takes
    bfloat16 and float16, K and N in multiples of 64. Rows that are no multiple of 8 are padded to
    one, which copies the input, the residual and the result. Unless the kernel is named, few rows
    are left to XLA: up to 32, and more where tiles are few (`tiles.is_left_to_xla`).

    Args:
      x: Input; leading axes count as rows.
      w: Weight, input features first.
      bias: Added to each row before the activation.
      residual: Added last.
      activation: "gelu" is exact, by the error function (absolute error 6e-7); "gelu_tanh" its
        approximation.
      scale: Multiplies what is added to the residual.
      sm_budget: SMs that the kernel may fill; None: all. XLA's implementation knows no budget and
        ignores it.
      implementation: "mosaic_gpu", "xla" or None for the best that can.
      tile: Overrides the choice made by shape.

    Returns:
      The result, in the dtype of x.

    Raises:
      ValueError: Shapes or dtypes that do not fit together, an unknown activation, a budget the
        device lacks.
      NotImplementedError: The named implementation cannot do this shape, dtype or device.
    """
    scale = number("gemm", "scale", scale)
    check_gemm(x, w, bias, residual, activation)
    ctas = dispatch.check_sm_budget("gemm", sm_budget)
    residuals = None if residual is None else [residual]
    epilogue = Epilogue(activation=activation, scale=scale)
    run = functools.partial(run_groups, [x], (w,), bias, residuals, epilogue, ctas, tile)
    return dispatch.dispatch(
        "gemm",
        implementation,
        {
            "mosaic_gpu": where_best("gemm", [x], (w,), implementation, lambda: run()[0]),
            "xla": lambda: xla.gemm(x, w, bias, residual, activation=activation, scale=scale),
        },
        {
            "x": x,
            "w": w,
            "bias": bias,
            "residual": residual,
            "activation": activation,
            "scale": scale,
        },
    )


def gated_gemm(
    x: Float[Array, "*B K"],
    w_gate: Float[Array, "K N"],
    w: Float[Array, "K N"],
    *,
    activation: Activation | None = "silu",
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> Float[Array, "*B N"]:
    """Multiplies two weights in one pass: activation(x @ w_gate) * (x @ w).

    With "silu" the first half of a SwiGLU layer, with "sigmoid" a gated linear unit.

    Args:
      x: Input; leading axes count as rows.
      w_gate: Weight of the gate, input features first.
      w: Weight of the value.
      activation: Of the gate.
      sm_budget: See `gemm`.
      implementation: See `gemm`.
      tile: Overrides the choice made by shape; its weights are 2.

    Returns:
      The result, in the dtype of x.

    Raises:
      ValueError: As for `gemm`.
      NotImplementedError: As for `gemm`.
    """
    check_gemm(x, w, None, None, activation)
    _check_like("w_gate", w_gate, w.shape, x)
    ctas = dispatch.check_sm_budget("gated_gemm", sm_budget)
    epilogue = Epilogue(activation=activation, gated=True)
    run = functools.partial(run_groups, [x], (w_gate, w), None, None, epilogue, ctas, tile)
    return dispatch.dispatch(
        "gated_gemm",
        implementation,
        {
            "mosaic_gpu": where_best(
                "gated_gemm", [x], (w_gate, w), implementation, lambda: run()[0]
            ),
            "xla": lambda: xla.gated_gemm(x, w_gate, w, activation=activation),
        },
        {"x": x, "w_gate": w_gate, "w": w, "activation": activation},
    )


def grouped_gemm(
    xs: Sequence[Float[Array, "..."]],
    w: Float[Array, "K N"],
    *,
    w_gate: Float[Array, "K N"] | None = None,
    bias: Float[Array, " N"] | None = None,
    residuals: Sequence[Float[Array, "..."]] | None = None,
    activation: Activation | None = None,
    scale: float = 1.0,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
    tile: Tile | None = None,
) -> list[Float[Array, "..."]]:
    """`gemm`, or `gated_gemm`, of several sub-batches with one weight, in one launch.

    The inputs stay where they are: no copy joins them. Tiles of all are one list that the SMs
    share, so that only the last wave of the whole is not full.

    Args:
      xs: One to eight inputs, each (..., K), of any numbers of rows.
      w: Weight, input features first.
      w_gate: Weight of the gate, as for `gated_gemm`, which has no bias, residual or scale.
      bias: Added to each row before the activation.
      residuals: One for each input.
      activation: See `gemm`.
      scale: See `gemm`.
      sm_budget: See `gemm`.
      implementation: See `gemm`.
      tile: See `gemm`.

    Returns:
      One result for each input.

    Raises:
      ValueError: As for `gemm`; no input or more than eight, or another number of residuals.
      NotImplementedError: As for `gemm`.
    """
    scale = number("grouped_gemm", "scale", scale)
    check_groups(xs, residuals, gated=w_gate is not None, plain=bias is None and scale == 1.0)
    for x, residual in zip(xs, residuals or [None] * len(xs), strict=True):
        check_gemm(x, w, bias, residual, activation)
        _check_like("x", x, x.shape, xs[0])
    if w_gate is not None:
        _check_like("w_gate", w_gate, w.shape, xs[0])
    ctas = dispatch.check_sm_budget("grouped_gemm", sm_budget)
    gated = w_gate is not None
    epilogue = Epilogue(activation=activation, gated=gated, scale=scale)
    weights = (w_gate, w) if gated else (w,)
    run = functools.partial(run_groups, list(xs), weights, bias, residuals, epilogue, ctas, tile)

    def by_xla():
        if gated:
            return [xla.gated_gemm(x, w_gate, w, activation=activation) for x in xs]
        added = residuals or [None] * len(xs)
        options = {"activation": activation, "scale": scale}
        return [xla.gemm(x, w, bias, r, **options) for x, r in zip(xs, added, strict=True)]

    options = {"w": w, "w_gate": w_gate, "bias": bias, "activation": activation, "scale": scale}
    for name, arrays in (("x", xs), ("residual", residuals or [])):
        options |= {f"{name}{i}": array for i, array in enumerate(arrays)}
    return dispatch.dispatch(
        "grouped_gemm",
        implementation,
        {
            "mosaic_gpu": where_best("grouped_gemm", xs, weights, implementation, run),
            "xla": by_xla,
        },
        options,
    )


def where_best(kernel, xs, weights, implementation, run):
    """What the kernel does: unless it was named, refuse other devices and too few tiles."""

    def attempt():
        if implementation is None:
            dispatch.require_hopper(kernel)
            rows = tuple(math.prod(x.shape[:-1]) for x in xs)
            (k, n), gated = weights[0].shape, len(weights) == 2
            if is_left_to_xla(rows, n, k, gated=gated, num_sms=dispatch.num_sms()):
                raise NotImplementedError(
                    f"{kernel}(x: {sum(rows)} rows, w: {k} x {n}): too few tiles to read a weight "
                    "at full bandwidth; leave it to implementation='xla'"
                )
        return run()

    return attempt


def run_groups(
    xs, weights, bias, residuals, epilogue: Epilogue, ctas: int, tile: Tile | None, row_scales=None
):
    """The results of one launch, one for each input, then their moments if asked for."""
    k, n = weights[0].shape
    shapes = [x.shape[:-1] for x in xs]
    rows = [math.prod(shape) for shape in shapes]
    if tile is None:
        tile = tile_for(
            tuple(rows),
            n,
            k,
            gated=epilogue.gated,
            heavy=residuals is not None or epilogue.activation is not None,
            ctas=ctas,
            num_sms=dispatch.num_sms(),
            moments=epilogue.moments,
        )
    results = _matmul(
        tuple(padded(x.reshape(m, k)) for x, m in zip(xs, rows, strict=True)),
        weights,
        bias,
        None
        if residuals is None
        else tuple(padded(r.reshape(m, n)) for r, m in zip(residuals, rows, strict=True)),
        None if row_scales is None else tuple(a.reshape(-1) for a in row_scales),
        epilogue=epilogue,
        tile=tile,
        ctas=ctas,
        name="pbjax_gated_gemm" if epilogue.gated else "pbjax_gemm",
    )
    found = [y[:m].reshape(*s, n) for y, m, s in zip(results, rows, shapes, strict=False)]
    return [*found, *results[len(xs) :]]


def padded(x):
    """With rows of zeros up to the next multiple of 8, as swizzled copies want them."""
    return jnp.pad(x, ((0, -x.shape[0] % ROWS), (0, 0))) if x.shape[0] % ROWS else x


# One launch is traced and lowered once for all its uses in a program.
_matmul = jax.jit(
    mosaic_gpu.matmul, static_argnames=("epilogue", "tile", "ctas", "name", "emulated")
)


def check_groups(xs, residuals, *, gated: bool, plain: bool) -> None:
    """Raises ValueError unless the inputs of a grouped GEMM fit together."""
    if not 1 <= len(xs) <= MAX_GROUPS:
        raise ValueError(
            f"grouped_gemm(xs: {len(xs)} inputs): each is code of its own in one kernel; 1 to "
            f"{MAX_GROUPS} are allowed; call it for a part of them at a time"
        )
    given = len(xs) if residuals is None else sum(r is not None for r in residuals)
    if given != len(xs) or len(residuals or xs) != len(xs):
        raise ValueError(
            f"grouped_gemm(residuals: {given}): there are {len(xs)} inputs; give one "
            "residual for each, or None"
        )
    if gated and (residuals is not None or not plain):
        raise ValueError(
            "grouped_gemm(w_gate=..., bias=, residuals= or scale=): a gated product has none of "
            "these; leave them out, or w_gate"
        )


def check_gemm(x, w, bias, residual, activation) -> None:
    """Raises ValueError unless the operands of a GEMM fit together, TypeError for no arrays."""
    check_arrays("gemm", {"x": x, "w": w}, {"bias": bias, "residual": residual})
    if x.ndim < 2 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"gemm(x: {x.shape}, w: {w.shape}): x is (..., K) with at least one axis of rows, w "
            "is (K, N); give w with its input features first"
        )
    if 0 in x.shape or 0 in w.shape:
        raise ValueError(f"gemm(x: {x.shape}, w: {w.shape}): empty; every axis is at least 1")
    if not jnp.issubdtype(x.dtype, jnp.floating) or w.dtype != x.dtype:
        raise ValueError(
            f"gemm(x: {x.dtype}, w: {w.dtype}): both are of one floating dtype; cast one of them"
        )
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"gemm(activation={activation!r}): no such activation; there are "
            f"{', '.join(ACTIVATIONS)} and None; choose one"
        )
    _check_like("bias", bias, (w.shape[1],), x)
    _check_like("residual", residual, (*x.shape[:-1], w.shape[1]), x)


def _check_like(name: str, array, shape, x) -> None:
    if array is not None and (array.shape != tuple(shape) or array.dtype != x.dtype):
        raise ValueError(
            f"gemm({name}: {array.dtype}{array.shape}): this x and w want "
            f"{x.dtype}{tuple(shape)}; reshape or cast it"
        )
