"""Compiles shipped kernels for sm_90a without a GPU: `python -m tests.kernels_aot SHAPE ...`.

Prints one line of JSON, {shape: {"registers": n, "spilled": bytes, "codes": [C75xx, ...]}}. Needs
the CUDA plugin of jax, with ptxas; its own process, as the variables below are read at import.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ.update(
    JAX_PLATFORMS="cpu", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", MOSAIC_GPU_DUMP_PTXAS="1"
)

import jax
import jax.experimental.pallas.mosaic_gpu  # sets the variables that are removed next
import jax.numpy as jnp
from jax.experimental import topologies

for name in ("MOSAIC_GPU_NVSHMEM_BC_PATH", "MOSAIC_GPU_NVSHMEM_SO_PATH"):
    os.environ.pop(name, None)

from pallas_kernels.attention import attention, attention_packed  # noqa: E402
from pallas_kernels.attention.shapes import PACKED, PACKED_RAGGED  # noqa: E402
from pallas_kernels.attention.shapes import SHAPES as ATTENTION_SHAPES  # noqa: E402
from pallas_kernels.decode_attention import decode_attention  # noqa: E402
from pallas_kernels.decode_attention.shapes import SHAPES as DECODE_SHAPES  # noqa: E402
from pallas_kernels.depthwise import depthwise_convolution  # noqa: E402
from pallas_kernels.depthwise.shapes import SHAPES as DEPTHWISE_SHAPES  # noqa: E402

HOPPER = (Path(__file__).parent / "data" / "h200.txtpb").read_text()
REPORT = re.compile(
    r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n.*?Used (\d+) registers"
)


def attention_call(case):
    """The kernel at a shape, and the shapes of its operands."""
    b, t, s, n, h = case.batch_size, case.num_queries, case.num_keys, case.num_heads, case.head_dim
    half, whole = jnp.bfloat16, jnp.int32
    operands = {
        "q": ((b, t, n, h), half),
        "k": ((b, s, case.num_kv_heads, h), half),
        "v": ((b, s, case.num_kv_heads, h), half),
    }
    if case.lengths:
        operands["lengths"] = ((b,), whole)
    if case.query_lengths:
        operands["query_lengths"] = ((b,), whole)
    if case.query_starts:
        operands["query_starts"] = ((b,), whole)
    if case.alibi:
        operands["alibi_slopes"] = ((n,), jnp.float32)
    if case.bias_batch:
        operands["bias"] = ((case.bias_batch, n, t, s), half)
    if case.key_bias:
        operands["key_bias"] = ((b, s), jnp.float32)
    if case.relative:
        operands["relative_rows"] = ((t + s, n, h), half)
        operands["relative_shift"] = ((n, h), half)

    def run(operands):
        return attention(
            **operands,
            causal=case.causal,
            window=case.window,
            softcap=case.softcap,
            implementation="mosaic_gpu",
        )

    return run, operands


def packed_call(case):
    """The kernel at a shape, and the shapes of its operands."""
    rows, h = case.num_rows, case.head_dim
    operands = {"q": ((rows, case.num_heads, h), jnp.bfloat16)}
    operands |= {name: ((rows, case.num_kv_heads, h), jnp.bfloat16) for name in ("k", "v")}
    operands["offsets"] = (case.offsets.shape, jnp.int32)
    if case.alibi:
        operands["alibi_slopes"] = ((case.num_heads,), jnp.float32)

    def run(operands):
        return attention_packed(
            **operands, causal=case.causal, window=case.window, implementation="mosaic_gpu"
        )

    return run, operands


def decode_call(case):
    """The kernel at a shape, and the shapes of its operands."""
    b, s, n, h = case.batch_size, case.num_keys, case.num_heads, case.head_dim
    cache = (b, s, case.num_kv_heads, h)
    operands = {"q": ((b, case.num_tokens, n, h), jnp.bfloat16), "lengths": ((b,), jnp.int32)}
    if case.page_size:
        pages = s // case.page_size
        cache = (b * pages, case.page_size, case.num_kv_heads, h)
        operands["page_table"] = ((b, pages), jnp.int32)
    operands |= {"k": (cache, jnp.bfloat16), "v": (cache, jnp.bfloat16)}
    if case.alibi:
        operands["alibi_slopes"] = ((n,), jnp.float32)

    def run(operands):
        return decode_attention(**operands, softcap=case.softcap, implementation="mosaic_gpu")

    return run, operands


def depthwise_call(case):
    """The kernel at a shape, and the shapes of its operands."""
    operands = {
        "x": ((case.batch_size, case.length, case.features), jnp.bfloat16),
        "kernel": ((case.width, case.features), jnp.float32),
    }
    if case.offset:
        operands["offset"] = ((case.features,), jnp.float32)

    def run(operands):
        return depthwise_convolution(
            **operands, activation=case.activation, implementation="mosaic_gpu"
        )

    return run, operands


CALLS = {case.name: (attention_call, case) for case in ATTENTION_SHAPES}
CALLS |= {case.name: (packed_call, case) for case in [*PACKED, *PACKED_RAGGED]}
CALLS |= {f"decode {case.name}": (decode_call, case) for case in DECODE_SHAPES}
CALLS |= {f"depthwise {case.name}": (depthwise_call, case) for case in DEPTHWISE_SHAPES}


def compile_report(shape: str, sharding) -> dict:
    """What ptxas says of one kernel; it writes to the C-level stdout."""
    call, case = CALLS[shape]
    run, operands = call(case)
    operands = {
        name: jax.ShapeDtypeStruct(*spec, sharding=sharding) for name, spec in operands.items()
    }
    saved = os.dup(1)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 1)
        try:
            jax.jit(run).lower(operands).compile()
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        log.seek(0)
        text = log.read().decode()
    ((stores, loads, registers),) = REPORT.findall(text)
    return {
        "registers": int(registers),
        "spilled": int(stores) + int(loads),
        "codes": sorted(set(re.findall(r"\((C75\d\d)\)", text))),
    }


def main() -> None:
    """Compiles the shapes named on the command line."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=HOPPER
    )
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    shapes = sys.argv[1:] or list(CALLS)
    print(json.dumps({shape: compile_report(shape, sharding) for shape in shapes}))


if __name__ == "__main__":
    main()
