"""What `collapipe device` and `collapipe edge` run: sessions of model parts behind gRPC."""
