"""The examples in docstrings run."""

from __future__ import annotations

import doctest

import pytest
import torch

import softdtw_cuda


@pytest.mark.parametrize("name", softdtw_cuda.__all__)
def test_examples(name: str) -> None:
    documented = getattr(softdtw_cuda, name)
    names = {"torch": torch, **{public: getattr(softdtw_cuda, public) for public in softdtw_cuda.__all__}}
    runner = doctest.DocTestRunner()
    tests = [test for test in doctest.DocTestFinder().find(documented, name, globs=names) if test.examples]
    # A record needs no example; everything that is called does.
    assert tests or name == "BarycenterInfo"
    for test in tests:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
