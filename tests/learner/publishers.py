"""Fakes at the engine boundary: they load what is published and hold it against the probe, as a real engine would."""

from __future__ import annotations

from pathlib import Path

import torch

from app.inference.protocol import Probe, SwapError, SwapReport
from learner.models import load_policy


class CheckingPublisher:
    """Serves whatever is published whole and matches its probe; `failures` are raised first, one per call."""

    def __init__(self, failures: list[Exception] | None = None, log_path: Path | None = None) -> None:
        self.failures = list(failures or [])
        self.log_path = log_path
        self.versions: list[int] = []

    def publish(self, path: Path, version: int, probe: Probe) -> SwapReport:
        if self.failures:
            raise self.failures.pop(0)
        served = load_policy(path, torch.bfloat16)
        token_ids_BT = torch.tensor([[*probe.prompt_ids, *probe.continuation_ids]])
        with torch.no_grad():
            logits_TV = served(input_ids=token_ids_BT).logits[0, len(probe.prompt_ids) - 1 : -1].float()
        log_softmax_TV = torch.log_softmax(logits_TV, -1)
        logprobs = log_softmax_TV.gather(-1, torch.tensor(probe.continuation_ids)[:, None]).squeeze(-1)
        differences = (logprobs - torch.tensor(probe.expected_logprobs)).abs()
        if float(differences.max()) > 1e-4:
            raise SwapError(f"the probe of version {version} does not match")
        self.versions.append(version)
        if self.log_path is not None:
            with self.log_path.open("a") as log:
                log.write(f"{version}\n")
        return SwapReport(version, 0.1, 0.2, 0.0, 0.0)
