"""What an operator asks for or a crash makes necessary: rebuild, verify, purge, pins, warm, recompress."""
