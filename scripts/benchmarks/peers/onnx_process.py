"""The rows of bench_peers.py through ONNX: ONNX Runtime by provider, and TensorRT by itself.

What it prints, and when, is in protocol.py.
"""

from .processes import PROVIDERS
from .protocol import check_scenario, make_parser

MODES = (*PROVIDERS, "tensorrt")


def main() -> None:
    """Runs one row in one mode."""
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--mode", required=True, choices=MODES)
    args = parser.parse_args()
    check_scenario(parser, args)
    # Here, so that --help needs neither PyTorch nor a runtime.
    from .onnx_calls import run

    run(args)


if __name__ == "__main__":
    main()
