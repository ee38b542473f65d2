"""Tiles that GEMMs choose on an H200, for the tests of plain and of folded ones."""

from pallas_kernels.gemm.mosaic_gpu import Tile
from pallas_kernels.gemm.shapes import GemmShape
from pallas_kernels.gemm.tiles import tile_for


def tile_of(shape: GemmShape, *, ctas: int = 132, moments: bool = False) -> Tile:
    """The tile of a shape."""
    return tile_for(
        (shape.m,),
        shape.n,
        shape.k,
        gated=shape.gated,
        heavy=shape.residual or shape.activation is not None,
        ctas=ctas,
        num_sms=132,
        moments=moments,
    )
