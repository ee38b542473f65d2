"""What bench_split.py runs: `pbjax.optimize` on a BERT encoder."""

import argparse
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pbjax
from models import BertConfig, BertModel
from models.kernels import with_kernels


def run(args: argparse.Namespace) -> None:
    """Builds the encoder, optimises it, prints what came of it."""
    config = getattr(BertConfig, args.model)()
    model = BertModel(config, dtype=args.dtype, rngs=nnx.Rngs(0))
    if args.kernels:
        model = with_kernels(model)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, config.vocab_size, (args.batch, args.seq)), jnp.int32)
    mask = jnp.ones_like(ids)
    fast = pbjax.optimize(model, ids, mask, unroll=args.unroll)
    report = fast.report()
    print(report)
    conditions = vars(args) | {"jax": jax.__version__, "cores": os.cpu_count()}
    keep = ("device_kind", "programs", "plan", "phases")
    found = {key: value for key, value in report.to_dict().items() if key in keep}
    print(json.dumps({"bench": "split", **conditions, **found}))
