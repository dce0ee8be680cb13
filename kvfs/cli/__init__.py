"""The ``kvfs`` command. Each module holds the commands of one noun; they are imported when they are run."""
