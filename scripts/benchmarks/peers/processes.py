"""Worker processes of bench_peers.py, and what nvidia-smi reads while they measure."""

import json
import os
import queue
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2]  # Where a process finds this package.
PROVIDERS = {
    "onnxruntime-cpu": "CPUExecutionProvider",
    "onnxruntime-cuda": "CUDAExecutionProvider",
    "onnxruntime-tensorrt": "TensorrtExecutionProvider",
}


def why_absent(python: str, mode: str) -> str:
    """Why a Python lacks the runtime of an ONNX mode; empty if it has it.

    Asked before a process for every row loads PyTorch and exports a model for nothing.
    """
    code = "import tensorrt"
    if provider := PROVIDERS.get(mode):
        code = f"""import onnxruntime as o
has = o.get_available_providers()
if {provider!r} not in has:
    exit(f"{provider} is none of onnxruntime {{o.__version__}}: it has {{has}}")"""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:600]


class Absent:
    """Stands in for a Worker whose program is not installed."""

    def __init__(self, side: str, mode: str, reason: str):
        """Keeps the reason."""
        self.line = {"side": side, "mode": mode, "error": reason}

    def wait_ready(self, deadline: float) -> None:
        """Returns at once."""

    def release(self) -> list[dict]:
        """Returns the line with the reason."""
        return [self.line]

    def stop(self) -> None:
        """Has nothing to end."""


class Worker:
    """A process that compiles, says READY, and measures when told."""

    def __init__(self, command: list[str], side: str, modes: list[str], threads: int):
        """Starts it.

        Args:
          command: The command of the process.
          side: The `side` of its lines.
          modes: The modes that it reports; those it does not get to are reported as errors.
          threads: Threads that Inductor compiles with.
        """
        paths = [str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "OMP_NUM_THREADS": "2",
        }
        self.side, self.modes = side, modes
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in stop()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=env,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.found: list[dict] = []
        self.ready, self.ready_at, self.end = False, 0.0, ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.strip() == "READY":
                self.ready_at = time.time()
            self.lines.put(line.strip())
        self.lines.put(None)

    def wait_ready(self, deadline: float) -> None:
        """Waits until it has compiled; ends it if that takes too long."""
        while not self.ready:
            try:
                line = self.lines.get(timeout=max(0.01, deadline - time.time()))
            except queue.Empty:
                self.end = "not compiled within the seconds of --ready-within"
                self.process.kill()
                self.process.wait()
                return
            if line is None:
                self.end = self._last_words()
                return
            self._take(line)

    def release(self) -> list[dict]:
        """Lets it measure; returns its lines, and one with the reason for each mode without."""
        if self.ready:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            while (line := self.lines.get()) not in (None, "DONE"):
                self._take(line)
            if line is None:
                self.end = self._last_words()
        told = {line["mode"] for line in self.found}
        missing = [mode for mode in self.modes if mode not in told]
        reason = self.end or "its process said nothing about it"
        return self.found + [{"side": self.side, "mode": m, "error": reason} for m in missing]

    def stop(self) -> None:
        """Ends the process, so that what it holds of the GPU's memory is free."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            stream.close()

    def _take(self, line: str) -> None:
        self.ready |= line == "READY"
        if line.startswith("{"):
            self.found.append(json.loads(line))

    def _last_words(self) -> str:
        """The last line that the process wrote as an error: of a traceback, the exception."""
        code = self.process.wait()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        return (lines or [f"ended with exit code {code}"])[-1][:600]


class Meter:
    """Clock, power and temperature of the first GPU, read five times a second."""

    QUERY = "clocks.sm,power.draw,temperature.gpu"

    def __init__(self):
        """Starts nvidia-smi; without it there is nothing to read."""
        self.samples: list[tuple[float, list[float]]] = []
        command = ["nvidia-smi", f"--query-gpu={self.QUERY}", "--format=csv,noheader,nounits"]
        try:
            self.process = subprocess.Popen(
                [*command, "--id=0", "--loop-ms=200"], stdout=subprocess.PIPE, text=True
            )
        except FileNotFoundError:
            self.process = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            try:
                values = [float(value) for value in line.split(",")]
            except ValueError:  # "[N/A]" is no reading.
                continue
            self.samples.append((time.time(), values))

    def between(self, began: float, ended: float) -> dict:
        """Medians of a span of time.time(); empty if nothing was read in it."""
        seen = [values for moment, values in self.samples if began <= moment <= ended]
        if not seen:
            return {}
        clock, power, heat = (statistics.median(column) for column in zip(*seen, strict=True))
        return {"clock_mhz": clock, "power_w": round(power, 1), "temperature_c": heat}

    def stop(self) -> None:
        """Ends nvidia-smi."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
