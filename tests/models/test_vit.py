import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models.keymap import abstract_parameters, count_parameters
from models.numeric import TOLERANCE
from models.parameters import fingerprint
from models.vit.checkpoint import key_map
from models.vit.modules import check_shape, extract_patches
from tests.encoders import (
    DATA,
    call,
    changed,
    equations,
    errors,
    errors_of,
    fields_of,
    load,
    make,
    operations,
    refused,
    scopes,
    tensors_of,
    trace,
)

NAMES = json.loads((DATA / "vit" / "names.json").read_text())["classes"]
POOLER = {"weight": (24, 24), "bias": (24,)}
POINTS = ("hidden_embedding", "hidden_block_0", "last_hidden_state")
VALUES = [
    *(("vit", point) for point in (*POINTS, "logits")),
    *(("vit_default", point) for point in (*POINTS, "logits")),
    *(("vit_features", point) for point in (*POINTS, "pooler_output")),
]


def images(batch_size=2):
    generator = np.random.default_rng(batch_size)
    return generator.uniform(-1, 1, (batch_size, 3, 20, 20)).astype(np.float32)


def tensors(name="ViTForImageClassification"):
    """The good fixture's tensors under the names of a class, the rest of them random."""
    good, generator = tensors_of("vit"), np.random.default_rng(0)
    return {
        key: good.get(key, good.get(f"vit.{key}", generator.normal(size=shape))).astype(np.float32)
        for key, shape in NAMES[name].items()
    }


# The forward pass


@pytest.mark.parametrize(("name", "point"), VALUES)
def test_value_agrees_with_transformers(name, point):
    assert errors_of(name)[point] <= TOLERANCE


@pytest.mark.parametrize("name", ["vit", "vit_default", "vit_features"])
def test_every_value_of_the_reference_is_compared(name):
    assert sorted(errors_of(name)) == sorted(point for n, point in VALUES if n == name)


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("embeddings.kernel", lambda x: jnp.transpose(x, (1, 0, 2, 3))),
        ("embeddings.kernel", lambda x: x[:, :, ::-1]),
        ("embeddings.kernel", lambda x: x[::-1, ::-1]),
        ("layers.0.attention.query.kernel", jnp.transpose),
        ("layers.1.attention.output.kernel", jnp.transpose),
    ],
    ids=["rows-for-columns", "channels-reversed", "flipped", "query", "output"],
)
def test_permuted_weights_are_noticed(path, fault):
    assert max(errors(changed(load("vit"), **{path: fault}), "vit").values()) > 0.1


def test_patches_column_by_column_are_noticed():
    def swap(position):
        grid = position[:, 1:].reshape(1, 5, 5, -1).transpose(0, 2, 1, 3)
        return jnp.concatenate([position[:, :1], grid.reshape(1, 25, -1)], axis=1)

    found = errors(changed(load("vit"), **{"embeddings.position": swap}), "vit")
    assert found["hidden_embedding"] > 0.1


@pytest.mark.parametrize(
    "path",
    [
        "embeddings.bias",
        "embeddings.cls_token",
        "layers.0.attention.norm.bias",
        "layers.0.attention.query.bias",
        "layers.0.attention.value.bias",
        "layers.1.mlp.up.bias",
        "norm.bias",
        "classifier.bias",
    ],
)
def test_dropped_vector_is_noticed(path):
    assert (
        max(errors(changed(load("vit"), **{path: jnp.zeros_like}), "vit").values()) > 10 * TOLERANCE
    )


def test_tanh_gelu_is_noticed():
    config = dataclasses.replace(load("vit").config, activation="gelu_tanh")
    assert errors(changed(load("vit"), config), "vit")["logits"] > 10 * TOLERANCE


def test_larger_epsilon_is_noticed_at_the_default_scale():
    model = load("vit_default")
    config = dataclasses.replace(model.config, norm_eps=1e-5)
    assert max(errors(changed(model, config), "vit_default").values()) > 5 * TOLERANCE


def test_patches_are_cut_row_by_row_with_channels_last():
    pixels = np.arange(2 * 3 * 4 * 6, dtype=np.float32).reshape(2, 3, 4, 6)
    patches = extract_patches(jnp.asarray(pixels), 2)
    expected = [
        pixels[:, :, row : row + 2, column : column + 2].transpose(0, 2, 3, 1).reshape(2, -1)
        for row in (0, 2)
        for column in (0, 2, 4)
    ]
    np.testing.assert_array_equal(patches, np.stack(expected, axis=1))


