"""The native core (Rust, ``ptwprobe/native``). Checked against the built module by ``tests/test_package.py``."""

class NativeError(Exception):
    """``args`` is (kind, message, offset or None); ``kind`` is a stable word."""

    args: tuple[str, str, int | None]

# ---- machine

def cpu_features() -> dict[str, bool]:
    """rdpid, rdtscp, fsgsbase, ptwrite_cpuid, invariant_tsc."""

def ptwrite_executes() -> bool:
    """Whether ``ptwrite`` runs here rather than raising #UD; tried in a forked child."""

def stub_template(name: str) -> str | None: ...
def stub_template_names() -> list[str]: ...
