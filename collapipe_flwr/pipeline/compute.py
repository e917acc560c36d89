"""Devices that parts compute on: a CPU or an accelerator, transfers between them, and precision.

A part and its optimizer state are on one device. Links and weights in transit use CPU tensors
only, which are moved to the part's device and back by the stage. For parts on a CPU nothing here
does anything.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import AUTO, check, compute_name
from collapipe_flwr.core.memory import read_available_bytes

CPU = torch.device("cpu")
# Metal has no double precision and lacks operators, so a model that trains on the CPU may fail
# there: `auto` does not choose it.
_AUTOMATIC = ("cuda", "xpu")
_KINDS = (*_AUTOMATIC, "mps")
_PINNED = ("cuda",)  # kinds for which pinned memory makes copies faster
_log = logging.getLogger(__name__)


@cache
def resolve(name: str, key: str = "compute") -> torch.device:
    """Find the device of a name; `auto` is the first accelerator that computes, else the CPU.

    Raises ConfigError, naming the `key`, for an unknown name and for a device that is not here or
    cannot compute.
    """
    check(key, name, compute_name())
    here = list_devices()
    if name == AUTO:
        fit = (d for d in here if d.type in _AUTOMATIC and not _find_fault(d, warns=True))
        return _switch_off_tf32(next(fit, CPU))
    device = _add_number(torch.device(name))
    if device not in here:
        raise ConfigError(
            f"{key} is {name!r}, but torch {torch.__version__} finds only "
            f"{', '.join(map(str, here))} here: choose one of these, or auto"
        )
    if fault := _find_fault(device):
        raise ConfigError(
            f"{key} is {name!r}, but a product there fails ({fault}): install a torch that was "
            "built for it, or choose cpu"
        )
    return _switch_off_tf32(device)


def list_devices() -> tuple[torch.device, ...]:
    """List all devices of this machine, the CPU first."""
    counts = {kind: torch.get_device_module(kind).device_count() for kind in _KINDS}
    found = (_add_number(torch.device(kind, i)) for kind, n in counts.items() for i in range(n))
    return (CPU, *found)


def find_place(part: nn.Module) -> torch.device:
    """Return the device of a part's tensors; the CPU for a part without any."""
    held = (t for tensors in _iterate_tables(part) for t in tensors.values() if t is not None)
    first = next(held, None)
    return CPU if first is None else first.device


def hold(part: nn.Module, device: torch.device) -> nn.Module:
    """Move all tensors of a part, which is returned; tied tensors stay tied.

    Make its optimizer afterwards.
    """
    if device == CPU and find_place(part) == CPU:
        return part
    moved: dict[Tensor, Tensor] = {}
    for tensors in _iterate_tables(part):
        for name, tensor in tensors.items():
            if tensor is not None:
                if tensor not in moved:
                    moved[tensor] = _move(tensor, device)
                tensors[name] = moved[tensor]
    return part


