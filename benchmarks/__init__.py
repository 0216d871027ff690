"""What is measured, and printed as it stands in the README."""
