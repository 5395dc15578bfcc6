"""What compiled device code uses: registers, stack, spills, wgmma and TMA instructions, read from a cubin.

Pure Python over the ELF file, so it works on every machine and needs no CUDA toolkit: SASS of sm_70 and later is a row of
16-byte instructions with the opcode in the low bits (tests/compile compares the counts with nvdisasm's). `sass` gives
the text where NVIDIA's disassembler is installed.

Reading the numbers: with setmaxnreg in use, `registers` is what a warp starts with, not the pressure; judge by `spill_bytes`
and by `stl` / `ldl`. `setmaxnreg` of 0 in a kernel that asked for it means ptxas dropped it (note C7508).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Low 9 bits of the instruction word: the opcode without the bits that tell operand forms apart.
_OPCODES = {
    0x1F0: "hgmma",
    0x1B4: "utmaldg",
    0x1B5: "utmastg",
    0x1B6: "utmaredg",
    0x187: "stl",
    0x183: "ldl",
    0x1C8: "setmaxnreg",
}
# sm_90 keeps the first KiB of a CTA's shared memory; ptxas counts it in the kernel's section, the launch limit does not
# (measured: 232448 dynamic bytes launch beside a section of 1024).
_RESERVED_SMEM = 1024
_REGCOUNT, _FRAME_SIZE, _REQNTID, _MAX_THREADS = 0x2F, 0x11, 0x10, 0x05

_LAUNCH_CONFIG = re.escape("!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>")
_CONSTANT = re.compile(r"^\s*(%\w+) = llvm\.mlir\.constant\((\d+) : i(?:32|64)\)")
_FIELD = re.compile(rf"^\s*(%\w+) = llvm\.getelementptr %\w+\[0, ([12])(?:, (\d))?\] .*{_LAUNCH_CONFIG}\s*$")
_STORE = re.compile(r"^\s*llvm\.store (%\w+), (%\w+) :")
_EXECUTED = re.compile(r"\.(?:text|nv\.info|nv\.constant\d+|nv\.shared)(?=\.|$)")


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    info: int
    size: int
    data: bytes


def inspect_cubin(cubin: bytes, log: str = "") -> dict[str, Any]:
    """Resources of all kernels in a cubin; `log` is the ``ptxas -v`` output of the same compile, if there is one.

    Keys: registers, stack_bytes, threads (of the kernel with most; threads is None if not fixed), static_smem_bytes,
    hgmma, utmaldg, utmastg, utmaredg, stl, ldl, setmaxnreg, sass_instructions (sums), spill_bytes (stores and loads;
    None without a log unless there is no local memory instruction), ptxas_version, ptxas_notes, cubin_sha256 (of what
    executes: code, constants and launch properties, not of names and tool versions, so that it survives a compiler upgrade
    that changes nothing).

    Raises ValueError if the bytes are no cubin.
    """
    sections = list(_sections(cubin))
    facts = _kernel_facts(sections)
    counts = dict.fromkeys(_OPCODES.values(), 0)
    instructions = 0
    for section in sections:
        if section.name.startswith(".text."):
            instructions += len(section.data) // 16
            for (word,) in struct.iter_unpack("<Q8x", section.data[: len(section.data) // 16 * 16]):
                name = _OPCODES.get(word & 0x1FF)
                if name is not None:
                    counts[name] += 1
    spills = _spill_bytes(log)
    if spills is None and not counts["stl"] and not counts["ldl"]:
        spills = 0
    return {
        **facts,
        **counts,
        "spill_bytes": spills,
        "sass_instructions": instructions,
        "ptxas_version": _ptxas_version(sections),
        "ptxas_notes": ptxas_notes(log),
        "cubin_sha256": _content_hash(sections),
    }


def launch_facts(module: str) -> tuple[int | None, int]:
    """(threads, dynamic shared memory in bytes) of the launch with most of each, from the host code's text.

    Neither is in the cubin. A value that is not a constant there counts as unknown: None threads, 0 bytes.
    """
    threads, smem = 0, 0
    constants: dict[str, int] = {}
    fields: dict[str, tuple[str, str | None]] = {}
    block: dict[str, int] = {}
    for line in module.splitlines():
        if "llvm.func" in line:
            constants, fields, block = {}, {}, {}
        elif match := _CONSTANT.match(line):
            constants[match[1]] = int(match[2])
        elif match := _FIELD.match(line):
            fields[match[1]] = (match[2], match[3])
        elif (match := _STORE.match(line)) and match[2] in fields:
            which, axis = fields[match[2]]
            value = constants.get(match[1])
            if which == "2" and value is not None:
                smem = max(smem, value)
            elif which == "1" and axis is not None and value is not None:
                block[axis] = value
                if len(block) == 3:
                    threads, block = max(threads, block["0"] * block["1"] * block["2"]), {}
    return threads or None, smem


def ptxas_notes(log: str) -> list[str]:
    """The C7xxx notes of a ptxas log (setmaxnreg ignored, wgmma serialised, ...), without duplicates."""
    found = re.findall(r"^.*?\(?(C7\d{3})\)?:?\s*(.*?)\s*$", log, re.MULTILINE)
    return list(dict.fromkeys(f"{code}: {text}".rstrip(": ") for code, text in found))


def sass(cubin: bytes) -> str | None:
    """Disassembly as text, or None where neither nvdisasm nor cuobjdump is installed or both fail."""
    for name, arguments in (("nvdisasm", ["-c"]), ("cuobjdump", ["--dump-sass"])):
        tool = find_tool(name)
        if tool is None:
            continue
        with tempfile.TemporaryDirectory(prefix="tpf_jit_") as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(cubin)
            done = subprocess.run([tool, *arguments, str(path)], capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            return done.stdout
    return None


def find_tool(name: str) -> str | None:
    """Path of a CUDA command line tool: from NVIDIA's pip packages, else from PATH, else None."""
    spec = importlib.util.find_spec("nvidia")
    for root in list(spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(root).glob(f"*/bin/{name}"), reverse=True):
            if os.access(path, os.X_OK):
                return str(path)
    return shutil.which(name)


