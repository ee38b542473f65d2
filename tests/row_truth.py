"""Functions of single rows, and the check that find_rows' word on a function is true."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.testing import assert_close
from pbjax.batch_axes.propagation import find_rows
from pbjax.graph.trace import trace

BATCH, PROBE = 6, 2
T, D, V = 4, 8, 16
KEY = jax.random.key(0)


@functools.cache
def weight(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def resized(inputs, axes, size):
    """Shapes of the inputs at another batch size."""

    def shape(x, axis):
        new = [size if i == axis else n for i, n in enumerate(x.shape)]
        return jax.ShapeDtypeStruct(new, x.dtype)

    return [shape(x, axis) for x, axis in zip(inputs, axes, strict=True)]


def analyse(f, inputs, axes, batch_size=BATCH, probe_size=PROBE):
    graphs = [
        trace(lambda params, *args: f(*args), (), *resized(inputs, axes, size))
        for size in (batch_size, probe_size)
    ]
    rows = find_rows(*graphs, batch_size, probe_size, axes)
    outputs = [rows[atom] if isinstance(atom, int) else None for atom in graphs[0].outputs]
    return rows, outputs


def check_rows_apart(f, inputs, axes):
    """The function is accepted, and two halves computed apart and joined equal the whole."""
    _, outputs = analyse(f, inputs, axes)
    fast = jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})
    whole = jax.tree.leaves(fast(*inputs))
    parts = []
    for start in (0, BATCH // 2):
        part = [
            x if axis is None else lax.slice_in_dim(x, start, start + BATCH // 2, axis=axis)
            for x, axis in zip(inputs, axes, strict=True)
        ]
        parts.append(jax.tree.leaves(fast(*part)))
    for value, found, pair in zip(whole, outputs, zip(*parts, strict=True), strict=True):
        joined = pair[0] if found is None else jnp.concatenate(pair, axis=found.axis)
        assert_close(joined, value, reduction=8 * D)
    return outputs


X = weight(BATCH, T, D, seed=1)
Y = weight(BATCH, T, D, seed=2)
IDS = jax.random.randint(KEY, (BATCH, T), 0, V)
POS = jnp.array([0, 2, 1, 3, 3, 0])
LENGTHS = jnp.array([1, 2, 3, 4, 2, 4])
TABLE = jnp.asarray(weight(V, D, seed=3))
W = weight(D, D, seed=4)
CACHE = weight(BATCH, 7, D, seed=5)
NEW = weight(BATCH, 1, D, seed=6)
HEADS = weight(BATCH, T, 2, 4, seed=7)


def attention(x, lengths):
    q, k, v = x @ W, x @ W.T, x
    scores = jnp.einsum("btd,bsd->bts", q, k) / jnp.sqrt(8.0)
    mask = jnp.arange(x.shape[1])[None, None, :] < lengths[:, None, None]
    return jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1) @ v


def heads_attention(x):
    b, t, _ = x.shape
    q = (x @ W).reshape(b, t, 2, 4).transpose(0, 2, 1, 3)
    scores = jnp.einsum("bnth,bnsh->bnts", q, q)
    causal = jnp.tril(jnp.ones((t, t), bool))
    scores = jnp.where(causal[None, None], scores, -jnp.inf)
    out = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(scores), q)
    return out.transpose(0, 2, 1, 3).reshape(b, t, 8)


def layer_norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)


def depthwise(x):
    return lax.conv_general_dilated(
        x,
        weight(3, 1, D),
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=D,
    )


def scan_layers(x):
    def layer(x, w):
        return jnp.tanh(x @ w), x.sum(-1)

    return lax.scan(layer, x, weight(3, D, D))


def scan_time(x):
    def step(state, t):
        state = jnp.tanh(state @ W + t)
        return state, state

    initial = jnp.zeros((x.shape[0], D))
    _, ys = lax.scan(step, initial, x.transpose(1, 0, 2))
    return ys.transpose(1, 0, 2)


def newton(x):
    def body(state):
        i, y = state
        return i + 1, 0.5 * (y + x / y)

    return lax.while_loop(lambda state: state[0] < 5, body, (0, jnp.ones_like(x)))[1]


def flat_experts(x):
    b, t, d = x.shape
    flat = jax.nn.gelu(x.reshape(b * t, d) @ W)
    mask = jnp.zeros((b * t, d)).at[:, 0].set(1.0)
    return (flat * mask + jnp.ones((b * t, 1))).reshape(b, t, d)


def guidance(x):
    both = jax.nn.silu(jnp.concatenate([x, 2 * x], axis=0) @ W)
    first, second = jnp.split(both, 2)
    return first + 0.5 * (second - first) + both[: x.shape[0]]


def last_token(x, lengths):
    return x[jnp.arange(x.shape[0]), lengths - 1]


def relative_positions(x):
    """The padded skew of a relative attention bias, all by reshapes."""
    b, t, _ = x.shape
    scores = jnp.einsum("btd,bsd->bts", x, x)
    padded = jnp.pad(scores, ((0, 0), (0, 0), (1, 0)))
    return padded.reshape(b, t + 1, t)[:, 1:].reshape(b, t, t)


def router(x):
    logits = x @ W
    top, indices = lax.top_k(logits, 2)
    gates = jax.nn.softmax(top)
    return jnp.einsum("btk,btkd->btd", gates, jax.nn.one_hot(indices, D))
