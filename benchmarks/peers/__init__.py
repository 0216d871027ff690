"""Other programs for the same training, each as fast as its framework allows."""
