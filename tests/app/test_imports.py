"""What the app may load, and what its list of the engine's parameters was taken from."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from app.api.chat_request import ENGINE_PARAMETERS, ChatRequest
from app.services.sampling import TIDELINE_PARAMETERS

HEAVY = ("torch", "vllm", "transformers", "learner")


def test_app_starts_without_torch_or_vllm() -> None:
    script = (
        "import sys, app.service, app.cli; from store.settings import Settings; app.service.create_app(Settings())\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def vllm_chat_parameters() -> set[str]:
    """The fields of vLLM's own chat request, read from its source without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.origin).parent / "entrypoints" / "openai" / "chat_completion" / "protocol.py"
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    (request,) = (node for node in classes if node.name == "ChatCompletionRequest")
    return {
        node.target.id for node in request.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_every_parameter_that_passes_is_one_vllm_takes() -> None:
    known = vllm_chat_parameters()
    assert known >= ENGINE_PARAMETERS
    assert known >= ChatRequest.model_fields.keys() - TIDELINE_PARAMETERS
