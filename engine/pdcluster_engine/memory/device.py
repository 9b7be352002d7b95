"""Memory of a device: which one, how much of it, and an arena in it.

The arena is one allocation of plain device memory (`cudaMalloc`, through torch's native allocator),
since only such memory can be registered with a network adapter. It is laid out as on the CPU: KV
regions first, metadata rows behind them. The model's region tensors are views over it, the
transport registers it as a whole, and the host sees it through windows that copy.

On the device "cpu" the same class is a plain tensor. Nothing serves from that; tests do, so that
this path runs where no GPU is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
import xxhash

from pdcluster_engine.memory.arena import Arena, arena_sizes
from pdcluster_engine.memory.finality import Mark, Record
from pdcluster_engine.memory.pieces import Pieces
from pdcluster_engine.memory.window import ArenaMemory, require_inside, require_pieces_inside
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.layout import KVLayout

METADATA_STAGING_BYTES = 4096
"""A row's buffers are at most 512 bytes each."""
DIGEST_STAGING_BYTES = 4 << 20
"""The longest run of pages in one copy."""
GIB = 1 << 30


def require_device(name: str) -> torch.device:
    """The torch device of a configuration's `device`.

    Raises:
        ConfigError: torch has no CUDA, the driver does not answer, or the number is too high.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if torch.version.cuda is None:
        raise ConfigError(
            f"device is {name}, but torch {torch.__version__} was built without CUDA; "
            "install a torch wheel with CUDA, or set device to cpu"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ConfigError(
            f"device is {name}, but torch finds no CUDA device; give the pod a GPU and a driver "
            f"for CUDA {torch.version.cuda}, or set device to cpu"
        )
    index = 0 if device.index is None else device.index
    if index >= count:
        raise ConfigError(
            f"device is {name}, but this process sees {count} CUDA devices, cuda:0 to "
            f"cuda:{count - 1}; choose one of them, or widen CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", index)


def device_memory_bytes(device: torch.device) -> int:
    """All memory of a CUDA device, used or not."""
    return int(torch.cuda.mem_get_info(device)[1])


def record_on(device: torch.device) -> Record | None:
    """Marks in the stream on which the calling thread computes; None where nothing is queued."""
    if device.type != "cuda":
        return None

    def record() -> Mark:
        mark: Mark = torch.cuda.current_stream(device).record_event()
        return mark

    return record


def reserve(
    device: torch.device, layout: KVLayout, page_count: int, *, metadata_bytes: int
) -> Arena | DeviceArena:
    """The arena of an engine whose model runs on `device`.

    Raises:
        ConfigError: there is no page, or not that much memory.
    """
    if device.type == "cpu":
        return Arena.create(layout, page_count, metadata_bytes=metadata_bytes)
    return DeviceArena.create(device, layout, page_count, metadata_bytes=metadata_bytes)


class DeviceArena:
    """A zeroed tensor of bytes with the KV regions first and the metadata rows behind them."""

    __slots__ = ("metadata_offset", "nbytes", "tensor", "window")

    def __init__(self, tensor: torch.Tensor, *, metadata_offset: int) -> None:
        self.tensor = tensor
        self.nbytes = int(tensor.numel())
        self.metadata_offset = metadata_offset
        self.window = TensorWindow(tensor, staging_bytes=METADATA_STAGING_BYTES)
        """For metadata rows."""

    @classmethod
    def create(
        cls, device: torch.device, layout: KVLayout, page_count: int, *, metadata_bytes: int
    ) -> DeviceArena:
        """Allocate an arena of `page_count` pages with `metadata_bytes` behind them.

        Raises:
            ConfigError: when there is no page, the device does not give that much memory, or its
                allocator gives a kind that cannot be registered.
        """
        metadata_offset, nbytes = arena_sizes(layout, page_count, metadata_bytes=metadata_bytes)
        if device.type == "cuda":
            _require_free(device, nbytes, page_count=page_count)
        try:
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            # Torch's out-of-memory error is one of these, and so is what the driver says.
            raise ConfigError(
                f"pages is {page_count}, which needs {nbytes} bytes on {device}: {error}; "
                "lower pages or max_context"
            ) from error
        if device.type == "cuda":
            _require_registrable(tensor)
        return cls(tensor, metadata_offset=metadata_offset)

    def memory(self) -> ArenaMemory:
        """The arena for a transport in this process, with a window of its own."""
        return ArenaMemory(
            address=int(self.tensor.data_ptr()),
            nbytes=self.nbytes,
            window=TensorWindow(self.tensor, staging_bytes=DIGEST_STAGING_BYTES),
            on_device=self.tensor.is_cuda,
        )

    def close(self) -> None:
        """Nothing to release before the process ends: the model's tensors are views over it."""


