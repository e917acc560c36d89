"""Frames over gRPC: codec, streams as links, TLS, and the client of the edge server."""