@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_any_batch_size_traces_to_the_same_operations(batch_size):
    model = load("vit")
    expected = operations(model, pixel_values=images(2))
    assert operations(model, pixel_values=images(batch_size)) == expected


def test_image_does_not_reach_others():
    given = images()
    other = np.stack([given[0], -given[1]])
    one, two = (call(load("vit"), pixel_values=x) for x in (given, other))
    np.testing.assert_array_equal(one.last_hidden_state[0], two.last_hidden_state[0])
    assert np.abs(one.logits[1] - two.logits[1]).max() > 0.1


def test_every_operation_has_a_scope():
    found = scopes(load("vit"), pixel_values=images())
    assert found == {"embeddings", "attention", "mlp", "norm", "classifier"}


def test_bfloat16_model_takes_norms_and_softmax_in_float32():
    jaxpr = trace(load("vit", "bfloat16"), pixel_values=images())
    found = {
        equation.primitive.name: equation.invars[0].aval.dtype
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name in {"reduce_sum", "reduce_max", "rsqrt", "exp", "erfc"}
    }
    assert len(found) == 5
    assert set(found.values()) == {jnp.dtype("float32")}


def test_bfloat16_matrix_products_stay_in_bfloat16():
    jaxpr = trace(load("vit", "bfloat16"), pixel_values=images())
    dots = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert {v.aval.dtype for e in dots for v in e.invars} == {jnp.dtype("bfloat16")}
    assert {aval.dtype for aval in jaxpr.out_avals} == {jnp.dtype("bfloat16")}


def test_output_is_a_frozen_tree_under_its_field_names():
    output = call(load("vit"), pixel_values=images())
    leaves, treedef = jax.tree_util.tree_flatten_with_path(output)
    assert [str(path[0]) for path, _ in leaves] == [".last_hidden_state", ".logits"]
    again = jax.tree_util.tree_unflatten(treedef, [leaf for _, leaf in leaves])
    assert again.logits is output.logits
    assert again.pooler_output is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.logits = None


