"""A model whose rows depend on each other runs unsplit, with the operation as the reason."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import pbjax
from pallas_kernels.testing import assert_close
from pbjax.errors import InputError, ModelError

from .fakes import fake_measure
from .networks import normal

B, D, E, F = 6, 8, 3, 12
IMAGE, TEXT = normal(1, D, F), normal(2, D, F)
EXPERTS, ROUTER = normal(3, E, D, D), normal(4, D, E)
LAYERS = normal(7, 12, D, D)


def clip(images, texts):
    """Similarities of all images with all texts."""
    a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (images @ IMAGE, texts @ TEXT))
    return jnp.exp(0.5) * a @ b.T


def mixture(x):
    """Each row goes to one expert, sorted by expert, without dropping any."""
    expert = jnp.argmax(x @ ROUTER, axis=-1)
    order = jnp.argsort(expert)
    counts = jnp.bincount(expert, length=E)
    y = jax.lax.ragged_dot(x[order], EXPERTS, counts)
    return x + jnp.zeros_like(y).at[order].set(y)


def mean_loss(x):
    """A loss over the batch."""
    return jnp.mean(jnp.sum(jnp.tanh(x @ IMAGE) ** 2, axis=-1))


def noisy(x):
    """Noise of one key for the whole batch."""
    return x + jax.random.normal(jax.random.key(3), x.shape)


def rows(seed=5):
    return normal(seed, B, D)


MODELS = {
    "clip": (clip, (rows(), rows(6)), "dot_general"),
    "mixture": (mixture, (rows(),), "sort"),
    "mean_loss": (mean_loss, (rows(),), "reduce_sum"),
    "noisy": (noisy, (rows(),), "random_bits"),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    return MODELS[request.param]


@pytest.fixture(scope="module")
def fast(case):
    """The model of a case, optimised once for all tests of it."""
    model, inputs, _ = case
    return pbjax.optimize(model, *inputs)


def test_it_computes_what_the_model_does_and_says_why_it_runs_whole(case, fast):
    model, inputs, primitive = case
    assert_close(fast(*inputs), model(*inputs), reduction=F, roundings=20)
    assert fast.plan.decision == "unsplit"
    assert fast.plan.sizes == (B,)
    for text in (fast.plan.reason, str(fast.report())):
        assert "the batch cannot be split: " in text
        assert primitive in text
        assert "test_unsplittable.py:" in text


def test_a_split_is_refused_with_the_operation_and_its_line(case):
    model, inputs, primitive = case
    with pytest.raises(
        ModelError, match=rf"split=\(4, 2\).*{primitive}.*test_unsplittable\.py:\d+"
    ):
        pbjax.optimize(model, *inputs, split=(4, 2))


def test_other_batch_sizes_are_refused(case, fast):
    model, inputs, _ = case
    with pytest.raises(ModelError, match=r"buckets=\(2,\)"):
        pbjax.optimize(model, *inputs, buckets=(2,))
    with pytest.raises(InputError, match="depend on each other"):
        fast(*(x[:4] for x in inputs))


def test_a_saved_plan_runs_again(case, fast, tmp_path, monkeypatch):
    model, inputs, _ = case
    plan = fast.plan
    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr("pbjax.tuning.autotune.measure", lambda *_: pytest.fail("timed again"))
    again = pbjax.optimize(model, *inputs, plan=tmp_path / "plan.json")
    assert again.plan == plan
    assert_close(again(*inputs), model(*inputs), reduction=F, roundings=20)


def stacked_clip(images, texts):
    """Layers in a loop before the batch is mixed."""

    def layer(x, w):
        return jnp.tanh(x @ w), None

    images, _ = jax.lax.scan(layer, images, LAYERS)
    return clip(images, texts)


def test_layers_written_out_compete_also_where_the_batch_is_mixed(monkeypatch):
    def faster(*args):
        measured = fake_measure({"unsplit": 2e-3})(*args)
        return [
            dataclasses.replace(each, seconds=(1e-3,) * 3) if each.spec.variant else each
            for each in measured
        ]

    monkeypatch.setattr("pbjax.tuning.autotune.measure", faster)
    inputs = rows(), rows(6)
    fast = pbjax.optimize(stacked_clip, *inputs)
    assert fast.plan.layers == "unrolled"
    assert_close(fast(*inputs), stacked_clip(*inputs), reduction=F, roundings=20)


def test_a_step_that_mixes_its_batch_carries_its_state():
    def step(x, state):
        (total,) = state
        return mixture(x), (total + jnp.mean(x, axis=0, keepdims=True),)

    def start():
        return (jnp.zeros((B, D)),)

    fast = pbjax.optimize(step, rows(), start(), state=1)
    assert "the batch cannot be split: " in fast.plan.reason
    out, held = fast(rows(), fast.hold(start()))
    want, (total,) = step(rows(), start())
    assert_close(out, want, reduction=F, roundings=20)
    assert_close(fast.release(held)[0], total, reduction=B, roundings=20)
    with pytest.raises(ModelError, match=r"split=\(4, 2\)"):
        pbjax.optimize(step, rows(), start(), state=1, split=(4, 2))


def test_a_foreign_plan_without_a_split_says_why_there_is_none():
    plan = pbjax.optimize(mean_loss, rows()).plan
    foreign = dataclasses.replace(plan, jax="0.0.1")
    with pytest.warns(pbjax.errors.PbjaxWarning, match="jax '0.0.1' in the plan"):
        fast = pbjax.optimize(mean_loss, rows(), plan=foreign)
    assert fast.plan.reason.startswith("the batch cannot be split: ")


def test_the_batch_itself_may_be_named_as_a_bucket():
    fast = pbjax.optimize(mean_loss, rows(), buckets=[len(rows())])
    assert fast.buckets == (len(rows()),)
