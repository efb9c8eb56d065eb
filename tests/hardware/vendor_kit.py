"""A machine made of files, and what the vendors' tools print on one.

The captures follow the vendors' documentation, since no such device is here: rocm-smi and the KFD topology (ROCm
documentation, "ROCm SMI" and kernel's kfd_topology.c), xpu-smi (Intel XPU Manager, "smi_user_guide"), npu-smi (Huawei,
"npu-smi command reference", 910B, 910C and 310P), mthreads-gmi (Moore Threads, "MTHREADS-GMI user guide"), xpu_smi
(Baidu Kunlun, "XRE user guide", and the form of nvidia-smi that the P800's driver prints).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CAPTURES = Path(__file__).with_name("captures")


def capture(name: str) -> str:
    return (CAPTURES / name).read_text()


class Tree:
    """A directory that stands for a machine's root, with `environ` to find it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "usr" / "bin"
        self.bin.mkdir(parents=True)

    @property
    def environ(self) -> dict[str, str]:
        keys = str(self.root / "keys")  # its user is not this one
        return {"PATH": "/usr/bin:/bin", "RLINF_ACTORS_PROBE_ROOT": str(self.root), "RLINF_ACTORS_KEYS": keys}

    def write(self, path: str, text: str | int = "") -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def pci(self, bus: str, vendor: str, kind: str, **files: str | int) -> None:
        for name, text in {"vendor": vendor, "class": kind, **files}.items():
            self.write(f"/sys/bus/pci/devices/{bus}/{name.replace('__', '/')}", text)

    def tool(self, name: str, body: str) -> None:
        """An executable whose body is Python; `out(text)` prints, `a` is its arguments."""
        file = self.bin / name
        file.write_text(
            f"#!{os.path.realpath(sys.executable)} -IS\nimport os, signal, sys, time\na = sys.argv[1:]\n"
            f"out = sys.stdout.write\n{body}\n"
        )
        file.chmod(0o755)

    def prints(self, name: str, answers: dict[str, str]) -> None:
        """A tool that prints a capture for its arguments."""
        texts = {arguments: capture(file) for arguments, file in answers.items()}
        self.tool(name, f"out({texts!r}.get(' '.join(a)) or sys.exit('unknown: ' + ' '.join(a)))")

    # --- machines with two devices each ---

    def amd(self) -> None:
        self.write("/dev/kfd")
        self.write("/sys/class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 64\nsimd_count 0")
        properties = capture("kfd_properties.txt")
        self.write("/sys/class/kfd/kfd/topology/nodes/2/properties", properties)
        second = properties.replace("location_id 3072", "location_id 8704").replace("6667579786996158299", "17")
        self.write("/sys/class/kfd/kfd/topology/nodes/10/properties", second)
        for bus in ("0000:0c:00.0", "0000:22:00.0"):
            self.pci(bus, "0x1002", "0x120000", numa_node=1, mem_info_vram_total=206141652992, gpu_busy_percent=5)
            self.write(f"/sys/bus/pci/devices/{bus}/hwmon/hwmon4/temp1_input", 41000)

    def intel(self) -> None:
        self.pci("0000:00:02.0", "0x8086", "0x030000", drm__card0__dev="226:0")
        for bus, node in (("0000:29:00.0", 0), ("0000:3a:00.0", 1)):
            self.pci(bus, "0x8086", "0x038000", device="0x0bd5", numa_node=node, drm__card1__dev="226:1")
            self.write(f"/sys/bus/pci/devices/{bus}/drm/card1/lmem_total_bytes", 128 << 30)

    def ascend(self) -> None:
        self.write("/dev/davinci0")
        self.pci("0000:c1:00.0", "0x19e5", "0x120000", numa_node=3)

    def moore_threads(self) -> None:
        self.pci("0000:3b:00.0", "0x1ed5", "0x030200", numa_node=0)

    def kunlun(self) -> None:
        self.write("/dev/xpu0")
        self.pci("0000:4b:00.0", "0x1d22", "0x120000", numa_node=1)
