"""Bytes on disk, without I/O: headers and entries of segments, checksums, codecs."""
