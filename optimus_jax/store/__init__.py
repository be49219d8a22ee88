"""Objects by URL (S3, GCS, Azure, HTTP), local copies of them, who writes."""
