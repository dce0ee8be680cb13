"""What a page is and what it is called: layouts, identity, chunk hashes, an engine's buffers."""
