"""Kernels in place of what a program writes out: attention, norms, products with an epilogue."""

from pbjax.fusion.checking import verify as verify
from pbjax.fusion.fusing import PATTERNS as PATTERNS
from pbjax.fusion.fusing import Fusion as Fusion
from pbjax.fusion.fusing import Patterns as Patterns
from pbjax.fusion.fusing import fuse as fuse
from pbjax.fusion.hoisting import Hoisted as Hoisted
from pbjax.fusion.hoisting import hoist as hoist
from pbjax.fusion.rewriting import Match as Match
from pbjax.fusion.rewriting import Miss as Miss
