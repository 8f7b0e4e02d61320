"""Whether a GPU run has the packages with which this version was measured."""

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

MEASURED = Path(__file__).resolve().parents[1] / "launch" / "constraints-h200.txt"


def pins(text: str) -> dict[str, str]:
    """Package -> version of a constraints file of name==version lines."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return dict(line.split("==") for line in lines if line)


def stack_note(installed: Callable[[str], str] = metadata.version, measured: Path = MEASURED) -> str | None:
    """One line that names every package of another version than measured; None where there is none."""
    other = []
    for name, pinned in pins(measured.read_text()).items():
        try:
            # Without the build, such as +cu130.
            found = installed(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            found = "absent"
        if found != pinned:
            other.append(f"{name} {found} (measured: {pinned})")
    if not other:
        return None
    return f"warning: not the measured stack of {measured.name}: {', '.join(other)}; kernels may be slower, or fail"
