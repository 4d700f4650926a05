"""Which blocks a sample is made of: few, the same for both sides, and never without the last."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from test_pulls import LAYER

from kvx.digest_check import SAMPLED_BLOCKS, DigestCheck, sampled_blocks, sampled_ranges

BIGGER = dataclasses.replace(
    LAYER, block_size_tokens=32, kernel_block_size_tokens=32, block_stride_bytes=1024, kernel_block_stride_bytes=1024
)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 1000])
def test_a_sample_is_few_blocks_and_has_the_last(num_tokens: int) -> None:
    ranges = sampled_ranges("r", LAYER, num_tokens)
    assert ranges[-1] == ((num_tokens - 1) // 16 * 16, num_tokens)
    assert 1 <= len(ranges) <= SAMPLED_BLOCKS
    assert all(start % 16 == 0 and start < end <= num_tokens for start, end in ranges)


def test_requests_have_samples_of_their_own() -> None:
    assert len({tuple(sampled_ranges(str(index), LAYER, 1000)) for index in range(20)}) > 10


def test_another_process_takes_the_same_sample() -> None:
    code = (
        "import random, sys; rng = random.Random('r'); print(sorted({62, *rng.sample(range(63), "
        f"{SAMPLED_BLOCKS - 1})}}))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str([start // 16 for start, _ in sampled_ranges("r", LAYER, 1000)])


def test_only_tokens_of_the_owners_sample_are_asked_for_and_expected() -> None:
    blocks = list(range(32))
    check = DigestCheck("r", [blocks], 40, 960, [BIGGER], [LAYER], 1000)
    sample = [(max(start, 40), end) for start, end in sampled_ranges("r", LAYER, 1000) if end > 40]
    assert [(ask.first_token, ask.first_token + ask.num_tokens) for ask in check.asks] == sample
    assert check.expected == sum(end - start for start, end in sample)
    (ours,) = check.blocks
    assert [block for block in ours if block >= 0] == sorted(
        {start // 32 for start, _ in sampled_ranges("r", LAYER, 1000)}
    )


def test_blocks_outside_of_the_sample_are_left_out() -> None:
    assert sampled_blocks([5, 6, -1, 8], LAYER, [(0, 16), (40, 48), (48, 50)]) == [5, -1, -1, 8]
