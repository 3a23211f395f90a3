"""Where a symbol is in an ELF file, by way of pyelftools only: what tests check the package's own answers against."""

from __future__ import annotations

from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection


def function(path: Path, name: str) -> tuple[int, int]:
    """(vaddr, file offset) of the function ``name`` (raw, with ``@version`` left out) in symtab or dynsym."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        for section in elf.iter_sections():
            if not isinstance(section, SymbolTableSection):
                continue
            for symbol in section.get_symbol_by_name(name) or []:
                if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_shndx"] != "SHN_UNDEF":
                    vaddr = int(symbol["st_value"])
                    return vaddr, _file_offset(elf, vaddr)
    raise LookupError(f"no function {name} in {path}")


def _file_offset(elf: ELFFile, vaddr: int) -> int:
    for segment in elf.iter_segments("PT_LOAD"):
        if segment["p_vaddr"] <= vaddr < segment["p_vaddr"] + segment["p_filesz"]:
            return int(vaddr - segment["p_vaddr"] + segment["p_offset"])
    raise LookupError(f"{vaddr:#x} is in no PT_LOAD segment")


def runtime_address(pid: int, path: Path, vaddr: int) -> int:
    """Where ``vaddr`` of the file ``path`` stands in the process."""
    with path.open("rb") as file:
        offset = _file_offset(ELFFile(file), vaddr)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or fields[5] != str(path.resolve()):
            continue
        start, end = (int(word, 16) for word in fields[0].split("-"))
        map_offset = int(fields[2], 16)
        if map_offset <= offset < map_offset + end - start and "x" in fields[1]:
            return start + offset - map_offset
    raise LookupError(f"process {pid} has not mapped {vaddr:#x} of {path}")


def memory(pid: int, addr: int, size: int) -> bytes:
    """``size`` bytes of the process at ``addr``."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as mem:
        mem.seek(addr)
        return mem.read(size)
