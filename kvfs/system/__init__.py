"""Every system call, descriptor and thread."""
