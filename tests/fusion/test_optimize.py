"""`optimize` with fusion: ten models as users write them, and one of each family of the package.

`optimize` itself verifies each match, and compares fused and split programs with the model; these
tests check that it did, what it found, and what it does where it must not or need not.
"""

from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
import pbjax
from models.kernels import with_kernels
from pallas_kernels.operation import PRIMITIVE
from pallas_kernels.testing import assert_close
from pbjax.batch_axes.propagation import SplitError
from pbjax.device import find_device
from pbjax.errors import FusionError, InputError, PbjaxWarning
from pbjax.fusion import fusing
from pbjax.graph.difference import difference
from pbjax.program import analysis
from pbjax.program.analysis import analyse
from tests import networks, user_models
from tests.cases import long_but
from tests.fakes import FakeTimer, fake_measure
from tests.fusion.test_families import DATA, IDS, LAYERS
from tests.jobs import check_house_form
from tests.models.test_with_kernels import PALLAS
from tests.user_models import D, F, H, K, N, S, hand_rms_norm, normal, tokens, weight

SECONDS = {"plain": 4e-3, "unsplit": 3e-3, "sequential": 2.5e-3, "split": 2e-3, "interleaved": 2e-3}
H200 = find_device("NVIDIA H200")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Compiles as fast as XLA can, and times nothing; ranks are promoted as users have it."""
    FakeTimer().install(monkeypatch)
    monkeypatch.setattr("pbjax.tuning.shortlist._rivals", lambda *_, **__: ())
    monkeypatch.setattr("pbjax.tuning.autotune.measure", fake_measure(SECONDS))
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def optimized(model, *inputs, fuse="all", **options):
    return pbjax.optimize(model, *inputs, fuse=fuse, **options)


def names(fast):
    return [program.name for program in fast.report().programs if not program.variant]


def kernels(report):
    found = Counter()
    for kind in report.fusion.kinds:
        found[kind.kernel] += kind.count
    return found


@pytest.mark.parametrize(
    "make",
    long_but(
        user_models.CASES,
        user_models.alibi_decoder,
        user_models.linen_decoder,
        user_models.nnx_llama,
        user_models.grouped_decode_step,
    ),
    ids=lambda make: make.__name__,
)
def test_a_users_model_runs_with_kernels_whole_and_split(make):
    case = make()
    inputs = [jnp.concatenate([x, x]) for x in case.inputs]
    fast = optimized(case.model, *inputs, variables=case.variables, split=(3, 1))
    report = fast.report()
    assert kernels(report) == case.kernels
    assert not report.fusion.misses
    # Where all stages are of one class there is nothing to overlap.
    assert names(fast) in (["plain", "unsplit", "split"], ["plain", "unsplit", "sequential"])
    assert fast.plan.max_difference is not None


@pytest.mark.parametrize(
    "name", long_but(["vit", "bert", "gpt2", "bloom", "llama", "conformer"], "bert", "llama")
)
def test_a_model_of_each_family_runs_with_kernels(name):
    given = np.load(DATA / name / "reference.npz")
    keys = [f"inputs.{key}" for key in ("pixel_values", "input_values", "input_features")]
    inputs = [given[key][:2] for key in keys if key in given.files] or [IDS]
    fast = optimized(models.load(DATA / name), *inputs, split=(2,))
    assert kernels(fast.report())["layer_norm" if name != "llama" else "rms_norm"] > 2 * LAYERS
    assert fast.plan.measured.plain == SECONDS["plain"]


def test_the_body_of_a_loop_over_layers_is_fused_and_split():
    network = networks.nnx_scan(3)
    fast = optimized(network.model, *network.inputs(4), split=(3, 1))
    assert {k.kernel for k in fast.report().fusion.kinds if k.in_loop} >= {"layer_norm"}
    assert names(fast) == ["plain", "unsplit", "split"]


SCALES = [1 + normal(i, D) * 0.1 for i in range(2)]
MLPS = [(weight(2 + i, D, F), weight(4 + i, F, D)) for i in range(2)]
ATTENTIONS = [[weight(10 * i + j, D, n * H) for j, n in enumerate((N, K, K, N))] for i in range(2)]


def two_layers(x):
    for scale, (up, down) in zip(SCALES, MLPS, strict=True):
        x = x + jax.nn.silu(hand_rms_norm(x, scale) @ up) @ down
    return x


def test_a_single_row_and_smaller_buckets_run_with_kernels():
    x = tokens()
    fast = optimized(two_layers, x, buckets=(1,))
    assert names(fast)[:2] == ["plain", "unsplit"]
    for rows in (x, x[:1]):
        assert_close(fast(rows), two_layers(rows), reduction=F, roundings=8)


class LinenPair(nn.Module):
    """Two products of one input, which are joined."""

    @nn.compact
    def __call__(self, x):
        return jnp.sin(nn.Dense(D)(x)) + jnp.tanh(nn.Dense(D)(x))


class NnxPair(nnx.Module):
    """The same."""

    def __init__(self, rngs):
        self.one, self.other = (nnx.Linear(D, D, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return jnp.sin(self.one(x)) + jnp.tanh(self.other(x))


def test_other_params_are_prepared_like_the_models_own():
    model, x = LinenPair(), tokens()
    variables = model.init(jax.random.key(0), x)
    fast = optimized(model, x, variables=variables, split=(2,))
    assert kernels(fast.report()) == {"gemm(2 joined, bias)": 1}
    other = jax.tree.map(lambda leaf: leaf * 1.1 + 0.01, variables)
    assert_close(fast.apply(other, x), model.apply(other, x), reduction=4 * D, roundings=40)


def test_the_model_as_given_is_kept_where_it_is_faster(monkeypatch, tmp_path):
    seconds = SECONDS | {"plain": 1e-3}
    monkeypatch.setattr("pbjax.tuning.autotune.measure", fake_measure(seconds))
    fast = optimized(two_layers, tokens())
    assert fast.plan.decision == "plain"
    assert "plain 1 ms" in fast.plan.reason
    fast.plan.save(tmp_path / "plan.json")
    again = optimized(two_layers, tokens(), plan=tmp_path / "plan.json")
    assert again.plan.decision == "plain"
    np.testing.assert_array_equal(again(tokens()), jax.jit(two_layers)(tokens()))


def test_a_plan_with_kernels_is_refused_without_them(tmp_path):
    optimized(two_layers, tokens(), split=(2,)).plan.save(tmp_path / "plan.json")
    with pytest.raises(pbjax.PbjaxError, match="the plan is for"):
        optimized(two_layers, tokens(), fuse="none", plan=tmp_path / "plan.json")


def test_on_a_cpu_nothing_is_fused_unless_it_is_asked_for():
    x, cpu = tokens(), find_device("cpu", num_cores=2)
    found = analyse(two_layers, (x,), device=cpu)
    assert "no Hopper GPU" in str(found.fusion)
    without = analyse(two_layers, (x,), device=cpu, fuse="none")
    assert difference(found.graph, without.graph) is None
    assert found.fingerprint == without.fingerprint
    assert "switched off" in str(without.fusion)


def test_for_a_hopper_gpu_everything_is_fused():
    found = analyse(two_layers, (tokens(),), device=H200)
    assert found.fused
    assert found.fingerprint == analyse(two_layers, (tokens(),), device=H200).fingerprint


def test_a_model_that_calls_kernels_is_left_alone():
    model = with_kernels(models.load(DATA / "bert"), PALLAS)
    found = analyse(model, (IDS,), device=H200)
    assert not found.fused
    assert "calls kernels itself" in str(found.fusion)
    assert found.weights[0] is jax.tree.leaves(found.model.params)[0]


def test_weights_that_depend_on_the_batch_size_are_no_weights():
    table, scale = normal(2, S, D), normal(3, 1, 1, D)

    def model(x):
        positions = jnp.repeat(table[None] * scale, x.shape[0], axis=0)
        return two_layers(x + positions * jnp.cos(positions))

    fast = optimized(model, tokens(), split=(2,))
    assert_close(fast(tokens()), model(tokens()), reduction=F, roundings=12)


def test_shapes_in_place_of_weights_are_enough_to_take_a_model_apart():
    model = nnx.eval_shape(lambda: NnxPair(nnx.Rngs(0)))
    found = analyse(model, (tokens(),), device=H200)
    weights = jax.eval_shape(found.prepare, jax.tree.leaves(found.model.params))
    assert [w.shape for w in weights].count((D, 2 * D)) == 1


@pytest.mark.parametrize("left_out", ["rms_norm", "rms_norm.1"])
def test_a_pattern_or_a_match_is_left_out_by_its_name(left_out):
    found = analyse(two_layers, (tokens(),), device=H200, fuse=["all", f"-{left_out}"])
    assert not any(kind.name == "rms_norm.1" and not kind.left_out for kind in found.fusion.kinds)
    assert ("rms_norm.1" in str(found.fusion)) == (left_out == "rms_norm.1")
    rest = {"gemm(silu)": 2, "gemm(residual)": 2}
    assert {k: n for k, n in kernels(found).items() if k != "rms_norm"} == rest


def test_a_model_that_only_kernels_make_unlike_is_told_from_one_that_is_refused(monkeypatch):
    found = fusing.find_norm

    def sometimes(reading, value, **options):
        """As a pattern that rests on the batch size, by mistake."""
        return None if reading.shape(value)[0] == 2 else found(reading, value, **options)

    monkeypatch.setattr(fusing, "find_norm", sometimes)
    with pytest.raises(FusionError, match="other kernels are found") as error:
        analyse(two_layers, (jnp.concatenate([tokens()] * 2),), device=H200)
    check_house_form(error)
    monkeypatch.undo()
    mixing = analyse(lambda x: two_layers(x - x.mean(0)), (tokens(),), device=H200)
    assert "reduce_sum" in mixing.unsplittable
    assert mixing.fused


def test_rows_that_only_kernels_mix_are_told_from_those_that_the_model_mixes(monkeypatch):
    rows = analysis.find_rows

    def confused(graph, *rest):
        if any(o.primitive == PRIMITIVE for o in graph.operations):
            raise SplitError("it mixes", "rows; by a kernel")
        return rows(graph, *rest)

    monkeypatch.setattr(analysis, "find_rows", confused)
    with pytest.raises(FusionError, match="told apart with kernels"):
        analyse(two_layers, (tokens(),), device=H200)
    assert not analyse(two_layers, (tokens(),), device=H200, fuse="none").fused


def test_a_match_that_there_is_not_is_refused_with_the_names_there_are():
    with pytest.raises(InputError, match=r"gemm\.1, gemm\.2, rms_norm\.1") as error:
        analyse(two_layers, (tokens(),), device=H200, fuse="-gemm.9")
    check_house_form(error)


def hidden_at_the_left(x, mask):
    """Causal, with padding: what queries without keys see is the mean of all values."""
    qkv = (jnp.einsum("btd,dnh->btnh", x, w.reshape(D, -1, H)) for w in ATTENTIONS[0][:1] * 3)
    q, k, v = qkv
    seen = jnp.tril(jnp.ones((S, S), bool)) & mask[:, None, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) + jnp.where(seen, 0.0, -1e30)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def test_what_kernels_do_not_compute_alike_is_told_and_left_out_unless_it_was_asked_for(
    monkeypatch,
):
    mask = jnp.arange(S)[None] >= jnp.array([[3], [0]])
    with pytest.raises(FusionError, match="fuse='none'"):
        optimized(hidden_at_the_left, tokens(), mask, split=(2,))
    for module in ("pallas_kernels.dispatch", "pbjax.program.traced_model"):  # as on a Hopper GPU
        monkeypatch.setattr(f"{module}.targets_hopper", lambda: True)
    with pytest.warns(PbjaxWarning, match="fusion is left out"):
        fast = optimized(hidden_at_the_left, tokens(), mask, split=(2,), fuse="auto")
    assert "it is not the model" in str(fast.report().fusion)
    assert_close(fast(tokens(), mask), hidden_at_the_left(tokens(), mask), reduction=D)


def test_a_match_that_computes_something_else_stops_optimize(monkeypatch):
    find = fusing.find_norm

    def wrong(*args, **options):
        found = find(*args, **options)
        if found is None:
            return None
        return fusing.replace(found, function=lambda *x: [1.1 * y for y in found.function(*x)])

    monkeypatch.setattr(fusing, "find_norm", wrong)
    with pytest.raises(FusionError, match=r"fuse='all,-rms_norm\.1'"):
        optimized(two_layers, tokens(), split=(2,))
    optimized(two_layers, tokens(), split=(2,), fuse="all,-rms_norm.1")


ROWS = 16


def decode_step(x, cache):
    """Two layers over a cache, written in plain JAX: grouped heads, a token appended to each."""
    position, layers = cache
    rows, new = jnp.arange(x.shape[0]), []
    seen = jnp.arange(S)[None, None, None] <= position[:, None, None, None]
    for i, (keys, values) in enumerate(layers):
        y = hand_rms_norm(x, SCALES[i])
        *qkv, out = ATTENTIONS[i]
        q, k, v = (y @ w for w in qkv)
        keys = keys.at[rows, position].set(k.reshape(-1, K, H))
        values = values.at[rows, position].set(v.reshape(-1, K, H))
        scores = jnp.einsum("bkgh,bskh->bkgs", q.reshape(-1, K, N // K, H), keys) * H**-0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        y = jnp.einsum("bkgs,bskh->bkgh", weights, values).reshape(x.shape)
        x = x + y @ out
        x = x + jax.nn.silu(x @ MLPS[i][0]) @ MLPS[i][1]
        new.append((keys, values))
    return x, (position + 1, new)


@pytest.mark.long
def test_a_step_in_plain_jax_is_interleaved_with_the_kernels_that_fusion_finds(monkeypatch):
    monkeypatch.setattr("pbjax.decode.search.HOPELESS", float("inf"))
    caches = [tuple(normal(7 + i + j, ROWS, S, K, H) for j in (0, 1)) for i in (0, 2)]
    cache = jnp.arange(ROWS, dtype=jnp.int32) % S, caches
    x = normal(1, ROWS, D)
    step = optimized(decode_step, x, cache, state=1)
    report = step.report()
    assert [p.name for p in report.programs] == ["plain", "unsplit", "interleaved", "sequential"]
    assert kernels(report)["decode_attention(lengths, grouped)"] == 2
    assert step.plan.decision == "split"
    want, (_, layers) = decode_step(x, cache)
    got, held = step(x, step.hold(jax.tree.map(jnp.copy, cache)))
    assert_close(got, want, reduction=F, roundings=20)
    pairs = zip(jax.tree.leaves(step.release(held)[1]), jax.tree.leaves(layers), strict=True)
    for found, expected in pairs:
        assert_close(found, expected, reduction=F, roundings=20)
