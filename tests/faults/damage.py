"""Faults in files: a changed digit, letter or byte, and truncation."""

import re


def faults(content, random, count):
    """Copies of a file's bytes with one fault each, and a description of the fault.

    Args:
        content: bytes of the file.
        random: a `random.Random`.
        count: number of faults of each kind.
    """

    def replaced(place, byte):
        return content[:place] + bytes([byte]) + content[place + 1 :]

    kinds = {"digit": rb"[0-9]", "letter": rb"[A-Za-z]"}
    for kind, pattern in kinds.items():
        places = [found.start() for found in re.finditer(pattern, content)]
        for place in random.sample(places, min(count, len(places))):
            old = content[place]
            choices = b"0123456789" if kind == "digit" else b"abcdefghijklmnopqrstuvwxyzABCDEFGHXYZ"
            new = random.choice([c for c in choices if c != old])
            yield f"{kind} at {place}: {chr(old)} -> {chr(new)}", replaced(place, new)
    for _ in range(count if content else 0):
        place = random.randrange(len(content))
        yield f"byte at {place}", replaced(place, content[place] ^ random.randrange(1, 256))
    for _ in range(count if content else 0):
        place = random.randrange(len(content))
        yield f"truncated to {place}", content[:place]
