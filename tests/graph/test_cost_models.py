"""FLOPs of whole small models against XLA's own analysis of what it compiled."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from pbjax.graph.cost import equation_cost, total_cost
from pbjax.graph.functional import functional
from pbjax.graph.trace import trace

ID = jnp.int32


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


class BertLayer(nnx.Module):
    def __init__(self, dim, heads, rngs):
        self.attention = nnx.MultiHeadAttention(heads, dim, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(dim, rngs=rngs) for _ in range(2)])
        self.up = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x, mask):
        x = self.norms[0](x + self.attention(x, mask=mask))
        return self.norms[1](x + self.down(jax.nn.gelu(self.up(x), approximate=False)))


class Bert(nnx.Module):
    def __init__(self, rngs, dim=64, layers=3):
        self.words = nnx.Embed(100, dim, rngs=rngs)
        self.positions = nnx.Embed(32, dim, rngs=rngs)
        self.layers = nnx.List([BertLayer(dim, 4, rngs) for _ in range(layers)])
        self.pooler = nnx.Linear(dim, dim, rngs=rngs)

    def __call__(self, ids, mask):
        x = self.words(ids) + self.positions(jnp.arange(ids.shape[1]))[None]
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :])
        return jnp.tanh(self.pooler(x[:, 0]))


class Gpt(nn.Module):
    dim: int = 64

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(256, self.dim)
        x = embed(ids) + nn.Embed(32, self.dim)(jnp.arange(ids.shape[1]))[None]
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(y, mask=nn.make_causal_mask(ids))
            y = nn.Dense(4 * self.dim)(nn.LayerNorm()(x))
            x = x + nn.Dense(self.dim)(nn.gelu(y))
        return embed.attend(nn.LayerNorm()(x))


class Conformer(nn.Module):
    dim: int = 48

    @nn.compact
    def __call__(self, features):
        x = nn.relu(nn.Conv(16, (3, 3), (2, 2))(features[..., None]))
        x = nn.Dense(self.dim)(x.reshape(x.shape[0], x.shape[1], -1))
        for _ in range(2):
            x = x + 0.5 * nn.Dense(self.dim)(nn.silu(nn.Dense(4 * self.dim)(nn.LayerNorm()(x))))
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            y = nn.glu(nn.Conv(2 * self.dim, (1,))(nn.LayerNorm()(x)))
            y = nn.Conv(self.dim, (15,), feature_group_count=self.dim)(y)
            y = nn.silu(nn.BatchNorm(use_running_average=True)(y))
            x = x + nn.Conv(self.dim, (1,))(y)
            x = nn.LayerNorm()(x)
        return nn.log_softmax(nn.Dense(30)(x))


def rotary(x):
    half = x.shape[-1] // 2
    frequencies = 1e4 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None] * frequencies[None]
    sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rms_norm(x, scale):
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale[None, None]


def llama_layer(x, w):
    b, t, d = x.shape
    y = rms_norm(x, w["norm"])
    q = rotary((y @ w["q"]).reshape(b, t, 8, 8))
    k = rotary((y @ w["k"]).reshape(b, t, 2, 8))
    v = (y @ w["v"]).reshape(b, t, 2, 8)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, d) @ w["o"]
    y = rms_norm(x, w["norm"])
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def llama(params, ids):
    x = params["embed"][ids]
    for w in params["layers"]:
        x = llama_layer(x, w)
    return x[:, -1] @ params["embed"].T


def llama_params(dim=64):
    shapes = {
        "q": (dim, 64),
        "k": (dim, 16),
        "v": (dim, 16),
        "o": (64, dim),
        "gate": (dim, 160),
        "up": (dim, 160),
        "down": (160, dim),
        "norm": (dim,),
    }
    layer = {name: spec(*shape) for name, shape in shapes.items()}
    return {"embed": spec(300, dim), "layers": [layer] * 2}


def models(name):
    """apply, params and inputs of a small model of each kind."""
    ids = spec(4, 24, dtype=ID)
    if name == "llama":
        return llama, llama_params(), (ids,)
    if name == "bert":
        model = Bert(nnx.Rngs(0))
        model.eval()
        found = functional(model)
        return found.apply, found.params, (ids, spec(4, 24, dtype=bool))
    module, inputs = (Gpt(), (ids,)) if name == "gpt" else (Conformer(), (spec(2, 64, 20),))
    variables = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    found = functional(module, variables)
    return found.apply, found.params, inputs


@pytest.mark.parametrize("name", ["bert", "gpt", "conformer", "llama"])
def test_flops_of_a_model_are_within_five_percent_of_xlas(name):
    apply, params, inputs = models(name)
    graph = trace(apply, params, *inputs)
    ours = total_cost(equation_cost(operation.equation) for operation in graph.operations)
    analysis = jax.jit(apply).lower(params, *inputs).compile().cost_analysis()
    assert ours.known
    assert ours.exact
    assert ours.flops == pytest.approx(analysis["flops"], rel=0.05)
    assert ours.transcendentals == pytest.approx(analysis["transcendentals"], rel=0.05)
