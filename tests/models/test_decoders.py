"""What holds for every decoder: agreement, masks, positions, traces, loading."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models.keymap import abstract_parameters
from models.numeric import TOLERANCE
from models.orbax_folder import Manifest, parse_config
from models.parameters import fingerprint
from tests.decoders import (
    DECODERS,
    POINTS,
    call,
    equations,
    errors,
    family,
    inputs,
    load,
    make,
    make_sharded,
    names,
    operations,
    reference,
    tensors_of,
    trace,
)

pytestmark = pytest.mark.parametrize("name", DECODERS)
HEAD = "lm_head.weight"


def shapes(model, **arguments):
    graphdef, state = nnx.split(model)
    return jax.eval_shape(lambda s, given: nnx.merge(graphdef, s)(**given), state, arguments)


def refused(folder, kind):
    with pytest.raises(kind) as caught:
        models.load(folder)
    return str(caught.value)


def word_key(name):
    (tie,) = family(name).ties
    return family(name).prefix + tie.equals


def whole(name):
    """The positions of sequences without padding on the left, where the model takes them."""
    positions = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    return {"position_ids": positions} if "position_ids" in reference(name).inputs else {}


def tied(name):
    """A fixture's tensors without a head of their own."""
    return {key: value for key, value in tensors_of(name).items() if key != HEAD}


@pytest.mark.parametrize("point", POINTS)
def test_value_agrees_with_transformers(name, point):
    assert errors(name)[point] <= TOLERANCE


def test_ignored_mask_is_noticed(name):
    given = reference(name).inputs | {"attention_mask": np.ones((2, 12), np.int32)}
    difference = np.abs(call(load(name), **given).logits - reference(name).outputs["logits"])
    assert difference[0].max() < 1e-4
    assert difference[1, 5:].max() > 0.1


def test_padding_on_the_left_is_invisible(name):
    given = inputs(name)
    padded = call(load(name), **given).logits[1, 6:]
    short = call(load(name), input_ids=given["input_ids"][1:, 6:]).logits[0]
    assert np.abs(padded - short).max() <= TOLERANCE * np.std(short)


def test_padding_on_the_right_is_invisible(name):
    given = inputs(name)
    mask = np.ones((2, 12), np.int32)
    mask[:, 6:] = 0
    padded = call(load(name), **(given | whole(name) | {"attention_mask": mask})).logits[0, :6]
    short = call(load(name), input_ids=given["input_ids"][:1, :6]).logits[0]
    assert np.abs(padded - short).max() <= TOLERANCE * np.std(short)


def test_padded_token_does_not_reach_others(name):
    given = inputs(name)
    other = np.where(given["attention_mask"], given["input_ids"], 5)
    one, two = (call(load(name), **(given | {"input_ids": i})) for i in (given["input_ids"], other))
    np.testing.assert_array_equal(one.logits[1, 6:], two.logits[1, 6:])


def test_later_token_does_not_reach_earlier_ones(name):
    given = inputs(name)
    other = given["input_ids"].copy()
    other[:, 9] = 3
    one, two = (call(load(name), **(given | {"input_ids": i})) for i in (given["input_ids"], other))
    np.testing.assert_array_equal(one.logits[0, :9], two.logits[0, :9])
    assert np.abs(one.logits[0, 9:] - two.logits[0, 9:]).max() > 0.1


def test_row_without_tokens_is_finite(name):
    given = inputs(name) | {"attention_mask": np.zeros((2, 12), np.int32)}
    assert np.isfinite(call(load(name, "float16"), **given).logits).all()


@pytest.mark.parametrize("bad", [97, -1])
def test_id_outside_the_vocabulary_gives_nan_in_its_row_alone(name, bad):
    given = inputs(name)
    given["input_ids"][1, 8] = bad
    output = call(load(name), **given)
    assert np.isfinite(output.logits[0]).all()
    assert np.isnan(output.logits[1, 8:]).all()


@pytest.mark.parametrize("masked", [False, True])
def test_any_batch_size_traces_to_the_same_operations(name, masked):
    def found(batch_size):
        given = inputs(name, batch_size)
        return operations(load(name), **(given if masked else {"input_ids": given["input_ids"]}))

    assert found(2) == found(5)
    assert len(found(2)) > 50


def test_rows_do_not_reach_each_other(name):
    given = inputs(name)
    other = given["input_ids"].copy()
    other[1] = (other[1] + 11) % 97
    one, two = (call(load(name), **(given | {"input_ids": i})) for i in (given["input_ids"], other))
    np.testing.assert_array_equal(one.logits[0], two.logits[0])
    assert np.abs(one.logits[1] - two.logits[1]).max() > 0.1


