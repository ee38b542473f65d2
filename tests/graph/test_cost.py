import functools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import pallas as pl

from pbjax.graph.cost import Cost, equation_cost, total_cost
from tests.cases import examples

F32 = jnp.float32


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def cost(**counts):
    return Cost(**{name: float(count) for name, count in counts.items()})


def cost_of(f, *inputs):
    """Cost of the last equation of a function."""
    return equation_cost(jax.make_jaxpr(f)(*inputs).eqns[-1])


def whole_cost(f, *inputs):
    return total_cost(map(equation_cost, jax.make_jaxpr(f)(*inputs).eqns))


def conv(x, kernel, *, padding="VALID", strides=(1,), groups=1, dilation=(1,)):
    return lax.conv_general_dilated(
        x,
        kernel,
        strides,
        padding,
        rhs_dilation=dilation,
        feature_group_count=groups,
        dimension_numbers=("NWC", "WIO", "NWC"),
    )


X = spec(4, 8)
ID = jnp.int32

BY_HAND = {
    "product": (jnp.matmul, [spec(4, 8), spec(8, 16)], 2 * 4 * 8 * 16, 4 * (32 + 128 + 64)),
    "bfloat16": (
        jnp.matmul,
        [spec(4, 8, dtype=jnp.bfloat16), spec(8, 16, dtype=jnp.bfloat16)],
        2 * 4 * 8 * 16,
        2 * (32 + 128 + 64),
    ),
    "batched product": (
        lambda x, y: lax.dot_general(x, y, (((2,), (2,)), ((0,), (0,)))),
        [spec(3, 4, 8), spec(3, 5, 8)],
        2 * 3 * 4 * 5 * 8,
        4 * 3 * (32 + 40 + 20),
    ),
    "two contracted axes": (
        lambda x, y: lax.dot_general(x, y, (((1, 2), (0, 1)), ((), ()))),
        [spec(4, 3, 8), spec(3, 8, 5)],
        2 * 4 * 5 * 24,
        4 * (96 + 120 + 20),
    ),
    "convolution": (conv, [spec(2, 10, 3), spec(4, 3, 5)], 2 * 2 * 7 * 5 * 3 * 4, 4 * 190),
    "strided convolution": (
        functools.partial(conv, strides=(2,)),
        [spec(2, 10, 3), spec(4, 3, 5)],
        2 * 2 * 4 * 5 * 3 * 4,
        4 * (60 + 60 + 40),
    ),
    "padded convolution counts no padding": (
        functools.partial(conv, padding="SAME"),
        [spec(1, 10, 1), spec(3, 1, 1)],
        2 * (3 * 10 - 2),
        4 * 23,
    ),
    "dilated convolution": (
        functools.partial(conv, padding=[(2, 2)], dilation=(2,)),
        [spec(1, 10, 1), spec(3, 1, 1)],
        2 * (3 * 10 - 4),
        4 * 23,
    ),
    "depthwise convolution": (
        functools.partial(conv, groups=6),
        [spec(2, 10, 6), spec(4, 1, 6)],
        2 * 2 * 7 * 6 * 4,
        4 * (120 + 24 + 84),
    ),
    "add": (jnp.add, [X, X], 32, 3 * 128),
    "add a literal": (lambda x: x + 1, [X], 32, 2 * 128 + 4),
    "integers": (jnp.add, [spec(4, 8, dtype=ID)] * 2, 32, 3 * 128),
    "compare": (jnp.less, [X, X], 32, 2 * 128 + 32),
    "select": (lambda p, x: lax.select(p, x, x), [spec(4, 8, dtype=bool), X], 32, 3 * 128 + 32),
    "convert": (lambda x: x.astype(jnp.bfloat16), [X], 32, 128 + 64),
    "square": (jnp.square, [X], 32, 256),
    "cube": (lambda x: lax.integer_pow(x, 3), [X], 64, 256),
    "seventh power": (lambda x: lax.integer_pow(x, 7), [X], 4 * 32, 256),
    "reciprocal": (lambda x: lax.integer_pow(x, -1), [X], 32, 256),
    "sum": (lambda x: x.sum(1), [X], 4 * 7, 128 + 16),
    "sum over all": (jnp.sum, [X], 31, 128 + 4),
    "maximum": (lambda x: x.max(0), [X], 8 * 3, 128 + 32),
    "argmax": (lambda x: lax.argmax(x, 1, ID), [X], 4 * 7, 128 + 16),
    "cumsum": (lambda x: lax.cumsum(x, axis=1), [X], 4 * 7, 256),
    "sort": (lambda x: lax.sort(x, dimension=1), [X], 32 * 3, 256),
    "top_k": (lambda x: lax.top_k(x, 2), [X], 32, 128 + 2 * 32),
    "pooling": (
        lambda x: lax.reduce_window_max_p.bind(
            x,
            window_dimensions=(1, 4),
            window_strides=(1, 4),
            padding=((0, 0), (0, 0)),
            base_dilation=(1, 1),
            window_dilation=(1, 1),
        ),
        [X],
        8 * 3,
        128 + 32,
    ),
    "transpose": (jnp.transpose, [X], 0, 256),
    "reshape": (lambda x: x.reshape(32), [X], 0, 0),
    "broadcast": (lambda x: lax.broadcast(x, (3,)), [X], 0, 128 + 3 * 128),
    "iota": (lambda: lax.iota(ID, 5), [], 0, 20),
    "concatenate": (lambda x: lax.concatenate([x, x], 0), [X], 0, 4 * 128),
    "pad": (lambda x: lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 0))), [X], 0, 128 + 4 + 192),
    "slice touches its part": (lambda x: lax.slice(x, (0, 0), (1, 8)), [X], 0, 64),
    "embedding touches its rows": (
        lambda table, ids: table.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False),
        [spec(30000, 8), spec(5, dtype=ID)],
        0,
        2 * 5 * 8 * 4 + 5 * 4,
    ),
    "cache update touches its entry": (
        lambda c, u, i: lax.dynamic_update_slice(c, u, (i, i), allow_negative_indices=False),
        [spec(1000, 8), spec(1, 8), spec(dtype=ID)],
        0,
        64,
    ),
    "product of ragged groups": (
        lambda x, w, sizes: lax.ragged_dot(x, w, sizes),
        [spec(6, 8), spec(3, 8, 5), spec(3, dtype=ID)],
        2 * 6 * 8 * 5,
        4 * (48 + 120 + 3 + 30),
    ),
    "fourier transform": (
        lambda x: lax.fft(x, "fft", (8,)),
        [spec(4, 8, dtype=jnp.complex64)],
        5 * 4 * 8 * 3,
        2 * 4 * 8 * 8,
    ),
    "random bits": (
        lambda key: jax.random.bits(key, (4, 8)),
        [jax.eval_shape(jax.random.key, 0)],
        50 * 32,
        8 + 128,
    ),
    "scatter-add": (
        lambda x, i, u: lax.scatter_add(x, i, u, lax.ScatterDimensionNumbers((1,), (0,), (0,))),
        [spec(1000, 8), spec(3, 1, dtype=ID), spec(3, 8)],
        24,
        3 * 96 + 12,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_cost_computed_by_hand(name):
    f, inputs, flops, moved = BY_HAND[name]
    assert cost_of(f, *inputs) == cost(flops=flops, bytes=moved)


@pytest.mark.parametrize(
    ("f", "flops"),
    [
        (jnp.exp, 0),
        (jnp.tanh, 0),
        (lax.rsqrt, 0),
        (lax.erf, 0),
        (lax.logistic, 3 * 32),
        (lax.erfc, 60 * 32),
    ],
)
def test_transcendental_functions_have_a_count_of_their_own(f, flops):
    assert cost_of(f, X) == cost(flops=flops, transcendentals=32, bytes=256)


def test_attention_by_cudnn_counts_its_two_products(monkeypatch):
    for check in ("check_cudnn_version", "check_compute_capability", "check_is_flash_attention"):
        monkeypatch.setattr(fused_attention_stablehlo, check, lambda *args: 99999)
    equal = "is_cuda_compute_capability_equal"
    monkeypatch.setattr(fused_attention_stablehlo, equal, lambda *args: False)
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    q, k = spec(2, 8, 4, 64, dtype=jnp.bfloat16), spec(2, 16, 4, 64, dtype=jnp.bfloat16)
    found = cost_of(attention, q, k, k)
    moved = 2 * (2 * 4 * 64) * (8 + 16 + 16 + 8)
    assert found == cost(flops=4 * (2 * 8 * 4 * 64) * 16, bytes=moved)


def test_kernel_costs_what_its_author_declares():
    def f(x):
        return pl.pallas_call(
            lambda x_ref, y_ref: None,
            out_shape=spec(4, 8),
            cost_estimate=pl.CostEstimate(flops=5, transcendentals=6, bytes_accessed=7),
        )(x)

    assert cost_of(f, X) == cost(flops=5, transcendentals=6, bytes=7)


def test_kernel_without_a_declaration_is_unknown():
    def f(x):
        return pl.pallas_call(lambda x_ref, y_ref: None, out_shape=spec(4, 8))(x)

    assert cost_of(f, X) == Cost(bytes=256.0, known=False)


def test_power_of_arrays_is_transcendental():
    assert cost_of(lax.pow, X, X).transcendentals == 32


def test_scan_counts_its_body_once_per_step():
    def f(x, w):
        return lax.scan(lambda c, w: (c @ w, None), x, w)[0]

    one = cost_of(jnp.matmul, spec(4, 8), spec(8, 8))
    assert cost_of(f, spec(4, 8), spec(7, 8, 8)) == one.times(7)


def test_loop_of_unknown_length_counts_once_and_says_so():
    found = cost_of(lambda x: lax.while_loop(lambda y: y[0, 0] < 1, lambda y: y * y, x), X)
    assert found.flops == 32 + 1
    assert not found.exact
    assert found.known


def test_branch_counts_as_its_costliest():
    def f(p, x):
        return lax.cond(p, lambda x: x @ jnp.ones((8, 8)), lambda x: x + 1, x)

    found = cost_of(f, spec(dtype=bool), X)
    assert found.flops == 2 * 4 * 8 * 8
    assert not found.exact


def test_equal_branches_are_exact():
    assert cost_of(
        lambda p, x: lax.cond(p, lambda x: x + 1, lambda x: x - 1, x), spec(dtype=bool), X
    ).exact


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_call_costs_what_its_body_does(wrap):
    assert cost_of(wrap(jnp.square), X) == cost_of(jnp.square, X)


COMPLEX = spec(8, 8, dtype=jnp.complex64)


@pytest.mark.parametrize(
    ("f", "flops"),
    [
        (lambda x: x @ x, 8 * 8**3),
        (lambda x: x * x, 6 * 64),
        (lambda x: x + x, 2 * 64),
        (lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "VALID"), 8 * 64),
        (lambda x: lax.reduce_sum_p.bind(x, axes=(0, 1), out_sharding=None), 2 * 63),
        (lambda x: lax.fft(x, "fft", (8,)), 5 * 64 * 3),
    ],
)
def test_complex_numbers_count_as_the_real_arithmetic_they_take(f, flops):
    assert cost_of(f, COMPLEX).flops == flops


