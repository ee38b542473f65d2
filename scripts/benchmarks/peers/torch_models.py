"""The rows of bench_peers.py by Hugging Face's classes: models, inputs, modes of PyTorch.

Full size, bfloat16, inference mode, SDPA attention where the class has it; weights and inputs are
hashed by the rule of rows.py and so equal ours bit for bit. Run by torch_process.py.

An all-ones attention mask is passed on purpose: without one, Inductor picks a slow attention for
BERT. The Conformer's activation is SiLU, as in the paper and in our preset.
"""

import argparse
import re
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from .protocol import NUM_INPUTS, Program, Ready, attempt, finish
from .rows import Row, get_row, scale_of, seed_of

# Where transformers 5 names the modules of ViT anew; its files keep the old names.
FILE_NAMES = {
    r"^layers\.": "encoder.layer.",
    r"attention\.q_proj": "attention.attention.query",
    r"attention\.k_proj": "attention.attention.key",
    r"attention\.v_proj": "attention.attention.value",
    r"attention\.o_proj": "attention.output.dense",
    r"mlp\.fc1": "intermediate.dense",
    r"mlp\.fc2": "output.dense",
}
CHUNK = 1 << 26
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(args: argparse.Namespace) -> None:
    """Compiles the modes of one row and times them in turn."""
    row = get_row(args.row, tiny=args.tiny)
    torch.backends.cuda.matmul.allow_tf32 = True
    with torch.inference_mode():
        if args.truth:
            save_truth(row, args.outputs)
        model = make_model(row)
        inputs = [make_inputs(row, index) for index in range(NUM_INPUTS)]
        ready = []
        for mode in args.modes:
            with attempt("torch", mode, args.deadline):
                call, compile_s = warm(model, inputs, mode)
                program = program_of(hidden_state_of(call), inputs)
                ready.append(Ready(mode=mode, program=program, compile_s=compile_s))
        finish("torch", ready, row, args)


def program_of(call, inputs: list[dict]) -> Program:
    """The program that both scenarios time; call(inputs) returns the last hidden state."""
    host = [move(given, "cpu") for given in inputs]
    return Program(
        call=call,
        inputs=inputs,
        upload=lambda index: move(host[index], DEVICE),
        wait=lambda result: synchronize(),
        first_rows=lambda result: result[:2].float().cpu().numpy(),
    )


def hidden_state_of(model):
    """A call with the inputs as one argument, which returns the last hidden state alone."""
    return lambda given: model(**given).last_hidden_state


def move(inputs: dict, device: str) -> dict:
    """Copies the tensors among the arguments of a call."""
    return {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}


