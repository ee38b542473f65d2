#!/usr/bin/env python3
"""Calls whole programs many times on the same inputs and compares every call bit for bit.

A decode step of LLaMA3-8B's layers, unsplit and interleaved, and the forward passes of the six
models. A round starts processes for each program: all compile at the same time, then one after the
other calls its program, the very first call of the process included. In every second round the
device's memory is filled before, but for what the program needs. Inputs are summed up before and
after, and so is the copy of the state that the first call uses up: processes are compared, whether
these, or only what was made of them, ever differed. With --together processes do not take turns:
the device switches between them in the middle of kernels, and its memory is not filled.

    PYTHONPATH=. python scripts/stress_programs.py [--programs ...] [--calls 100] [--rounds 4]
"""

import argparse
import sys

from benchmarks.program_stress import MODELS, STEPS, program_names, run


def main() -> int:
    """Reads the options, and starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="+", help=f"{', '.join((*STEPS, *MODELS))}")
    parser.add_argument("--calls", type=int, default=100, help="of a process, 2 or more")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--copies", type=int, default=1, help="processes of a program in a round")
    parser.add_argument("--together", action="store_true", help="processes share the GPU in time")
    parser.add_argument("--tiny", action="store_true", help="small programs: a try on the CPU")
    args = parser.parse_args()
    if args.calls < 2 or args.rounds < 1 or args.copies < 1:
        parser.error(
            f"--calls {args.calls} --rounds {args.rounds} --copies {args.copies}: 2 or more calls, "
            "1 or more rounds and copies are allowed; give more"
        )
    possible = program_names(tiny=args.tiny)
    if unknown := set(args.programs or ()) - set(possible):
        parser.error(
            f"--programs {' '.join(sorted(unknown))}: not a program; programs are "
            f"{', '.join(possible)}; choose of these"
        )
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
