"""What is measured, and printed as it stands in README.md and docs/."""
