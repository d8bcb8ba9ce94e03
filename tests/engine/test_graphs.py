"""Which numbers of rows get a graph. The graphs themselves are tested on a card, in tests/gpu."""

import pytest

from albatross.engine.sizes import graph_sizes


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 48, 64, 65, 100, 256, 300, 960, 4096])
def test_every_number_of_rows_finds_a_graph_that_is_not_much_larger(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    for rows in range(1, max_rows + 1):
        size = next(size for size in sizes if size >= rows)
        assert size <= max(2 * rows, rows + 8)
        assert rows < 64 or size <= 1.5 * rows


def test_the_largest_engine_has_few_enough_graphs_to_capture_at_start() -> None:
    assert len(graph_sizes(960)) <= 24
    assert graph_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
