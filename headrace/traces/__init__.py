"""Request traces: read from files that others publish, described in figures, and turned into arrivals."""
