"""The minimal programs for racecheck, and parsing of its output, without a GPU."""

import pytest

# Output format of compute-sanitizer 2025.3.
OUTPUT = """========= COMPUTE-SANITIZER
numbers Named_blocks_nobody 0
========= Error: Potential RAW hazard detected at __shared__ 0x400 in block (2,0,0) :
=========     Write Thread (64,0,0) at Arrive_cluster_server+0x3d0
=========     Read Thread (32,0,0) at Arrive_cluster_server+0x420
=========     Current Value : 2
=========
========= Error: Potential RAW hazard detected at __shared__ 0x401 in block (2,0,0) :
=========     Write Thread (64,0,0) (block rank 1) at Arrive_cluster_server+0x3d0
=========     Read Thread (63,0,0) (block rank 2) at Arrive_cluster_server+0x420
=========     Current Value : 0
=========
========= Error: Potential WAR hazard detected at __shared__ 0x401 in block (2,0,0) :
=========     Read Thread (0,0,0) at Arrive_cluster_server+0x420
=========     Write Thread (64,0,0) at Arrive_cluster_server+0x3d0
=========     Current Value : 0
=========
numbers Arrive_cluster_server 0
========= Warning: (Warp Level Programming) Potential RAW hazard detected (invalid memcpy_async \
synchronization) at __shared__ 0x424 in block (1,0,0) :
=========     Write Thread (33,0,0) at CopyNothing_blocks_nobody+0x350
=========     Read Thread (32,0,0) at CopyNothing_blocks_nobody+0x3a0
=========     Current Value : 1
=========
numbers CopyNothing_blocks_nobody 7
========= RACECHECK SUMMARY: 4 hazards displayed (3 errors, 1 warning)
"""


@pytest.fixture
def module(bench):
    return bench("racecheck_patterns")


def test_hazards_by_kind_and_warps(module):
    found = module.hazards(OUTPUT)
    assert found == {
        "Arrive_cluster_server": {"RAW 2>1": 2, "WAR 0>2": 1},
        "CopyNothing_blocks_nobody": {"RAW warning 1>1": 1},
    }


def test_the_source_says_what_its_patterns_are(module):
    text = module.SOURCE.read_text()
    found = {pattern.name: pattern for pattern in module.patterns(text)}
    assert len(found) == text.count("ROUND {") == 20
    # Incorrect programs are named after what they lack.
    assert {name for name, p in found.items() if not p.right} == {
        name for name in found if name.endswith(("Nothing", "Early"))
    }
    assert {name for name, p in found.items() if p.only_cluster} == {
        name for name in found if name.startswith(("Remote", "Async"))
    }


def test_each_way_to_run_a_pattern_is_a_kernel(module):
    arrive = module.Pattern("Arrive", True, False, "")
    text = module.with_kernels("", arrive)
    for name in (*arrive.launches(False), *arrive.launches(True)):
        assert text.count(f"void {name}(Args args)") == 1
    assert "run<Arrive, 1, 2>(args)" in text
    assert module.Pattern("Async", True, True, "").launches(False) == []


def lines_of(module, output, *patterns):
    lines, well = module.table(patterns, output)
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[1:]}, well


def test_the_table(module):
    arrive = module.Pattern("Arrive", True, False, "who writes only arrives")
    ran = "".join(f"numbers {n} 0\n" for c in (False, True) for n in arrive.launches(c))
    lines, well = lines_of(module, ran + OUTPUT, arrive)
    assert well
    assert lines["right:"] == "who writes only arrives [Arrive]"
    assert lines["blocks"] == "- / - / -"
    assert lines["cluster"] == "- / RAW 2>1 x2, WAR 0>2 x1 / -"


def test_a_right_program_with_wrong_numbers_is_no_evidence(module):
    ran = "".join(f"numbers Async_cluster_{who} 5\n" for who in module.LATE)
    words = "a pattern"
    lines, well = lines_of(module, ran, module.Pattern("Async", True, True, words))
    assert not well
    assert "5 wrong numbers" in lines["cluster"]
    # An incorrect program should be reported; one that did not run proves nothing either.
    assert lines_of(module, ran, module.Pattern("Async", False, True, words))[1]
    lines, well = lines_of(module, "", module.Pattern("Async", False, True, words))
    assert not well
    assert lines["cluster"].startswith("did not run")
