"""Torch tensors over a reservation, made by DLPack, and the views of a cache geometry on them.

The tensor (and through it every view, and every graph that holds one) keeps its reservation: when the last of them
dies, DLPack calls `_forget` and the reservation counts it out. At interpreter exit tensors may die after Python has
gone, so the call-back is taken out of every one that still lives, and the kernel takes the memory back.
"""

from __future__ import annotations

import atexit
import ctypes
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from kvx.errors import LayoutError
from kvx.spec import CacheGeometry
from kvx.vmm import Reservation, Transaction


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor of DLPack 0.x, which every consumer reads; its DLTensor is written out in place."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_alive: dict[int, tuple[_ManagedTensor, Any, Reservation]] = {}
"""By the struct's own address: what a living tensor needs, and the reservation that it keeps."""


def _forget(address: int) -> None:
    _, _, reservation = _alive.pop(address)
    reservation.let_go()


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget)


@atexit.register
def _leave_to_the_kernel() -> None:
    for managed, _, _ in _alive.values():
        managed.deleter = None
        _keep_for_ever(managed)  # its tensor may die after this module has, and will look into it


_keep_for_ever = ctypes.pythonapi.Py_IncRef
_keep_for_ever.argtypes = [ctypes.py_object]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_CAPSULE_NAME = b"dltensor"  # the capsule keeps the pointer: this object must never go


def tensor_over(reservation: Reservation) -> torch.Tensor:
    """A flat int8 tensor [nbytes] over the whole reservation; only its committed bytes may be touched.

    DLPack does not look at the memory, so there need not be any yet. `__cuda_array_interface__` and Triton do: a view
    may go there once its first byte is committed.
    """
    driver = reservation.driver
    _, _, index = driver.device.partition(":")
    shape = (ctypes.c_int64 * 1)(reservation.nbytes)
    managed = _ManagedTensor(
        data=reservation.address, device_type=driver.dlpack_device_type, device_id=int(index or 0),
        ndim=1, type_code=0, type_bits=8, type_lanes=1, shape=shape, deleter=ctypes.cast(_deleter, ctypes.c_void_p),
    )  # fmt: skip
    address = ctypes.addressof(managed)
    _alive[address] = (managed, shape, reservation)
    reservation.hold()
    try:
        tensor: torch.Tensor = from_dlpack(_new_capsule(address, _CAPSULE_NAME, None))
    except BaseException:
        _forget(address)
        raise
    return tensor


def resize_mapping(reservation: Reservation, offset_bytes: int, kept: torch.Tensor, new_bytes: int) -> None:
    """Puts one allocation of another size at an offset: the bytes of `kept`, which starts there, then zeros.

    Old and new memory exist side by side while it copies. A failure leaves the old mapping as it was.
    """
    scratch = Reservation(reservation.driver, new_bytes)
    with Transaction() as transaction:
        scratch.reserve()
        transaction.callback(scratch.release)
        scratch.commit_range(0, new_bytes)
        _copy_into(scratch, kept)
        allocation = scratch.unbind(0)
        transaction.callback(scratch.park, allocation)
        old = reservation.unbind(offset_bytes)
        transaction.callback(reservation.bind, offset_bytes, old)
        reservation.bind(offset_bytes, allocation)
        transaction.callback(reservation.unbind, offset_bytes)
        scratch.release()
        reservation.driver.release(old)
        transaction.commit()


def _copy_into(scratch: Reservation, content: torch.Tensor) -> None:
    copy = tensor_over(scratch)
    try:
        copy[: content.numel()].copy_(content)
        if not scratch.driver.allocations_are_zero:
            copy[content.numel() :].zero_()
    finally:
        scratch.driver.synchronize()  # also after an error: what was queued must not find its memory unmapped
        del copy, content  # an error's traceback would keep them, and with them the memory


def views_of(buffer: torch.Tensor, geometry: CacheGeometry, *, kernel_blocks: bool = False) -> dict[str, torch.Tensor]:
    """Each layer's view on the buffer: [B, H, N, C], or in kernel blocks [B * r, H, N / r, C]."""
    views = {}
    for group_index, group in enumerate(geometry.groups):
        dtype = torch_dtype(group.spec.dtype)
        for layer_index, layer in enumerate(group.layers):
            place = geometry.placement(group_index, layer_index)
            shape, strides = place.shape, place.strides_bytes
            if kernel_blocks:
                shape, strides = place.view_shape, place.view_strides_bytes
            views[layer] = _strided(buffer, dtype, place.offset_bytes, shape, strides)
    return views


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"dtype {name!r} is not one of torch's; use a name such as float32 or bfloat16")
    return dtype


def _strided(
    buffer: torch.Tensor, dtype: torch.dtype, offset_bytes: int, shape: tuple[int, ...], strides_bytes: tuple[int, ...]
) -> torch.Tensor:
    size = dtype.itemsize
    if uneven := [value for value in (offset_bytes, *strides_bytes) if value % size]:
        raise LayoutError(
            f"{uneven[0]} bytes is not a whole number of {dtype} elements; pad pages to multiples of {size}"
        )
    strides = tuple(stride // size for stride in strides_bytes)
    return buffer.view(dtype).as_strided(shape, strides, offset_bytes // size)
