"""Where training happens: the only place in which the strategies differ."""
