"""The kernels compile for the GPUs they are meant for. Needs no GPU and no driver: NVRTC, or else nvcc."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hurray_wire import kernels

ARCHITECTURES = ("80", "90")


def nvrtc_path() -> Path | None:
    """NVRTC's library as its wheel installs it, for CUDA 12 or 13."""
    for package in ("nvidia.cuda_nvrtc", "nvidia.cu13"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in spec.submodule_search_locations or () if spec else ():
            found = sorted(Path(folder, "lib").glob("libnvrtc.so.*"))
            if found:
                return found[0]
    return None


def compile_with_nvrtc(library: Path, architecture: str) -> str:
    """PTX of the kernels. NVRTC's errors and warnings fail the test."""
    nvrtc = ctypes.CDLL(str(library))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def text(kind: str) -> str:
        assert getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)) == 0
        found = ctypes.create_string_buffer(size.value)
        assert getattr(nvrtc, f"nvrtcGet{kind}")(program, found) == 0
        return found.value.decode()

    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), kernels.source().encode(), b"kernels.cu", 0, None, None)
    assert created == 0
    options = [f"--gpu-architecture=compute_{architecture}".encode(), *(item.encode() for item in kernels.OPTIONS)]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    log = text("ProgramLog")
    assert (status, log) == (0, ""), log
    return text("PTX")


def compile_with_nvcc(nvcc: str, architecture: str, folder: Path) -> str:
    """The same by nvcc, and through the assembler."""
    source, ptx, cubin = folder / "kernels.cu", folder / "kernels.ptx", folder / "kernels.cubin"
    source.write_text(kernels.source())
    common = [nvcc, *kernels.OPTIONS, f"-arch=sm_{architecture}", "-Werror", "all-warnings"]
    for kind, out in (("-ptx", ptx), ("-cubin", cubin)):
        subprocess.run([*common, kind, source, "-o", out], check=True, timeout=100)
    return ptx.read_text()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_compile(architecture: str, tmp_path: Path) -> None:
    library, nvcc = nvrtc_path(), shutil.which("nvcc")
    if library is not None:
        ptx = compile_with_nvrtc(library, architecture)
    elif nvcc is not None:
        ptx = compile_with_nvcc(nvcc, architecture, tmp_path)
    else:
        assert not os.environ.get("CI"), "CI installs nvidia-cuda-nvrtc-cu12 with the extra dev"
        pytest.skip("neither NVRTC (nvidia-cuda-nvrtc-cu12) nor nvcc is here")

    entries = set(re.findall(r"\.visible \.entry (\w+)\(", ptx))
    host = Path(__file__).with_name("host.cpp").read_text()
    assert entries == set(re.findall(r"^HOST\((\w+)\)", host, re.MULTILINE)), "host.cpp lacks a kernel, or has one more"
    assert not re.search(r"\.(shared|local) ", ptx), "threads share nothing, and keep everything in registers"
