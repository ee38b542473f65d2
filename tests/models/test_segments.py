import re
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models import segments
from models.attention import Keys, attention
from models.kernels import Kernels, with_kernels
from models.layers import attend
from models.segments import attend_packed, segment_bias
from pallas_kernels.attention import attention_packed
from pallas_kernels.testing import assert_close
from pbjax.inference.packing import pack
from tests.kernel_layers import lowered

LENGTHS = (5, 3, 8, 1, 7, 2)


def packed():
    packing = pack(LENGTHS, 10)
    arrays = packing.arrays([[1] * length for length in LENGTHS], 0, len(packing.rows) + 1)
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (*arrays.segment_ids.shape, 2, 8)
    return packing, arrays, [jax.random.normal(key, shape) for key in keys]


def test_bias_lets_a_token_see_its_own_sequence():
    ids = np.array([[1, 1, 2, 0]])
    seen = np.asarray(segment_bias(ids))[0, 0] == 0
    np.testing.assert_array_equal(seen, ids[0][:, None] == ids[0][None])


def test_rows_give_what_each_sequence_gives_alone():
    packing, arrays, (query, key, value) = packed()
    found = attend(query, key, value, segment_bias(arrays.segment_ids))
    for number in range(len(packing.rows)):
        bounds = packing.cumulative_lengths(number)
        for start, stop in pairwise(bounds):
            parts = (x[number : number + 1, start:stop] for x in (query, key, value))
            np.testing.assert_allclose(
                found[number, start:stop], attend(*parts, None)[0], rtol=0, atol=2e-6
            )


def test_offsets_say_to_the_kernel_what_the_bias_says():
    _, arrays, tensors = packed()
    by_bias = attend(*tensors, segment_bias(arrays.segment_ids))
    flat = (x.reshape(-1, *x.shape[2:]) for x in tensors)
    by_offsets = attention_packed(*flat, jnp.asarray(arrays.offsets), implementation="xla")
    np.testing.assert_allclose(by_offsets.reshape(by_bias.shape), by_bias, rtol=0, atol=2e-6)


def test_kernel_is_called_where_it_can(monkeypatch):
    asked = {}

    def kernel(q, k, v, offsets, *, implementation):
        asked.update(shape=q.shape, implementation=implementation)
        return attention_packed(q, k, v, offsets, implementation="xla")

    monkeypatch.setattr(segments, "require_hopper", lambda name: None)
    monkeypatch.setattr(segments, "attention_packed", kernel)
    _, arrays, tensors = packed()
    bias = segment_bias(arrays.segment_ids)
    keys = Keys(by="pallas", bias=bias, offsets=jnp.asarray(arrays.offsets))
    found = attention(*tensors, keys)
    assert asked == {"shape": (arrays.segment_ids.size, 2, 8), "implementation": "mosaic_gpu"}
    np.testing.assert_allclose(found, attend(*tensors, bias), rtol=0, atol=2e-6)


@pytest.mark.parametrize("by", ["pallas", "xla"])
def test_bias_does_it_where_there_is_no_kernel(by):
    _, arrays, tensors = packed()
    bias = segment_bias(arrays.segment_ids)
    found = attention(*tensors, Keys(by=by, bias=bias, offsets=jnp.asarray(arrays.offsets)))
    np.testing.assert_array_equal(found, attend(*tensors, bias))


def test_packed_bert_calls_the_kernel_once_a_layer():
    config = replace(
        models.BertConfig.base(), num_layers=2, embed_dim=128, num_heads=2, mlp_dim=256
    )
    model = with_kernels(
        nnx.eval_shape(lambda: models.BertModel(config, dtype="bfloat16", rngs=nnx.Rngs(0))),
        Kernels(attention="pallas"),
    )
    graphdef, state = nnx.split(model)
    rows = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    offsets = jax.ShapeDtypeStruct((37,), jnp.int32)
    text = lowered(
        lambda state, *inputs: nnx.merge(graphdef, state).packed_hidden_state(*inputs),
        *(state, rows, rows, rows, offsets),
    )
    assert text.count("call @attention_packed(") == 2
    assert re.findall(r"pbjax_[a-z_]+", text).count("pbjax_attention") == 1  # lowered once
    assert "4x2x128x128" not in text  # no scores of rows by rows


@pytest.mark.gpu
def test_kernel_agrees_on_the_device():
    _, arrays, tensors = packed()
    wide = [jnp.tile(x, (1, 1, 1, 8)).astype(jnp.bfloat16) for x in tensors]
    bias = segment_bias(arrays.segment_ids)
    found = attend_packed(*wide, jnp.asarray(arrays.offsets), bias)
    expected = attend(*(x.astype(jnp.float32) for x in wide), bias)
    assert_close(found, expected, reduction=10, roundings=1)
