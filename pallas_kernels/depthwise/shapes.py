"""The depthwise convolutions of Conformers at their benchmark's size, and odd ones."""

from dataclasses import dataclass

from pallas_kernels.gemm.activations import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthwiseShape:
    """One convolution of (B, T, D) frames by kernels of some width, and what follows it."""

    name: str
    batch_size: int
    length: int
    features: int
    width: int
    offset: bool = True
    activation: Activation | None = "silu"


MODELS = [
    DepthwiseShape(name="conformer-l 32x512", batch_size=32, length=512, features=512, width=31),
    DepthwiseShape(name="parakeet 32x512", batch_size=32, length=512, features=1024, width=9),
]
RAGGED = [
    DepthwiseShape(name="odd length", batch_size=2, length=69, features=512, width=15),
    DepthwiseShape(name="shorter than a chunk", batch_size=2, length=5, features=512, width=7),
    DepthwiseShape(
        name="even width", batch_size=1, length=40, features=512, width=8, activation=None
    ),
    DepthwiseShape(
        name="widest, no offset", batch_size=2, length=70, features=512, width=33, offset=False
    ),
    DepthwiseShape(name="one weight", batch_size=1, length=64, features=512, width=1),
]
SHAPES = [*MODELS, *RAGGED]
