"""The rows of bench_peers.py through PyTorch and Hugging Face's classes: one row, some modes.

Modes: eager, inductor (torch.compile), max-autotune (the same with autotuned templates and CUDA
graphs), reduce-overhead (CUDA graphs). What it prints, and when, is in protocol.py.
"""

from .protocol import check_scenario, make_parser

MODES = ("eager", "inductor", "max-autotune", "reduce-overhead")


def main() -> None:
    """Runs one row."""
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", default=["eager", "inductor"], choices=MODES)
    parser.add_argument("--truth", action="store_true", help="write the first output in f32 too")
    args = parser.parse_args()
    check_scenario(parser, args)
    # Here, so that --help needs no PyTorch.
    from .torch_models import run

    run(args)


if __name__ == "__main__":
    main()
