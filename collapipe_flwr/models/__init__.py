"""Splitting models: embedding (control unit) | blocks (devices) | edge."""

import atexit
import gc

# The interpreter's last collections would walk through all of torch and transformers: a second.
atexit.register(gc.freeze)
