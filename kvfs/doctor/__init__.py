"""What is wrong around a store, with remedies."""
