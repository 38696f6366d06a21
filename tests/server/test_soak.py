"""A short load of all kinds; `soak.py` is the program for a long one."""

import asyncio

import pytest
from soak import soaked

pytestmark = pytest.mark.slow


def test_no_answer_is_wrong_and_nothing_stays_behind(tmp_path):
    assert asyncio.run(soaked(tmp_path, requests=1500, seconds=None, seed=1, connections=32)) == []
