"""MODEL_DIR/membership: which hosts train together, agreed on through files.

    membership = Membership(Path("/shared/run"), addresses, own=0)
    membership.group()                          # the newest
    membership.propose(group, members)          # False if there is a newer one already
    with Watcher(membership, on_snapshot):      # a thread: on_snapshot(snapshot) about every second
        ...

| file | contents | written by |
| --- | --- | --- |
| group-00000003.json | the addresses of all hosts, and the members of generation 3 | a launcher |
| host-2.json | HostRecord: that the launcher runs, and which hosts it reaches | that of host 2 |

A file of a group is complete when it gets its name, and gets it in one operation that succeeds once
(a hard link). So there is one group of each generation, and all launchers read the same. Two groups
never train at the same time: docs/failures.md has the reasons.

A host reaches another one if a connection to its task is accepted or refused: a refusal comes from
a host without a task at that moment. Nothing comes from a host that is off or cut off.
"""

import concurrent.futures
import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from data.system.files import partial_name
from strategies.cluster.peers import is_reachable
from strategies.cluster.tf_config import ClusterError
from trainer.local.group_rules import Group, HostRecord, Snapshot
from trainer.local.task_logs import say
from trainer.run_files import MEMBERSHIP, newest_generation, progress_of

_POLL_SECS = 1.0
_NUM_PARALLEL = 128  # Hosts that are tried at the same time: one that is off takes a second.
_RECORD_BYTES = 1024  # Records of equal length are overwritten in one piece.


