"""Compiles the loop of generation for an H200 without a GPU: `python -m tests.generation_aot`.

Prints one line of JSON: the custom calls, the copies of an array of the cache, the bytes of cache,
of what is returned in the memory it came in, and of temporaries. Needs the CUDA plugin of jax; its
own process. Arguments are further folders of packages, for a Python that lacks flax.
"""

import json
import os
import re
import sys
from pathlib import Path

os.environ.update(JAX_PLATFORMS="cpu", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
sys.path.extend(sys.argv[1:])

import jax
import jax.experimental.pallas.mosaic_gpu  # sets the variables that are removed next
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

for name in ("MOSAIC_GPU_NVSHMEM_BC_PATH", "MOSAIC_GPU_NVSHMEM_SO_PATH"):
    os.environ.pop(name, None)

from dataclasses import replace  # noqa: E402
from unittest import mock  # noqa: E402

from flax import nnx  # noqa: E402

import models  # noqa: E402
from pallas_kernels import dispatch  # noqa: E402
from pbjax.graph.functional import shared_method  # noqa: E402
from pbjax.inference.generation import api, decoding  # noqa: E402
from pbjax.inference.generation.sampling import Sampling, settings_of  # noqa: E402

HOPPER = (Path(__file__).parent / "data" / "h200.txtpb").read_text()
BATCH_SIZE, NUM_KEYS, PROMPT = 64, 1024, 16


def compile_report() -> dict[str, object]:
    """Compiles `advance` for blocks of LLaMA 3 8B."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=HOPPER
    )
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def shaped(tree):
        def shape(leaf):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(shape, tree)

    config = replace(models.LlamaConfig.llama3_8b(), num_layers=2, vocab_size=1024)
    model = models.LlamaModel(config, dtype="bfloat16", rngs=nnx.Rngs(0))
    methods = {name: shared_method(model, name) for name in api.METHODS}
    decoder = decoding.Decoder(**{name: method.apply for name, method in methods.items()})
    weights = shaped(methods["decode"].params)
    rules = decoding.Rules(
        settings=settings_of(Sampling(), BATCH_SIZE, config.vocab_size),
        seeds=jnp.zeros(BATCH_SIZE, jnp.uint32),
        stop_tokens=jnp.full(1, -1, jnp.int32),
    )
    given = {"decoder": decoder, "static": Sampling().static}

    def begin(*inputs):
        return decoding.begin(*inputs, num_keys=NUM_KEYS, **given)

    prompts, lengths = np.zeros((BATCH_SIZE, PROMPT), np.int32), np.ones(BATCH_SIZE, np.int32)
    cache, state = jax.eval_shape(begin, weights, prompts, lengths, rules)
    stopped, limit = np.zeros(BATCH_SIZE, bool), np.int32(9)
    inputs = shaped((cache, state, stopped, limit, rules))
    compiled = decoding.advance.lower(weights, *inputs, **given).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    shape = ",".join(map(str, cache.keys[0].shape))
    return {
        "custom_calls": sorted(set(re.findall(r'custom_call_target="([^"]+)"', text))),
        "cache_writes": len(re.findall(rf"= bf16\[{shape}\]\S* scatter\(", text)),
        "cache_copies": len(re.findall(rf"= bf16\[{shape}\]\S* copy\(", text)),
        "cache_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)),
        "alias_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


if __name__ == "__main__":
    # Kernels ask which device is traced for; there is none here.
    with mock.patch.object(dispatch, "_target_kind", return_value="NVIDIA H200"):
        print(json.dumps(compile_report()))
