"""Transmit power as planned, where a board's radio and its system allow it; off by default."""

from __future__ import annotations

import logging
import math
import subprocess
from dataclasses import dataclass

from collapipe_flwr.core.errors import ConfigError

_log = logging.getLogger(__name__)
_IW_S = 5.0
_LEAST_W = 1e-3  # 0 dBm: what `iw` and most radios take as their least


@dataclass(frozen=True, slots=True)
class IwPower:
    """Sets a Wi-Fi interface's power by ``iw``, which needs CAP_NET_ADMIN."""

    interface: str

    def __post_init__(self) -> None:
        if not self.interface.isalnum() or len(self.interface) > 15:
            raise ConfigError(
                f"--radio-interface must be the name of an interface, as wlan0, got "
                f"{self.interface!r}"
            )

    def apply(self, tx_power_w: float) -> None:
        """Send with this power from now on; a radio that cannot is logged, training goes on."""
        command = ["iw", "dev", self.interface, "set", "txpower", "fixed", str(mbm(tx_power_w))]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_IW_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            _log.warning("planned power not applied: %s", error)
            return
        if done.returncode != 0:
            _log.warning("planned power not applied: `%s`: %s", " ".join(command), done.stderr)


def mbm(tx_power_w: float) -> int:
    """Hundredths of dBm, the unit of ``iw``."""
    return round(100 * 10 * math.log10(max(tx_power_w, _LEAST_W) / 1e-3))
