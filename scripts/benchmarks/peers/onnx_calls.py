"""The rows of bench_peers.py through ONNX: ONNX Runtime by provider, and TensorRT by itself.

The model of torch_models.py is exported once with its weights, in the dtype that the runtime
computes in: float16 on a GPU, since ONNX Runtime's CUDA provider lacks operations in bfloat16
(float16 has the same bytes and the same rate on tensor cores), float32 on a CPU. PyTorch holds
inputs and outputs, so that nothing is copied. Run by onnx_process.py.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from .processes import PROVIDERS
from .protocol import NUM_INPUTS, Ready, attempt, finish
from .rows import Row, get_row
from .torch_models import DEVICE, make_inputs, make_model, program_of, synchronize

OUTPUT = "last_hidden_state"


def run(args: argparse.Namespace) -> None:
    """Exports one row, compiles it in one mode and times it."""
    row, mode = get_row(args.row, tiny=args.tiny), args.mode
    dtype = torch.float16 if DEVICE == "cuda" else torch.float32
    start = time.perf_counter()
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        ready = []
        with attempt("onnx", mode, args.deadline):
            make = tensorrt_call if mode == "tensorrt" else session_maker(PROVIDERS[mode])
            inputs = [arguments(make_inputs(row, i), dtype) for i in range(NUM_INPUTS)]
            path = export(row, dtype, inputs[0], Path(folder))
            output = torch.empty(
                (row.batch_size, row.length, row.embed_dim), dtype=dtype, device=DEVICE
            )
            program = program_of(make(path, output), inputs)
            program.wait(program.call(inputs[0]))
            compile_s = round(time.perf_counter() - start, 1)
            name = str(dtype).removeprefix("torch.")
            ready.append(Ready(mode=mode, program=program, compile_s=compile_s, dtype=name))
        finish("onnx", ready, row, args)


def arguments(inputs: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors among the arguments of a call, in the dtype of the exported model."""
    tensors = {k: x for k, x in inputs.items() if isinstance(x, torch.Tensor)}
    return {k: x.to(dtype) if x.is_floating_point() else x for k, x in tensors.items()}


def export(row: Row, dtype: torch.dtype, inputs: dict, folder: Path) -> Path:
    """Writes the row's model for inputs of one shape, and returns the file."""
    model = make_model(row, dtype)
    names, path = list(inputs), folder / "model.onnx"

    class LastHiddenState(torch.nn.Module):
        """Takes tensors by position and returns one: ONNX has no dataclasses."""

        def forward(self, *tensors):
            given = dict(zip(names, tensors, strict=True))
            cached = {} if row.image_size or not row.causal else {"use_cache": False}
            return model(**given, **cached).last_hidden_state

    torch.onnx.export(
        LastHiddenState().eval(),
        tuple(inputs.values()),
        path,
        input_names=names,
        output_names=[OUTPUT],
        dynamo=True,
        external_data=True,
        verbose=False,
    )
    return path


def session_maker(provider: str):
    """Returns make(path, output) -> call for a provider of ONNX Runtime.

    Raises:
      RuntimeError: Another one was taken.
    """
    import onnxruntime

    def make(path: Path, output: torch.Tensor):
        session = onnxruntime.InferenceSession(path, providers=[provider])
        if session.get_providers()[0] != provider:  # It falls back to another without a word.
            raise RuntimeError(f"{provider}: onnxruntime took {session.get_providers()[0]} instead")
        names = [x.name for x in session.get_inputs()]

        def call(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            binding = session.io_binding()
            for name in names:
                bind(binding.bind_input, name, inputs[name])
            bind(binding.bind_output, OUTPUT, output)
            synchronize()  # Inputs come from PyTorch's stream, the session has another.
            session.run_with_iobinding(binding)
            return output

        return call

    def bind(bind_one, name: str, tensor: torch.Tensor) -> None:
        bind_one(name, DEVICE, 0, _numpy_type(tensor), tuple(tensor.shape), tensor.data_ptr())

    return make


def _numpy_type(tensor: torch.Tensor) -> np.dtype:
    return np.dtype(str(tensor.dtype).removeprefix("torch."))


def tensorrt_call(path: Path, output: torch.Tensor):
    """Builds an engine from an ONNX file and returns call(inputs) -> output on PyTorch's stream.

    Raises:
      RuntimeError: TensorRT cannot read or build the model.
    """
    import tensorrt

    logger = tensorrt.Logger(tensorrt.Logger.ERROR)
    builder = tensorrt.Builder(logger)
    # Types come from the file, as of TensorRT 10; nothing is lowered further.
    network = builder.create_network(
        1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    )
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        raise RuntimeError(f"TensorRT reads the exported model: {parser.get_error(0)}")
    engine = builder.build_serialized_network(network, builder.create_builder_config())
    if engine is None:
        raise RuntimeError("TensorRT builds an engine: none came; its log is above")
    context = tensorrt.Runtime(logger).deserialize_cuda_engine(engine).create_execution_context()

    def call(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        for name, tensor in (inputs | {OUTPUT: output}).items():
            context.set_tensor_address(name, tensor.data_ptr())
        context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
        return output

    return call
