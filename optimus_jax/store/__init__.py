"""Objects by URL (S3, GCS, Azure, HTTP), local copies of them, the single-writer lease."""
