"""A GEMM and bandwidth-bound work of another sub-batch in one launch: the public functions."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.arguments import number, whole
from pallas_kernels.corun import mosaic_gpu
from pallas_kernels.corun.tiles import tile_beside
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention.api import check_decode_attention, check_scale
from pallas_kernels.gemm.activations import Activation
from pallas_kernels.gemm.api import ROWS, check_gemm, check_groups, gated_gemm, gemm
from pallas_kernels.gemm.mosaic_gpu import Epilogue
from pallas_kernels.norm.api import add_layer_norm, add_rms_norm, check_norm


class GemmBesideNorm(NamedTuple):
    """Results of two independent pieces of work.

    Attributes:
      product: residual + scale * activation(x @ w + bias), as of `gemm`.
      normed: The norm of the other sub-batch's sum.
      total: The sum itself.
    """

    product: Float[Array, "*B N"]
    normed: Float[Array, "*C D"]
    total: Float[Array, "*C D"]


class GemmBesideDecodeAttention(NamedTuple):
    """Results of two independent pieces of work.

    Attributes:
      product: The result of `gemm` or `gated_gemm`.
      attended: The result of `decode_attention`.
    """

    product: Float[Array, "*B N"]
    attended: Float[Array, "C T A H"]


def gemm_beside_norm(
    x: Float[Array, "*B K"],
    w: Float[Array, "K N"],
    norm_x: Float[Array, "*C D"],
    norm_residual: Float[Array, "*C D"],
    norm_scale: Float[Array, " D"],
    norm_bias: Float[Array, " D"] | None = None,
    *,
    eps: float,
    centred: bool,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "*B N"] | None = None,
    activation: Activation | None = None,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
) -> GemmBesideNorm:
    """A GEMM of one sub-batch beside the residual sum and norm of another, in one launch.

    Args:
      x: Input of the GEMM, as of `gemm`.
      w: Weight of the GEMM.
      norm_x: Rows to add to and normalise, as of `add_layer_norm`; widths to 4,096.
      norm_residual: Added to norm_x.
      norm_scale: Gain per feature.
      norm_bias: Added per feature.
      eps: Added to the variance.
      centred: Whether the mean is subtracted: LayerNorm, else RMSNorm, which has no bias.
      bias: Bias of the GEMM.
      residual: Residual of the GEMM.
      activation: Activation of the GEMM.
      sm_budget: SMs that the launch may fill; None: all.
      implementation: "mosaic_gpu" for the one launch, "xla" for one after the other, None for the
        best that can.

    Returns:
      The results of both.

    Raises:
      ValueError: See `gemm` and `add_layer_norm`.
      NotImplementedError: The named implementation cannot do these shapes, dtypes or device.
    """
    check_gemm(x, w, bias, residual, activation)
    eps = number("gemm_beside_norm", "eps", eps)
    check_norm("gemm_beside_norm", norm_x, norm_residual, norm_scale, norm_bias, eps)
    if norm_bias is not None and not centred:
        raise ValueError(
            "gemm_beside_norm(centred=False, norm_bias=...): RMSNorm has no bias; pass "
            "norm_bias=None"
        )
    width = norm_x.shape[-1]
    rows = [a.reshape(-1, width) for a in (norm_x, norm_residual)]

    def together(sms: int) -> GemmBesideNorm:
        product, *others = _beside_norm(
            rows_of(x),
            w,
            bias,
            None if residual is None else rows_of(residual),
            *rows,
            norm_scale,
            norm_bias,
            eps=eps,
            centred=centred,
            epilogue=Epilogue(activation=activation),
            ctas=sms,
        )
        normed, total = (a.reshape(norm_x.shape) for a in others)
        return GemmBesideNorm(with_axes_of(product, x), normed, total)

    def in_sequence() -> GemmBesideNorm:
        options = {"bias": bias, "residual": residual, "activation": activation}
        product = gemm(x, w, **options, implementation="xla")
        rows = (norm_x, norm_residual, norm_scale)
        if centred:
            both = add_layer_norm(*rows, norm_bias, eps=eps, implementation="xla")
        else:
            both = add_rms_norm(*rows, eps=eps, implementation="xla")
        return GemmBesideNorm(product, both.normed, both.total)

    return dispatch.run_kernel(
        "gemm_beside_norm",
        launch=together,
        plain=in_sequence,
        sm_budget=sm_budget,
        implementation=implementation,
    )


def gemm_beside_decode_attention(
    x: Float[Array, "*B K"],
    w: Float[Array, "K N"],
    q: Float[Array, "C T A H"],
    k: Float[Array, "_ S G H"],
    v: Float[Array, "_ S G H"],
    lengths: Int[Array, " C"],
    *,
    alibi_slopes: Float[Array, " A"] | None = None,
    attention_scale: float | None = None,
    first_sequence: int = 0,
    w_gate: Float[Array, "K N"] | None = None,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "*B N"] | None = None,
    activation: Activation | None = None,
    scale: float = 1.0,
    sm_budget: int | None = None,
    implementation: dispatch.Implementation | None = None,
) -> GemmBesideDecodeAttention:
    """A GEMM of one sub-batch beside the decode attention of another, in one launch.

    It pays with enough rows that the weights, which each sub-batch reads for itself, cost less than
    the attention (docs/design/corun.md).

    The attention of a layer is shared out over the launches of several GEMMs by sequences: each
    gets some of q and lengths, and the whole cache. With 8 key-value heads, multiples of 16
    sequences fill the SMs evenly.

    Args:
      x: Input of the GEMM, as of `gemm`.
      w: Weight of the GEMM.
      q: Queries, as of `decode_attention`; T times A / G at most 8.
      k: Keys of these and possibly other sequences, contiguous.
      v: Values, in the layout of the keys.
      lengths: Number of valid keys of each sequence of q.
      alibi_slopes: See `decode_attention`.
      attention_scale: Factor of the scores; 1 / sqrt(H) if None.
      first_sequence: The sequence of the cache that is the first of q.
      w_gate: Makes the GEMM a `gated_gemm`, which has no bias, residual or scale.
      bias: Bias of the GEMM.
      residual: Residual of the GEMM.
      activation: Activation of the GEMM.
      scale: Scale of the GEMM.
      sm_budget: SMs that the launch may fill; None: all.
      implementation: See `gemm_beside_norm`.

    Returns:
      The results of both.

    Raises:
      ValueError: See `gemm` and `decode_attention`.
      TypeError: See `decode_attention`.
      NotImplementedError: The named implementation cannot do these shapes, dtypes or device.
    """
    gated = w_gate is not None
    check_groups(
        [x],
        None if residual is None else [residual],
        gated=gated,
        plain=(bias is None and scale == 1.0),
    )
    check_gemm(x, w, bias, residual, activation)
    if gated:
        check_gemm(x, w_gate, None, None, activation)
    first_sequence = whole("gemm_beside_decode_attention", "first_sequence", first_sequence)
    check_decode_attention(q, k, v, lengths, None, alibi_slopes, first_sequence)
    attention_scale = check_scale(q, attention_scale)

    def together(sms: int) -> GemmBesideDecodeAttention:
        product, attended = _beside_decode_attention(
            rows_of(x),
            (w_gate, w) if gated else (w,),
            bias,
            None if residual is None else rows_of(residual),
            q,
            k,
            v,
            lengths,
            alibi_slopes,
            first_sequence=first_sequence,
            attention_scale=attention_scale,
            epilogue=Epilogue(activation=activation, gated=gated, scale=scale),
            ctas=sms,
        )
        return GemmBesideDecodeAttention(with_axes_of(product, x), attended)

    def in_sequence(implementation: dispatch.Implementation | None) -> GemmBesideDecodeAttention:
        if gated:
            options = {"activation": activation, "implementation": implementation}
            product = gated_gemm(x, w_gate, w, **options)
        else:
            options = {"bias": bias, "residual": residual, "activation": activation}
            product = gemm(x, w, **options, scale=scale, implementation=implementation)
        attended = decode_attention(
            q,
            k,
            v,
            lengths,
            alibi_slopes=alibi_slopes,
            scale=attention_scale,
            first_sequence=first_sequence,
            implementation=implementation,
        )
        return GemmBesideDecodeAttention(product, attended)

    def best(sms: int) -> GemmBesideDecodeAttention:
        try:
            return together(sms)
        except NotImplementedError:
            if implementation is not None:
                raise
            return in_sequence(None)  # The best kernel for each.

    return dispatch.run_kernel(
        "gemm_beside_decode_attention",
        launch=best,
        plain=lambda: in_sequence("xla"),
        sm_budget=sm_budget,
        implementation=implementation,
    )


def rows_of(x: Float[Array, "*B K"]) -> Float[Array, "_ K"]:
    """The input with its leading axes as rows, and rows of zeros up to a multiple of 8."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    missing = -rows.shape[0] % ROWS
    return jnp.pad(rows, ((0, missing), (0, 0))) if missing else rows


