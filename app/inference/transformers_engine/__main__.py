"""`python -m app.inference.transformers_engine`: serve one model, as vLLM's API server would be started."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import uvicorn

from app.inference.transformers_engine.decoder import Decoder
from app.inference.transformers_engine.server import EngineRoutes, EngineThread


def main() -> None:
    """Load the model, then serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m app.inference.transformers_engine")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--uds")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--num-threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    decoder = Decoder(
        arguments.model,
        dtype=getattr(torch, arguments.dtype),
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=arguments.max_model_len,
    )
    engine = EngineThread(decoder)
    config = uvicorn.Config(
        EngineRoutes(engine).app(),
        uds=arguments.uds,
        host=arguments.host,
        port=arguments.port,
        log_level="warning",
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    engine.start(on_failure=lambda: setattr(server, "should_exit", True))
    server.run()
    if engine.failure is not None:
        raise SystemExit(1)
    engine.stop()


if __name__ == "__main__":
    main()
