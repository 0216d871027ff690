"""What happens: `python -m trainer` and the parts it is made of."""
