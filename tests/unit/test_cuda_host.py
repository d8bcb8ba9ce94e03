"""The emulator that CUDA kernels are tested on without a card (cuda_host/): it finds each mistake that small kernels were given,
in whatever order threads run, and none in the same kernels without it.
"""

import pytest
from cuda_host_cases import ORDERS, HostKernels

# What is said of each kernel of cuda_host/small_kernels.cu that has the mistake; of some it depends on the order.
MISTAKES = {
    "exchange_in_a_warp": "race: shared word",
    "exchange_between_warps": "race: shared word",
    "overwrite": "race: shared word",
    "read_what_was_written": "nobody has written it",
    "store_in_shared_memory": "shared store of 4 bytes at 65536 is out of the block's 65536",
    "store_by_address": "shared store of 8 bytes at 65536 is out of the block's 65536",
    "store_in_global_memory": "global store of 4 bytes is out of bounds",
    "keep_constants": "global store to what may only be read",
    "align_vectors": "shared access of 16 bytes is misaligned",
    "meet_with_all_lanes": "deadlock: threads wait for ever in warps 0 1",
    "meet_in_one_operation": "the lanes of a warp meet in",
    "arrive_after_all_lanes": "race: shared word",
    "arrive": "deadlock: threads wait for ever in warps 1",
    "wait_for_a_phase_that_ends": "race: shared word|deadlock",
    "initialise": "an mbarrier is used that nobody has initialised",
    "initialise_first": "race: an mbarrier is used|an mbarrier is used that nobody has initialised",
    "leave_barriers_alone": "an mbarrier is read or written as memory",
    "wait_for_copies_before_reading": r"shared word \d+ is read, and thread \d+ has not waited for its copy there",
    "wait_for_enough_groups": r"shared word \d+ is read, and thread \d+ has not waited for its copy there",
    "commit_what_is_awaited": r"shared word \d+ is read, and thread \d+ has not waited for its copy there",
    "sync_after_the_wait": r"race: shared word|is read, and thread \d+ has not waited for its copy there",
    "store_after_the_wait": r"shared word \d+ is written, and thread \d+ has not waited for its copy there",
    "initialise_after_the_wait": r"shared word \d+ is written, and thread \d+ has not waited for its copy there",
    "copy_once": r"shared word \d+ is written, and thread \d+ has not waited for its copy there",
    "change_the_source_after_the_wait": "the source of an asynchronous copy is written before the wait for the copy",
    "copy_over_what_is_done_with": "race: shared word|is written, and thread",
    "wait_for_copies_before_the_end": "a thread ends, and has not waited for 2 of its asynchronous copies",
    "align_the_source": "the source of an asynchronous copy is misaligned",
    "align_the_target": "shared access of 16 bytes is misaligned",
    "copy_from_within_bounds": "global load of 16 bytes is out of bounds",
    "copy_to_within_bounds": "shared store of 16 bytes at 65536 is out of the block's 65536",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_nothing_else(host_kernels: HostKernels, name: str, order: str) -> None:
    for seed in range(3):
        host_kernels.set_options(order, seed)
        host_kernels.small_kernel(name, is_broken=False)
        with pytest.raises(RuntimeError, match=MISTAKES[name]):
            host_kernels.small_kernel(name, is_broken=True)


def test_bank_conflicts_are_counted_where_they_are(host_kernels: HostKernels) -> None:
    host_kernels.set_options(counts_banks=True)
    host_kernels.small_kernel("spread_over_banks", is_broken=False)
    assert host_kernels.conflicts() == {}
    host_kernels.small_kernel("spread_over_banks", is_broken=True)
    assert host_kernels.conflicts() == {"spread_over_banks": 31}
