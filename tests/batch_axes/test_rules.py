import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo

from pbjax.batch_axes.propagation import Rows
from pbjax.errors import ModelError
from tests.row_truth import (
    BATCH,
    LENGTHS,
    POS,
    X,
    Y,
    analyse,
    check_rows_apart,
)

ALONG_AN_AXIS = [
    lax.cumsum,
    lax.cumprod,
    lax.cummax,
    lax.cummin,
    lax.cumlogsumexp,
    jnp.sum,
    jnp.max,
    jnp.min,
    jnp.prod,
    lambda x, axis: (x > 0).all(axis),
    lambda x, axis: (x > 0).any(axis),
    lambda x, axis: lax.reduce_xor((x > 0), (axis,)),
    lambda x, axis: lax.reduce(x, 0.0, lambda a, b: jnp.hypot(a, b), (axis,)),
    jnp.argmax,
    jnp.argmin,
    jnp.sort,
    jnp.flip,
    lambda x, axis: lax.reduce_window(
        x, -jnp.inf, lax.max, [1 + (i == axis) for i in range(3)], (1, 1, 1), "VALID"
    ),
    lambda x, axis: lax.reduce_window(
        x, jnp.inf, lax.min, [1 + (i == axis) for i in range(3)], (1, 1, 1), "SAME"
    ),
    lambda x, axis: jnp.split(x, 2, axis)[0],
    lambda x, axis: jax.nn.logsumexp(x, axis),
    lambda x, axis: jax.nn.standardize(x, axis),
]


@pytest.mark.parametrize("f", ALONG_AN_AXIS)
def test_work_along_another_axis_is_accepted(f):
    assert analyse(lambda x: f(x, 1), [X], [0])[1][0].axis == 0
    assert analyse(lambda x: f(x, 0), [X.transpose(1, 2, 0)], [2])[1][0].axis in (1, 2)


@pytest.mark.parametrize("f", ALONG_AN_AXIS)
def test_work_along_the_batch_is_refused(f):
    with pytest.raises(ModelError):
        analyse(lambda x: f(x, 0), [X], [0])
    with pytest.raises(ModelError):
        analyse(lambda x: f(x, 2), [X.transpose(1, 2, 0)], [2])


UNARY = """
    acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cosh digamma erf erfc exp2
    expm1 floor lgamma log1p neg sign sinh sqrt tan round abs is_finite square rsqrt logistic
"""
BINARY = "atan2 max min pow nextafter rem igamma igammac ge le eq ne complex"


@pytest.mark.parametrize("name", UNARY.split())
def test_function_of_each_element_is_accepted(name):
    assert analyse(getattr(lax, name), [X], [0])[1] == [Rows(axis=0)]


@pytest.mark.parametrize("name", BINARY.split())
def test_function_of_pairs_of_elements_is_accepted_if_they_are_of_one_row(name):
    f = getattr(lax, name)
    assert analyse(f, [X, Y], [0, 0])[1] == [Rows(axis=0)]
    with pytest.raises(ModelError, match="lie differently"):
        analyse(lambda x, y: f(x[:, None, 0], y[None, :, 0]), [X, Y], [0, 0])


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "min", "max", "set"])
def test_scatter_of_every_kind_is_accepted_at_the_rows_own_numbers(name):
    def f(x, i, numbers):
        return getattr(x.at[numbers, i], name)(2.0)

    check_rows_apart(lambda x, i: f(x, i, jnp.arange(len(x))), [X, POS], [0, 0])
    with pytest.raises(ModelError):
        analyse(lambda x, i: f(x, i, i), [X, POS], [0, 0])


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_stack_along_any_axis_is_accepted(axis):
    outputs = check_rows_apart(lambda x: jnp.stack([x, x + 1], axis), [X], [0])
    assert outputs == [Rows(axis=int(axis == 0))]


def test_key_data_of_each_row_is_accepted():
    def f(data):
        return jax.random.key_data(jax.random.wrap_key_data(data))

    data = np.arange(2 * BATCH, dtype=np.uint32).reshape(BATCH, 2)
    assert analyse(f, [data], [0])[1] == [Rows(axis=0)]


@pytest.fixture
def cudnn(monkeypatch):
    """Lets attention by cuDNN be traced on a machine without it; nothing of it is run."""
    for check in ("check_cudnn_version", "check_compute_capability", "check_is_flash_attention"):
        monkeypatch.setattr(fused_attention_stablehlo, check, lambda *args: 99999)
    equal = "is_cuda_compute_capability_equal"
    monkeypatch.setattr(fused_attention_stablehlo, equal, lambda *args: False)


def cudnn_attention(q, lengths, mask):
    return jax.nn.dot_product_attention(
        q,
        q,
        q,
        mask=mask,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )


HALF_HEADS = jax.ShapeDtypeStruct((BATCH, 8, 2, 64), jnp.bfloat16)
MASK = jax.ShapeDtypeStruct((BATCH, 1, 8, 8), jnp.bool_)


def test_attention_by_cudnn_keeps_rows_apart(cudnn):
    _, outputs = analyse(cudnn_attention, [HALF_HEADS, LENGTHS, MASK], [0, 0, 0])
    assert outputs == [Rows(axis=0)]


def test_attention_by_cudnn_over_the_batch_is_refused(cudnn):
    with pytest.raises(ModelError, match="dot_product_attention"):
        analyse(lambda q: cudnn_attention(q.transpose(1, 0, 2, 3), None, None), [HALF_HEADS], [0])
