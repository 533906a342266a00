"""The virtual cards: what Inductor and Triton ask a device, from the vendors' data sheets.

Sources: NVIDIA H100, H200, A100 and B200 data sheets and architecture whitepapers; the per-block
and per-multiprocessor limits are those of the CUDA C++ Programming Guide's table of compute
capabilities. ``total_memory`` is what the driver reports, a little under the marketed size.
"""

from __future__ import annotations

import dataclasses

GIB = 1 << 30
KIB = 1 << 10


@dataclasses.dataclass(frozen=True)
class Card:
    """One virtual card. Sizes in bytes, clock rates in kHz, bus width in bits.

    The attribute names from ``name`` on are those of ``torch.cuda.get_device_properties()``, so
    that a ``Card`` can stand in for the properties object.
    """

    key: str
    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int
    shared_memory_per_block: int = 48 * KIB
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""
    uuid: str = "00000000-0000-0000-0000-000000000000"
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0

    @property
    def capability(self) -> int:
        """Compute capability as one number: 90 for 9.0. What Triton calls the target's arch."""
        return self.major * 10 + self.minor


CARDS = {
    card.key: card
    for card in (
        Card(
            key="a100",
            name="NVIDIA A100-SXM4-80GB",
            major=8,
            minor=0,
            multi_processor_count=108,
            total_memory=int(79.25 * GIB),
            L2_cache_size=40 * KIB * KIB,
            shared_memory_per_multiprocessor=164 * KIB,
            shared_memory_per_block_optin=163 * KIB,
            clock_rate=1_410_000,
            memory_clock_rate=1_593_000,
            memory_bus_width=5120,
        ),
        Card(
            key="h100",
            name="NVIDIA H100 80GB HBM3",
            major=9,
            minor=0,
            multi_processor_count=132,
            total_memory=int(79.1 * GIB),
            L2_cache_size=50 * KIB * KIB,
            shared_memory_per_multiprocessor=228 * KIB,
            shared_memory_per_block_optin=227 * KIB,
            clock_rate=1_980_000,
            memory_clock_rate=2_619_000,
            memory_bus_width=5120,
        ),
        Card(
            key="h200",
            name="NVIDIA H200",
            major=9,
            minor=0,
            multi_processor_count=132,
            total_memory=int(139.8 * GIB),
            L2_cache_size=60 * KIB * KIB,
            shared_memory_per_multiprocessor=228 * KIB,
            shared_memory_per_block_optin=227 * KIB,
            clock_rate=1_980_000,
            memory_clock_rate=3_201_000,
            memory_bus_width=6144,
        ),
        Card(
            key="b200",
            name="NVIDIA B200",
            major=10,
            minor=0,
            multi_processor_count=148,
            total_memory=int(178.3 * GIB),
            L2_cache_size=126 * KIB * KIB,
            shared_memory_per_multiprocessor=228 * KIB,
            shared_memory_per_block_optin=227 * KIB,
            clock_rate=1_965_000,
            memory_clock_rate=3_996_000,
            memory_bus_width=8192,
        ),
    )
}


def card(name: str) -> Card:
    """The virtual card called ``name``, one of "a100", "h100", "h200", "b200" (any case).

    Raises ValueError for any other name.
    """
    found = CARDS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"expected a virtual card out of {sorted(CARDS)}, got {name!r}")
    return found