class Membership:
    """The files, read and written by one host. All methods raise OSError if the storage fails."""

    def __init__(self, model_dir: Path, addresses: Sequence[str], own: int) -> None:
        """`addresses` are those of the tasks of all hosts, in the order of --hosts."""
        self.model_dir = model_dir
        self.addresses = tuple(addresses)
        self.own = own
        self._directory = model_dir / MEMBERSHIP

    def group(self) -> Group:
        """Returns the newest group.

        Raises ClusterError if it has another list of hosts.
        """
        generation = newest_generation(self.model_dir)
        if not generation:
            return Group(0, frozenset(range(len(self.addresses))))
        path = self._path_of(generation)
        try:
            document = json.loads(path.read_text())
            hosts = list(map(str, document["hosts"]))
            members = frozenset(map(hosts.index, document["members"]))
        except (ValueError, LookupError, TypeError) as error:
            raise OSError(
                f"{path} is damaged: {error!r}. If no launcher runs any more, type: "
                f"rm -r {self._directory}"
            ) from error
        if hosts != list(self.addresses):
            raise ClusterError(
                f"{path} is of --hosts={','.join(hosts)}. Received: "
                f"--hosts={','.join(self.addresses)}. Give every launcher the same list; or, if no "
                f"launcher of the former list runs any more, type: rm -r {self._directory}"
            )
        return Group(generation, members)

    def propose(self, group: Group, members: frozenset[int]) -> bool:
        """Makes `members` the group after `group`; returns False if another launcher was faster.

        Raises ClusterError if the file system has no hard links.
        """
        document = {
            "hosts": self.addresses,
            "members": [self.addresses[host] for host in sorted(members)],
            "written_by": self.addresses[self.own],
        }
        return self._write_once(self._path_of(group.generation + 1), json.dumps(document))

    def check(self) -> None:
        """Raises ClusterError if `propose` cannot write, or if the file of the group is damaged."""
        probe = Path(partial_name(str(self._directory / "probe")))
        try:
            self._write_once(probe, "")
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise ClusterError(
                f"The hosts agree who trains through files in {self._directory}, where this host "
                f"cannot write: {error.strerror}. Make it writable, or give another --model_dir."
            ) from None
        try:
            self.group()
        except OSError as error:
            raise ClusterError(str(error)) from None

    def _write_once(self, path: Path, content: str) -> bool:
        """Makes the complete file `path` in one operation; returns False if it exists already."""
        self._directory.mkdir(parents=True, exist_ok=True)
        partial = Path(partial_name(str(self._directory / "proposal")))
        with partial.open("x") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            raise ClusterError(
                f"--min_workers needs hard links, which the file system of {self.model_dir} does "
                "not have. Give --model_dir on another file system, or leave --min_workers out."
            ) from None
        finally:
            partial.unlink(missing_ok=True)
        return True

    def write(self, record: HostRecord) -> None:
        """Writes the record of this host."""
        self._directory.mkdir(parents=True, exist_ok=True)
        document = {**record._asdict(), "reaches": sorted(record.reaches)}
        # In place: a file system over the network may keep showing a file that was replaced.
        content = json.dumps(document).ljust(_RECORD_BYTES).encode()
        fd = os.open(self._path_of_host(self.own), os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(fd, content, 0)
            os.ftruncate(fd, len(content))
        finally:
            os.close(fd)

    def records(self) -> dict[int, HostRecord]:
        """Returns the record of each host that has one, except records that are incomplete."""
        found = {}
        for host in range(len(self.addresses)):
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
                record = HostRecord(**json.loads(self._path_of_host(host).read_text()))
                found[host] = record._replace(reaches=frozenset(record.reaches))
        return found

    def _path_of(self, generation: int) -> Path:
        return self._directory / f"group-{generation:08d}.json"

    def _path_of_host(self, host: int) -> Path:
        return self._directory / f"host-{host}.json"


@dataclass
class Watcher:
    """A thread that writes this host's record, and reads all records, about every second.

    If the storage fails or hangs, there is no snapshot: this launcher decides nothing, and the
    others consider this host away.
    """

    membership: Membership
    on_snapshot: Callable[[Snapshot], None]  # Called on the thread.
    identity: str = ""  # For the record.

    def __post_init__(self) -> None:
        self._start = os.urandom(8).hex()
        self._beat = 0
        self._reaches: frozenset[int] = frozenset()
        self._is_over = threading.Event()
        self._lock = threading.Lock()  # Of the record: the last one stays.
        self._thread = threading.Thread(target=self._watch, name="membership", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join(timeout=_POLL_SECS)

    def end(self, exit_code: int) -> None:
        """Writes down that this launcher ends with `exit_code`."""
        self.__exit__()
        # The thread may still be there, if it waits for a connection.
        with self._lock, contextlib.suppress(OSError):  # The others notice it by the silence.
            self._write(ended=exit_code)

    def _write(self, ended: int | None = None) -> HostRecord:
        self._beat += 1
        record = HostRecord(self._start, self._beat, self._reaches, ended, self.identity)
        self.membership.write(record)
        return record

    def _watch(self) -> None:
        failure = ""
        with concurrent.futures.ThreadPoolExecutor(_NUM_PARALLEL) as pool:
            while not self._is_over.is_set():
                self._reaches = self._reached(pool)
                now = time.monotonic()
                try:
                    with self._lock:
                        if self._is_over.is_set():
                            return
                        own = self._write()
                    records: Mapping[int, HostRecord] = {
                        **self.membership.records(),
                        self.membership.own: own,
                    }
                    saved, _ = progress_of(str(self.membership.model_dir))
                    self.on_snapshot(Snapshot(now, records, saved))
                    failure = ""
                except OSError as error:
                    if str(error) != failure:
                        say(f"The records of the hosts cannot be read or written: {error}")
                    failure = str(error)
                self._is_over.wait(_POLL_SECS)

    def _reached(self, pool: concurrent.futures.ThreadPoolExecutor) -> frozenset[int]:
        own, addresses = self.membership.own, self.membership.addresses
        others = [host for host in range(len(addresses)) if host != own]
        found = pool.map(is_reachable, (addresses[host] for host in others))
        return frozenset(host for host, answers in zip(others, found, strict=True) if answers)
