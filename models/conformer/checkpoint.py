"""The key map of a Conformer encoder, in the names of wav2vec2-conformer's files.

A bare encoder has no checkpoints; it is a part of these models.
"""

from functools import partial

from models.conformer.config import ConformerConfig
from models.keymap import Leaf, batch_norm, linear, norm, pointwise

WIDTH, MLP = "hidden_size", "intermediate_size"
square = partial(linear, outputs=WIDTH, inputs=WIDTH)


def encoder_key_map(config: ConformerConfig, theirs: str = "", ours: str = "") -> tuple[Leaf, ...]:
    """Returns one leaf for every variable of a `ConformerEncoder`.

    Args:
      config: The configuration of the encoder.
      theirs: The prefix of the names in the file.
      ours: The prefix of the names in the module.
    """
    leaves = [*norm(f"{theirs}layer_norm", f"{ours}norm", features=WIDTH)]
    for index in range(config.num_layers):
        leaves += _block(config, f"{theirs}layers.{index}", f"{ours}layers.{index}")
    return tuple(leaves)


def _block(config: ConformerConfig, theirs: str, ours: str) -> list[Leaf]:
    leaves = [*norm(f"{theirs}.final_layer_norm", f"{ours}.norm", features=WIDTH)]
    for their_name, our_name in (("ffn1", "mlp_before"), ("ffn2", "mlp_after")):
        mlp = f"{ours}.{our_name}"
        leaves += norm(f"{theirs}.{their_name}_layer_norm", f"{mlp}.norm", features=WIDTH)
        up, down = (f"{theirs}.{their_name}.{n}_dense" for n in ("intermediate", "output"))
        leaves += linear(up, f"{mlp}.up", outputs=MLP, inputs=WIDTH)
        leaves += linear(down, f"{mlp}.down", outputs=WIDTH, inputs=MLP)
    leaves += _attention(config, theirs, f"{ours}.attention")
    return leaves + _convolution(f"{theirs}.conv_module", f"{ours}.convolution")


def _attention(config: ConformerConfig, theirs: str, ours: str) -> list[Leaf]:
    leaves = [*norm(f"{theirs}.self_attn_layer_norm", f"{ours}.norm", features=WIDTH)]
    names = {"q": "query", "k": "key", "v": "value", "out": "output"}
    for their_name, our_name in names.items():
        leaves += square(f"{theirs}.self_attn.linear_{their_name}", f"{ours}.{our_name}")
    if config.positions == "relative":
        leaves += square(f"{theirs}.self_attn.linear_pos", f"{ours}.position", bias=False)
        axes = ("num_attention_heads", WIDTH)
        for letter, name in (("u", "content"), ("v", "position")):
            key = f"{theirs}.self_attn.pos_bias_{letter}"
            leaves.append(Leaf(key=key, path=f"{ours}.{name}_bias", axes=axes))
    return leaves


def _convolution(theirs: str, ours: str) -> list[Leaf]:
    return [
        *norm(f"{theirs}.layer_norm", f"{ours}.norm", features=WIDTH),
        *pointwise(f"{theirs}.pointwise_conv1", f"{ours}.gated", outputs=WIDTH, inputs=WIDTH),
        Leaf(
            key=f"{theirs}.depthwise_conv.weight",
            path=f"{ours}.depthwise",
            axes=(WIDTH, WIDTH, "conv_depthwise_kernel_size"),
            permutation=(2, 1, 0),
        ),
        *batch_norm(f"{theirs}.batch_norm", f"{ours}.batch_norm", features=WIDTH),
        *pointwise(f"{theirs}.pointwise_conv2", f"{ours}.output", outputs=WIDTH, inputs=WIDTH),
    ]