def _sections(cubin: bytes) -> Iterator[_Section]:
    try:
        if cubin[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        (table,) = struct.unpack_from("<Q", cubin, 0x28)
        entry, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
        headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + index * entry) for index in range(count)]
        names = cubin[headers[names_index][4] :][: headers[names_index][5]]
        for name, kind, _flags, _address, offset, size, _link, info, _align, _entry in headers:
            text = names[name : names.index(b"\0", name)].decode()
            yield _Section(text, kind, info, size, b"" if kind == 8 else cubin[offset : offset + size])  # 8: NOBITS
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"not a cubin: {error}") from error


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) records of a .nv.info section."""
    position = 0
    while position + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, position)
        position += 4
        if form == 4:  # the value is the payload's size
            yield attribute, data[position : position + value]
            position += value
        else:
            yield attribute, struct.pack("<H", value)


def _kernel_facts(sections: list[_Section]) -> dict[str, Any]:
    registers, stack, threads, smem = 0, 0, 0, 0
    for section in sections:
        if section.name == ".nv.info":
            for attribute, payload in _attributes(section.data):
                if attribute == _REGCOUNT and len(payload) >= 8:
                    registers = max(registers, struct.unpack_from("<I", payload, 4)[0])
                elif attribute == _FRAME_SIZE and len(payload) >= 8:
                    stack = max(stack, struct.unpack_from("<I", payload, 4)[0])
        elif section.name.startswith(".nv.info."):
            for attribute, payload in _attributes(section.data):
                if attribute in (_REQNTID, _MAX_THREADS) and len(payload) >= 12:
                    x, y, z = struct.unpack_from("<III", payload)
                    threads = max(threads, x * y * z)
        elif section.name.startswith(".nv.shared.") and not section.name.startswith(".nv.shared.reserved"):
            smem = max(smem, section.size - _RESERVED_SMEM)
    if not registers:  # older cubins have the count only in the header of the code section
        registers = max((section.info >> 24 for section in sections if section.name.startswith(".text.")), default=0)
    return {"registers": registers, "stack_bytes": stack, "threads": threads or None, "static_smem_bytes": smem}


def _content_hash(sections: list[_Section]) -> str:
    digest = hashlib.sha256()
    for section in sections:
        executed = _EXECUTED.match(section.name)
        if executed:
            digest.update(f"{executed.group()}\0{section.size}\0".encode())
            digest.update(section.data)
    return digest.hexdigest()


def _ptxas_version(sections: list[_Section]) -> str | None:
    for section in sections:
        if section.name == ".note.nv.tkinfo":
            match = re.search(rb"release [\d.]+, V([\d.]+)", section.data)
            if match:
                return match.group(1).decode()
    return None


def _spill_bytes(log: str) -> int | None:
    found = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    return sum(map(int, found)) if found else None
