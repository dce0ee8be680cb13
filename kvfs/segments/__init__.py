"""One segment file: append records, scan its tables, hold it open for readers."""
