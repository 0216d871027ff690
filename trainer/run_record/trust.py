"""Refuses to execute the config file of a run if another user could have written it.

check_trust(model_dir)          # or ConfigError: "/shared/a/config.py belongs to another user"

A command that needs the model of a run executes the config file that config.json names. Another
user who can write or replace one of these two files could run code as this user.
"""

import grp
import os
import pwd
import stat
from pathlib import Path

from absl import flags

from data.system.files import is_url
from trainer.config_file import split_target
from trainer.run_files import RunFiles
from trainer.step.options import ConfigError

_PROGRAM = Path(__file__).resolve().parents[2]


def define_trust() -> None:
    """Declares the flag --trust."""
    flags.DEFINE_boolean(
        "trust", False, "Execute a run's config file also if another user could have written it."
    )


def check_trust(model_dir: str) -> None:
    """Raises ConfigError if `doubt` finds a reason, and --trust is not given."""
    if not flags.FLAGS.trust and (reason := doubt(model_dir)):
        raise ConfigError(reason)


def doubt(model_dir: str) -> str:
    """Returns the reason not to execute the config file of a run, and what to type; or "".

    config.json and the config file are checked, each with its directory and the directory above,
    and the Python files beside the config file, which it may import, also those in packages. A
    bucket has permissions of its own. A config file of this program is as safe as the program.
    """
    if is_url(model_dir):
        return ""
    files = RunFiles(model_dir)
    place, _ = split_target(str(files.read_config()["recipe"]))
    executed = Path(files.config).resolve(), Path(place).resolve()
    for path in executed if os.path.isfile(place) else executed[:1]:
        if _PROGRAM in path.parents:
            continue
        neighbours = [] if path == executed[0] else _modules_beside(path)
        for each in (path, path.parent, path.parent.parent, *neighbours):
            if writer := _other_writer(each):
                return (
                    f"The config file of {model_dir}, {place}, would be executed as your user, but "
                    f"{each} {writer}. Read the file, and type --trust if you trust it."
                )
    return ""


def _modules_beside(path: Path) -> list[Path]:
    """The directories from which a config file may import, and their Python files.

    They are its own, that of its outermost package, and the directories of modules in these two.
    """
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    places = {root, path.parent}
    packages = {file.parent for place in places for file in place.glob("*/*.py")}
    places |= {package for package in packages if package.name.isidentifier()}
    found = [each for place in sorted(places) for each in (place, *place.glob("*.py"))]
    return list(filter(os.path.exists, found))


def _other_writer(path: Path) -> str:
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (uid {found.st_uid})"
    if found.st_mode & stat.S_ISVTX and path.is_dir():  # Nobody replaces the files of others.
        return ""
    if found.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    group = _shared_group(found) if found.st_mode & stat.S_IWGRP else ""
    return f"can be written by the group {group}" if group else ""


def _shared_group(found: os.stat_result) -> str:
    """Returns the name of a file's group if another user than the file's owner has it, or "".

    A private group has the owner's name, or is the primary group of the owner alone, among the
    users that this host can list: not all of LDAP, for example. A group without a name has no known
    members: in a container, for example.
    """
    try:
        group = grp.getgrgid(found.st_gid)
    except KeyError:
        return ""
    having = {user.pw_name for user in pwd.getpwall() if user.pw_gid == found.st_gid}
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
        is_private = owner == group.gr_name or having == {owner}
    except KeyError:
        owner, is_private = "", found.st_gid == found.st_uid
    return "" if is_private and not set(group.gr_mem) - {owner} else group.gr_name
