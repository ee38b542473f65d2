"""Joins products of one input, such as Q, K and V, into one with their weights side by side.

The weights are joined where the model reads them, once a call; `hoisting` moves that out of the
call.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.gemm import gemm
from pbjax.fusion.axes import Axes, Layout
from pbjax.fusion.gemms import Linear, find_linear, input_of, product_operands, weight_of
from pbjax.fusion.reading import Reading
from pbjax.fusion.rewriting import Match, Mismatch, match, operand


class _Part(NamedTuple):
    """One of the products: its labels, its result and the result's layout."""

    axes: Axes
    linear: Linear
    value: int
    layout: Layout

    @property
    def width(self) -> int:
        return self.axes.size(self.axes.cut(self.linear.columns))


def find_joint(reading: Reading, is_free: Callable[[int], bool]) -> Iterator[Match]:
    """Yields a match for every two or more products of one input, with biases or without.

    Args:
      reading: The graph.
      is_free: Whether no match has taken the operation that writes a value.
    """
    groups, seen = defaultdict(list), set()
    for operation in reversed(reading.graph.operations):
        value = operation.outputs[0]
        if not is_free(value) or reading.is_view(value):
            continue
        axes = Axes(reading)
        layout = axes.label(reading.shape(value))
        linear = find_linear(axes, value, layout)
        if linear is not None and linear.dot not in seen:
            seen.add(linear.dot)
            key = input_of(linear), linear.bias is None, reading.dtype(value)
            groups[str(key)].append(_Part(axes, linear, value, layout))
    for parts in groups.values():
        if len(parts) > 1:
            try:
                yield _joined(reading, parts[::-1])
            except Mismatch:
                continue  # They stay separate products.


def _joined(reading: Reading, parts: Sequence[_Part]) -> Match:
    first = parts[0]
    with_bias = first.linear.bias is not None
    dtype = reading.dtype(first.value)

    def function(x, *others):
        weights, biases = others[: len(parts)], others[len(parts) :]
        rows = (*first.linear.rows, first.linear.over)
        x = first.axes.arrange(x, first.linear.x[1], rows)
        arrays = [weight_of(p.axes, p.linear, w) for p, w in zip(parts, weights, strict=True)]
        w = jnp.concatenate(arrays, axis=1)
        bias = None
        if with_bias:
            joined = [_bias(p, b) for p, b in zip(parts, biases, strict=True)]
            bias = jnp.concatenate(joined).astype(x.dtype)
        y = gemm(x, w, bias=bias)
        ends = [sum(part.width for part in parts[: i + 1]) for i in range(len(parts) - 1)]
        return tuple(
            part.axes.arrange(piece, (*part.linear.rows, part.linear.columns), part.layout).astype(
                dtype
            )
            for part, piece in zip(parts, jnp.split(y, ends, axis=-1), strict=True)
        )

    operands = product_operands(first.axes, first.linear)
    operands += [operand(p.linear.w[0], operands[1].spread) for p in parts[1:]]
    operands += [operand(p.linear.bias[0]) for p in parts if p.linear.bias is not None]
    return match(
        reading,
        "qkv",
        f"gemm({len(parts)} joined{', bias' if with_bias else ''})",
        anchors=[part.linear.dot for part in parts],
        operands=operands,
        outputs=[part.value for part in parts],
        gives=reading.dtype(first.linear.x[0]),
        function=function,
    )


def _bias(part: _Part, bias):
    if part.linear.bias is None:
        raise AssertionError("products with and without a bias are not joined")
    return part.axes.arrange(bias, part.linear.bias[1], (part.linear.columns,))
