"""Writing pages: claim, append, publish; relocation of records from segment to segment."""
