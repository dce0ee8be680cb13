"""Mutants: small changes of the source that tests must notice, drawn at random, or named by hand."""
