"""What the model benchmark counts and how it judges; its measurements need a GPU."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend("scripts")
    return lambda name: importlib.import_module(f"benchmarks.peers.{name}")


@pytest.mark.parametrize(
    ("name", "per_s"),
    [
        ("vit", 22_300),
        ("bert", 11_100),
        ("conformer", 6_400),
        ("gpt2", 490),
        ("bloom", 125),
        ("llama", 110),
    ],
)
def test_bounds_are_those_counted_by_hand(script, name, per_s):
    # By hand from published sizes, attention counted whole or in part: hence a few percent.
    row = script("rows").ROWS[name]
    assert row.batch_size / row.bound_s == pytest.approx(per_s, rel=0.05)


def test_flops_are_twice_the_weights_of_the_layers_and_the_attention(script):
    from flax import nnx

    rows, ours = script("rows"), script("jax_process")
    row = rows.ROWS["llama"]
    model = nnx.eval_shape(lambda: ours.build(row))
    weights = sum(
        leaf.size for layer in model.layers for leaf in _leaves(layer) if len(leaf.shape) == 2
    )
    tokens = row.batch_size * row.length
    attention = tokens * row.num_layers * 2 * row.length * row.embed_dim
    assert row.flops == 2 * tokens * weights + attention


def _leaves(module):
    import jax
    from flax import nnx

    return jax.tree.leaves(nnx.state(module))


def test_hashed_values_follow_the_rule(script):
    seed = 0x9ABCDEF1
    expected = np.empty(1000)
    for i in range(1000):
        h = (i * 0x9E3779B1 + seed) % 2**32
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        expected[i] = ((h ^ h >> 16) >> 8) * 2.0**-23 - 1
    actual = script("jax_process").hashed(jnp.uint32(seed), (10, 100), (0.0, 1.0))
    np.testing.assert_array_equal(actual.ravel(), expected.astype(jnp.bfloat16))
    assert abs(expected.mean()) < 0.1
    assert abs(expected.std() - 3**-0.5) < 0.05


def test_every_row_has_a_tensor_for_every_weight(script):
    from flax import nnx

    rows, ours = script("rows"), script("jax_process")
    for name in rows.ROWS:
        row = rows.get_row(name, tiny=True)
        filled = [leaf.path for leaf, _ in ours.stored_shapes(row)]
        weights = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda row=row: ours.build(row))))
        assert sorted(filled) == sorted(".".join(map(str, path)) for path, _ in weights)


@pytest.mark.parametrize(("error", "agrees"), [(1e-3, True), (0.5, False)])
def test_outputs_agree_where_roundings_explain_the_difference(script, tmp_path, error, agrees):
    results, rows = script("results"), script("rows")
    row = rows.get_row("bert", tiny=True)
    truth = np.random.default_rng(0).normal(size=(2, 8, 16))
    np.save(tmp_path / "torch bert float32.npy", truth)
    np.save(tmp_path / "jax bert library.npy", truth * (1 + error))
    line = {"side": "jax", "mode": "library", "seconds": 0.5}
    (found,) = results.finish(row, [line], tmp_path)
    assert found["agrees"] is agrees
    assert found["items_per_s"] == row.batch_size / 0.5
