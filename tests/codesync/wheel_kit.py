"""A package that needs no index: a wheel made by hand, and the tools that install it."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path


def wheel(directory: Path, name: str, version: str = "1.0", needs: tuple[str, ...] = ()) -> Path:
    """Write a wheel of the module *name*, whose VERSION is *version*, into *directory*."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    with zipfile.ZipFile(path, "w") as file:
        for inner, text in files.items():
            file.writestr(inner, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{inner},sha256={digest},{len(text)}\n"
        file.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return path


def uv(directory: Path) -> str:
    """Return the path of uv: the installed one, else one installed into *directory* from the index; "" without any."""
    found = shutil.which("uv")
    if found:
        return found
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    command = [sys.executable, "-m", "pip", "--python", str(directory / "bin" / "python"), "install", "-q", "uv"]
    done = subprocess.run([*command, "--disable-pip-version-check"], capture_output=True, timeout=60, check=False)
    made = directory / "bin" / "uv"
    return str(made) if done.returncode == 0 and made.exists() else ""
