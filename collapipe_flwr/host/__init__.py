"""The edge server: holds the last part of the model, one replica per cluster."""