def test_bfloat16_model_takes_norms_and_softmax_in_float32(name):
    jaxpr = trace(load(name, "bfloat16"), **inputs(name))
    watched = {"reduce_sum", "reduce_max", "rsqrt", "exp", "cos", "sin", "tanh", "logistic"}
    found = {
        equation.primitive.name: equation.invars[0].aval.dtype
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name in watched
    }
    assert {"reduce_sum", "reduce_max", "rsqrt", "exp"} <= set(found)
    assert set(found.values()) == {jnp.dtype("float32")}
    assert {aval.dtype for aval in jaxpr.out_avals} == {jnp.dtype("bfloat16")}


def test_bfloat16_matrix_products_stay_in_bfloat16_but_scores_are_float32(name):
    jaxpr = trace(load(name, "bfloat16"), **inputs(name))
    dots = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert {v.aval.dtype for e in dots for v in e.invars} == {jnp.dtype("bfloat16")}
    exact = [e.outvars[0].aval.size for e in dots if e.outvars[0].aval.dtype == jnp.float32]
    assert exact == [2 * load(name).config.num_heads * 12 * 12] * 2


def test_every_operation_has_a_scope(name):
    jaxpr = trace(load(name), **inputs(name))
    scopes = [str(e.source_info.name_stack).split("/")[0] for e in jaxpr.jaxpr.eqns]
    assert {"embeddings", "causal_bias", "attention", "mlp", "norm", "head"} <= set(scopes)
    assert all(scopes)


def test_output_is_a_tree_under_its_field_names(name):
    output = call(load(name), **inputs(name))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(output)
    assert [str(path[0]) for path, _ in leaves] == [".last_hidden_state", ".logits"]
    again = jax.tree_util.tree_unflatten(treedef, [leaf for _, leaf in leaves])
    assert again.logits is output.logits
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.logits = None


