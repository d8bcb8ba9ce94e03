"""Memory that runs out: said in one sentence, and given back."""

import gc
import weakref

import pytest
import torch

from albatross.errors import ConfigError
from albatross.models.memory import require_free, within_memory

CPU = torch.device("cpu")
ALLOCATOR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
LIBRARY = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
DRIVER = RuntimeError("CUDA error: out of memory")


class Buffer:
    """Stands for memory that was taken."""


@pytest.mark.parametrize("cause", [ALLOCATOR, LIBRARY, DRIVER])
def test_running_out_of_memory_names_purpose_memory_and_advice(cause: RuntimeError) -> None:
    def make() -> None:
        raise cause

    with pytest.raises(ConfigError, match=r"A table needs more than the \d+\.\d\d GiB .* free on cpu: take fewer\.$"):
        within_memory(make, CPU, "A table", "take fewer")


def test_an_error_that_hides_the_missing_memory_is_understood() -> None:
    def make() -> None:
        try:
            raise ALLOCATOR
        finally:
            raise RuntimeError("the capture was ended by an earlier error")

    with pytest.raises(ConfigError, match="needs more than"):
        within_memory(make, CPU, "A graph", "take fewer")


def test_what_was_taken_is_given_back() -> None:
    taken: list[weakref.ref[Buffer]] = []

    def make() -> None:
        buffer = Buffer()
        taken.append(weakref.ref(buffer))
        raise torch.OutOfMemoryError("no")

    with pytest.raises(ConfigError) as refusal:
        within_memory(make, CPU, "A graph", "take fewer")
    gc.collect()
    assert taken[0]() is None
    assert refusal.value.__context__ is None


def test_other_errors_and_results_pass() -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        within_memory(fail, CPU, "A graph", "take fewer")
    assert within_memory(lambda: 5, CPU, "A graph", "take fewer") == 5


def test_too_much_is_refused_before_it_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"A pool needs 1048576\.00 GiB .* \d+\.\d\d GiB are free: take fewer"):
        require_free(1 << 50, CPU, "A pool", "take fewer")