def _solve(a, b, unit=False):
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=True, unit_diagonal=unit)


@pytest.mark.parametrize(
    ("f", "shapes", "flops"),
    [
        (_solve, [(3, 6, 6), (3, 6, 5)], 3 * 5 * 36),
        (functools.partial(_solve, unit=True), [(6, 6), (6, 5)], 5 * (36 - 6)),
        (lax.linalg.cholesky_p.bind, [(3, 6, 6)], 3 * 6**3 / 3),
        (lax.linalg.lu, [(6, 6)], 2 * 6**3 / 3),
        (lax.linalg.lu_p.bind, [(8, 6)], 36 * (8 - 6 / 3)),
        (lambda x: lax.linalg.qr(x, full_matrices=False), [(8, 6)], 2 * 2 * 36 * (8 - 6 / 3)),
        (lambda x: lax.fft(x, "rfft", (8,)), [(4, 8)], 2.5 * 32 * 3),
    ],
)
def test_factorisations_have_their_textbook_counts(f, shapes, flops):
    jaxpr = jax.make_jaxpr(f)(*(spec(*shape) for shape in shapes))
    costs = [equation_cost(e) for e in jaxpr.eqns]
    assert max(c.flops for c in costs) == pytest.approx(flops)


def test_iterative_factorisations_are_counted_and_said_to_be_no_exact_count():
    assert cost_of(jnp.linalg.svd, spec(8, 6)).flops == 4 * 64 * 6 + 8 * 8 * 36 + 9 * 216
    assert not cost_of(lambda x: lax.linalg.eigh(x, symmetrize_input=False), spec(6, 6)).exact


