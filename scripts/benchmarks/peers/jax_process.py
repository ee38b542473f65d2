"""Our side of bench_peers.py: compiles the variants of a row in a process of its own, times them.

What it prints, and when, is in protocol.py.
"""

import dataclasses
import functools
import re
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import models
from models.kernels import HOPPER, Kernels, with_kernels
from models.keymap import Leaf
from models.parameters import Parameter, fill

from .protocol import (
    NUM_INPUTS,
    Program,
    Ready,
    check_scenario,
    error_text,
    finish,
    make_parser,
    report,
)
from .rows import Row, get_row, scale_of, seed_of

LIBRARY = Kernels(
    attention="cudnn", ragged_attention="cudnn", causal_attention="cudnn", alibi_attention="cudnn"
)
PALLAS = Kernels(
    attention="pallas",
    ragged_attention="pallas",
    causal_attention="pallas",
    alibi_attention="pallas",
    gemm="pallas",
    norm="pallas",
)
# The dot merger joins products that share an input, and slices of the result are copied.
NO_TRITON = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
replace = dataclasses.replace
VARIANTS = {
    "plain": (Kernels(), {}),
    "library, Triton GEMM": (LIBRARY, {}),
    "library": (LIBRARY, NO_TRITON),
    "attention": (replace(PALLAS, gemm="xla", norm="xla"), NO_TRITON),
    "gemm": (replace(LIBRARY, gemm="pallas"), NO_TRITON),
    "norm": (replace(LIBRARY, norm="pallas"), NO_TRITON),
    "gemm, norm": (replace(LIBRARY, gemm="pallas", norm="pallas"), NO_TRITON),
    "all kernels": (PALLAS, NO_TRITON),
    "with_kernels": (HOPPER, NO_TRITON),
    "folded norms": (replace(HOPPER, norm="folded"), NO_TRITON),
}


def main() -> None:
    """Runs one row."""
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--trace", nargs="*", default=[], help="variants whose kernels are listed")
    args = parser.parse_args()
    check_scenario(parser, args)
    row = get_row(args.row, tiny=args.tiny)
    inputs = [make_inputs(row, index) for index in range(NUM_INPUTS)]
    parameters = make_parameters(row)
    ready = []
    with ThreadPoolExecutor() as pool:  # What compiles in C++ leaves Python free for the next.
        futures = {
            name: pool.submit(prepare, row, name, parameters, inputs[0], args.tiny)
            for name in args.variants
        }
    for name, future in futures.items():
        if error := future.exception():  # A variant that fails is reported, not hidden.
            report("jax", name, error=error_text(error))
        else:
            traced = name in args.trace and not args.tiny
            ready.append(ready_of(name, future.result(), inputs, traced=traced))
    finish("jax", ready, row, args)


def ready_of(name: str, prepared: tuple, inputs: list[dict], *, traced: bool) -> Ready:
    """A variant as `prepare` returned it, for its turn; `traced` lists its kernels."""
    compiled, weights, compile_s = prepared

    def more() -> dict[str, object]:
        memory = compiled.memory_analysis()
        found = {"temporary_bytes": memory.temp_size_in_bytes} if memory else {}
        return found | ({"kernels": kernels_of(compiled, weights, inputs[0])} if traced else {})

    program = program_of(compiled, weights, inputs)
    return Ready(mode=name, program=program, compile_s=compile_s, more=more)


def program_of(compiled, weights: list, inputs: list[dict]) -> Program:
    """Returns what both scenarios time."""
    host = [jax.tree.map(np.asarray, given) for given in inputs]

    def first_rows(result) -> np.ndarray:
        return np.asarray(result.last_hidden_state[:2].astype(jnp.float32))

    return Program(
        call=functools.partial(compiled, weights),
        inputs=inputs,
        upload=lambda index: jax.device_put(host[index]),
        wait=jax.block_until_ready,
        first_rows=first_rows,
    )


def prepare(row: Row, name: str, parameters: list[Parameter], inputs: dict, tiny: bool):
    """Returns the compiled program, its weights, and the seconds that compiling took."""
    start = time.perf_counter()
    program = compile_variant(row, name, tiny)
    compile_s = round(time.perf_counter() - start, 1)
    weights = variant_weights(row, name, parameters, tiny)
    jax.block_until_ready(program(weights, inputs))
    return program, weights, compile_s


def build(row: Row) -> nnx.Module:
    """The module of a row with fresh weights; to be called inside nnx.eval_shape."""
    sizes = {"num_layers": row.num_layers, "embed_dim": row.embed_dim, "num_heads": row.num_heads}
    wide, tokens = sizes | {"mlp_dim": row.mlp_dim}, {"vocab_size": row.vocab_size}
    match row.name:
        case "vit":
            config = replace(
                models.ViTConfig.base(),
                **wide,
                image_size=row.image_size,
                num_labels=0,
                pooler=True,
            )
            kind = models.ViTModel
        case "bert":
            config = replace(models.BertConfig.base(), **wide, **tokens, pooler=False)
            kind = models.BertModel
        case "conformer":
            config = replace(models.ConformerConfig.conformer_l(), **wide)
            kind = models.ConformerEncoder
        case "gpt2":
            config = replace(models.GPT2Config.xl(), **wide, **tokens, lm_head=False)
            kind = models.GPT2Model
        case "bloom":
            config = replace(models.BloomConfig.bloom_7b1(), **sizes, **tokens, lm_head=False)
            kind = models.BloomModel
        case "llama":
            config = replace(
                models.LlamaConfig.llama3_8b(),
                **wide,
                **tokens,
                num_kv_heads=row.num_kv_heads,
                head_dim=row.embed_dim // row.num_heads,
                lm_head=False,
            )
            kind = models.LlamaModel
    return kind(config, dtype="bfloat16", rngs=nnx.Rngs(0))


