"""Replaces parts of a traced program by kernels: attention, norms, products with an epilogue."""

from pbjax.fusion.checking import verify as verify
from pbjax.fusion.fusing import Fusion as Fusion
from pbjax.fusion.fusing import fuse as fuse
from pbjax.fusion.hoisting import Hoisted as Hoisted
from pbjax.fusion.hoisting import hoist as hoist
from pbjax.fusion.listing import FusionReport as FusionReport
from pbjax.fusion.listing import listed as listed
from pbjax.fusion.rewriting import Match as Match
from pbjax.fusion.rewriting import Miss as Miss
from pbjax.fusion.selection import PATTERNS as PATTERNS
from pbjax.fusion.selection import Patterns as Patterns
from pbjax.fusion.selection import Selection as Selection
from pbjax.fusion.selection import selection_of as selection_of
