"""Virtual environments of the peers: made once, kept outside the repository."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

from .roster import Peer


def python_of(peer: Peer) -> Path:
    """Return the interpreter of a peer's environment, made now if it is not there.

    Raises ``RuntimeError`` with pip's last words if it cannot be installed.
    """
    names = " ".join([sys.version, *peer.packages])
    place = cache() / f"{peer.module}-{hashlib.sha256(names.encode()).hexdigest()[:10]}"
    python, complete = place / "bin" / "python", place / "complete"
    if not complete.exists():
        venv.create(place, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, *peer.packages], capture_output=True, text=True, check=False, timeout=600
        )
        if done.returncode:
            raise RuntimeError(f"not installed: {done.stderr.strip().splitlines()[-1]}")
        complete.touch()
    return python


def cache() -> Path:
    """Return the directory of the environments: in tox's, or in the user's cache."""
    if given := os.environ.get("OUTBOX_BENCH_CACHE") or os.environ.get("TOX_WORK_DIR"):
        return Path(given) / "peers"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "django_outbox" / "peers"
