"""Every exception a user can cause, by what it is about. `assert` elsewhere marks a bug of our own."""


class TransformersNeuronxError(Exception):
    """Base of all errors this package raises on purpose."""

    def __init__(self, message: str) -> None:
        # A name in a damaged file may hold what cannot be printed.
        super().__init__(message.encode("utf-8", "backslashreplace").decode())


class GraphError(TransformersNeuronxError, ValueError):
    """An operation in a PyHLO function got operands it cannot take."""


class ConfigError(TransformersNeuronxError, ValueError):
    """A model configuration or an option asks for something that is contradictory or not supported."""


class CheckpointError(TransformersNeuronxError, ValueError):
    """A checkpoint is missing something, has something too many, is damaged, or points outside its directory."""


class InputError(TransformersNeuronxError, ValueError):
    """A call got ids, positions or options that the compiled model cannot serve; the model stays usable."""


class EngineError(TransformersNeuronxError, RuntimeError):
    """The engine below (jaxlib, the Neuron runtime) is missing, unsupported, too small, or wrong."""


class StorageError(TransformersNeuronxError, OSError):
    """A file cannot be written: the disk is full or fails, or another process has it. What was there is unchanged.

    `errno` is the system's number of the reason, if it gave one.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno
