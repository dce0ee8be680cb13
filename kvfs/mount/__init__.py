"""A store as a directory: what it holds, to look at, and files of any program, kept as pages."""
