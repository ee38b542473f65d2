import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models.bloom.checkpoint import FAMILY, key_map
from models.bloom.modules import alibi_bias, alibi_slopes
from models.keymap import abstract_parameters, count_parameters
from models.numeric import TOLERANCE
from tests.decoders import (
    DATA,
    changed,
    errors,
    fields_of,
    load,
    make,
    reference,
    tensors_of,
)

PRESETS = {
    "bloom_560m": (models.BloomConfig.bloom_560m(), 559_214_592),
    "bloom_1b1": (models.BloomConfig.bloom_1b1(), 1_065_314_304),
    "bloom_1b7": (models.BloomConfig.bloom_1b7(), 1_722_408_960),
    "bloom_3b": (models.BloomConfig.bloom_3b(), 3_002_557_440),
    "bloom_7b1": (models.BloomConfig.bloom_7b1(), 7_069_016_064),
}


def parse(**change):
    return models.BloomConfig.from_hugging_face(fields_of("bloom", **change))


# Faults that the fixture must show


def test_heads_inside_query_key_value_are_noticed():
    def wrong(kernel):
        return kernel.reshape(24, 3, 6, 4).swapaxes(1, 2).reshape(24, 72)

    path = "layers.0.attention.query_key_value.kernel"
    assert errors("bloom", changed("bloom", **{path: wrong}))["logits"] > 0.1


def test_transposed_square_matrix_is_noticed():
    path = "layers.1.attention.output.kernel"
    assert errors("bloom", changed("bloom", **{path: jnp.transpose}))["logits"] > 0.1


@pytest.mark.parametrize(
    "path",
    [
        "embeddings.norm.bias",
        "layers.0.attention.query_key_value.bias",
        "layers.1.attention.output.bias",
        "layers.1.mlp.up.bias",
        "norm.bias",
    ],
)
def test_dropped_bias_is_noticed(path):
    wrong = changed("bloom", **{path: jnp.zeros_like})
    assert errors("bloom", wrong)["logits"] > 10 * TOLERANCE


def test_skipped_embedding_norm_is_noticed():
    paths = {"embeddings.norm.scale": jnp.ones_like, "embeddings.norm.bias": jnp.zeros_like}
    assert errors("bloom", changed("bloom", **paths))["hidden_embedding"] > 0.1


def test_exact_gelu_is_noticed():
    def probe(model, given):
        for layer in model.layers:
            layer.mlp.activation = "gelu"
        return FAMILY.probe(model, given)

    assert errors("bloom", probe=probe)["logits"] > 5 * TOLERANCE


def test_wrong_epsilon_is_noticed():
    config = dataclasses.replace(load("bloom").config, norm_eps=1e-6)
    assert errors("bloom", changed("bloom", config))["logits"] > 5 * TOLERANCE


def test_slopes_of_one_series_are_noticed(monkeypatch):
    def wrong(heads):
        return np.exp2(-8 * np.arange(1, heads + 1) / heads).astype(np.float32)

    def probe(model, given):
        return FAMILY.probe(model, given)

    monkeypatch.setattr("models.bloom.modules.alibi_slopes", wrong)
    assert errors("bloom", probe=probe)["logits"] > 10 * TOLERANCE


# ALiBi


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (16, [i / 2 for i in range(1, 17)]),
    ],
)
def test_slopes_are_powers_of_two(heads, exponents):
    np.testing.assert_allclose(alibi_slopes(heads), [2.0**-e for e in exponents], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int32, bool])
def test_positions_count_from_the_first_token(dtype):
    mask = np.array([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]], dtype)
    bias = alibi_bias(8, 4, mask)
    assert bias.shape == (3, 8, 1, 4)
    np.testing.assert_array_equal(bias[:, 0, 0] * 2, [[0, 1, 2, 3], [0, 0, 0, 1], [0, 1, 0, 0]])


def test_positions_without_mask_are_those_of_a_full_one():
    full = alibi_bias(6, 5, np.ones((1, 5), np.int32))
    np.testing.assert_array_equal(alibi_bias(6, 5, None), full)


