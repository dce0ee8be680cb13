"""From a prompt to a ``PrefixMatch`` that holds its segments."""