def make_model(row: Row, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """A model of Hugging Face's with hashed weights."""
    torch.set_default_dtype(dtype)
    with torch.device(DEVICE):
        # Not cast as a whole: rotary frequencies must stay in f32, as where a checkpoint is read.
        model = build(row).eval()
    torch.set_default_dtype(torch.float32)
    for name, tensor in model.state_dict().items():
        if row.name == "vit":
            for pattern, replacement in FILE_NAMES.items():
                name = re.sub(pattern, replacement, name)
        if tensor.is_floating_point():
            tensor.copy_(hashed(seed_of(name), tensor.shape, scale_of(name, tensor.dim())))
    return model


def build(row: Row) -> torch.nn.Module:
    """The model without weights worth keeping."""
    hf, sdpa = transformers, {"attn_implementation": "sdpa"}
    dim, layers, heads, mlp = row.embed_dim, row.num_layers, row.num_heads, row.mlp_dim
    sizes = {"hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads}
    wide = sizes | {"intermediate_size": mlp}
    match row.name:
        case "vit":
            config = hf.ViTConfig(**wide, image_size=row.image_size)
            return hf.ViTModel._from_config(config, **sdpa)
        case "bert":
            config = hf.BertConfig(**wide, vocab_size=row.vocab_size)
            return hf.BertModel._from_config(config, add_pooling_layer=False, **sdpa)
        case "conformer":
            config = hf.Wav2Vec2ConformerConfig(
                **wide,
                hidden_act="silu",
                position_embeddings_type="relative",
                conv_depthwise_kernel_size=31,
            )
            return hf.Wav2Vec2ConformerModel._from_config(config).encoder
        case "gpt2":
            config = hf.GPT2Config(
                n_embd=dim, n_layer=layers, n_head=heads, n_inner=mlp, vocab_size=row.vocab_size
            )
            return hf.GPT2Model._from_config(config, **sdpa)
        case "bloom":
            config = hf.BloomConfig(
                hidden_size=dim, n_layer=layers, n_head=heads, vocab_size=row.vocab_size
            )
            return hf.BloomModel._from_config(config)
        case "llama":
            config = hf.LlamaConfig(
                **wide,
                num_key_value_heads=row.num_kv_heads,
                vocab_size=row.vocab_size,
                rope_theta=500000.0,
                rms_norm_eps=1e-5,
                max_position_embeddings=8192,
            )
            return hf.LlamaModel._from_config(config, **sdpa)


def hashed(seed: int, shape: tuple[int, ...], spread: tuple[float, float]) -> torch.Tensor:
    """Values of a tensor in bfloat16; the rule is in rows.py."""
    size = int(np.prod(shape))
    out = torch.empty(size, dtype=torch.bfloat16, device=DEVICE)
    middle, scale = (torch.tensor(x, dtype=torch.float32, device=DEVICE) for x in spread)
    for start in range(0, size, CHUNK):
        stop = min(start + CHUNK, size)
        h = torch.arange(start, stop, dtype=torch.int64, device=DEVICE) * 0x9E3779B1 + seed
        h &= 0xFFFFFFFF
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        h = (h ^ (h >> 16)) >> 8
        values = h.to(torch.float32) * 2.0**-23 - 1.0
        out[start:stop] = (middle + scale * values).to(torch.bfloat16)
    return out.reshape(shape)


def make_inputs(row: Row, index: int) -> dict[str, object]:
    """Random inputs of a call, by argument."""
    seed, batch = seed_of(f"inputs {index}"), row.batch_size
    if row.image_size:
        shape = (batch, 3, row.image_size, row.image_size)
        return {"pixel_values": hashed(seed, shape, (0.0, 1.0))}
    if not row.vocab_size:
        shape = (batch, row.length, row.embed_dim)
        return {"hidden_states": hashed(seed, shape, (0.0, 1.0))}
    values = hashed(seed, (batch, row.length), (0.0, 1.0)).float()
    ids = (values.abs() * (row.vocab_size - 1)).to(torch.int64)
    mask = torch.ones(batch, row.length, dtype=torch.long, device=DEVICE)
    given = {"input_ids": ids, "attention_mask": mask}
    return given if row.name == "bert" else given | {"use_cache": False}


def warm(model: torch.nn.Module, inputs: list[dict], mode: str):
    """Compiles a mode and calls it a few times; returns it and the seconds that took."""
    start = time.perf_counter()
    call = model
    if mode != "eager":
        option = None if mode == "inductor" else mode
        call = torch.compile(model, mode=option, dynamic=False)
    for i in range(4):  # CUDA graphs are recorded in the second call.
        call(**inputs[i % NUM_INPUTS])
    synchronize()
    return call, round(time.perf_counter() - start, 1)


def save_truth(row: Row, folder: Path) -> None:
    """Writes the first rows of the first output of the same model in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_model(row, torch.float32)
    first = {
        name: x if isinstance(x, bool) else x[:2].float() if x.is_floating_point() else x[:2]
        for name, x in make_inputs(row, 0).items()
    }
    output = model(**first).last_hidden_state.cpu().numpy()
    np.save(folder / f"torch {row.name} float32.npy", output)
    torch.backends.cuda.matmul.allow_tf32 = True
    del model, first
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Waits for the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