def with_axes_of(product: Float[Array, "_ N"], x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
    """The product of `rows_of` x with the leading axes of x."""
    rows = math.prod(x.shape[:-1])
    return product[:rows].reshape(*x.shape[:-1], product.shape[1])


def _run_beside_norm(
    x, w, bias, residual, norm_x, norm_residual, scale, norm_bias, *, eps, centred, epilogue, ctas
):
    partner = mosaic_gpu.norm_partner(
        norm_x, norm_residual, scale, norm_bias, eps=eps, centred=centred
    )
    return mosaic_gpu.gemm_beside(
        x,
        (w,),
        bias,
        residual,
        partner,
        epilogue=epilogue,
        ctas=ctas,
        name="pbjax_gemm_beside_norm",
    )


def _run_beside_decode_attention(
    x,
    weights,
    bias,
    residual,
    q,
    k,
    v,
    lengths,
    alibi_slopes,
    *,
    first_sequence,
    attention_scale,
    epilogue,
    ctas,
):
    tile = tile_beside(x.shape[0], weights[0].shape[1], x.shape[1], gated=epilogue.gated, ctas=ctas)
    partner = mosaic_gpu.decode_partner(
        q,
        k,
        v,
        lengths,
        alibi_slopes,
        first_sequence=first_sequence,
        scale=attention_scale,
        tile=tile,
    )
    product, folded = mosaic_gpu.gemm_beside(
        x,
        weights,
        bias,
        residual,
        partner,
        epilogue=epilogue,
        ctas=ctas,
        tile=tile,
        name="pbjax_gemm_beside_decode_attention",
    )
    return product, mosaic_gpu.unfold(folded, q.shape[1])


# One launch is traced and lowered once for all its uses in a program.
_beside_norm = jax.jit(_run_beside_norm, static_argnames=("eps", "centred", "epilogue", "ctas"))
_beside_decode_attention = jax.jit(
    _run_beside_decode_attention,
    static_argnames=("first_sequence", "attention_scale", "epilogue", "ctas"),
)