class TensorWindow:
    """A `ByteWindow` that copies through a buffer of the host, on a stream of its own.

    So it waits neither for a forward that is under way nor makes one wait. That rows are final is
    the caller's to know (`finality`); what is written is complete when `write` returns. Several
    threads may share a window and take turns.
    """

    __slots__ = ("_host", "_lock", "_staging", "_stream", "_tensor")

    def __init__(self, tensor: torch.Tensor, *, staging_bytes: int) -> None:
        self._tensor = tensor
        self._lock = threading.Lock()
        # Only pinned memory is copied without a detour, and without blocking other streams.
        self._staging = torch.zeros(staging_bytes, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        self._host = memoryview(self._staging.numpy())
        self._stream = torch.cuda.Stream(tensor.device) if tensor.is_cuda else None

    @property
    def nbytes(self) -> int:
        """See `ByteWindow`."""
        return int(self._tensor.numel())

    def read(self, offset: int, nbytes: int) -> bytes:
        """See `ByteWindow`."""
        require_inside(self.nbytes, offset, nbytes)
        with self._lock:
            return b"".join(bytes(chunk) for chunk in self._chunks(offset, nbytes))

    def write(self, offset: int, content: bytes) -> None:
        """See `ByteWindow`."""
        require_inside(self.nbytes, offset, len(content))
        step = len(self._host)
        with self._lock:
            for start in range(0, len(content), step):
                part = content[start : start + step]
                self._host[: len(part)] = part
                begin = offset + start
                self._copy(self._tensor[begin : begin + len(part)], self._staging[: len(part)])

    def digest(self, offset: int, nbytes: int, *, pieces: int = 1, stride: int = 0) -> int:
        """See `ByteWindow`."""
        places = Pieces(offset, nbytes, pieces, stride)
        require_pieces_inside(self.nbytes, places)
        hashed = xxhash.xxh3_64()
        with self._lock:
            for chunk in self._piece_chunks(places):
                hashed.update(chunk)
        return hashed.intdigest()

    def _piece_chunks(self, pieces: Pieces) -> Iterator[memoryview]:
        """As `_chunks`; many small pieces come in one copy, since each copy has a fixed price."""
        rows_max = len(self._host) // max(1, pieces.nbytes)
        if pieces.count == 1 or rows_max < 2:
            for start, end in pieces.ranges():
                yield from self._chunks(start, end - start)
            return
        for first in range(0, pieces.count, rows_max):
            rows = min(rows_max, pieces.count - first)
            length = rows * pieces.nbytes
            start = pieces.offset + first * pieces.stride
            strided = self._tensor.as_strided((rows, pieces.nbytes), (pieces.stride, 1), start)
            self._copy(self._staging[:length].view(rows, pieces.nbytes), strided)
            yield self._host[:length]

    def _chunks(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Each chunk is valid until the next one is asked for."""
        step = len(self._host)
        for start in range(offset, offset + nbytes, step):
            length = min(step, offset + nbytes - start)
            self._copy(self._staging[:length], self._tensor[start : start + length])
            yield self._host[:length]

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None:
            destination.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
        self._stream.synchronize()


def _require_free(device: torch.device, nbytes: int, *, page_count: int) -> None:
    # What loading the model left in torch's cache would neither be free nor be one piece.
    torch.cuda.empty_cache()
    free = int(torch.cuda.mem_get_info(device)[0])
    if nbytes > free:
        raise ConfigError(
            f"pages is {page_count}, which needs {nbytes / GIB:.2f} GiB on {device}; "
            f"{free / GIB:.2f} GiB are free: lower pages or max_context, or use another device"
        )


def _require_registrable(tensor: torch.Tensor) -> None:
    """Refuse memory that was mapped piece by piece, which adapters cannot register as one."""
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise ConfigError(
            f"torch allocates with {backend}, whose memory cannot be registered; "
            "take backend out of PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF)"
        )
    address = tensor.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        begin = segment["address"]
        if begin <= address < begin + segment["total_size"] and segment.get("is_expandable"):
            raise ConfigError(
                "torch allocates expandable segments, whose memory cannot be registered; "
                "take expandable_segments out of PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF)"
            )
