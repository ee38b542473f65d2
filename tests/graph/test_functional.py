import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pbjax.errors import InputError, InputTypeError, ModelError
from pbjax.graph.functional import check_state, functional

X = jnp.arange(8.0).reshape(2, 4)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))

    def encode(self, x):
        return self.norm(self.linear(x))


class ScannedNnx(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return NnxModel(rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(layer, x):
            return layer(x)

        return forward(self.layers, x)


class RematNnx(ScannedNnx):
    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def forward(layer, x):
            return layer(x)

        return forward(self.layers, x)


class CondNnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = NnxModel(rngs)

    def __call__(self, x):
        return nnx.cond(x[0, 0] > 0, lambda m, x: m(x), lambda m, x: 2 * m(x), self.layers, x)


class JittedNnx(nnx.Module):
    def __init__(self, rngs):
        self.inner = ScannedNnx(rngs)

    def __call__(self, x):
        return nnx.jit(lambda inner, x: inner(x))(self.inner, x)


class Cached(nnx.Module):
    def __init__(self):
        self.step = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.step[...] = self.step[...] + 1
        return x * 2


class LinenModel(nn.Module):
    train: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=not self.train)(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=not self.train)(x)

    def shifted(self, x):
        return self(x) + 1


def linen_variables():
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return LinenModel().init(rngs, X)


@pytest.mark.parametrize("kind", [NnxModel, ScannedNnx, RematNnx, CondNnx, JittedNnx])
def test_nnx_module_in_evaluation_mode_is_pure_and_gives_the_models_output(kind):
    model = kind(nnx.Rngs(0))
    model.eval()
    f = functional(model)
    check_state(f, X)
    np.testing.assert_array_equal(f.apply(f.params, X), model(X))
    assert f.name == kind.__name__


@pytest.mark.parametrize("kind", [NnxModel, ScannedNnx, RematNnx, CondNnx, JittedNnx])
def test_nnx_state_that_a_call_changes_is_refused_by_its_path(kind):
    model = kind(nnx.Rngs(0))
    model.train()
    with pytest.raises(ModelError, match=r"dropout\.rngs\.count.*norm\.mean.*norm\.var.*eval\(\)"):
        check_state(functional(model), X)


def test_unchanged_variables_are_not_named_in_the_refusal():
    model = NnxModel(nnx.Rngs(0))
    model.train()
    with pytest.raises(ModelError) as raised:
        check_state(functional(model), X)
    assert "kernel" not in str(raised.value)
    assert "rngs.key" not in str(raised.value)


def test_random_counter_that_no_result_needs_is_no_change():
    """A recurrent layer draws a seed for its initial state, which is zeros."""
    model = nnx.RNN(nnx.LSTMCell(4, 4, rngs=nnx.Rngs(0)))
    f = functional(model)
    check_state(f, X[None])
    np.testing.assert_allclose(f.apply(f.params, X[None]), model(X[None]), rtol=1e-6)


def test_nnx_cache_is_refused():
    with pytest.raises(ModelError, match="step"):
        check_state(functional(Cached()), X)


def test_nnx_model_is_not_mutated():
    model = NnxModel(nnx.Rngs(0))
    model.train()
    before = jax.tree.leaves(nnx.state(model))
    f = functional(model)
    f.apply(f.params, X)
    with pytest.raises(ModelError):
        check_state(f, X)
    after = jax.tree.leaves(nnx.state(model))
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_params_do_not_follow_later_changes_of_the_model():
    model = Cached()
    f = functional(model)
    model(X)
    assert jax.tree.leaves(f.params)[0] == 0


def test_check_state_takes_shapes_in_place_of_arrays():
    model = NnxModel(nnx.Rngs(0))
    model.eval()
    check_state(functional(model), jax.ShapeDtypeStruct((2, 4), jnp.float32))


def test_unbound_linen_module_with_variables():
    variables = linen_variables()
    f = functional(LinenModel(), variables)
    check_state(f, X)
    np.testing.assert_array_equal(f.apply(f.params, X), LinenModel().apply(variables, X))
    assert f.name == "LinenModel"


def test_bound_linen_module():
    variables = linen_variables()
    f = functional(LinenModel().bind(variables))
    check_state(f, X)
    np.testing.assert_array_equal(f.apply(f.params, X), LinenModel().apply(variables, X))


def test_unbound_linen_module_without_variables_is_refused():
    with pytest.raises(InputError, match="variables="):
        functional(LinenModel())


def test_bound_linen_module_with_variables_is_refused():
    variables = linen_variables()
    with pytest.raises(InputError, match="bound"):
        functional(LinenModel().bind(variables), variables)


def test_linen_batch_statistics_in_training_mode_are_refused():
    with pytest.raises(ModelError, match=r"mean.*BatchNorm_0.*use_running_average=True"):
        check_state(functional(LinenModel(train=True), linen_variables()), X)


def test_linen_dropout_without_deterministic_is_refused():
    dropout = nn.Dropout(0.5, deterministic=False)
    with pytest.raises(ModelError, match=r"dropout.*deterministic=True"):
        check_state(functional(dropout, {}), X)


def test_incomplete_linen_variables_are_refused():
    variables = {"params": linen_variables()["params"]}
    with pytest.raises(ModelError, match="batch_stats"):
        check_state(functional(LinenModel(), variables), X)


def test_method_of_an_nnx_module_brings_its_params():
    model = NnxModel(nnx.Rngs(0))
    model.eval()
    f = functional(model.encode)
    check_state(f, X)
    np.testing.assert_array_equal(f.apply(f.params, X), model.encode(X))
    assert len(jax.tree.leaves(f.params)) == 8
    assert f.name == "NnxModel.encode"


def test_state_that_a_method_changes_is_refused():
    model = NnxModel(nnx.Rngs(0))
    model.train()
    with pytest.raises(ModelError, match=r"norm\.mean"):
        check_state(functional(model.encode), X)


def test_method_of_a_bound_linen_module():
    variables = linen_variables()
    f = functional(LinenModel().bind(variables).shifted)
    check_state(f, X)
    np.testing.assert_array_equal(f.apply(f.params, X), LinenModel().apply(variables, X) + 1)
    assert f.name == "LinenModel.shifted"


def test_method_of_an_unbound_linen_module_takes_variables():
    variables = linen_variables()
    f = functional(LinenModel().shifted, variables)
    np.testing.assert_array_equal(f.apply(f.params, X), LinenModel().apply(variables, X) + 1)


def test_function_that_captures_a_module_in_evaluation_mode():
    model = NnxModel(nnx.Rngs(0))
    model.eval()
    f = functional(lambda x: model(x))
    check_state(f, X)
    np.testing.assert_array_equal(f.apply((), X), model(X))


def test_function_that_captures_a_module_in_training_mode_is_refused():
    model = NnxModel(nnx.Rngs(0))
    model.train()
    with pytest.raises(ModelError, match=r"BatchStat.*model\.eval\(\)"):
        check_state(functional(lambda x: model(x)), X)
    np.testing.assert_array_equal(model.norm.mean[...], jnp.zeros(4))


def test_function_that_captures_a_module_with_transformations_is_refused_with_the_way_out():
    model = ScannedNnx(nnx.Rngs(0))
    model.eval()
    with pytest.raises(ModelError, match="pass the module"):
        check_state(functional(lambda x: model(x)), X)


def test_error_of_the_model_itself_reaches_the_user():
    def broken(x):
        raise ValueError("my own")

    with pytest.raises(ValueError, match="my own"):
        check_state(functional(broken), X)


def test_callable_has_no_params():
    f = functional(jnp.tanh)
    check_state(f, X)
    assert f.params == ()
    np.testing.assert_array_equal(f.apply((), X), jnp.tanh(X))


def scaled(x, factor):
    return x * factor


@pytest.mark.parametrize("model", [scaled, jax.jit(scaled), functools.partial(scaled, factor=2.0)])
def test_name_of_a_callable_is_the_functions(model):
    assert functional(model).name == "scaled"


def test_several_inputs_and_pytrees_reach_the_model():
    f = functional(lambda pair, z: {"sum": pair[0] + pair[1] + z})
    np.testing.assert_array_equal(f.apply((), (X, X), X)["sum"], 3 * X)


@pytest.mark.parametrize("model", [jnp.tanh, NnxModel(nnx.Rngs(0))])
def test_variables_without_a_linen_module_are_refused(model):
    with pytest.raises(InputError, match="leave out variables="):
        functional(model, {})


@pytest.mark.parametrize("model", [NnxModel, LinenModel])
def test_a_class_is_refused(model):
    with pytest.raises(InputTypeError, match="pass an instance"):
        functional(model)


@pytest.mark.parametrize("model", [3, None, X])
def test_what_cannot_be_called_is_refused(model):
    unchecked = inspect.unwrap(functional)  # the runtime type checks of the test run come first
    with pytest.raises(InputTypeError, match="can be called"):
        unchecked(model)


def test_nnx_module_without_call_is_refused():
    class Silent(nnx.Module):
        pass

    with pytest.raises(InputTypeError, match="can be called"):
        functional(Silent())


def test_arrays_of_numpy_are_put_on_the_device_once():
    inputs = jnp.ones((2, 3))
    linen = nn.Dense(4)
    variables = jax.tree.map(np.asarray, linen.init(jax.random.key(0), inputs))
    module = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    module.kernel = nnx.Param(np.ones((3, 4), np.float32))
    for found in (functional(linen, variables), functional(module)):
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found.params))
        assert found.apply(found.params, inputs).shape == (2, 4)
    assert isinstance(module.kernel[...], np.ndarray)
