"""What measured steps teach about predictions."""
