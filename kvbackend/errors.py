"""The two errors of the public surface; both are raised before anything is written."""


class ArgumentError(ValueError):
    """The call itself is wrong: what was got; what is allowed: what to do."""


class UnsupportedError(RuntimeError):
    """No backend that may be used can run this call; the message carries every backend's reasons."""
