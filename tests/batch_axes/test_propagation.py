import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pbjax.batch_axes.propagation import Rows, find_rows
from pbjax.errors import InputError
from pbjax.graph.trace import trace
from tests.row_truth import (
    BATCH,
    CACHE,
    HEADS,
    IDS,
    KEY,
    LENGTHS,
    NEW,
    POS,
    TABLE,
    D,
    T,
    V,
    W,
    X,
    analyse,
    attention,
    check_rows_apart,
    depthwise,
    flat_experts,
    guidance,
    heads_attention,
    last_token,
    layer_norm,
    newton,
    relative_positions,
    router,
    scan_layers,
    scan_time,
    weight,
)

PER_ROW = {
    "identity": (lambda x: x, [X], [0]),
    "attention with padding mask": (attention, [X, LENGTHS], [0, 0]),
    "attention with heads and causal mask": (heads_attention, [X], [0]),
    "dot_product_attention": (
        lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True),
        [HEADS],
        [0],
    ),
    "dot_product_attention with lengths": (
        lambda q, n: jax.nn.dot_product_attention(q, q, q, key_value_seq_lengths=n),
        [HEADS, LENGTHS],
        [0, 0],
    ),
    "layer norm": (layer_norm, [X], [0]),
    "embedding": (lambda ids: TABLE[ids], [IDS], [0]),
    "embedding by take": (lambda ids: jnp.take(TABLE, ids, axis=0), [IDS], [0]),
    "one-hot": (lambda ids: jax.nn.one_hot(ids, V) @ TABLE, [IDS], [0]),
    "position table": (lambda x: x + weight(1, T, D), [X], [0]),
    "class token": (
        lambda x: jnp.concatenate([jnp.tile(weight(1, 1, D), (x.shape[0], 1, 1)), x], 1),
        [X],
        [0],
    ),
    "broadcast token": (
        lambda x: jnp.concatenate([jnp.broadcast_to(weight(1, 1, D), (x.shape[0], 1, D)), x], 1),
        [X],
        [0],
    ),
    "first token": (lambda x: x[:, 0], [X], [0]),
    "last token": (lambda x: x[:, -1], [X], [0]),
    "token at shared position": (lambda x, i: x[:, i], [X, jnp.array(2)], [0, None]),
    "token by dynamic slice": (
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 2, axis=1),
        [X, jnp.array(1)],
        [0, None],
    ),
    "tokens at shared positions": (
        lambda x, i: x[:, i],
        [X, jnp.array([2, 0])],
        [0, None],
    ),
    "last token by arange": (last_token, [X, LENGTHS], [0, 0]),
    "tokens by arange column": (
        lambda x, i: x[jnp.arange(x.shape[0])[:, None], i],
        [X, IDS % T],
        [0, 0],
    ),
    "take_along_axis": (
        lambda x, i: jnp.take_along_axis(x, i[..., None] % T, axis=1),
        [X, IDS],
        [0, 0],
    ),
    "take_along_axis of features": (
        lambda x, i: jnp.take_along_axis(x, i[..., None] % D, axis=2),
        [X, IDS],
        [0, 0],
    ),
    "vmapped look-up": (lambda x, i: jax.vmap(lambda r, j: r[j])(x, i), [X, POS], [0, 0]),
    "cache update by dynamic_update_slice": (
        lambda c, u, i: lax.dynamic_update_slice(c, u, (0, i, 0)),
        [CACHE, NEW, jnp.array(3)],
        [0, 0, None],
    ),
    "cache update in dim": (
        lambda c, u, i: lax.dynamic_update_slice_in_dim(c, u, i, axis=1),
        [CACHE, NEW, jnp.array(3)],
        [0, 0, None],
    ),
    "cache update at shared position": (
        lambda c, u, i: c.at[:, i].set(u[:, 0]),
        [CACHE, NEW, jnp.array(3)],
        [0, 0, None],
    ),
    "cache update by scatter": (
        lambda c, u, i: c.at[jnp.arange(c.shape[0]), i].set(u[:, 0]),
        [CACHE, NEW, POS],
        [0, 0, 0],
    ),
    "cache update by vmap": (
        lambda c, u, i: jax.vmap(lambda c, u, i: lax.dynamic_update_slice(c, u, (i, 0)))(c, u, i),
        [CACHE, NEW, POS],
        [0, 0, 0],
    ),
    "cache of another batch axis": (
        lambda c, u, i: c.at[1, :, i].set(u[:, 0]),
        [jnp.stack([CACHE, CACHE]), NEW, jnp.array(3)],
        [1, 0, None],
    ),
    "scatter-add": (
        lambda x, i: x.at[jnp.arange(x.shape[0]), i].add(1.0),
        [X, POS],
        [0, 0],
    ),
    "scatter into zeros": (
        lambda ids: jnp.zeros((ids.shape[0], V)).at[jnp.arange(ids.shape[0])[:, None], ids].add(1),
        [IDS],
        [0],
    ),
    "depthwise convolution": (depthwise, [X], [0]),
    "convolution": (
        lambda x: lax.conv_general_dilated(
            x, weight(3, D, 5), (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        ),
        [X],
        [0],
    ),
    "vmapped convolution": (
        lambda x: jax.vmap(lambda r: jnp.convolve(r[:, 0], jnp.ones(3), mode="same"))(x),
        [X],
        [0],
    ),
    "cumsum over time": (lambda x: jnp.cumsum(x, axis=1), [X], [0]),
    "associative scan over time": (lambda x: lax.associative_scan(jnp.add, x, axis=1), [X], [0]),
    "top_k": (lambda x: lax.top_k(x, 3), [X], [0]),
    "sort and argsort": (lambda x: (jnp.sort(x, 1), jnp.argsort(x, -1)), [X], [0]),
    "argmax": (lambda x: (jnp.argmax(x, -1), jnp.argmin(x, 1)), [X], [0]),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=-1), [X], [0]),
    "flip of time": (lambda x: jnp.flip(x, axis=1), [X], [0]),
    "roll of time": (lambda x: jnp.roll(x, 1, axis=1), [X], [0]),
    "padding of time": (lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0))), [X], [0]),
    "pooling": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 2, 1), "VALID"),
        [X],
        [0],
    ),
    "repeat": (lambda x: jnp.repeat(x, 2, axis=1), [X], [0]),
    "tile": (lambda x: jnp.tile(x, (1, 1, 2)), [X], [0]),
    "patches": (
        lambda x: x.reshape(x.shape[0], 2, 2, D).transpose(0, 2, 1, 3).reshape(-1, 2, 2 * D),
        [X],
        [0],
    ),
    "flattened and back": (flat_experts, [X], [0]),
    "first token of flattened": (
        lambda x: x.reshape(-1, D)[:: x.shape[1]],
        [X],
        [0],
    ),
    "relative positions": (relative_positions, [X], [0]),
    "two batches in one": (guidance, [X], [0]),
    "repeated rows": (
        lambda x: jnp.repeat(x, 3, axis=0).reshape(-1, 3, T, D).sum(1),
        [X],
        [0],
    ),
    "time-major": (
        lambda x: (x @ W).mean(0),
        [X.transpose(1, 0, 2)],
        [1],
    ),
    "batch axis 1": (lambda x, y: x * y.transpose(1, 0, 2), [X.transpose(1, 0, 2), X], [1, 0]),
    "batch axis last": (lambda x: jnp.einsum("tdb,de->teb", x, W), [X.transpose(1, 2, 0)], [2]),
    "shared input": (lambda x, s: x * s, [X, weight(1, 1, D)], [0, None]),
    "scan over layers": (scan_layers, [X], [0]),
    "scan over time": (scan_time, [X], [0]),
    "reversed scan over time": (
        lambda x: lax.scan(lambda c, t: (c + t, c), x[:, 0], x.transpose(1, 0, 2), reverse=True),
        [X],
        [0],
    ),
    "fori loop": (lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) + i, x), [X], [0]),
    "while loop": (newton, [jnp.abs(X) + 1], [0]),
    "cond on a shared scalar": (
        lambda p, x: lax.cond(p, lambda x: x @ W, lambda x: jnp.zeros_like(x), x),
        [jnp.array(True), X],
        [None, 0],
    ),
    "switch": (
        lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, lambda x: x], x),
        [jnp.array(1), X],
        [None, 0],
    ),
    "map over rows": (lambda x: lax.map(lambda row: jnp.sort(row, 0) @ W, x), [X], [0]),
    "vmap": (lambda x: jax.vmap(lambda row: jax.nn.softmax(row @ row.T) @ row)(x), [X], [0]),
    "vmap with axes": (
        lambda x, y: jax.vmap(lambda a, b: a @ b, in_axes=(1, 0), out_axes=1)(x, y),
        [X.transpose(1, 0, 2), X.transpose(0, 2, 1)],
        [1, 0],
    ),
    "vmapped scan": (
        lambda x: jax.vmap(lambda r: lax.scan(lambda c, t: (c + t, c * t), r[0], r))(x),
        [X],
        [0],
    ),
    "vmapped while": (
        lambda x: jax.vmap(
            lambda r: lax.while_loop(lambda c: c.sum() < 3, lambda c: c + jnp.abs(c) + 0.1, r)
        )(x),
        [X],
        [0],
    ),
    "vmapped cond": (
        lambda x, n: jax.vmap(lambda r, k: lax.cond(k > 2, jnp.sin, jnp.cos, r))(x, n),
        [X, LENGTHS],
        [0, 0],
    ),
    "jit, remat and custom derivatives": (
        lambda x: jax.checkpoint(jax.jit(lambda x: jax.nn.relu(jax.nn.silu(x))))(x),
        [X],
        [0],
    ),
    "router": (router, [X], [0]),
    "ones of the batch": (lambda x: jnp.ones((x.shape[0], 3)), [X], [0]),
    "mask from zeros": (
        lambda x: jnp.where(jnp.zeros((x.shape[0], 1, 1), bool), 0.0, x),
        [X],
        [0],
    ),
    "output that is shared": (lambda x: (x, W), [X], [0]),
    "outer product within a row": (lambda x: x[:, :, None] * x[:, None], [X], [0]),
    "fourier transform": (lambda x: jnp.abs(jnp.fft.rfft(x, axis=-1)), [X], [0]),
    "keys split per row": (
        lambda x, k: x + jax.vmap(lambda k: jax.random.uniform(jax.random.split(k)[1], (T, D)))(k),
        [X, jax.random.split(KEY, BATCH)],
        [0, 0],
    ),
    "rows repeated by their numbers": (
        lambda x: x[jnp.repeat(jnp.arange(x.shape[0]), 2)].reshape(-1, 2, T, D).sum(1),
        [X],
        [0],
    ),
    "unstacked time": (lambda x: [*x.transpose(1, 0, 2)], [X], [0]),
    "approximate top": (lambda x: lax.approx_max_k(x, 2), [X], [0]),
    "barrier": (lambda x: lax.optimization_barrier((x, 2 * x)), [X], [0]),
    "device_put": (lambda x: jax.device_put(x) + 1, [X], [0]),
    "bits": (lambda x: lax.bitcast_convert_type(lax.reduce_precision(x, 8, 7), jnp.int8), [X], [0]),
    "zeros flattened either way": (
        lambda x: (
            x
            + jnp.zeros(x.shape[0] * T).reshape(-1, T)[..., None]
            + jnp.zeros(x.shape[0] * T).reshape(T, -1).T[..., None]
        ),
        [X],
        [0],
    ),
    "quantised": (
        lambda x: lax.dot_general(
            jnp.round(x * 10).astype(jnp.int8),
            jnp.round(W * 10).astype(jnp.int8),
            (((2,), (0,)), ((), ())),
            preferred_element_type=jnp.int32,
        ),
        [X],
        [0],
    ),
    "keys per row": (
        lambda x, k: x + jax.vmap(lambda k: jax.random.normal(k, (T, D)))(k),
        [X, jax.random.split(KEY, BATCH)],
        [0, 0],
    ),
}


@pytest.mark.parametrize("name", PER_ROW)
def test_function_of_single_rows_is_accepted_and_splits(name):
    check_rows_apart(*PER_ROW[name])


@pytest.mark.parametrize(
    "spec",
    [
        "btd,bsd->bts",
        "btd,bsd->tsb",
        "btd,de->bte",
        "de,btd->ebt",
        "btd,bte->bde",
        "btd,btd->bt",
        "btd,btd->b",
        "tbd,sbd->bts",
        "btd,bd->tb",
        "dtb,bdt->b",
    ],
)
def test_einsum_over_all_but_the_batch_is_accepted(spec):
    size = {"b": BATCH, "t": T, "s": 5, "d": D, "e": 3}
    terms = spec.split("->")[0].split(",")
    operands = [weight(*(size[c] for c in term), seed=i) for i, term in enumerate(terms)]
    axes = [term.index("b") if "b" in term else None for term in terms]
    outputs = check_rows_apart(lambda *args: jnp.einsum(spec, *args), operands, axes)
    assert outputs == [Rows(axis=spec.split("->")[1].index("b"))]


def test_rows_of_inner_values_are_reported():
    rows, _ = analyse(flat_experts, [X], [0])
    assert Rows(axis=0, inner=T) in rows


def test_weights_and_their_products_have_no_rows():
    rows, _ = analyse(lambda x: x @ (jnp.asarray(W) @ jnp.asarray(W)), [X], [0])
    assert rows[0] is None
    assert rows.count(None) == len(rows) - 2


def test_two_batches_in_one_value_lie_outside():
    rows, _ = analyse(guidance, [X], [0])
    assert Rows(axis=0, outer=2) in rows


@pytest.mark.parametrize("batch_size", [D, T])
def test_batch_as_long_as_another_axis_is_still_told_apart(batch_size):
    x = jax.ShapeDtypeStruct((batch_size, T, D), jnp.float32)
    _, outputs = analyse(heads_attention, [x], [0], batch_size=batch_size)
    assert outputs == [Rows(axis=0)]


@pytest.mark.parametrize("sizes", [(6, 6), (1, 2), (6, 1)])
def test_sizes_that_do_not_tell_the_batch_are_refused(sizes):
    with pytest.raises(InputError, match="differ"):
        analyse(jnp.sin, [X], [0], *sizes)


def test_wrong_number_of_axes_is_refused():
    graphs = [trace(lambda _, x: x, (), jnp.ones((n, 3))) for n in (4, 2)]
    with pytest.raises(InputError, match="2 batch axes for 1 inputs"):
        find_rows(*graphs, 4, 2, [0, 0])


@pytest.mark.parametrize("axis", [1, 2, None])
def test_wrong_batch_axis_is_refused_by_the_inputs_name(axis):
    graphs = [trace(lambda _, x: x, (), {"ids": jnp.ones((n, 3))}) for n in (4, 2)]
    with pytest.raises(InputError, match=r"inputs\[0\]\['ids'\].*batch_axes"):
        find_rows(*graphs, 4, 2, [axis])