def test_reference_is_padded_on_the_left():
    mask = reference("bloom").inputs["attention_mask"]
    assert list(mask.sum(1)) == [12, 7]
    assert mask[1, 0] == 0
    assert mask[1, -1] == 1


def test_any_length_is_accepted():
    ids = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
    graphdef, state = nnx.split(load("bloom"))
    output = jax.eval_shape(lambda s, i: nnx.merge(graphdef, s)(i), state, ids)
    assert output.logits.shape == (2, 4096, 97)


# Full sizes


@pytest.mark.parametrize("preset", PRESETS)
def test_full_size_model_has_the_known_number_of_parameters(preset):
    config, total = PRESETS[preset]
    shapes = abstract_parameters(
        nnx.eval_shape(lambda: models.BloomModel(config, rngs=nnx.Rngs(0)))
    )
    assert count_parameters(shapes) == total
    assert {leaf.path for leaf in key_map(config)} == set(shapes)


def test_full_size_model_traces_at_full_length():
    config = models.BloomConfig.bloom_7b1()
    model = nnx.eval_shape(lambda: models.BloomModel(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    ids = jax.ShapeDtypeStruct((2, 2048), jnp.int32)
    output = jax.eval_shape(lambda s, i: nnx.merge(graphdef, s)(i, i), state, ids)
    assert output.last_hidden_state.shape == (2, 2048, 4096)
    assert output.logits.shape == (2, 2048, 250880)
    assert output.logits.dtype == jnp.bfloat16


# Files and config.json


def test_report_of_the_good_fixture():
    lines = []
    models.load(DATA / "bloom", report=lines.append)
    total = sum(tensor.size for tensor in tensors_of("bloom").values())
    assert lines == [
        "config   bloom, BloomForCausalLM: 2 layers x 24, vocabulary 97",
        "keys     29 read, 0 missing, 0 unexpected, 0 dropped, 0 tied",
        f"params   {total:,}, expected {total:,}",
    ]


def test_fields_of_the_first_files_are_understood():
    old = {
        "hidden_size": ...,
        "n_embed": 24,
        "n_head": ...,
        "num_attention_heads": 6,
        "n_inner": None,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "offset_alibi": 100,
        "seq_length": 2048,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
        "unk_token_id": 0,
        "pretraining_tp": 2,
    }
    assert parse(**old) == parse() == load("bloom").config


@pytest.mark.parametrize(
    ("alias", "value", "name"),
    [("n_embed", 48, "hidden_size"), ("num_attention_heads", 4, "n_head")],
)
def test_alias_that_differs_is_refused(alias, value, name):
    with pytest.raises(
        models.ConfigError, match=f"{alias} is {value}; {name} is .* means the same"
    ):
        parse(**{alias: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("apply_residual_connection_post_layernorm", True),
        ("n_head", 5),
        ("n_inner", 48),
        ("pruned_heads", {"0": [1]}),
    ],
)
def test_unsupported_value_is_refused_by_name(field, value):
    with pytest.raises(models.ConfigError) as caught:
        parse(**{field: value})
    assert f"config.json: {field} is {value!r}" in str(caught.value)


def test_sliced_products_are_refused_only_with_several_slices():
    with pytest.raises(models.ConfigError, match="slow_but_exact is True"):
        parse(slow_but_exact=True, pretraining_tp=4)
    assert parse(slow_but_exact=True, pretraining_tp=1) == parse()


def test_wrong_shape_of_the_fused_projection_is_named(tmp_path):
    key = "transformer.h.0.self_attention.query_key_value.weight"
    tensors = tensors_of("bloom") | {key: np.zeros((24, 72), np.float32)}
    with pytest.raises(models.KeyMismatchError, match=r"shape \[24, 72\], wanted \[72, 24\]"):
        models.load(make(tmp_path / "m", "bloom", tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_heads": 7}, "embed_dim is 1024 with 7 heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(models.ConfigError, match=message):
        dataclasses.replace(models.BloomConfig.bloom_560m(), **change)
