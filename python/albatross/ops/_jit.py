"""The native library that is built at start where no other fits, if ALBATROSS_JIT=1 asks for it.

Says what the cache has for the cards of a context, and builds it; `albatross.build.jit` knows how. Called by `_loader`.
"""

import logging

from albatross.build.jit import Plan, build_cached, find_cached, make_plan
from albatross.build.native import Listener, Options, archs_of, normalize_archs
from albatross.build.toolchain import BuildError
from albatross.ops._manifest import JIT, Candidate, read_candidate
from albatross.ops._selection import Context
from albatross.ops._targets import forced_target

logger = logging.getLogger(__name__)


def find_library(context: Context) -> Candidate:
    """The library in the cache; one still to be built, where all that this needs is there; or what is missing. Builds nothing."""
    try:
        folder = find_cached(_plan(context))
    except BuildError as error:
        return Candidate(JIT, problem=str(error))
    return Candidate(JIT) if folder is None else read_candidate(JIT, folder)


def build_library(context: Context) -> None:
    """Put the library into the cache, which takes a minute. Raises BuildError."""
    plan = _plan(context)
    logger.warning("The native library is built for %s, since none fits and ALBATROSS_JIT=1.", plan.options.archs)
    build_cached(plan, _Log())


class _Log(Listener):
    def message(self, line: str) -> None:
        logger.info("%s", line)


def _plan(context: Context) -> Plan:
    target = forced_target(context.kernel_arch) if context.kernel_arch else None
    if target is None:
        return make_plan(Options(archs_of(card.capability for card in context.cards)))
    is_ptx = target.startswith("compute_")
    number = target.partition("_")[2]
    return make_plan(Options(normalize_archs(number + ("+PTX" if is_ptx else "")), ptx_only=is_ptx))
