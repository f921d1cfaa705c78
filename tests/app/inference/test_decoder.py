"""The transformers engine's batch: what shares it never changes what a sequence is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.inference.checkpoint import WeightsRefusedError
from app.inference.transformers_engine.decoder import DecodedToken, Decoder
from app.inference.transformers_engine.sampling import Sampling
from store.types import VersionSpan
from tests.app.inference.models import build_policy, load_reference, reference_logprobs, roughened, with_tensors


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("decoder") / "policy", seed=0, tied=True)


@pytest.fixture(scope="module")
def decoder(policy: Path) -> Decoder:
    # In float32, so that batching changes nothing but the last bits.
    return Decoder(policy, dtype=torch.float32, max_num_seqs=4, max_model_len=64, version=3)


def run(decoder: Decoder) -> dict[str, list[DecodedToken]]:
    """Step until nothing is left; tokens by sequence id."""
    tokens: dict[str, list[DecodedToken]] = {}
    while decoder.num_running or decoder.num_waiting:
        for token in decoder.step():
            tokens.setdefault(token.sequence_id, []).append(token)
    return tokens


def ids(tokens: list[DecodedToken]) -> list[int]:
    return [token.token_id for token in tokens]


requests = st.lists(
    st.tuples(st.lists(st.integers(3, 300), min_size=1, max_size=12), st.integers(1, 8)), min_size=1, max_size=7
)


@settings(max_examples=15, deadline=None)
@given(requests=requests, joining_after=st.integers(0, 5))
def test_sequence_is_the_same_alone_and_in_a_batch(
    decoder: Decoder, requests: list[tuple[list[int], int]], joining_after: int
) -> None:
    samplings = [
        Sampling(max_tokens=length, seed=number, ignore_eos=True) for number, (_, length) in enumerate(requests)
    ]
    alone = []
    for (prompt, _), sampling in zip(requests, samplings, strict=True):
        decoder.add("alone", prompt, sampling)
        alone.append(run(decoder)["alone"])
    together: dict[str, list[DecodedToken]] = {}
    for number, ((prompt, _), sampling) in enumerate(zip(requests, samplings, strict=True)):
        decoder.add(str(number), prompt, sampling)
        for _ in range(joining_after % (number + 1)):
            for token in decoder.step():
                together.setdefault(token.sequence_id, []).append(token)
    for name, tokens in run(decoder).items():
        together.setdefault(name, []).extend(tokens)
    for number, tokens in enumerate(alone):
        assert ids(together[str(number)]) == ids(tokens)
        expected = [token.logprob for token in tokens]
        assert [token.logprob for token in together[str(number)]] == pytest.approx(expected, abs=1e-3)


def test_no_more_sequences_run_than_allowed(decoder: Decoder) -> None:
    for number in range(9):
        decoder.add(str(number), [5, 6, 7], Sampling(max_tokens=3, ignore_eos=True))
    most = 0
    while decoder.num_running or decoder.num_waiting:
        decoder.step()
        most = max(most, decoder.num_running)
    assert most == 4


def test_score_and_sampled_logprobs_agree(decoder: Decoder) -> None:
    decoder.add("a", [5, 6, 7], Sampling(max_tokens=10, ignore_eos=True))
    tokens = run(decoder)["a"]
    scored = decoder.score([5, 6, 7, *ids(tokens)])[2:]
    assert scored == pytest.approx([token.logprob for token in tokens], abs=1e-3)


def test_aborted_sequence_leaves_the_others_alone(decoder: Decoder) -> None:
    sampling = Sampling(max_tokens=12, seed=1, ignore_eos=True)
    decoder.add("stays", [9, 10, 11, 12], sampling)
    expected = ids(run(decoder)["stays"])
    decoder.add("goes", list(range(20, 40)), Sampling(max_tokens=30, ignore_eos=True))
    decoder.add("stays", [9, 10, 11, 12], sampling)
    got = [token for _ in range(3) for token in decoder.step()]
    decoder.abort("goes")
    decoder.abort("never was")
    assert decoder.num_running == 1
    tokens = [token for token in got if token.sequence_id == "stays"] + run(decoder)["stays"]
    assert ids(tokens) == expected


@pytest.mark.parametrize("recompute", [False, True])
def test_swap_between_steps_stamps_each_token_with_its_weights(policy: Path, tmp_path: Path, recompute: bool) -> None:
    decoder = Decoder(policy, dtype=torch.float32, max_model_len=64, version=1)
    after = roughened(policy, tmp_path / "after", noise=0.5)
    decoder.add("a", [5, 6, 7], Sampling(max_tokens=10, ignore_eos=True, seed=1))
    tokens = [token for _ in range(4) for token in decoder.step()]
    decoder.load_weights(after)
    decoder.version = 2
    if recompute:
        decoder.recompute_running()
    tokens += run(decoder)["a"]
    assert tokens[-1].version_spans == (VersionSpan(1, 0, 4), VersionSpan(2, 4, 10))
    sampled = [token.logprob for token in tokens]
    for directory, start, end in ((policy, 0, 4), (after, 4, 10)):
        model = load_reference(directory).float()
        expected = reference_logprobs(model, [5, 6, 7], ids(tokens))[start:end]
        exact = directory == policy or recompute
        assert (sampled[start:end] == pytest.approx(expected, abs=1e-3)) == exact


def test_refused_weights_leave_the_model_untouched(policy: Path, tmp_path: Path) -> None:
    decoder = Decoder(policy, max_model_len=64)
    before = decoder.score(list(range(5, 25)))
    with pytest.raises(WeightsRefusedError, match=r"lm_head\.weight"):
        decoder.load_weights(with_tensors(policy, tmp_path / "headless", {"lm_head.weight": None}))
    assert decoder.score(list(range(5, 25))) == before
