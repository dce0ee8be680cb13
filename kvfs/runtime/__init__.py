"""What the Store objects of one directory share in a process: services, background tasks, forks."""
