"""What compiled code is told of an upload, so that the call that plans can send the plan, too."""

from __future__ import annotations

from ctypes import Structure, c_int, c_uint64, c_void_p

from warploom.runtime.devices.cuda import driver_entries

STAGES = 4  # plans that may be on their way to the device at the same time

_CALLED = {
    "exchange_capture_mode": "cuThreadExchangeStreamCaptureMode",
    "is_capturing": "cuStreamIsCapturing",
    "is_done": "cuEventQuery",
    "wait": "cuEventSynchronize",
    "copy_to_device": "cuMemcpyHtoDAsync",
    "copy_on_device": "cuMemcpyDtoDAsync",
    "record": "cuEventRecord",
}


class _Stage(Structure):
    _fields_ = (("event", c_void_p), ("memory", c_void_p))


class Delivery(Structure):
    """`warploom::Delivery` of host_planner/delivery.hpp, which says what its members are."""

    _fields_ = (
        *((name, c_void_p) for name in _CALLED),
        ("target", c_uint64),
        ("stream", c_void_p),
        ("pages", c_uint64),
        ("stages", _Stage * STAGES),
        ("last", c_int),
    )
    target: int
    stream: int
    pages: int
    last: int

    def call_driver(self) -> None:
        """Let copies be made by the driver of this process."""
        for name, address in zip(_CALLED, driver_entries(*_CALLED.values()), strict=True):
            setattr(self, name, address)
