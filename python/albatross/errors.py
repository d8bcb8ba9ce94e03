"""Every error Albatross raises on purpose. Each text says what was expected, what was found and what to do.

`InvalidRequestError` carries the field it speaks of, so that a server can name it in an OpenAI error body.
"""


class AlbatrossError(Exception):
    """Base of all errors below."""


class ConfigError(AlbatrossError):
    """A setting is out of range, unknown, or contradicts another."""


class CheckpointError(AlbatrossError):
    """A model file is missing, damaged, of another kind, or does not hold an RWKV-7 model."""


class UnsupportedModelError(CheckpointError):
    """The file holds a model, but one of a generation, layout or kind Albatross does not run."""


class NativeLibraryError(AlbatrossError):
    """The native library is missing, damaged, or built for something else than what was found."""


class UnsupportedGPUError(NativeLibraryError):
    """The native library holds no code for this card, or the driver is too old for it."""


class InvalidRequestError(AlbatrossError):
    """A request asks for something impossible.

    `param` is the name of the offending field (or None), `code` a short machine-readable word (or None).
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(AlbatrossError):
    """The waiting queue is full. `retry_after_s` estimates when a place will be free."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(AlbatrossError):
    """The engine process died, is stuck, or is restarting; the request was lost and may be sent again."""
