"""A run as one self-contained HTML page: events, folded into data, drawn as figures."""
