"""Types of the arrays that prices and decisions are computed with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Places = NDArray[np.intp]  # what numpy's searches return
