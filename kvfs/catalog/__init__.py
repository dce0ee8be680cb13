"""What is in a store: namespaces, prefixes, records."""
