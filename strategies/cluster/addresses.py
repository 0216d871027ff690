"""Checks the text of an address, `host:port`.

parse_address(" Host-A:02222 ", "worker")       # "host-a:2222"
"""


def parse_address(given: object, job: str) -> str:
    """The address in its normal form. Raises ValueError, whose text continues a sentence."""
    if not isinstance(given, str):
        raise ValueError(
            f"must be a string, but is {kind_of(given)}: {given!r}. "
            'Write "host:port", for example "localhost:2222".'
        )
    host, colon, port = (part.strip() for part in given.strip().rpartition(":"))
    if fault := _fault_of_address(given.strip(), host, colon, port, job):
        raise ValueError(f"is {given!r}{fault}")
    return f"{host.lower()}:{int(port)}"


def _fault_of_address(address: str, host: str, colon: str, port: str, job: str) -> str | None:
    """The mistake in `address`, as the end of a message; None if it is valid."""
    has_brackets = host.startswith("[") and host.endswith("]")
    if "," in address:
        form = f'"{job}": ["a:1", "b:1"]'
        return f": several addresses in one string. Write a list, one for each task: {form}."
    if "/" in address:
        return '. It must be "host:port" alone, without a scheme or a path.'
    if not colon or (host.startswith("[") and not has_brackets):
        return f', without a port. Add one: "{address}:2222".'
    if ":" in host and not has_brackets:
        return f'. An IPv6 address needs brackets before the port: "[{host}]:{port}".'
    if host in ("", "[]"):
        own = f'"localhost:{port or 2222}"'
        return f", without a host. Other tasks must find this one: {own} on one machine."
    if any(character.isspace() for character in host):
        return ": the host has a space in it. Write one host for each task."
    try:
        host.encode("idna")
    except UnicodeError as error:
        return f", whose host is not a valid name: {error}. Correct it."
    if not is_index(port) or not 1 <= int(port) <= 65535:
        return f': {port!r} is not a port. Use a number from 1 to 65535: "{host}:2222".'
    return None


def is_index(text: str) -> bool:
    """Returns True if `text` is a number from 0."""
    return text.isascii() and text.strip().isdigit() and len(text) < 10


def kind_of(value: object) -> str:
    """What JSON calls the type of `value`."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
