"""Fast sums against slow ones."""

from __future__ import annotations

import pytest
import torch

from ropelens.statistics import memory


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_a_running_sum_is_cumsum(count: int) -> None:
    x = torch.randn(2, 3, count, 5, generator=torch.Generator().manual_seed(count))
    found = memory.running_sum(x)
    torch.testing.assert_close(found.double(), x.double().cumsum(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sums", [memory._sum_shifted, memory._sum_gathered])
def test_sums_by_offset_of_rows_anywhere(sums) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.rand(2, 2, 3, 4, 9, generator=random)
    own = torch.tensor([[2, 3, 7, 8], [1, 4, 5, 8]])
    weight = torch.rand(2, 4, generator=random)
    values *= (torch.arange(9) <= own[..., None])[:, None, None]
    values[..., 0] = 0
    expected = torch.zeros(2, 2, 3, 9)
    for sequence in range(2):
        for row in range(4):
            for key in range(int(own[sequence, row]) + 1):
                offset = own[sequence, row] - key
                read = values[sequence, :, :, row, key]
                expected[sequence, :, :, offset] += weight[sequence, row] * read
    torch.testing.assert_close(sums(values, own, weight), expected)
