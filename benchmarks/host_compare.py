"""Compares two recordings of host_bits.py."""

import json
import sys

before, after = (json.load(open(path)) for path in sys.argv[1:])
both = [case for case in after if case in before]
differ = [case for case in both if after[case] != before[case]]
print(f"{len(before)} and {len(after)} calls, {len(both)} in both, {len(differ)} differ")
for case in differ[:25]:
    names = before[case].keys() | after[case].keys()
    print(case, [n for n in names if before[case].get(n) != after[case].get(n)], after[case].get("error"))
