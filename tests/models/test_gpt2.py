import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models.gpt2.checkpoint import key_map
from models.keymap import abstract_parameters, count_parameters
from models.numeric import TOLERANCE
from models.parameters import fingerprint
from tests.decoders import (
    DATA,
    call,
    changed,
    errors,
    fields_of,
    inputs,
    load,
    make,
    reference,
    tensors_of,
    trace,
)

PRESETS = {
    "small": (models.GPT2Config.small(), 124_439_808),
    "medium": (models.GPT2Config.medium(), 354_823_168),
    "large": (models.GPT2Config.large(), 774_030_080),
    "xl": (models.GPT2Config.xl(), 1_557_611_200),
}


def refused(folder, kind=models.ConfigError):
    with pytest.raises(kind) as caught:
        models.load(folder)
    return str(caught.value)


# Faults that the fixture must show


@pytest.mark.parametrize("path", ["layers.0.attention.output.kernel"])
def test_conv1d_transposed_like_a_linear_is_noticed(path):
    assert max(errors("gpt2", changed("gpt2", **{path: jnp.transpose})).values()) > 0.1


def test_heads_outside_query_key_value_are_noticed():
    def wrong(kernel):
        return kernel.reshape(32, 4, 3, 8).swapaxes(1, 2).reshape(32, 96)

    path = "layers.0.attention.query_key_value.kernel"
    assert max(errors("gpt2", changed("gpt2", **{path: wrong})).values()) > 0.1


@pytest.mark.parametrize(
    "path",
    [
        "layers.0.attention.norm.bias",
        "layers.0.attention.query_key_value.bias",
        "layers.1.attention.output.bias",
        "layers.1.mlp.up.bias",
        "layers.1.mlp.down.bias",
        "norm.bias",
    ],
)
def test_dropped_bias_is_noticed(path):
    assert max(errors("gpt2", changed("gpt2", **{path: jnp.zeros_like})).values()) > 10 * TOLERANCE


@pytest.mark.parametrize("change", [{"activation": "gelu"}, {"norm_eps": 1e-6}])
def test_wrong_constant_is_noticed(change):
    config = dataclasses.replace(load("gpt2").config, **change)
    assert errors("gpt2", changed("gpt2", config))["logits"] > 5 * TOLERANCE


def test_positions_that_ignore_left_padding_are_noticed():
    counted = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    given = reference("gpt2").inputs | {"position_ids": counted}
    difference = np.abs(call(load("gpt2"), **given).logits - reference("gpt2").outputs["logits"])
    assert difference[0].max() < 1e-4
    assert difference[1, 5:].max() > 0.1


# Positions


def test_positions_of_the_reference_are_those_of_its_mask():
    given = reference("gpt2").inputs
    positions = np.maximum(given["attention_mask"].cumsum(axis=1) - 1, 0)
    np.testing.assert_array_equal(positions, given["position_ids"])


@pytest.mark.parametrize("bad", [16, -1])
def test_position_outside_the_table_gives_nan(bad):
    given = inputs("gpt2")
    given["position_ids"][1, 8] = bad
    logits = call(load("gpt2"), **given).logits
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1, 8:]).all()


def test_too_long_sequence_is_refused():
    with pytest.raises(models.InputError, match=r"length is 17; 1 to 16 is possible; truncate"):
        call(load("gpt2"), input_ids=np.ones((1, 17), np.int32))


def test_longest_sequence_is_accepted():
    given = inputs("gpt2", length=16)
    assert trace(load("gpt2"), **given).out_avals[1].shape == (2, 16, 97)


# Full sizes


@pytest.mark.parametrize("preset", PRESETS)
def test_full_size_model_has_the_known_number_of_parameters(preset):
    config, total = PRESETS[preset]
    shapes = abstract_parameters(nnx.eval_shape(lambda: models.GPT2Model(config, rngs=nnx.Rngs(0))))
    assert count_parameters(shapes) == total
    assert {leaf.path for leaf in key_map(config)} == set(shapes)