def leaves_of(row: Row) -> tuple[Leaf, ...]:
    """The key map: names in Hugging Face's files, and how tensors are laid out."""
    config = nnx.eval_shape(lambda: build(row)).config
    if row.name == "conformer":
        from models.conformer.checkpoint import encoder_key_map

        return encoder_key_map(config)
    family = {"vit": "vit", "bert": "bert", "gpt2": "gpt2", "bloom": "bloom", "llama": "llama"}
    module = __import__(f"models.{family[row.name]}.checkpoint", fromlist=["key_map"])
    return module.key_map(config)


@functools.partial(jax.jit, static_argnums=(1, 2))
def hashed(seed: jax.Array, shape: tuple[int, ...], spread: tuple[float, float]) -> jax.Array:
    """Values of a tensor in bfloat16; the rule is in rows.py."""
    size = int(np.prod(shape))
    h = jax.lax.iota(jnp.uint32, size) * jnp.uint32(0x9E3779B1) + seed
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    h = (h ^ (h >> 16)) >> 8
    values = h.astype(jnp.float32) * 2.0**-23 - 1.0
    middle, scale = spread
    return (middle + scale * values).astype(jnp.bfloat16).reshape(shape)


def stored_shapes(row: Row) -> list[tuple[Leaf, tuple[int, ...]]]:
    """Every tensor of the row's file and its shape there."""
    state = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: build(row))))
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in state}
    return [(leaf, leaf.stored_shape(shapes[leaf.path])) for leaf in leaves_of(row)]


def make_parameters(row: Row) -> list[Parameter]:
    """The weights of a row on the device, each tensor made in its file's layout."""
    found = []
    for leaf, shape in stored_shapes(row):
        tensor = hashed(jnp.uint32(seed_of(leaf.key)), shape, scale_of(leaf.key, len(shape)))
        found.append(Parameter(path=leaf.path, value=leaf.arrange(tensor)))
    return found


def make_inputs(row: Row, index: int) -> dict[str, jax.Array]:
    """Random inputs of a call, by argument."""
    batch, seed = row.batch_size, jnp.uint32(seed_of(f"inputs {index}"))
    if row.image_size:
        shape = (batch, 3, row.image_size, row.image_size)
        return {"pixel_values": hashed(seed, shape, (0.0, 1.0))}
    if not row.vocab_size:
        shape = (batch, row.length, row.embed_dim)
        return {"hidden_states": hashed(seed, shape, (0.0, 1.0))}
    values = hashed(seed, (batch, row.length), (0.0, 1.0)).astype(jnp.float32)
    ids = (jnp.abs(values) * (row.vocab_size - 1)).astype(jnp.int32)
    return {"input_ids": ids, "attention_mask": jnp.ones((batch, row.length), jnp.int32)}


def kernels_of_variant(name: str, tiny: bool) -> Kernels:
    """The kernels that a variant calls; without a GPU there is no cuDNN."""
    chosen = dataclasses.asdict(VARIANTS[name][0])
    return Kernels(**{k: "xla" if tiny and v == "cudnn" else v for k, v in chosen.items()})


def compile_variant(row: Row, name: str, tiny: bool) -> jax.stages.Compiled:
    """The program program(weights, inputs) -> last hidden state, compiled for a variant."""
    kernels, options = kernels_of_variant(name, tiny), {} if tiny else VARIANTS[name][1]
    graphdef, state = nnx.split(nnx.eval_shape(lambda: with_kernels(build(row), kernels)))
    weights, tree = jax.tree.flatten(state)

    def run(weights, inputs):
        return nnx.merge(graphdef, jax.tree.unflatten(tree, weights))(**inputs)

    inputs = jax.eval_shape(lambda: make_inputs(row, 0))
    return jax.jit(run, compiler_options=options).lower(weights, inputs).compile()


def variant_weights(row: Row, name: str, parameters: list[Parameter], tiny: bool) -> list:
    """The weights as a variant holds them, flat: a tree would be walked in Python every call."""
    config = nnx.eval_shape(lambda: build(row)).config
    family = _Builder(row)
    model = fill(family, config, "bfloat16", parameters)
    return jax.tree.leaves(nnx.split(with_kernels(model, kernels_of_variant(name, tiny)))[1])


class _Builder:
    """The part of a `Family` that `fill` needs."""

    def __init__(self, row: Row):
        self.row = row

    def build(self, config: object, dtype: str) -> nnx.Module:
        return build(self.row)


def kernels_of(program, weights, inputs) -> list[dict]:
    """Device seconds of one call by name of kernel, longest first; by CUPTI."""
    from jax._src.lib import mosaic_gpu  # Private: CUPTI has no public entry.

    cupti = mosaic_gpu._mosaic_gpu_ext
    jax.block_until_ready(program(weights, inputs))
    cupti._cupti_init()
    try:
        jax.block_until_ready(program(weights, inputs))
    finally:
        launches = cupti._cupti_get_timings(False)
    totals: dict[str, list[float]] = {}
    for name, milliseconds in launches:
        totals.setdefault(re.sub(r"_\d+$", "", name), []).append(milliseconds)
    ordered = sorted(totals.items(), key=lambda item: -sum(item[1]))
    return [
        {"kernel": name[:90], "launches": len(times), "seconds": round(1e-3 * sum(times), 7)}
        for name, times in ordered
    ]


if __name__ == "__main__":
    main()
