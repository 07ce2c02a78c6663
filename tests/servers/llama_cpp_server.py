"""llama.cpp's own HTTP server as a process, on the packaged Gemma 3 270M: `with LlamaCppServer(384) as url:`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType

from worker.adapters.llama_cpp import packaged_model


class LlamaCppServer:
    """Ends with the block, and with this process: it reads until its standard input closes."""

    def __init__(self, context_tokens: int, path: Path | None = None) -> None:
        self._arguments = [str(path or packaged_model()), str(context_tokens)]

    def __enter__(self) -> str:
        command = [sys.executable, "-m", "tests.servers.llama_cpp_server", *self._arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate(timeout=60)


def main(path: str, context_tokens: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = int(context_tokens)
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_gpu_layers = 0
    params.swa_full = True
    params.no_extra_bufts = True
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_ram_mib = 0
    params.warmup = False
    params.verbosity = -1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
