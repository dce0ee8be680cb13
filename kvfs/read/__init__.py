"""From a match to verified bytes."""
