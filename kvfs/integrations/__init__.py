"""Adapters between engines and the public API. Each imports its engine; nothing outside imports them."""
