"""Optimises a BERT encoder with random weights, and prints the report and one JSON line.

The programs that are timed run the same kernels: the whole batch at once (unsplit), the sub-batches
one after the other (sequential) and staggered (split), without and with SM budgets and unrolling.
"""

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


def main():
    """Builds the encoder, optimises it, prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("minilm", "base", "large"), default="base")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--seq", type=int, default=384)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--unroll", type=int, help="blocks in one step of the loop; several tried")
    parser.add_argument("--kernels", action="store_true", help="call pallas_kernels where they can")
    args = parser.parse_args()
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
    figures = {key: value for key, value in report.to_dict().items() if key in keep}
    print(json.dumps({"bench": "split", **conditions, **figures}))


if __name__ == "__main__":
    main()
