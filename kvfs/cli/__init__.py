"""The ``kvfs`` command. Each module holds one command, or the commands of one noun, and is imported when
one of them runs."""
