"""Times embeddings of texts of mixed lengths: padded as they come, padded by length, packed.

The texts are random tokens of log-normal lengths, as sentences and paragraphs have them. All three
run the same model with the same number of tokens a batch at most, and a second time, so that
nothing is compiled; prints one JSON line each, with the largest difference from the first.
"""

import argparse

from benchmarks.embedding import run


def main() -> None:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("minilm", "base", "large"), default="minilm")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--median", type=float, default=25, help="tokens of half of the texts")
    parser.add_argument("--spread", type=float, default=0.8, help="standard deviation of the log")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
