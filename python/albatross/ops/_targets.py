"""Which code runs on which card: targets such as "sm_90" (machine code) and "compute_90" (PTX) against compute capabilities.

Knows nothing of libraries on disk and asks no driver. `_selection` judges by it, `albatross doctor` shows what it says.
"""

import re

from albatross.ops._manifest import Build


def code_for(capability: tuple[int, int], build: Build) -> str | None:
    """The code of the library that the driver takes for a card: the latest machine code it can run, else the latest PTX."""
    for targets in (build.arch, build.ptx):
        usable = [target for target in targets if runs_on(target, capability)]
        if usable:
            return max(usable, key=_preference)
    return None


def _preference(target: str) -> tuple[tuple[int, int], int]:
    capability, suffix = _capability(target)
    return capability, ("", "f", "a").index(suffix)  # the closest fit first


def runs_on(target: str, capability: tuple[int, int]) -> bool:
    """Machine code runs on its own major version from its minor upwards, PTX on every capability from its own upwards.

    Code for one architecture alone (sm_90a, compute_90a) runs on that one alone; a family's (sm_100f) on its major version.
    """
    wanted, suffix = _capability(target)
    if suffix == "a":
        return capability == wanted
    if suffix == "f" or target.startswith("sm"):
        return capability[0] == wanted[0] and capability >= wanted
    return capability >= wanted


def forced_target(text: str) -> str | None:
    """The target that the text of ALBATROSS_KERNEL_ARCH names, "sm_90" for "9.0"; None if it names none."""
    found = re.fullmatch(r"(sm_|compute_)?(\d{1,2})\.?(\d)([af]?)", text.strip().lower())
    return f"{found[1] or 'sm_'}{found[2]}{found[3]}{found[4]}" if found else None


def _capability(target: str) -> tuple[tuple[int, int], str]:
    """((12, 0), "") of "sm_120" and "compute_120", ((9, 0), "a") of "sm_90a"."""
    number = target.partition("_")[2]
    digits = number.rstrip("af")
    return (int(digits[:-1]), int(digits[-1])), number[len(digits) :]
