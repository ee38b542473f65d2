"""Attention by cuDNN: one primitive with everything in its parameters."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention import attention
from pbjax.fusion.reading import Reading
from pbjax.fusion.rewriting import Match, Mismatch, match, named, operand
from pbjax.graph.trace import Atom

PRIMITIVE = "dot_product_attention_fwd_wrapper"

# Parameter values of jax/_src/cudnn/fused_attention_stablehlo.py.
_BTNH = 0
_MASKS = ("NO_MASK", "PADDING", "CAUSAL", "PADDING_CAUSAL")


def find_cudnn_attention(reading: Reading, value: int) -> Match | None:
    """Matches a value that is the result of cuDNN's attention.

    Raises:
      Mismatch: It uses dropout, packed segments or pages, which the kernel does not have.
    """
    operation = reading.maker(value)
    if operation is None or operation.primitive != PRIMITIVE:
        return None
    params = operation.params
    q, k, v, bias, query_lengths, lengths, *packing = operation.inputs
    mask = params["mask_type"].name
    if mask not in _MASKS or params["layout"] != _BTNH or params["dropout_rate"]:
        raise Mismatch("it has dropout, another layout than BTNH, or ALiBi by cuDNN")
    if any(reading.shape(a) != (0,) for a in packing):
        raise Mismatch("its sequences are packed, or its keys in pages")
    given: dict[str, Atom] = {"bias": bias} if params["variadic_args"][0] else {}
    if "PADDING" in mask:
        sizes = {"query_lengths": (query_lengths, q), "lengths": (lengths, k)}
        for name, (counts, array) in sizes.items():
            if reading.scalar(counts) != reading.shape(array)[1]:
                given[name] = counts
    window = params["sliding_window_length"]
    causal = "CAUSAL" in mask or window is not None

    def function(q, k, v, *others):
        options = dict(zip(given, others, strict=True))
        if "bias" in options:
            options["bias"] = _whole(options["bias"], q, k)
        out = attention(
            q, k, v, causal=causal, window=window, scale=float(params["scale"]), **options
        )
        return (out,)

    spread = float(max(reading.shape(k)[1] - 1, 1))
    return match(
        reading,
        "attention",
        named("attention", {"causal": causal, "window": window, **given}),
        anchors=[reading.makers[value]],
        operands=[*map(operand, (q, k, v)), *(operand(a, spread) for a in given.values())],
        outputs=(value,),
        function=function,
    )


def _whole(bias: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.broadcast_to(bias, (len(bias), q.shape[2], q.shape[1], k.shape[1]))
