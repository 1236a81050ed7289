"""The version, in one place: the build reads it here, and peers compare it at the handshake."""

__version__ = "0.1.0"
