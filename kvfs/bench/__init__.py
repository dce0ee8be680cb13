"""What a store does on this machine, next to bare system calls of the same run, and from when on restoring pays."""
