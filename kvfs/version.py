"""The version of the package and of the on-disk format."""

__version__ = "0.1.0"
#: The on-disk format this code writes (docs/format.md).
FORMAT = 1
