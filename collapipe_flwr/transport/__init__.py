"""Frames over gRPC: codec, streams as links, TLS, the table of RPCs, and the client of a host."""
