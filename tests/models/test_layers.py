import jax.numpy as jnp
import numpy as np
import pytest

from models.layers import attend, causal_bias


@pytest.mark.parametrize("dtype", [np.int32, bool])
def test_causal_bias_is_zero_or_the_lowest_finite_number(dtype):
    bias = causal_bias(2, np.array([[1, 1], [0, 1]], dtype))
    low = np.finfo(np.float32).min
    assert bias.dtype == jnp.float32
    np.testing.assert_array_equal(bias[:, 0], [[[0, low], [0, 0]], [[low, low], [low, 0]]])


def test_causal_bias_without_mask_is_shared_by_all_rows():
    assert causal_bias(3, None).shape == (1, 1, 3, 3)


@pytest.mark.parametrize("key_heads", [2, 6])
def test_query_head_reads_the_key_head_of_its_group(key_heads):
    generator = np.random.default_rng(0)
    query = generator.normal(size=(2, 3, 6, 4)).astype(np.float32)
    key, value = generator.normal(size=(2, 2, 5, key_heads, 4)).astype(np.float32)
    bias = generator.normal(size=(2, 1, 3, 5)).astype(np.float32)
    alibi = generator.normal(size=(2, 6, 1, 5)).astype(np.float32)
    actual = attend(*map(jnp.asarray, (query, key, value, bias, alibi)))
    for head in range(6):
        group = head // (6 // key_heads)
        scores = np.einsum("bth,bsh->bts", query[:, :, head], key[:, :, group]) / 2
        scores += bias[:, 0] + alibi[:, head]
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        expected = np.einsum("bts,bsh->bth", weights, value[:, :, group])
        np.testing.assert_allclose(actual[:, :, head], expected, atol=1e-5)
