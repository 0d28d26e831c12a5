"""The few functions of the CUDA driver that torch does not offer: memory that other processes map, and stream flags."""

from __future__ import annotations

import ctypes
from functools import cache

from surogate_core.errors import MachineError

_WAIT_EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ."""
_ENABLE_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_char * 64),)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    address, size, stream = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
    library.cuMemAlloc_v2.argtypes = [ctypes.POINTER(address), size]
    library.cuMemcpyAsync.argtypes = [address, address, size, stream]
    library.cuMemsetD8_v2.argtypes = [address, ctypes.c_ubyte, size]
    library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(IpcHandle), address]
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(address), IpcHandle, ctypes.c_uint]
    library.cuIpcCloseMemHandle.argtypes = [address]
    library.cuStreamWriteValue32_v2.argtypes = [stream, address, ctypes.c_uint32, ctypes.c_uint]
    library.cuStreamWaitValue32_v2.argtypes = [stream, address, ctypes.c_uint32, ctypes.c_uint]
    return library


def _check(code: int, what: str) -> None:
    if code:
        raise MachineError(f"{what} failed: CUDA error {code}")


def allocate(nbytes: int) -> int:
    """Address of zeroed memory of the current device."""
    found = ctypes.c_uint64()
    _check(_library().cuMemAlloc_v2(ctypes.byref(found), nbytes), f"allocating {nbytes} bytes of GPU memory")
    _check(_library().cuMemsetD8_v2(found, 0, nbytes), "clearing GPU memory")
    return found.value


def export(address: int) -> bytes:
    """A handle by which another process maps memory that `allocate` gave."""
    handle = IpcHandle()
    _check(_library().cuIpcGetMemHandle(ctypes.byref(handle), address), "sharing GPU memory with other processes")
    return bytes(ctypes.string_at(ctypes.byref(handle), ctypes.sizeof(handle)))


def attach(handle: bytes) -> int:
    """Address here of another process's memory."""
    found = ctypes.c_uint64()
    code = _library().cuIpcOpenMemHandle_v2(
        ctypes.byref(found), IpcHandle.from_buffer_copy(handle), _ENABLE_PEER_ACCESS
    )
    _check(code, "mapping another GPU's memory")
    return found.value


def detach(address: int) -> None:
    """End a mapping."""
    _library().cuIpcCloseMemHandle(address)


def copy(to: int, source: int, nbytes: int, stream: int) -> None:
    """Copy on a stream, by a copy engine where the memory is on two devices."""
    _check(_library().cuMemcpyAsync(to, source, nbytes, stream), "copying between GPUs")


def write_flag(address: int, value: int, stream: int) -> None:
    """Set 4 bytes when all earlier work of the stream is done and visible."""
    _check(_library().cuStreamWriteValue32_v2(stream, address, value, 0), "writing a flag")


def wait_flag(address: int, value: int, stream: int) -> None:
    """Let the stream wait until the 4 bytes have a value."""
    _check(_library().cuStreamWaitValue32_v2(stream, address, value, _WAIT_EQUAL), "waiting for a flag")