@pytest.mark.parametrize(
    ("ids", "others", "message"),
    [
        ((12,), {}, r"input_ids\): shape is \(12,\)"),
        ((2, 0), {}, "length is 0; 1 "),
        ((2, 12), {"attention_mask": (2, 11)}, r"attention_mask\): shape is \(2, 11\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name, ids, others, message):
    shapes = {"input_ids": ids} | others
    arguments = {key: jax.ShapeDtypeStruct(shape, jnp.int32) for key, shape in shapes.items()}
    # The bare function: jaxtyping's check of the test run would come before ours.
    plain = type(load(name)).hidden_states
    plain = getattr(plain, "__wrapped__", plain)
    with pytest.raises(models.InputError, match=message):
        plain(load(name), **arguments)


# Loading


def test_key_map_is_total(name):
    config = load(name).config
    assert {leaf.path for leaf in family(name).leaves(config)} == set(
        abstract_parameters(load(name))
    )


def test_sharded_folder_is_read(name, tmp_path):
    assert len(set(names(name)["index"]["weight_map"].values())) > 2
    folder = make_sharded(tmp_path / "m", name)
    assert fingerprint(models.load(folder)) == fingerprint(load(name))


def test_file_without_prefix_is_read(name, tmp_path):
    tensors = {k.removeprefix(family(name).prefix): v for k, v in tensors_of(name).items()}
    folder = make(tmp_path / "m", name, tensors)
    assert fingerprint(models.load(folder)) == fingerprint(load(name))


def test_half_the_prefixes_are_refused(name, tmp_path):
    prefix = family(name).prefix
    tensors = {
        key.removeprefix(prefix) if ".0." in key else key: value
        for key, value in tensors_of(name).items()
    }
    message = refused(make(tmp_path / "m", name, tensors), models.KeyMismatchError)
    lacking = sorted(key.removeprefix(prefix) for key in tensors_of(name) if ".0." in key)
    assert f"{len(lacking)} of the model lack it; all or none may have it" in message
    assert message.endswith(f"lacking: {', '.join(lacking)}")


def test_every_missing_tensor_is_named(name, tmp_path):
    gone = sorted(key for key in tensors_of(name) if ".1." in key)
    kept = {key: value for key, value in tensors_of(name).items() if key not in gone}
    message = refused(make(tmp_path / "m", name, kept), models.KeyMismatchError)
    found = [line.split()[1] for line in message.splitlines() if line.startswith("missing ")]
    assert found == [key.removeprefix(family(name).prefix) for key in gone]


def test_unexpected_tensor_is_named(name, tmp_path):
    extra = f"{family(name).prefix}{family(name).base[0]}.weight_g"
    tensors = tensors_of(name) | {extra: np.zeros(3, np.float32)}
    message = refused(make(tmp_path / "m", name, tensors), models.KeyMismatchError)
    assert f"unexpected  {extra}" in message


def test_wrong_shape_names_the_field_at_fault(name, tmp_path):
    tensors = tensors_of(name) | {word_key(name): np.zeros((96, 32), np.float32)}
    message = refused(make(tmp_path / "m", name, tensors), models.KeyMismatchError)
    assert f"{word_key(name)} has shape [96, 32], wanted [97, " in message
    assert "by vocab_size 97" in message


def test_base_class_has_no_head(name, tmp_path):
    (base,) = (kind for kind in names(name)["classes"] if "LM" not in kind)
    prefix = family(name).prefix
    keys = names(name)["classes"][base]
    tensors = {key: tensors_of(name)[prefix + key] for key in keys}
    model = models.load(make(tmp_path / "m", name, tensors, architectures=[base]))
    output = shapes(model, **inputs(name))
    assert output.logits is None
    assert output.last_hidden_state.shape == reference(name).outputs["last_hidden_state"].shape
    assert model.logits(jnp.zeros((1, 1, model.config.embed_dim))) is None


def test_tied_head_is_the_embedding(name, tmp_path):
    lines = []
    folder = make(tmp_path / "m", name, tied(name), tie_word_embeddings=True)
    model = models.load(folder, report=lines.append)
    assert lines[1].endswith("0 dropped, 0 tied")
    hidden = reference(name).outputs["last_hidden_state"]
    expected = hidden @ tensors_of(name)[word_key(name)].T
    difference = np.abs(model.logits(jnp.asarray(hidden)) - expected)
    assert difference.max() <= TOLERANCE * np.std(expected)


def test_tied_head_in_the_file_must_equal_the_embedding(name, tmp_path):
    tensors = tied(name) | {HEAD: tensors_of(name)[word_key(name)].copy()}
    lines = []
    folder = make(tmp_path / "m", name, tensors, tie_word_embeddings=True)
    models.load(folder, report=lines.append)
    assert lines[1].endswith("0 dropped, 1 tied")
    tensors[HEAD][3, 4] += 1e-6
    message = refused(make(tmp_path / "m", name, tensors, tie_word_embeddings=True),
                      models.KeyMismatchError)  # fmt: skip
    assert f"{HEAD} differs from {word_key(name)}, to which it is tied" in message


def test_untied_head_is_a_parameter_of_its_own(name, tmp_path):
    head = np.random.default_rng(0).normal(size=(97, load(name).config.embed_dim))
    tensors = tied(name) | {HEAD: head.astype(np.float32)}
    model = models.load(make(tmp_path / "m", name, tensors, tie_word_embeddings=False))
    hidden = reference(name).outputs["last_hidden_state"]
    expected = hidden @ tensors[HEAD].T
    difference = np.abs(model.logits(jnp.asarray(hidden)) - expected)
    assert difference.max() <= TOLERANCE * np.std(expected)


def test_untied_head_must_be_in_the_file(name, tmp_path):
    folder = make(tmp_path / "m", name, tied(name), tie_word_embeddings=False)
    assert f"missing     {HEAD}" in refused(folder, models.KeyMismatchError)


def test_configuration_survives_our_own_folder(name):
    config = load(name).config
    manifest = Manifest(
        format="pbjax",
        format_version=1,
        model_type=name,
        config=json.loads(json.dumps(dataclasses.asdict(config))),
        dtype="float32",
        num_parameters=1,
        fingerprint="",
        outputs={},
        source_class="",
    )
    assert parse_config(family(name), manifest, "config.json") == config


def test_fixed_example_fits_the_model(name):
    given = family(name).example(load(name).config)
    assert sorted(given) == sorted(reference(name).inputs)
    assert shapes(load(name), **given).logits.shape == (*given["input_ids"].shape, 97)
    assert given["input_ids"].max() < 97
    assert not given["attention_mask"].all()


@pytest.mark.parametrize("value", [None, 1, "true"])
def test_malformed_flag_is_refused(name, tmp_path, value):
    folder = make(tmp_path / "m", name, tie_word_embeddings=value)
    assert f"tie_word_embeddings is {value!r}" in refused(folder, models.ConfigError)


@pytest.mark.parametrize(
    ("field", "value"),
    [("is_encoder_decoder", True), ("add_cross_attention", True), ("architectures", ["GPTNeoX"])],
)
def test_other_kinds_of_model_are_refused_by_name(name, tmp_path, field, value):
    message = refused(make(tmp_path / "m", name, **{field: value}), models.ConfigError)
    assert f"config.json: {field} is {value!r}" in message
