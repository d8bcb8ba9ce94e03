"""Log lines, ours and every library's, in one format: for people on a terminal, or one JSON object a line.

Called once by `run`. Lines go to stderr. Exceptions are shown without the values of variables, which may hold prompts.
"""

import logging
import sys
from typing import Literal

import structlog


def configure_logging(level: str, style: Literal["console", "json"]) -> None:
    """Sets up structlog and the root logger of this process."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level, *shared, structlog.processors.StackInfoRenderer(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )  # fmt: skip
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_rendering(style)))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _rendering(style: Literal["console", "json"]) -> list[structlog.typing.Processor]:
    drop_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if style == "json":
        return [drop_meta, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    console = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
    return [drop_meta, console]
