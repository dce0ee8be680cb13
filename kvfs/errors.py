"""What kvfs raises, and the exit code that the command line gives each.

    KvfsError
    |- ConfigError (also ValueError)        bad argument, setting or tensor: names the value and the remedy
    |  '- UnsupportedModelError             a model whose KV must not be reused
    |- StoreNotFoundError                   the path holds no store
    |- StoreLockedError                     another process holds what is needed
    |- FormatError                          written by another version, or not a store at all
    |- StoreReadOnlyError                   a write to a store that is open read-only
    |- StoreAccessError                     no permission, or a file system that cannot host a store
    |- NoSpaceError                         a limit too small for the request
    '- CorruptError                         the store's own files contradict each other

The inference path (``put``, ``match``, ``get``, ``view``) never raises for a disk that fails: a fault is a miss or a
decline, and counted. Bad arguments raise everywhere, before anything is written.
"""

from __future__ import annotations


class KvfsError(Exception):
    """Base of everything that kvfs raises on purpose."""

    exit_code = 1


class ConfigError(KvfsError, ValueError):
    """A bad argument, setting or tensor. The message names the value and the remedy."""

    exit_code = 2


class UnsupportedModelError(ConfigError):
    """A model whose KV is not a function of the token prefix, or whose cache kvfs cannot describe."""


class StoreNotFoundError(KvfsError):
    """The path holds no kvfs store."""

    exit_code = 10


class StoreLockedError(KvfsError):
    """Another process (or another host) holds what is needed."""

    exit_code = 11


class FormatError(KvfsError):
    """Written by another format version, or not by kvfs."""

    exit_code = 12


class StoreReadOnlyError(KvfsError):
    """A write to a store that is open read-only."""


class StoreAccessError(KvfsError):
    """No permission, or a file system that cannot host a store."""


class NoSpaceError(KvfsError):
    """A limit is too small for what was asked."""

    exit_code = 14


class CorruptError(KvfsError):
    """The store's own files contradict each other."""

    exit_code = 90


class IndexUnavailableError(KvfsError):
    """Internal: the index cannot answer within the deadline. Public calls turn it into a miss or a decline."""

    exit_code = 11
