"""Graphs of models for tests of fusion: traced for an H200, fused, and run on the CPU."""

from collections import Counter

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pbjax.fusion import fuse
from pbjax.graph.functional import functional
from pbjax.graph.trace import evaluate, trace

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))


# Running costs nothing here, compiling all.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def traced(model, *inputs, variables=None):
    seam = functional(model, variables)
    with use_abstract_mesh(H200), jax.numpy_rank_promotion("allow"):  # as users have it
        return trace(seam.apply, seam.params, *inputs), jax.tree.leaves(seam.params)


def fused(model, *inputs, patterns="all", variables=None):
    graph, _ = traced(model, *inputs, variables=variables)
    with use_abstract_mesh(H200):
        return fuse(graph, patterns)


def run(graph, weights, inputs):
    def program(*values):
        env = dict(enumerate(values))
        evaluate(graph.operations, env)
        return [a.val if isinstance(a, Literal) else env[a] for a in graph.outputs]

    values = [*weights, *map(jnp.asarray, graph.constants), *jax.tree.leaves(inputs)]
    return jax.jit(program, compiler_options=FAST)(*values)


def kernels(fusion):
    return Counter(found.kernel for found in fusion.matches)
