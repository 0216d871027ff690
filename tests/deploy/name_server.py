"""A name server for the pods of a test: an address for each name of a JSON file.

    python -m tests.deploy.name_server 10.200.0.1 names.json

It reads the file again for each query, so a test can change it. The messages are those of RFC 1035.
"""

import json
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

_HEADER_BYTES = 12
_ADDRESS = 1  # The type of a query for an IPv4 address, and the class of the internet.
_FOUND, _UNKNOWN = 0x8180, 0x8183  # Flags of an answer.
_NAME_OF_QUESTION = 0xC00C  # A pointer to the first name of the message.


def answer(query: bytes, addresses: Mapping[str, str]) -> bytes:
    """The answer to a query with one question, which no resolver may keep."""
    labels, at = [], _HEADER_BYTES
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode())
        at += 1 + length
    question = query[_HEADER_BYTES : at + 5]
    (kind,) = struct.unpack_from(">H", query, at + 1)
    address = addresses.get(".".join(labels).lower())
    record = b""
    if address and kind == _ADDRESS:
        fields = struct.pack(">HHHIH", _NAME_OF_QUESTION, _ADDRESS, _ADDRESS, 0, 4)
        record = fields + socket.inet_aton(address)
    counts = struct.pack(">HHHH", 1, bool(record), 0, 0)
    flags = struct.pack(">H", _FOUND if address else _UNKNOWN)
    return query[:2] + flags + counts + question + record


def main() -> None:
    """Answers until this process is killed."""
    address, path = sys.argv[1], Path(sys.argv[2])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        while True:
            query, sender = server.recvfrom(512)
            server.sendto(answer(query, json.loads(path.read_text())), sender)


if __name__ == "__main__":
    main()
