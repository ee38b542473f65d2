"""Random programs: what find_rows accepts must split, and what keeps rows apart it must accept."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbjax.batch_axes.propagation import Rows
from pbjax.errors import ModelError
from tests.row_truth import (
    BATCH,
    D,
    T,
    analyse,
    weight,
)


@st.composite
def einsums(draw):
    """Two operands, each with the batch in some or none of them, and any result."""
    terms = [draw(st.permutations("btde").map(lambda p: "".join(p[:3]))) for _ in range(2)]
    letters = sorted(set("".join(terms)))
    out = draw(st.permutations(letters))[: draw(st.integers(1, len(letters)))]
    return f"{','.join(terms)}->{''.join(out)}"


@settings(max_examples=100)
@given(einsums())
def test_random_einsum_is_accepted_if_and_only_if_the_batch_stays(spec):
    size = {"b": BATCH, "t": T, "d": D, "e": 3}
    inputs, out = spec.split("->")
    operands = [weight(*(size[c] for c in term)) for term in inputs.split(",")]
    axes = [term.index("b") if "b" in term else None for term in inputs.split(",")]

    def f(*args):
        return jnp.einsum(spec, *args)

    if axes == [None, None]:
        return
    if "b" in out:
        assert analyse(f, operands, axes)[1] == [Rows(axis=out.index("b"))]
    else:
        with pytest.raises(ModelError, match=r"sums over|reduces over"):
            analyse(f, operands, axes)


ALONG = {
    "cumsum": lambda x, axis, xp: xp.cumsum(x, axis=axis),
    "flip": lambda x, axis, xp: xp.flip(x, axis=axis),
    "sort": lambda x, axis, xp: xp.sort(x, axis=axis),
    "sum": lambda x, axis, xp: x.sum(axis=axis, keepdims=True),
    "max": lambda x, axis, xp: x - x.max(axis=axis, keepdims=True),
    "roll": lambda x, axis, xp: xp.roll(x, 1, axis=axis),
    "take": lambda x, axis, xp: xp.take(x, xp.asarray([0, 0]), axis=axis),
    "double": lambda x, axis, xp: xp.concatenate([x, 2 * x], axis=axis),
    "repeat": lambda x, axis, xp: xp.repeat(x, 2, axis=axis),
    "half": lambda x, axis, xp: xp.split(x, [x.shape[axis] // 2], axis=axis)[1],
    "stride": lambda x, axis, xp: x[(slice(None),) * axis + (slice(None, None, 2),)],
    "pad": lambda x, axis, xp: xp.pad(x, [(int(i == axis), 0) for i in range(x.ndim)]),
    "size": lambda x, axis, xp: x * x.shape[axis],
    "number": lambda x, axis, xp: (
        x * xp.arange(x.shape[axis]).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    ),
    "own": lambda x, axis, xp: xp.moveaxis(
        xp.moveaxis(x, axis, 0)[xp.arange(x.shape[axis])], 0, axis
    ),
    "own and first": lambda x, axis, xp: xp.moveaxis(
        xp.moveaxis(x, axis, 0)[xp.arange(x.shape[axis]), 0][:, None], 0, axis
    ),
    "gram": lambda x, axis, xp: xp.moveaxis(
        xp.moveaxis(x, axis, -1) @ xp.swapaxes(xp.moveaxis(x, axis, -1), -1, -2), -1, axis
    ),
    "split": lambda x, axis, xp: x.reshape(*x.shape[:axis], -1, 2, *x.shape[axis + 1 :]).sum(
        axis + 1
    ),
}
SHAPES = ("move", "merge", "expand", "add")
PROGRAMS = st.lists(
    st.tuples(st.sampled_from([*ALONG, *SHAPES, *SHAPES]), st.integers(0, 11)), max_size=7
)


def run(program, x, xp):
    """Applies a program of operations along numbered axes, with numpy or jax.numpy.

    Returns the result, and whether an operation worked along an axis that the batch lies in.
    """
    axes, touched = [{"batch"}, {"time"}, {"features"}], False
    for name, k in program:
        axis = k % x.ndim
        if name == "move":
            x = xp.moveaxis(x, axis, 0)
            axes.insert(0, axes.pop(axis))
        elif name == "merge":
            x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
            axes[axis : axis + 2] = [set().union(*axes[axis : axis + 2])]
        elif name == "expand":
            x = xp.expand_dims(x, axis)
            axes.insert(axis, set())
        elif name == "add":
            x = x + xp.sin(x)
        elif x.ndim > 1 and not (name == "split" and x.shape[axis] % 2) and x.size < 10**5:
            touched = touched or "batch" in axes[axis] or name in ("gram", "own and first")
            x = ALONG[name](x, axis, xp)
    return x, touched or {"batch"} not in axes


@settings(max_examples=250)
@given(PROGRAMS)
def test_random_program_is_accepted_if_rows_are_apart_and_splits_if_accepted(program):
    x = weight(BATCH, T, D, seed=11).astype(np.float64)
    whole, touched = run(program, x, np)
    try:
        _, outputs = analyse(lambda x: run(program, x, jnp)[0], [x.astype(np.float32)], [0])
    except ModelError:
        assert touched
        return
    parts = [run(program, part, np)[0] for part in (x[:2], x[2:])]
    joined = np.concatenate(parts, axis=outputs[0].axis)
    np.testing.assert_allclose(joined, whole, rtol=1e-9)
