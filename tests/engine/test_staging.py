"""Columns of numbers on their way to the device."""

from array import array

import torch

from albatross.engine.staging import Staging

CPU = torch.device("cpu")


def test_columns_arrive_as_they_were_given() -> None:
    staging = Staging(16, CPU, depth=2)
    columns = staging.upload(([3, 1, -1], array("I", [70_000, 5]), range(4), []))
    assert [column.tolist() for column in columns] == [[3, 1, -1], [70_000, 5], [0, 1, 2, 3], []]
    assert all(column.dtype == torch.int32 for column in columns)


def test_a_later_upload_leaves_an_earlier_one_as_it_was() -> None:
    staging = Staging(4, CPU, depth=2)
    first, *_ = staging.upload(([1, 2, 3, 4],))
    for _ in range(3):
        staging.upload(([9, 9, 9, 9],))
    assert first.tolist() == [1, 2, 3, 4]


def test_columns_can_be_laid_into_a_tensor_whose_rest_stays() -> None:
    out = torch.full((5,), 7, dtype=torch.int32)
    Staging(8, CPU, depth=1).upload(([4, 0], [-1]), out=out)
    assert out.tolist() == [4, 0, -1, 7, 7]
