"""Build the native module with nothing but a C++17 compiler: python native/build.py [FILE].

The kernels are compiled once per instruction set with that set's flags; everything else with the baseline's, so that
the library loads on any CPU of the platform and chooses its kernels at run time. A cross compiler in CXX builds for
its own platform: CXX=aarch64-linux-gnu-g++.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "src" / "dcil_runtime"
OUT = PACKAGE / "libdcil_runtime.so"
BASE = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", f"-I{PACKAGE / 'include'}"]
#: Contraction lets kernels use fused multiply-add where the CPU has it, as every BLAS does.
KERNEL = ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-Wno-ignored-attributes"]
SETS = {"portable": ["-DLANES=4"], "wide": ["-DLANES=16", "-DFEW_TILES", "-O1"]}
#: MANY_REGISTERS: 32 of them, for larger tiles.
AVX512 = ["-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mfma", "-mprefer-vector-width=512"]
PLATFORM_SETS = {
    "x86_64": {
        "avx2": ["-DLANES=8", "-mavx2", "-mfma"],
        "avx512": ["-DLANES=16", "-DMANY_REGISTERS", *AVX512],
    },
    "aarch64": {"neon": ["-DLANES=4", "-DMANY_REGISTERS", "-DNEON"]},
}
#: For u8, besides those: with dot products of bytes.
QUANT_SETS = {
    "x86_64": {
        "avxvnni": ["-DLANES=8", "-mavx2", "-mfma", "-mavxvnni"],
        "avx512vnni": ["-DLANES=16", "-DMANY_REGISTERS", *AVX512, "-mavx512vnni", "-mavx512vbmi"],
    },
    "aarch64": {"neondot": ["-DLANES=4", "-DMANY_REGISTERS", "-DNEON", "-march=armv8.2-a+dotprod"]},
}
DEFINED = {"x86_64": ["-DDCIL_X86"], "aarch64": ["-DDCIL_ARM"]}


def compiler() -> str:
    """Return the C++ compiler: $CXX, or the first of the usual names."""
    found = os.environ.get("CXX") or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    if not found:
        raise FileNotFoundError("no C++ compiler: install g++ (or clang++), or set CXX")
    return found


def ask(cxx: str, question: str) -> str:
    """Return the compiler's answer to an option that asks for something."""
    return subprocess.run([cxx, question], capture_output=True, text=True, check=True).stdout.strip()


def knows(cxx: str, flag: str) -> bool:
    """Return whether the compiler knows an option; kernels without theirs are compiled as plain code."""
    words = [cxx, flag, "-E", "-x", "c++", os.devnull]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def machine(cxx: str) -> str:
    """Return the kind of processor that the compiler writes code for, as Python and wheels name it."""
    found = ask(cxx, "-dumpmachine").split("-")[0]
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(found, found)


def library_flags(cxx: str, name: str) -> list[str]:
    """Return the linker's flags for a library, with libstdc++ inside where the compiler has it as an archive."""
    static = ["-static-libstdc++"] if Path(ask(cxx, "-print-file-name=libstdc++.a")).is_absolute() else []
    script = f"-Wl,--version-script={HERE / 'exports.map'}"
    return ["-shared", "-Wl,--gc-sections", f"-Wl,-soname,{name}", script, *static]


def up_to_date(out: Path = OUT) -> bool:
    """Return whether ``out`` is newer than every source and than this file."""
    sources = [
        *HERE.rglob("*.cpp"),
        *HERE.rglob("*.h"),
        HERE / "exports.map",
        *PACKAGE.glob("include/*.h"),
        Path(__file__),
    ]
    return out.exists() and out.stat().st_mtime >= max(file.stat().st_mtime for file in sources)


def build(out: Path = OUT, extra: Sequence[str] = (), main: Sequence[Path] = ()) -> Path:
    """Compile everything in parallel and link ``out`` atomically: a library, or with ``main`` a program."""
    cxx = compiler()
    target = machine(cxx)
    base = [*BASE, *DEFINED.get(target, [])]
    sets = {**SETS, **PLATFORM_SETS.get(target, {})}
    quant = {
        name: [flag for flag in flags if flag.startswith("-D") or knows(cxx, flag)]
        for name, flags in QUANT_SETS.get(target, {}).items()
    }
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            [HERE / "kernels.cpp", f"{folder}/kernels_{name}.o", f"-DISA={name}", *KERNEL, *flags]
            for name, flags in sets.items()
        ]
        # The last of two counts; GCC warns about its own header for AVX-512.
        exact = [*KERNEL, "-ffp-contract=off", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
        jobs += [
            [HERE / "quant_kernels.cpp", f"{folder}/quant_kernels_{name}.o", f"-DISA={name}", *exact, *flags]
            for name, flags in {**sets, **quant}.items()
        ]
        compiled = ("kernels.cpp", "quant_kernels.cpp")
        plain = [file for file in sorted([*HERE.glob("*.cpp"), *HERE.glob("ops/*.cpp")]) if file.name not in compiled]
        jobs += [[file, f"{folder}/{file.name}.o"] for file in [*plain, *main]]

        def compile_one(job: list[Any]) -> str:
            source, target, *flags = job
            subprocess.run([cxx, *base, *flags, *extra, "-c", str(source), "-o", target], check=True)
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, jobs))
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = out.with_name(f".{out.name}.{os.getpid()}")
        kind = [] if main else library_flags(cxx, out.name)
        subprocess.run([cxx, *base, *extra, *kind, *objects, "-o", str(draft)], check=True)
        draft.replace(out)
    return out


if __name__ == "__main__":
    sys.stdout.write(f"{build(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)}\n")
