"""Policies on running machines: real daemons behind shaped links, as slow as boards."""
