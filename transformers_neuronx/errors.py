"""Exceptions that a user can cause, one class for each subject. An `assert` elsewhere marks a bug of this package."""


class TransformersNeuronxError(Exception):
    """Base of all errors that this package raises on purpose."""

    def __init__(self, message: str) -> None:
        # A name in a damaged file may have characters that cannot be printed.
        super().__init__(message.encode("utf-8", "backslashreplace").decode())


class GraphError(TransformersNeuronxError, ValueError):
    """An operation in a PyHLO function got operands that it cannot take."""


class ConfigError(TransformersNeuronxError, ValueError):
    """A model configuration or an option is contradictory or not supported."""


class CheckpointError(TransformersNeuronxError, ValueError):
    """A checkpoint is incomplete, has unexpected parts, is damaged, or points outside its directory."""


class InputError(TransformersNeuronxError, ValueError):
    """A call got ids, positions or options that the compiled model cannot serve. The model stays usable."""


class GrammarError(InputError):
    """A request's text was to follow a grammar that cannot be followed."""


class QueueFullError(InputError):
    """Too many requests, or too many tokens of prompts, are waiting. Submit the request later."""


class NotSupportedError(TransformersNeuronxError, NotImplementedError):
    """A name of the original library that this package does not have was used. Importing it is no error."""


class EngineError(TransformersNeuronxError, RuntimeError):
    """The engine (jaxlib or the Neuron runtime) is missing, unsupported, too small, or computes wrong results."""


class StorageError(TransformersNeuronxError, OSError):
    """A file cannot be written: the disk is full or fails, or another process has it. An existing file is unchanged.

    `errno` is the system's error number, if there is one.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno
