"""What bench_optimize.py runs: `pbjax.optimize` on plain BERT-Base."""

import argparse
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import models
import pbjax
from pbjax.progress import ProgressPrinter
from pbjax.runtime.provenance import provenance_here


def run(args: argparse.Namespace) -> None:
    """Optimises, prints the report and writes it with its provenance."""
    config = models.BertConfig.base()
    if args.tiny:
        config = replace(config, num_layers=2, embed_dim=64, mlp_dim=128, num_heads=2)
    model = models.BertModel(config, dtype="bfloat16", rngs=nnx.Rngs(0))
    drawn = np.random.default_rng(0).integers(0, config.vocab_size, (args.batch, args.seq))
    ids = jnp.asarray(drawn, jnp.int32)
    with ProgressPrinter() as progress:
        fast = pbjax.optimize(model, ids, jnp.ones_like(ids), progress=progress)
    kind = jax.devices()[0].device_kind
    provenance = provenance_here(kind, " ".join(["python", *sys.argv]))
    text = f"{provenance}\n\n{fast.report()}\n"
    print(text)
    if args.out:
        args.out.write_text(text)
