import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pbjax.batch_axes.propagation import SplitError
from tests.row_truth import (
    BATCH,
    IDS,
    KEY,
    POS,
    TABLE,
    D,
    T,
    V,
    X,
    analyse,
    weight,
)


def running_norm(x):
    return (x - x.mean((0, 1), keepdims=True)) / x.std((0, 1), keepdims=True)


def taken(x, *indices):
    """Indexing as it is given, without the arithmetic that negative indices bring."""
    return x.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


MIXING = {
    "rows by data beside row numbers": (
        lambda x, i: taken(x, i, jnp.arange(x.shape[0])),
        [weight(BATCH, 9, D), POS],
        [0, 0],
        "gather",
    ),
    "row number as a token": (
        lambda x: taken(jnp.asarray(weight(99, D)), jnp.arange(x.shape[0])),
        [X],
        [0],
        "gather",
    ),
    "row number as a position": (
        lambda x: jax.vmap(taken)(x, jnp.arange(x.shape[0])),
        [weight(BATCH, 9, D)],
        [0],
        "gather",
    ),
    "batch norm in training": (running_norm, [X], [0], "reduce_sum"),
    "mean over the batch": (lambda x: x - x.mean(0, keepdims=True), [X], [0], "reduce_sum"),
    "maximum over the batch": (lambda x: x / x.max(), [X], [0], "reduce_max"),
    "all rows with all rows": (lambda x: x[:, 0] @ x[:, 0].T, [X], [0], "dot_general"),
    "gram matrix": (lambda x: x[:, 0].T @ x[:, 0], [X], [0], "dot_general"),
    "differences of rows": (lambda x: x[:, None, 0] - x[None, :, 0], [X], [0], "sub"),
    "softmax over rows": (lambda x: jax.nn.softmax(x, axis=0), [X], [0], "reduce_max"),
    "sort over rows": (lambda x: jnp.sort(x, axis=0), [X], [0], "sort"),
    "argmax over rows": (lambda x: jnp.argmax(x, axis=0), [X], [0], "argmax"),
    "top rows": (lambda x: lax.top_k(x[:, 0, 0], 2), [X], [0], "top_k"),
    "approximate top rows": (
        lambda x: lax.approx_max_k(x, 2),
        [X.transpose(1, 2, 0)],
        [2],
        "approx_top_k",
    ),
    "rows taken apart": (lambda x: sum([*x]), [X], [0], "unstack"),
    "cumsum over rows": (lambda x: jnp.cumsum(x, axis=0), [X], [0], "cumsum"),
    "cumsum over all": (lambda x: jnp.cumsum(x.reshape(-1, D), axis=0), [X], [0], "cumsum"),
    "batch size as a number": (lambda x: x / x.shape[0], [X], [0], "div"),
    "batch size as a float": (lambda x: x * jnp.float32(1 / len(x)), [X], [0], "mul"),
    "row number as data": (
        lambda x: x + jnp.arange(x.shape[0], dtype=jnp.float32)[:, None, None],
        [X],
        [0],
        "add",
    ),
    "row number as output": (lambda x: (x, jnp.arange(x.shape[0])), [X], [0], "output 1"),
    "row number looks up": (
        lambda x: x + jnp.asarray(weight(99, D))[jnp.arange(len(x))][:, None],
        [X],
        [0],
        "add",
    ),
    "row number along time": (
        lambda x: jnp.take_along_axis(x, jnp.arange(len(x))[:, None, None], axis=1),
        [X],
        [0],
        "add",
    ),
    "counter over all tokens": (
        lambda x: x + jnp.arange(x.shape[0] * T, dtype=jnp.float32).reshape(-1, T)[..., None],
        [X],
        [0],
        "iota",
    ),
    "dropout": (
        lambda x: jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), x, 0),
        [X],
        [0],
        "random_bits",
    ),
    "noise": (lambda x: x + jax.random.normal(KEY, x.shape), [X], [0], "random_bits"),
    "reversed rows": (lambda x: x[::-1], [X], [0], "rev"),
    "flipped rows": (lambda x: jnp.flip(x, 0), [X], [0], "rev"),
    "rolled rows": (lambda x: jnp.roll(x, 1, axis=0), [X], [0], "slice"),
    "first row for all": (lambda x: x - x[:1], [X], [0], "slice"),
    "last row": (lambda x: x - x[-1:], [X], [0], "slice"),
    "every second row": (lambda x: x[::2], [X], [0], "slice"),
    "difference of neighbours": (lambda x: jnp.diff(x, axis=0), [X], [0], "slice"),
    "row at shared position": (lambda x, i: x[i], [X, jnp.array(1)], [0, None], "add"),
    "shuffled rows": (lambda x, i: x[i], [X, jnp.array([1, 0])], [0, None], "add"),
    "rows by rows": (lambda x, i: x[i], [X, POS], [0, 0], "add"),
    "rows merged into features": (
        lambda x: x[:, 0].T.reshape(-1) @ jnp.ones((x.shape[0] * D, 2)),
        [X],
        [0],
        "dot_general",
    ),
    "rows merged the wrong way": (
        lambda x: x.reshape(T, x.shape[0], D).sum(0),
        [X],
        [0],
        "reshape",
    ),
    "rows in pairs": (lambda x: x.reshape(-1, 2, T, D).sum(1), [X], [0], "reshape"),
    "extra row": (lambda x: jnp.concatenate([x, jnp.ones((1, T, D))]), [X], [0], "concatenate"),
    "padded batch": (lambda x: jnp.pad(x, ((0, 1), (0, 0), (0, 0))), [X], [0], "pad"),
    "convolution over rows": (
        lambda x: lax.conv_general_dilated(
            x[:, 0].T[None], weight(D, D, 3), (1,), "SAME", dimension_numbers=("NCH", "OIH", "NCH")
        ),
        [X],
        [0],
        "conv_general_dilated",
    ),
    "window over rows": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1, 1), (1, 1, 1), "SAME"),
        [X],
        [0],
        "reduce_window_sum",
    ),
    "scan over rows": (lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x)[1], [X], [0], "slice"),
    "scan over rows with shared start": (
        lambda x: lax.scan(lambda c, r: (c + r, c), jnp.zeros((T, D)), x)[1],
        [X],
        [0],
        "scan",
    ),
    "map over rows that sees all": (
        lambda x: lax.map(lambda row: x + row[None], x),
        [X],
        [0],
        "scan",
    ),
    "mixing inside a scan": (
        lambda x: lax.scan(
            lambda c, w: (c @ w - c.mean(0, keepdims=True), None), x, weight(3, D, D)
        )[0],
        [X],
        [0],
        "reduce_sum",
    ),
    "mixing inside a while": (
        lambda x: lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] - s[1].max()), (0, x)
        ),
        [X],
        [0],
        "reduce_max",
    ),
    "loop until every row is done": (
        lambda x: lax.while_loop(lambda y: (y > 1).any(), lambda y: y / 2, x),
        [X],
        [0],
        "reduce_or",
    ),
    "as many steps as rows": (
        lambda x: lax.fori_loop(0, x.shape[0], lambda i, y: y * 0.5, x),
        [X],
        [0],
        "scan",
    ),
    "mixing inside a cond": (
        lambda p, x: lax.cond(p, lambda x: x - x.mean(0, keepdims=True), lambda x: x, x),
        [jnp.array(True), X],
        [None, 0],
        "reduce_sum",
    ),
    "mixing inside jit": (
        jax.jit(lambda x: jnp.tanh(x) - x.sum(0, keepdims=True)),
        [X],
        [0],
        "reduce_sum",
    ),
    "histogram of all rows": (
        lambda ids: jnp.zeros(V).at[ids].add(1.0)[ids],
        [IDS],
        [0],
        "scatter",
    ),
    "branch on the batch size": (
        lambda x: jnp.sin(x) if x.shape[0] > 3 else jnp.cos(x),
        [X],
        [0],
        "cos",
    ),
    "longer program for more rows": (
        lambda x: sum((x * float(i) for i in range(x.shape[0])), x),
        [X],
        [0],
        "operations",
    ),
    "array of the batch": (lambda x: x + np.ones((len(x), 1, 1), np.float32), [X], [0], "captured"),
    "array of the batch in a nested call": (
        jax.jit(lambda x: x + np.ones((len(x), 1, 1), np.float32)),
        [X],
        [0],
        "captured",
    ),
    "array filled with the batch size": (
        jax.jit(lambda x: x + jnp.asarray(np.full((1, 1, D), len(x), np.float32))),
        [X],
        [0],
        "captured",
    ),
    "array in a loop filled with the batch size": (
        lambda x: lax.fori_loop(0, 3, lambda i, y: y + np.full((1, 1, D), len(x), np.float32), x),
        [X],
        [0],
        "captured",
    ),
    "power of the batch": (lambda x: lax.integer_pow(x, len(x)), [X], [0], "integer_pow"),
    "window that moves with the batch": (
        lambda x: jnp.tile(x, (1, 3, 1))[:, len(x) : len(x) + 2],
        [X],
        [0],
        "slice",
    ),
    "identity matrix of the batch": (lambda x: jnp.eye(len(x)), [X], [0], "iota"),
    "merged output": (lambda x: x.reshape(-1, D), [X], [0], "output 0"),
    "row numbers behind the batch": (
        lambda x: lax.gather(
            jnp.asarray(TABLE),
            (lax.iota(jnp.int32, x.shape[0]) + x.shape[0])[:, None],
            lax.GatherDimensionNumbers((1,), (0,), (0,)),
            (1, D),
        ),
        [X],
        [0],
        "gather",
    ),
    "start that moves with the batch": (
        lambda x: x.reshape(-1, D)[x.shape[0] // 2 - 1 :: T],
        [X],
        [0],
        "slice",
    ),
    "count of rows": (lambda x: jnp.ones(x.shape[0]).sum() * x, [X], [0], "reduce_sum"),
    "one row written": (lambda x: x.at[0].set(0.0), [X], [0], "scatter"),
    "shared value in one row": (
        lambda x: lax.dynamic_update_slice(x, jnp.ones((1, T, D)), (0, 0, 0)),
        [X],
        [0],
        "dynamic_update_slice",
    ),
    "batch norm in training, batch last": (
        lambda x: x - x.mean(-1, keepdims=True),
        [X.transpose(1, 2, 0)],
        [2],
        "reduce_sum",
    ),
    "callback": (
        lambda x: jax.pure_callback(
            lambda x: np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x
        ),
        [X],
        [0],
        "pure_callback",
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_function_that_mixes_rows_is_refused_by_the_operations_name(name):
    f, inputs, axes, operation = MIXING[name]
    with pytest.raises(SplitError, match=operation) as raised:
        analyse(f, inputs, axes)
    assert "\n" not in str(raised.value)
    # Bodies that a library has jitted have no line of this file: that of the call is named.
    assert re.search(r"\(test_mixing.py:\d+\)", raised.value.found)


def clip_logits(x, y):
    return x[:, 0] @ y[:, 0].T


def sorted_experts(x, key):
    """A dropless mixture of experts: tokens sorted by expert, one product for each group."""
    ids = jnp.argmax(x[:, 0] + jax.random.normal(key, x[:, 0].shape), -1)
    order = jnp.argsort(ids)
    groups = jnp.bincount(ids, length=D)
    y = lax.ragged_dot(x[order, 0], weight(D, D, D), groups)
    return y[jnp.argsort(order)]


def batch_mean_loss(x):
    return jnp.mean(jnp.square(jnp.tanh(x)))


@jax.custom_jvp
def centred(x):
    return x - x.mean(0, keepdims=True)


@jax.custom_vjp
def scaled(x):
    return x / x.max()


MIXED_WHOLE = {
    "logits of two encoders": (clip_logits, (X, X), (0, 0), "dot_general"),
    "noise for a router": (sorted_experts, (X, KEY), (0, None), "random_bits"),
    "noise by an old key": (
        sorted_experts,
        (X, np.zeros(2, np.uint32)),
        (0, None),
        "random_bits",
    ),
    "rows sorted by a library": (lambda x: x[jnp.argsort(x[:, 0, 0])], (X,), (0,), "sort"),
    "rows permuted": (lambda x: jax.random.permutation(KEY, x), (X,), (0,), "random_bits"),
    "keys split for rows": (
        lambda x: jax.vmap(jax.random.normal)(jax.random.split(KEY, len(x))),
        (X,),
        (0,),
        "random_split",
    ),
    "experts in groups": (
        lambda x, sizes: lax.ragged_dot(x[:, 0], weight(3, D, D), sizes),
        (X, np.full(3, 2, np.int32)),
        (0, None),
        "ragged_dot_general",
    ),
    "mean loss": (batch_mean_loss, (X,), (0,), "reduce_sum"),
    "custom jvp": (lambda x: centred(x), (X,), (0,), "reduce_sum"),
    "custom vjp": (lambda x: scaled(x), (X,), (0,), "reduce_max"),
    "jit in jit": (
        jax.jit(lambda x: jax.jit(jnp.sort, static_argnums=1)(x, 0)),
        (X,),
        (0,),
        "sort",
    ),
    "remat": (jax.checkpoint(lambda x: jnp.cumsum(x, 0)), (X,), (0,), "cumsum"),
    "argsort in a scan": (
        lambda x: lax.scan(lambda c, _: (c[jnp.argsort(c[:, 0, 0])], None), x, None, 2)[0],
        (X,),
        (0,),
        "sort",
    ),
    "argsort in a while": (
        lambda x: lax.while_loop(lambda y: y[0, 0, 0] < 0, lambda y: jnp.sort(y, axis=0), x),
        (X,),
        (0,),
        "sort",
    ),
    "sort in a branch": (
        lambda x, yes: lax.cond(yes, lambda x: jnp.sort(x, axis=0), lambda x: x, x),
        (X, np.True_),
        (0, None),
        "sort",
    ),
}
centred.defjvp(lambda primals, tangents: (centred(*primals), tangents[0]))
scaled.defvjp(lambda x: (scaled(x), None), lambda _, g: (g,))


@pytest.mark.parametrize("name", MIXED_WHOLE)
def test_first_operation_that_mixes_is_named_with_the_line_that_calls_it(name):
    f, inputs, axes, operation = MIXED_WHOLE[name]
    with pytest.raises(SplitError) as raised:
        analyse(f, inputs, axes)
    assert re.match(rf"({operation})\b.* \(test_mixing.py:\d+\)", raised.value.found)
    assert str(raised.value).count(";") >= 2


def test_two_calls_of_one_jitted_function_have_lines_of_their_own():
    """A library's function is traced once, and its first caller's line is not the second's."""

    def first(x):
        return jnp.argsort(x, axis=1)

    def second(x):
        return jnp.argsort(x.swapaxes(0, 1), axis=1)

    analyse(first, [X[..., 0]], [0])
    with pytest.raises(SplitError, match=rf"sort \(test_mixing.py:{line_of(second) + 1}\)"):
        analyse(second, [X[..., 0]], [0])


def line_of(function):
    return function.__code__.co_firstlineno


def test_refusal_names_the_line_of_the_model():
    with pytest.raises(SplitError, match=r"reduce_sum in encoder/norm \(test_mixing.py:\d+\)"):
        analyse(jax.named_scope("encoder/norm")(running_norm), [X], [0])
