"""What a kernel needs of the machine, read from the cubin (an ELF file) without any CUDA tool."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_NOT_A_CUBIN = "not a cubin of one 64-bit little-endian ELF image"

# Attributes in the `.nv.info` sections. A record is (format, attribute, 16-bit value), and a record
# of format _SIZED has that many bytes of payload behind it.
_SIZED = 4
_REGISTER_COUNT = 0x2F  # payload: symbol, registers
_FRAME_SIZE = 0x11  # payload: symbol, bytes of local memory per thread
_MAX_THREADS = 0x05  # payload: x, y, z of __launch_bounds__

_BARE_COPY = 0xDAE  # low bits of LDGSTS without a descriptor; with one they are 0xFAE


@dataclass(frozen=True)
class Resources:
    """What one kernel uses.

    Attributes:
        registers: 32-bit registers per thread.
        local_bytes: local memory per thread: spilled registers, and arrays not held in registers.
        shared_bytes: static shared memory per CTA; from sm_90 on it includes the system's 1024.
        max_threads: limit of threads per CTA (`__launch_bounds__`), 0 if none was declared.
        spill_bytes: bytes of spill stores and loads, from the compiler's log; None if unknown.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    max_threads: int = 0
    spill_bytes: int | None = None


@dataclass(frozen=True)
class _Section:
    name: str
    data: bytes
    size: int  # of a section without bytes in the file, such as shared memory, `data` is empty


def read_resources(cubin: bytes, entry: str = "warploom_kernel") -> Resources:
    """Resources of kernel `entry`.

    Raises:
        ValueError: the bytes are no cubin, or it holds no such kernel.
    """
    try:
        sections = {section.name: section for section in _sections(cubin)}
        symbols = _symbol_names(sections)
        if f".text.{entry}" not in sections:
            raise ValueError(f"the cubin has no kernel {entry!r}")
        of_module = _attributes(sections[".nv.info"].data)
        per_symbol = {
            (attribute, symbols[payload[0]]): payload[1]
            for attribute, payload in of_module
            if len(payload) == 2
        }
        of_kernel = dict(_attributes(sections[f".nv.info.{entry}"].data))
        x, y, z = of_kernel.get(_MAX_THREADS, (0, 0, 0))[:3]
        shared = sections.get(f".nv.shared.{entry}")
        return Resources(
            registers=per_symbol[_REGISTER_COUNT, entry],
            local_bytes=per_symbol.get((_FRAME_SIZE, entry), 0),
            shared_bytes=shared.size if shared else 0,
            max_threads=x * y * z,
        )
    except (struct.error, KeyError, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"{_NOT_A_CUBIN}: {error!r}") from error


def has_broken_copies(cubin: bytes) -> bool:
    """Whether a copy from global to shared memory lacks the descriptor of its source.

    ptxas of CUDA 13.0.88 writes such instructions where a copy with a hint for L2 goes to the very
    address that a register holds, and a GPU ends the kernel with "illegal instruction"; 13.5.37
    does not. Right copies have other low bits on every architecture from sm_80 to sm_120.

    Raises:
        ValueError: the bytes are no cubin.
    """
    texts = (x.data for x in _sections(cubin) if x.name.startswith(".text"))
    firsts = (memoryview(text).cast("Q")[::2] for text in texts)  # of the two words of each
    return any(word & 0xFFF == _BARE_COPY for words in firsts for word in words)


def _sections(elf: bytes) -> Iterator[_Section]:
    if elf[:6] != b"\x7fELF\x02\x01":  # 64 bits, little endian
        raise ValueError(_NOT_A_CUBIN)
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry_size) for i in range(count)]
    _, _, _, _, names_offset, names_size, *_ = headers[names_index]
    names = elf[names_offset : names_offset + names_size]
    for name, kind, _, _, offset, size, *_ in headers:
        no_bits = kind == 8
        data = b"" if no_bits else elf[offset : offset + size]
        if not no_bits and len(data) != size:
            raise ValueError(f"{_NOT_A_CUBIN}: cut off")
        yield _Section(_c_string(names, name), data, size)


def _c_string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _symbol_names(sections: dict[str, _Section]) -> list[str]:
    table, strings = sections[".symtab"].data, sections[".strtab"].data
    return [_c_string(strings, record[0]) for record in struct.iter_unpack("<IBBHQQ", table)]


def _attributes(info: bytes) -> list[tuple[int, tuple[int, ...]]]:
    """(attribute, payload as 32-bit words) of each sized record; the others do not matter."""
    found = []
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            words = struct.unpack_from(f"<{size // 4}I", info, at)
            found.append((attribute, words))
            at += size
    return found
