"""FLOPs of convolutions."""

import math

from jax.extend.core import JaxprEqn

from pbjax.graph.moved_bytes import shape_of


def conv_flops(equation: JaxprEqn) -> int | float:
    """Two for each product with an input entry; products with padding are not counted."""
    params = equation.params
    numbers = params["dimension_numbers"]
    lhs, rhs, out = (shape_of(var) for var in (*equation.invars, equation.outvars[0]))
    taps = math.prod(
        _valid_taps(
            size=lhs[numbers.lhs_spec[i + 2]],
            window=rhs[numbers.rhs_spec[i + 2]],
            num_out=out[numbers.out_spec[i + 2]],
            stride=params["window_strides"][i],
            low=params["padding"][i][0],
            spread=params["lhs_dilation"][i],
            dilation=params["rhs_dilation"][i],
        )
        for i in range(len(lhs) - 2)
    )
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    return 2 * batch * features * rhs[numbers.rhs_spec[1]] * taps / params["batch_group_count"]


def _valid_taps(
    *, size: int, window: int, num_out: int, stride: int, low: int, spread: int, dilation: int
) -> int:
    """How many taps of a window along one axis fall on an entry instead of padding."""
    count = 0
    for tap in range(window):
        first = tap * dilation - low
        if spread == 1:
            start = max(0, -(first // stride)) if first < 0 else 0
            stop = min(num_out, (size - 1 - first) // stride + 1)
            count += max(0, stop - start)
        else:
            positions = (first + i * stride for i in range(num_out))
            count += sum(p % spread == 0 and 0 <= p // spread < size for p in positions)
    return count
