"""Claim, append, publish; copies of records from segment to segment."""