def test_full_size_model_traces_at_full_length():
    config = models.GPT2Config.small()
    model = nnx.eval_shape(lambda: models.GPT2Model(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    ids = jax.ShapeDtypeStruct((8, 1024), jnp.int32)
    output = jax.eval_shape(lambda s, i: nnx.merge(graphdef, s)(i, i, i), state, ids)
    assert output.last_hidden_state.shape == (8, 1024, 768)
    assert output.logits.shape == (8, 1024, 50257)
    assert output.logits.dtype == jnp.bfloat16


# Files and config.json


def test_mask_buffers_of_old_files_are_dropped(tmp_path):
    tensors = tensors_of("gpt2")
    for layer in range(2):
        mask = np.tril(np.ones((1, 1, 16, 16)))
        kind = (np.float32, np.uint8)[layer]
        tensors[f"transformer.h.{layer}.attn.bias"] = mask.astype(kind)
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
    lines = []
    model = models.load(make(tmp_path / "m", "gpt2", tensors), report=lines.append)
    assert lines[1].endswith("4 dropped (mask buffers 4), 0 tied")
    assert fingerprint(model) == fingerprint(load("gpt2"))


def test_bias_of_the_fused_projection_is_no_mask_buffer(tmp_path):
    tensors = tensors_of("gpt2")
    del tensors["transformer.h.0.attn.c_attn.bias"]
    message = refused(make(tmp_path / "m", "gpt2", tensors), models.KeyMismatchError)
    assert "missing     h.0.attn.c_attn.bias" in message


def test_hub_file_without_prefix_and_with_mask_buffers_is_read(tmp_path):
    tensors = {k.removeprefix("transformer."): v for k, v in tensors_of("gpt2").items()}
    tensors["h.1.attn.bias"] = np.tril(np.ones((1, 1, 16, 16), bool))
    folder = make(tmp_path / "m", "gpt2", tensors, n_ctx=16, n_inner=...)
    assert fingerprint(models.load(folder)) == fingerprint(load("gpt2"))


def test_report_of_the_good_fixture():
    lines = []
    model = models.load(DATA / "gpt2", report=lines.append)
    total = sum(tensor.size for tensor in tensors_of("gpt2").values())
    assert lines == [
        "config   gpt2, GPT2LMHeadModel: 2 layers x 32, vocabulary 97",
        "keys     28 read, 0 missing, 0 unexpected, 0 dropped, 0 tied",
        f"params   {total:,}, expected {total:,}",
    ]
    assert model.head is None


def test_alias_of_the_longest_sequence_is_understood():
    fields = fields_of("gpt2", n_positions=..., n_ctx=16)
    assert models.GPT2Config.from_hugging_face(fields) == load("gpt2").config


def test_alias_that_differs_is_refused():
    with pytest.raises(models.ConfigError, match="n_ctx is 8; n_positions is 16"):
        models.GPT2Config.from_hugging_face(fields_of("gpt2", n_ctx=8))


def test_width_of_the_mlp_is_read():
    fields = fields_of("gpt2", n_inner=40)
    assert models.GPT2Config.from_hugging_face(fields).mlp_dim == 40
    assert load("gpt2").config.mlp_dim == 128


def test_fields_of_the_first_files_are_understood():
    fields = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 1600,
        "n_head": 25,
        "n_layer": 48,
        "n_positions": 1024,
        "output_past": True,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    }
    assert models.GPT2Config.from_hugging_face(fields) == models.GPT2Config.xl()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("reorder_and_upcast_attn", True),
        ("activation_function", "relu"),
        ("n_head", 5),
        ("n_inner", 0),
        ("pruned_heads", {"0": [1]}),
    ],
)
def test_unsupported_value_is_refused_by_name(field, value):
    with pytest.raises(models.ConfigError) as caught:
        models.GPT2Config.from_hugging_face(fields_of("gpt2", **{field: value}))
    assert f"config.json: {field} is {value!r}" in str(caught.value)


def test_unknown_field_gives_a_warning():
    with pytest.warns(models.CheckpointWarning, match="surprise"):
        models.GPT2Config.from_hugging_face(fields_of("gpt2", surprise=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_heads": 7}, "embed_dim is 768 with 7 heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(models.ConfigError, match=message):
        dataclasses.replace(models.GPT2Config.small(), **change)
