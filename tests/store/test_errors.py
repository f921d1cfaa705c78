"""Errors of the store are of one family and cross process borders."""

from __future__ import annotations

import pickle

import pytest

from store import errors
from store.types import TidelineError

LEAVES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, TidelineError)]


@pytest.mark.parametrize("leaf", LEAVES)
def test_error_survives_pickling(leaf: type[TidelineError]) -> None:
    copy = pickle.loads(pickle.dumps(leaf("what happened")))
    assert type(copy) is leaf
    assert str(copy) == "what happened"


def test_every_error_but_the_root_is_also_a_builtin_error() -> None:
    leaves = [leaf for leaf in LEAVES if leaf is not TidelineError]
    assert len(leaves) >= 10
    assert all(any(base.__module__ == "builtins" for base in leaf.__bases__) for leaf in leaves)