def bring(tensors: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
    """Copy tensors to a device; those that are there already are not copied."""
    if device == CPU:
        return tensors
    waits = device.type not in _PINNED
    return {name: t.to(device, non_blocking=not waits) for name, t in tensors.items()}


def bring_home(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Copy tensors to the CPU, detached if they were elsewhere; complete when this returns."""
    away = [tensor for tensor in tensors.values() if tensor.device != CPU]
    if not away:
        return tensors
    found = {name: _begin_copy(tensor) for name, tensor in tensors.items()}
    for device in {tensor.device for tensor in away if tensor.device.type in _PINNED}:
        finish(device)
    return found


def finish(device: torch.device) -> None:
    """Wait until all work begun on the device is done; timed work ends with this."""
    if device != CPU:
        module = torch.get_device_module(device.type)
        module.synchronize() if device.type == "mps" else module.synchronize(device)


def use_one_thread(device: torch.device) -> AbstractContextManager[Any]:
    """Run backward passes in the thread that calls them, as on a CPU.

    Otherwise autograd runs those of an accelerator in another thread, without the thread-local
    state of the caller: deferred gradients, recomputation, hooks.
    """
    return nullcontext() if device == CPU else torch.autograd.set_multithreading_enabled(False)


def measure_free_bytes(device: torch.device) -> int:
    """Read the memory of a device that a new program could use."""
    if device == CPU:
        return read_available_bytes()
    module = torch.get_device_module(device.type)
    if device.type == "mps":
        return int(module.recommended_max_memory() - module.driver_allocated_memory())
    return int(module.mem_get_info(device)[0])


class AllocatorPeak:
    """Peak memory of an accelerator's allocator since the creation, temporaries included.

    All work on the device counts. `own_bytes` were allocated before.
    """

    def __init__(self, device: torch.device, own_bytes: int) -> None:
        self._device = device
        self._module: Any = None
        if device != CPU and hasattr(torch.get_device_module(device.type), "max_memory_allocated"):
            self._module = torch.get_device_module(device.type)
            self._module.reset_peak_memory_stats(device)
            self._others = self._module.memory_allocated(device) - own_bytes

    @property
    def num_bytes(self) -> int:
        """The peak so far; 0 on a CPU, and where the allocator keeps none (Metal)."""
        if self._module is None:
            return 0
        return int(self._module.max_memory_allocated(self._device) - self._others)


def describe(device: torch.device) -> str:
    """Name a device with its compute capability, to be shown."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{device} ({torch.cuda.get_device_name(device)}, sm_{major}{minor})"
    if device.type == "xpu":
        return f"{device} ({torch.xpu.get_device_name(device)})"
    return str(device)


def describe_torch() -> str:
    """Name the installed torch and what it was built for."""
    version = torch.version
    kinds = {"CUDA": version.cuda, "ROCm": version.hip, "XPU": getattr(version, "xpu", None)}
    built = [f"{name} {number}" for name, number in kinds.items() if number]
    return f"{torch.__version__.partition('+')[0]} ({', '.join(built) or 'CPU'})"


def _add_number(device: torch.device) -> torch.device:
    """Write `cuda` as `cuda:0`, as tensors call it."""
    return device if device == CPU else torch.device(device.type, device.index or 0)


def _find_fault(device: torch.device, *, warns: bool = False) -> str:
    """Try one product on a device; returns its error or "", as drivers and builds may not fit."""
    try:
        ones = torch.ones(8, 8, device=device)
        found = float((ones @ ones).sum())
        return "" if found == 8**3 else f"8 x 8 ones times themselves sum up to {found:g}"
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        if warns:
            _log.warning("%s does not compute, so the CPU does: %s", device, why)
        return why


def _switch_off_tf32(device: torch.device) -> torch.device:
    """Switch off TF32 in products of single precision."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    return device


def _iterate_tables(part: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield parameters and buffers of every module, whatever `part.parameters` yields."""
    for module in part.modules():
        yield module._parameters
        yield module._buffers


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    held = tensor.detach()
    alike = tuple(slice(0, 1 if stride == 0 else None) for stride in held.stride())
    there = (
        held[alike].to(device).expand(held.shape)
    )  # expanded tensors take no memory there either
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(there, requires_grad=tensor.requires_grad)
    return there


def _begin_copy(tensor: Tensor) -> Tensor:
    """Begin a copy to the CPU, which may be incomplete until `finish`."""
    if tensor.device.type not in _PINNED:
        return tensor.detach().to(CPU)
    pages = torch.empty_like(tensor, device=CPU, pin_memory=True, requires_grad=False)
    return pages.copy_(tensor.detach(), non_blocking=True)


def compute_in(precision: str, place: torch.device = CPU) -> AbstractContextManager[object]:
    """Compute products in ``precision``; casts of weights pass gradients back to fp32 ones.

    The dtype of the output is kept on links, so that a cut changes no result.
    """
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(place.type, dtype=torch.bfloat16)
