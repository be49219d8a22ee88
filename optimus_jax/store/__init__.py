"""Object stores (S3, GCS, Azure, HTTP): objects by URL, local copies of them, and who writes."""
