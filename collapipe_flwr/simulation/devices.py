"""Device and radio presets: rounded public figures, not measurements.

``speed`` is the *effective* fp32 training speed, taken as 25-40 % of the vendor's or published
peak, because small-batch transformer training reaches no more. ``energy_per_flop`` is the board
power under load less idle, divided by that speed. ``memory`` leaves room for the operating
system. Measure your own boards where it matters; these are for planning experiments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from collapipe_flwr.core.domain import DeviceProfile
from collapipe_flwr.core.errors import ConfigError

GIGA = 1e9


def _preset(
    kind: str, gflop_per_s: float, gib: float, load_w: float, tx_power_w: float
) -> DeviceProfile:
    """A class of board: a profile without a name and without an energy budget."""
    return DeviceProfile(
        device_id="",
        kind=kind,
        speed_flop_per_s=gflop_per_s * GIGA,
        memory_bytes=int(gib * 2**30),
        energy_per_flop_j=load_w / (gflop_per_s * GIGA),
        tx_power_max_w=tx_power_w,
        energy_budget_j=math.inf,
    )


_PRESETS = (
    # 4x Cortex-A72 at 1.5 GHz: 24 GFLOP/s HPL-class fp32 peak 48; 4 GB board; 3.5 W over idle
    # (raspberrypi.com product brief; published Linpack and power reviews). Wi-Fi about 20 dBm.
    _preset("raspberry-pi-4", 12.0, 3.0, 3.5, 0.1),
    # 4x Cortex-A76 at 2.4 GHz: fp32 peak 154, HPL 30 fp64; 8 GB board; 6 W over idle
    # (raspberrypi.com product brief; published Linpack and power reviews).
    _preset("raspberry-pi-5", 35.0, 6.5, 6.0, 0.1),
    # 128-core Maxwell: 236 GFLOP/s fp32 peak; 4 GB shared; 10 W mode (NVIDIA data sheet).
    _preset("jetson-nano", 80.0, 2.8, 6.5, 0.1),
    # 1024-core Ampere: 1.28 TFLOP/s fp32 peak; 8 GB shared; 15 W mode (NVIDIA data sheet).
    _preset("jetson-orin-nano", 450.0, 6.0, 10.0, 0.1),
    # Mid-range phone SoC on its big CPU cores: 100-200 fp32 peak, thermally limited to about
    # 3.5 W; 3GPP power class 3 is 23 dBm = 0.2 W.
    _preset("phone", 50.0, 2.0, 3.5, 0.2),
)

PRESETS: dict[str, DeviceProfile] = {preset.kind: preset for preset in _PRESETS}


def device_preset(kind: str) -> DeviceProfile:
    """The class of board of that name, without an id and without an energy budget.

    Raises ConfigError with the list of known names.
    """
    if kind not in PRESETS:
        known = ", ".join(PRESETS)
        raise ConfigError(f"unknown device kind {kind!r}: choose one of {known}")
    return PRESETS[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class RadioPreset:
    """Bands of one kind of uplink and its path loss."""

    kind: str
    edge_bandwidth_hz: float  # shared by all clusters
    d2d_bandwidth_hz: float  # each hop inside a cluster
    carrier_hz: float
    path_loss_exponent: float
    noise_w_per_hz: float


# Thermal noise -174 dBm/Hz plus a receiver's noise figure of 7 dB is -167 dBm/Hz = 2e-20 W/Hz.
_NOISE_W_PER_HZ = 2e-20
_RADIOS = (
    # 802.11ac: 80 MHz channels at 5.2 GHz to the access point, 20 MHz Wi-Fi Direct between devices.
    RadioPreset(
        kind="wifi",
        edge_bandwidth_hz=80e6,
        d2d_bandwidth_hz=20e6,
        carrier_hz=5.2e9,
        path_loss_exponent=3.0,
        noise_w_per_hz=_NOISE_W_PER_HZ,
    ),
    # 5G NR n78: 100 MHz at 3.5 GHz (3GPP TS 38.101-1); 10 MHz sidelink between devices.
    RadioPreset(
        kind="5g",
        edge_bandwidth_hz=100e6,
        d2d_bandwidth_hz=10e6,
        carrier_hz=3.5e9,
        path_loss_exponent=3.2,
        noise_w_per_hz=_NOISE_W_PER_HZ,
    ),
)

RADIOS: dict[str, RadioPreset] = {preset.kind: preset for preset in _RADIOS}


def radio_preset(kind: str) -> RadioPreset:
    """The preset of that name; raises ConfigError with the list of known names."""
    if kind not in RADIOS:
        raise ConfigError(f"unknown radio {kind!r}: choose one of {', '.join(RADIOS)}")
    return RADIOS[kind]
