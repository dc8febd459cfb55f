"""What is written and read: result folders, records, progress."""