def test_a_reduction_costs_what_its_own_body_does():
    def f(x):
        return lax.reduce(x, 0.0, lambda a, b: a + b * b, (1,))

    assert cost_of(f, X).flops == 2 * (32 - 4)


def test_unknown_primitive_is_marked_and_counted_by_its_bytes():
    def f(x):
        return jax.pure_callback(lambda x: x, spec(4, 8), x)

    assert cost_of(f, X) == Cost(bytes=256.0, known=False)


def test_unknown_primitive_inside_a_loop_is_marked():
    def f(x):
        return lax.fori_loop(0, 3, lambda i, x: jax.pure_callback(lambda x: x, spec(4, 8), x), x)

    assert not cost_of(f, X).known


def test_sum_of_costs_keeps_the_doubts():
    total = Cost(flops=1.0, bytes=2.0) + Cost(
        flops=3.0, transcendentals=5.0, exact=False, known=False
    )
    assert total == Cost(flops=4.0, bytes=2.0, transcendentals=5.0, exact=False, known=False)


def test_intensity_is_work_over_bytes():
    assert cost(flops=6, transcendentals=2, bytes=4).intensity == 2
    assert Cost().intensity == 0
    assert cost(flops=1).intensity == math.inf


@settings(max_examples=examples(40))
@given(
    size=st.integers(1, 12),
    window=st.integers(1, 5),
    stride=st.integers(1, 3),
    low=st.integers(-1, 4),
    high=st.integers(0, 4),
    spread=st.integers(1, 3),
    dilation=st.integers(1, 3),
)
def test_taps_of_a_convolution_are_those_that_meet_an_entry(
    size, window, stride, low, high, spread, dilation
):
    """A convolution of ones with ones counts, at each position, the products that there are."""

    def f(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (stride,), [(low, high)], lhs_dilation=(spread,), rhs_dilation=(dilation,)
        )

    x, kernel = jnp.ones((1, 1, size)), jnp.ones((1, 1, window))
    if min(jax.eval_shape(f, x, kernel).shape) == 0:
        return
    assert cost_of(f, x, kernel).flops == 2 * float(f(x, kernel).sum())
