"""Programs that others would write for the same training: one each, as fast as its kind goes."""
