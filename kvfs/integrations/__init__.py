"""Adapters between engines and the public API. Each imports its engine; nothing else imports an adapter."""