@pytest.mark.parametrize("shape", [(3, 20, 20), (2, 20, 20, 3), (2, 3, 20, 24), (2, 1, 20, 20)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(models.InputError, match=r"\[batch, 3, 20, 20\] is needed"):
        check_shape(load("vit").config, shape)


def test_model_checks_the_shape_of_its_images():
    with pytest.raises(models.InputError, match=r"shape is \(2, 3, 20, 16\)"):
        load("vit")(np.zeros((2, 3, 20, 16), np.float32))


# Sizes and configuration


@pytest.mark.parametrize(
    ("config", "total"),
    [
        (models.ViTConfig.base(), 86_567_656),
        (models.ViTConfig.large(), 304_326_632),
        (dataclasses.replace(models.ViTConfig.base(), num_labels=0, pooler=True), 86_389_248),
    ],
    ids=["base", "large", "base-pooler"],
)
def test_full_size_model_has_the_known_number_of_parameters(config, total):
    model = nnx.eval_shape(lambda: models.ViTModel(config, rngs=nnx.Rngs(0)))
    shapes = abstract_parameters(model)
    assert count_parameters(shapes) == total
    assert {leaf.path for leaf in key_map(config)} == set(shapes)


@pytest.mark.parametrize("config", [models.ViTConfig.base(), models.ViTConfig.large()])
def test_full_size_model_traces_in_bfloat16(config):
    model = nnx.eval_shape(lambda: models.ViTModel(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    pixels = jax.ShapeDtypeStruct((96, 3, 224, 224), jnp.float32)
    output = jax.eval_shape(lambda s, x: nnx.merge(graphdef, s)(x), state, pixels)
    assert output.last_hidden_state.shape == (96, 197, config.embed_dim)
    assert (output.logits.shape, output.logits.dtype) == ((96, 1000), jnp.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_labels": -1, "norm_eps": 0.0}, "norm_eps is 0.0, num_labels is -1"),
        ({"num_heads": 7}, "embed_dim is 768 with 7 heads"),
        ({"image_size": 225}, "image_size is 225 with patches of 16"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(models.ConfigError, match=message):
        dataclasses.replace(models.ViTConfig.base(), **change)


def test_tiny_config_is_that_of_its_file():
    fields = fields_of("vit")
    assert models.ViTConfig.from_hugging_face(fields) == models.ViTConfig(
        num_layers=2,
        embed_dim=24,
        mlp_dim=40,
        num_heads=6,
        image_size=20,
        patch_size=4,
        num_channels=3,
        norm_eps=1e-12,
        num_labels=5,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": [20, 24]}, r"image_size is \[20, 24\]"),
        ({"patch_size": 3}, "patch_size is 3; it must divide image_size 20"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5; it must divide hidden_size 24"),
        ({"qkv_bias": 1}, "qkv_bias is 1; true or false"),
        ({"id2label": []}, r"id2label is \[\]"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"pooler_act": "relu"}, "pooler_act is 'relu'"),
        ({"pooler_output_size": 7}, "pooler_output_size is 7"),
        ({"architectures": ["ViTForMaskedImageModeling"]}, "ViTForMaskedImageModeling"),
        ({"quantization_config": {}}, "quantization_config"),
    ],
)
def test_unsupported_field_is_refused_by_name(change, message):
    fields = fields_of("vit", **change)
    with pytest.raises(models.ConfigError, match=message):
        models.ViTConfig.from_hugging_face(fields)


# Folders


def test_absent_labels_are_two(tmp_path):
    short = {k: v[:2] if k.startswith("classifier") else v for k, v in tensors().items()}
    assert models.load(make(tmp_path / "m", "vit", short, id2label=...)).config.num_labels == 2


def test_features_with_pooler_are_read_without_prefix(tmp_path):
    model = models.load(
        make(tmp_path / "m", "vit", tensors("ViTModel"), architectures=["ViTModel"])
    )
    output = call(model, pixel_values=images())
    assert output.logits is None
    assert output.pooler_output.shape == (2, 24)
    expected = call(load("vit"), pixel_values=images()).last_hidden_state
    np.testing.assert_array_equal(output.last_hidden_state, expected)


def test_features_without_pooler_give_none(tmp_path):
    found = {k: v for k, v in tensors("ViTModel").items() if not k.startswith("pooler")}
    model = models.load(make(tmp_path / "m", "vit", found, architectures=["ViTModel"]))
    assert model.pooler is None


def test_pooler_beside_a_classifier_is_dropped(tmp_path):
    extra = {f"vit.pooler.dense.{k}": np.ones(s, np.float32) for k, s in POOLER.items()}
    lines = []
    model = models.load(make(tmp_path / "m", "vit", tensors() | extra), report=lines.append)
    assert fingerprint(model) == fingerprint(load("vit"))
    assert lines[0] == (
        "config   vit, ViTForImageClassification: 2 layers x 24,"
        " 20 pixels in patches of 4, 5 labels"
    )
    assert lines[1] == "keys     40 read, 0 missing, 0 unexpected, 2 dropped (pooler 2), 0 tied"


@pytest.mark.parametrize("key", [*sorted(NAMES["ViTForImageClassification"])][::6])
def test_missing_tensor_is_named(tmp_path, key):
    found = tensors()
    del found[key]
    inner = key.removeprefix("vit.")
    message = refused(make(tmp_path / "m", "vit", found))
    assert f"missing     {inner}" in message


def test_bias_without_qkv_bias_is_unexpected(tmp_path):
    message = refused(make(tmp_path / "m", "vit", tensors(), qkv_bias=False))
    assert "6 unexpected" in message
    assert "unexpected  vit.encoder.layer.1.attention.attention.value.bias" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": 24}, "wanted [1, 37, 24] by image_size 24"),
        ({"patch_size": 2}, "wanted [24, 3, 2, 2] by patch_size 2"),
        ({"num_channels": 1}, "wanted [24, 1, 4, 4] by num_channels 1"),
        ({"id2label": {"0": "a", "1": "b"}}, "wanted [2, 24] by id2label 2"),
    ],
)
def test_wrong_shape_names_the_field_at_fault(tmp_path, change, message):
    assert message in refused(make(tmp_path / "m", "vit", tensors(), **change))
