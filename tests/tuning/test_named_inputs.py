"""Inputs by the model's names; what an `Optimized` is called, and what it cannot do."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pbjax
from pbjax.errors import InputError, InputTypeError, PbjaxWarning
from pbjax.graph import placement
from pbjax.graph.functional import functional
from pbjax.tuning.named_inputs import InputNames
from pbjax.tuning.request import Request
from tests.fakes import FakeTimer
from tests.jobs import check_house_form

X, MASK = jnp.arange(8.0).reshape(4, 2), jnp.array([[1.0], [0.0], [1.0], [1.0]])


def model(x, mask=None, scale=None):
    x = x if mask is None else jnp.where(mask > 0, x, jnp.zeros_like(x))
    return x if scale is None else x * scale


@pytest.fixture(scope="module")
def fast():
    with pytest.MonkeyPatch.context() as monkeypatch:
        FakeTimer().install(monkeypatch)
        return pbjax.optimize(model, {"x": X, "mask": MASK}, split=(4,))


@pytest.mark.parametrize(
    "call",
    [
        lambda f: f(X, MASK),
        lambda f: f(x=X, mask=MASK),
        lambda f: f(X, mask=MASK),
        lambda f: f({"mask": MASK, "x": X}),
        lambda f: f(**{"mask": np.asarray(MASK), "x": np.asarray(X)}),
    ],
)
def test_inputs_go_by_place_or_by_the_models_names(fast, call):
    np.testing.assert_array_equal(call(fast), model(X, MASK))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f: f(x=X, maks=MASK), "maks= is given"),
        (lambda f: f(x=X), "mask= is missing"),
        (lambda f: f(X, MASK, x=X), "x= is given"),
        (lambda f: f(x=X, mask=MASK, scale=X), "scale= is given"),
        (lambda f: f([[1.0, 2.0]] * 4, MASK), "input 0 is a list of numbers"),
        (lambda f: jax.jit(lambda x: f(x, MASK))(X), "an input is being traced"),
        (pickle.dumps, "save fast.plan"),
        (copy.deepcopy, "save fast.plan"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_sentence(fast, call, words):
    with pytest.raises(InputTypeError, match=words) as error:
        call(fast)
    check_house_form(error)


def test_a_line_tells_what_runs(fast):
    assert repr(fast) == "<Optimized model: unsplit, batch sizes 4>"
    assert repr(copy.copy(fast)) == repr(fast)


@pytest.mark.parametrize(
    ("inputs", "kind", "words"),
    [
        ((X, jnp.float32(2)), InputError, "is a scalar, which has no rows"),
        (([[1.0, 2.0]] * 4,), InputTypeError, r"inputs\[0\] is a list of numbers"),
        (({"x": X, "scale": X, "mask": 1.0},), InputTypeError, r"inputs\[1\] is a float"),
    ],
)
def test_inputs_that_are_no_arrays_of_rows_are_refused(inputs, kind, words):
    with pytest.raises(kind, match=words) as error:
        pbjax.optimize(model, *inputs)
    check_house_form(error)


@pytest.mark.parametrize("traced", [lambda x: Request.of(model, (x,)), lambda x: late(x)])
def test_nothing_is_optimised_while_jax_traces(traced):
    with pytest.raises(InputTypeError, match="while JAX traces a function") as error:
        jax.jit(traced)(X)
    check_house_form(error)


def late(x):
    """The example itself is not traced."""
    return Request.of(model, (X,)), x


def test_names_are_those_of_what_takes_its_inputs_by_place():
    def open_ended(x, *rest, scale=None):
        return x

    assert InputNames.of(open_ended).names == ("x",)
    assert InputNames.of(max).names == ()
    names = InputNames.of(model)
    assert names.left_out == {"mask", "scale"}
    assert names.in_order("optimize", (), {"scale": 1, "x": 2}) == (2, None, 1)
    assert not names.are_keys_of(({"ids": X},))
    assert not names.are_keys_of((X, MASK))


def test_nan_of_random_inputs_is_no_error_of_optimize(monkeypatch):
    FakeTimer().install(monkeypatch)
    with jax.debug_nans(True):
        fast = pbjax.optimize(lambda x: jnp.log(x - 4), X + 5, split=(4,))
        with pytest.raises(FloatingPointError, match="call: the program returns nan"):
            fast(X)


def test_arrays_on_several_devices_are_moved_to_that_of_the_programs(fast, monkeypatch):
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("i",)), PartitionSpec())
    if len(jax.devices()) == 1:  # Then another device is one that no program runs on.
        monkeypatch.setattr(placement, "home", lambda: "another")
        monkeypatch.setattr(jax, "device_put", lambda x, device: (x, device))
    x = jnp.ones((2, 2), device=everywhere)
    moved = placement.placed(x)
    assert moved is not x
    assert placement.placed("text") == "text"
    with pytest.raises(InputError, match=r"captured an array float32\[2, 2\] that lies on") as e:
        placement.refuse_captured("model", (1.0, x))
    check_house_form(e)


def test_weights_elsewhere_are_moved_with_a_warning(monkeypatch):
    from flax import nnx

    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    monkeypatch.setattr("pbjax.graph.functional.is_elsewhere", lambda x: True)
    with pytest.warns(PbjaxWarning, match="the model's weights lie on cpu:0; programs run on"):
        functional(linear)
