"""PaTH attention to earlier chunks; each chunk transforms the passing query."""
