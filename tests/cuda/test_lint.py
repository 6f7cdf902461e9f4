"""The lint of machine code, against listings written by hand: each kind of hazard planted, and what looks like one and is none."""

from __future__ import annotations

import pytest

from kernel_checks import sass
from kernel_checks.lint import Hazard, InFlight, UnknownOpcode, flow, in_flight, skipped
from kernel_checks.lint.operands import Access, access, product

# The product of most of these: D is R24 to R55, A is R4 to R7.
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def listing(*lines: str) -> tuple[sass.Instruction, ...]:
    """The instructions of a listing, 16 bytes apart, in which "name:" stands in front of an instruction that others jump to."""
    labels, text = dict[str, int](), list[str]()
    for line in lines:
        label, colon, rest = line.partition(": ")
        if colon:
            labels[label] = len(text) * 16
        text.append(rest if colon else line)
    for label, address in labels.items():
        text = [line.replace(f"<{label}>", f"0x{address:x}") for line in text]
    body = "\n".join(f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(text))
    ((_, instructions),) = sass._functions(f"\t\tFunction : kitsune_region\n{body}\n")
    assert len(instructions) == len(text)
    return instructions


def run(*lines: str) -> InFlight:
    return in_flight(flow(listing(*lines, "EXIT")))


def found(*lines: str) -> list[tuple[int, str, tuple[str, ...]]]:
    """Where in the listing (by line), what and to which registers."""
    return [(h.address // 16, h.what, h.registers) for h in run(*lines).hazards]


@pytest.mark.parametrize(
    "touch, what, registers",
    [
        ("MOV R6, RZ", "writes A", ("R6",)),
        ("@!P1 IMAD.MOV.U32 R6, RZ, RZ, R90", "writes A", ("R6",)),
        ("LDG.E.128.CONSTANT R4, desc[UR12][R96.64]", "writes A", ("R4", "R5", "R6", "R7")),
        ("LDS.64 R2, [R90]", "", ()),
        ("LDS.64 R6, [R90+UR4]", "writes A", ("R6", "R7")),
        ("CS2R R6, SRZ", "writes A", ("R6", "R7")),
        ("CS2R.32 R6, SR_CLOCKLO", "writes A", ("R6",)),
        ("IMAD.WIDE.U32 R6, R90, 0x2, R92", "writes A", ("R6", "R7")),
        ("LDSM.16.MT88.4 R2, [R90]", "writes A", ("R4", "R5")),
        ("IADD3 R6, P4, R90, R91, RZ", "writes A", ("R6",)),
        ("LOP3.LUT P0, R7, R90, 0x1, RZ, 0xc0, !PT", "writes A", ("R7",)),
        ("SHFL.BFLY PT, R5, R90, 0x1, 0x1f", "writes A", ("R5",)),
        ("ATOMG.E.ADD.STRONG.GPU PT, R4, desc[UR4][R90.64], R91", "writes A", ("R4",)),
        ("HMMA.16816.F32.BF16 R0, R80, R84, R88", "", ()),
        ("HMMA.16816.F32.BF16 R4, R80, R84, R88", "writes A", ("R4", "R5", "R6", "R7")),
        ("FADD R60, R4, R5", "", ()),  # A is only read by the tensor core
        ("STG.E.128 desc[UR8][R90.64], R4", "", ()),
        ("FADD R24, R60, R61", "writes the sum", ("R24",)),
        ("FADD R60, R55, R61", "reads the sum", ("R55",)),
        ("FADD R60, R56, R61", "", ()),
        ("STS.128 [R90], R52", "reads the sum", ("R52", "R53", "R54", "R55")),
        ("STG.E.64 desc[UR8][R90.64+0x10], R22", "", ()),
        ("LDG.E.U16 R60, desc[UR8][R54.64]", "reads the sum", ("R54", "R55")),
        ("F2FP.BF16.F32.PACK_AB R60, R25, R24", "reads the sum", ("R24", "R25")),
        ("HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0", "", ()),  # sums into one accumulator are in order
        (
            "HGMMA.64x32x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0",
            "adds into a part of the sum",
            tuple(f"R{r}" for r in range(24, 40)),
        ),
        ("HGMMA.64x64x16.F32.BF16 R80, R24, gdesc[UR8], R80, gsb0", "multiplies with the sum", ("R24", "R25", "R26", "R27")),
        ("HGMMA.64x8x16.F32.BF16 R4, gdesc[UR8], R4, gsb0", "adds into A", ("R4", "R5", "R6", "R7")),
        ("HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0", "", ()),
        ("R2UR UR4, R6", "", ()),
        ("BAR.SYNC.DEFER_BLOCKING R6, 0x80", "", ()),
        ("ISETP.NE.AND P0, PT, R24, RZ, PT", "reads the sum", ("R24",)),
        ("UMOV UR24, 0x4", "", ()),
        ("SYNCS.ARRIVE.TRANS64 RZ, [R24+URZ+0x18], R2", "reads the sum", ("R24",)),
    ],
)
def test_a_touch_between_issue_and_wait(touch: str, what: str, registers: tuple[str, ...]) -> None:
    assert found(PRODUCT, touch, WAIT) == ([(1, what, registers)] if what else [])
    if "HGMMA" not in touch:
        assert found(touch, PRODUCT, WAIT) == []
        assert found(PRODUCT, WAIT, touch) == []


def test_a_hazard_is_told_in_a_sentence() -> None:
    (hazard,) = run(PRODUCT, "STS.128 [R90], R52", WAIT).hazards
    assert hazard == Hazard(16, "reads the sum", ("R52", "R53", "R54", "R55"), "STS.128 [R90], R52", 0)
    assert str(hazard) == "0x10: STS.128 [R90], R52 reads the sum R52, R53, R54, R55 of the HGMMA at 0x0, which is in flight"


def test_a_wait_leaves_the_newest_groups_in_flight() -> None:
    lines = (
        PRODUCT,
        "HGMMA.64x64x16.F32.BF16 R80, R8, gdesc[UR8], R80",
        "HGMMA.64x64x16.F32.BF16 R80, R12, gdesc[UR8], R80, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "MOV R4, RZ",  # of the first group, which is over
        "MOV R24, RZ",
        "MOV R8, RZ",  # of the second
        WAIT,
        "MOV R12, RZ",
    )
    assert found(*lines) == [(6, "writes A", ("R8",))]
    first, last = run(*lines).waits
    assert (first.leaves, first.arriving, first.arriving_products, first.left_products) == (1, (2,), (3,), (2,))
    assert (last.leaves, last.arriving, last.arriving_products, last.left_products) == (0, (1,), (2,), (0,))
    assert run(*lines).most_left == 2


def test_groups_without_a_product_are_counted() -> None:
    assert run(PRODUCT, WAIT).empty == 0
    assert run(PRODUCT, "HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0", WAIT).empty == 1


def test_a_group_that_is_not_closed_is_not_waited_for() -> None:
    assert found(PRODUCT.removesuffix(", gsb0"), WAIT, "MOV R5, RZ") == [
        (2, "writes A", ("R5",)),
        (3, "ends the thread without a wait for", tuple(f"R{r}" for r in range(24, 56))),
    ]


def test_a_hazard_across_a_loops_back_edge() -> None:
    body = ("loop: MOV R6, R90", PRODUCT, "@P0 BRA <loop>", WAIT)
    assert found(*body) == [(0, "writes A", ("R6",))]
    open_group = [line.removesuffix(", gsb0") for line in body]
    assert found(*open_group)[0] == (0, "writes A", ("R6",))
    assert found("loop: MOV R6, R90", PRODUCT, WAIT, "@P0 BRA <loop>") == []
    # Products that take turns: what a wait leaves in flight is over one iteration later.
    turns = (
        "loop: MOV R6, R120",
        PRODUCT,
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "MOV R10, R120",
        "HGMMA.64x64x16.F32.BF16 R80, R8, gdesc[UR8], R80, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, {}",
        "@P0 BRA <loop>",
        WAIT,
    )
    assert found(*(line.format("0x1") for line in turns)) == []
    assert found(*(line.format("0x2") for line in turns)) == [(0, "writes A", ("R6",))]


def test_a_hazard_in_one_branch_only() -> None:
    lines = (
        PRODUCT,
        "@P0 BRA <other>",
        "MOV R60, RZ",
        "BRA <wait>",
        "other: MOV R7, RZ",
        f"wait: {WAIT}",
        "MOV R7, RZ",
    )
    assert found(*lines) == [(4, "writes A", ("R7",))]


def test_a_wait_that_one_path_goes_around() -> None:
    assert found(PRODUCT, "@P0 BRA <after>", WAIT, "after: FADD R60, R24, R25", WAIT) == [(3, "reads the sum", ("R24", "R25"))]
    assert found(PRODUCT, f"@P0 {WAIT}", "FADD R60, R24, R25", WAIT) == [(2, "reads the sum", ("R24", "R25"))]
    (wait,) = run("@P0 BRA <wait>", PRODUCT, f"wait: {WAIT}").waits
    assert wait.arriving == (0, 1)


def test_code_that_is_never_reached_is_not_judged() -> None:
    assert found(PRODUCT, "BRA <wait>", "MOV R4, RZ", f"wait: {WAIT}") == []


def test_a_call_is_followed_and_returns_to_its_caller() -> None:
    lines = (
        PRODUCT,
        "CALL.REL.NOINC <sub>",
        WAIT,
        "CALL.REL.NOINC <sub>",
        "FADD R60, R24, R25",  # after the second call nothing is in flight
        "EXIT",
        "sub: MUFU.RCP R{}, R61",
        "RET.REL.NODEC R62 0x0",
    )
    assert found(*(line.replace("R{}", "R60") for line in lines)) == []
    assert found(*(line.replace("R{}", "R4") for line in lines)) == [(6, "writes A", ("R4",))]


def test_pointwise_work_beside_a_product_is_counted() -> None:
    result = run(
        "FADD R60, R61, R62", PRODUCT, "FMUL R60, R60, R60", "MUFU.EX2 R60, R60", WAIT, "F2FP.BF16.F32.PACK_AB R60, R25, R24"
    )
    assert (result.pointwise, result.hidden) == (4, 2)
    # Not where one path has nothing in flight.
    assert run("@P0 BRA <on>", PRODUCT, "on: FMUL R60, R60, R60", WAIT).hidden == 0


def test_products_of_one_sum_that_wait_for_each_other_are_serialised() -> None:
    again = PRODUCT.replace("R4", "R8")
    assert run(PRODUCT, WAIT, again, WAIT).serialised
    assert not run(PRODUCT, again, WAIT).serialised
    other = again.replace("R24", "R80")
    assert not run(PRODUCT, WAIT, other, WAIT).serialised  # a sum of one product each: there is nothing to wait less for


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("BRX R4 -0x10", "the target of this jump is not known"),
        ("@P0 BRA 0x12340", "where no instruction is"),
        ("RET.REL.NODEC R4 0x0", "nothing was called"),
    ],
)
def test_what_cannot_be_followed_is_an_error(line: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        run(PRODUCT, line, WAIT)


def test_an_unknown_opcode_is_an_error() -> None:
    with pytest.raises(UnknownOpcode, match="FROB"):
        run(PRODUCT, "FROB.X R0, R1", WAIT)


def test_threads_meet_behind_their_barrier() -> None:
    assert found("BSSY B0, <join>", PRODUCT, WAIT, "BSYNC B0", "join: MOV R4, RZ") == []
    with pytest.raises(ValueError, match="in front of where its threads meet"):
        run("BSSY B0, <join>", "BSYNC B0", PRODUCT, f"join: {WAIT}")


def test_predicates_are_read_and_written() -> None:
    one = lambda line: access(listing(line)[0])  # noqa: E731
    assert one("@!P1 FSEL R3, R4, RZ, P2").reads == {"R4", "P1", "P2"}
    assert one("ISETP.GT.U32.AND.EX P0, PT, R3, RZ, PT, P3").writes == {"P0"}
    assert one("ISETP.GT.U32.AND.EX P0, PT, R3, RZ, PT, P3").reads == {"R3", "P3"}
    assert one("FSETP.GT.AND P5, P6, R70, RZ, PT").writes == {"P5", "P6"}
    assert one("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x8], R3").writes == {"P0"}
    assert one("R2P PR, R0.B1, 0x7f").writes == {f"P{i}" for i in range(7)}
    assert one("R2P PR, R0, 0x6").writes == {"P1", "P2"}
    assert one("P2R R74, PR, RZ, 0x2") == Access(frozenset({"P1"}), frozenset({"R74"}))
    assert one("P2R R0, PR, RZ, 0x7f") == access(listing("P2R R0, PR, RZ, 0x7f")[0])
    assert one("IADD3.X R5, P1, P2, R6, R7, RZ, P3, !PT").writes == {"R5", "P1", "P2"}
    assert one("IADD3.X R5, P1, P2, R6, R7, RZ, P3, !PT").reads == {"R6", "R7", "P3"}
    assert one("PLOP3.LUT P0, PT, P1, P2, PT, 0x80, 0x0").reads == {"P1", "P2"}
    assert one("R2UR.OR P1, UR23, R5").writes == {"P1"}
    assert product(listing("FADD R0, R1, R2")[0]) is None


# --- instructions for whole warps

TID = "S2R R0, SR_TID.X"


def skips(*lines: str) -> list[tuple[int, int]]:
    """(line of the instruction, line of what makes threads skip it)."""
    return [(s.address // 16, s.branch // 16) for s in skipped(flow(listing(*lines, "EXIT")))]


@pytest.mark.parametrize(
    "aligned", [PRODUCT, "WARPGROUP.ARRIVE", "BAR.SYNC.DEFER_BLOCKING 0x1, 0x80", "USETMAXREG.DEALLOC.CTAPOOL 0x18"]
)
@pytest.mark.parametrize(
    "condition, differs",
    [
        (("ISETP.NE.AND P0, PT, R0, RZ, PT",), True),
        (("ISETP.GT.U32.AND P0, PT, R0, 0x7f, PT",), False),  # the first four warps and the others
        (("ISETP.GE.U32.AND P0, PT, R0, 0x80, PT",), False),
        (("ISETP.GT.U32.AND P0, PT, R0, 0x80, PT",), True),
        (("ISETP.NE.AND P0, PT, R0, 0x80, PT",), True),
        (("SHF.R.U32.HI R1, RZ, 0x7, R0", "ISETP.NE.AND P0, PT, R1, RZ, PT"), False),
        (("SHF.R.U32.HI R1, RZ, 0x4, R0", "ISETP.NE.AND P0, PT, R1, RZ, PT"), True),
        (("LEA.HI R1, R0, 0xffffffff, RZ, 0x19", "ISETP.NE.AND P0, PT, R1, RZ, PT"), False),  # a warpgroup's, less one
        (("LEA.HI R1, R0, 0xffffffff, RZ, 0x1c", "ISETP.NE.AND P0, PT, R1, RZ, PT"), True),
        (("LEA.HI R1, R0, R0, RZ, 0x19", "ISETP.NE.AND P0, PT, R1, RZ, PT"), True),
        (("LEA.HI R1, R0, RZ, R0, 0x19", "ISETP.NE.AND P0, PT, R1, RZ, PT"), True),
        (("LOP3.LUT R1, R0, 0xffffff80, RZ, 0xc0, !PT", "ISETP.NE.AND P0, PT, R1, RZ, PT"), False),
        (("LOP3.LUT R1, R0, 0x1f, RZ, 0xc0, !PT", "ISETP.NE.AND P0, PT, R1, RZ, PT"), True),
        (("VIADD R1, R0, 0xffffff80", "SHF.R.U32.HI R1, RZ, 0x7, R1", "ISETP.NE.AND P0, PT, R1, RZ, PT"), False),
        (("VIADD R1, R0, 0x1", "SHF.R.U32.HI R1, RZ, 0x7, R1", "ISETP.NE.AND P0, PT, R1, RZ, PT"), True),
        (("SHFL.IDX PT, R1, R0, RZ, 0x1f", "ISETP.NE.AND P0, PT, R1, RZ, PT"), False),
        (("SHFL.IDX PT, R1, R0, R0, 0x1f", "ISETP.NE.AND P0, PT, R1, RZ, PT"), True),
        (("S2R R1, SR_CTAID.X", "ISETP.NE.AND P0, PT, R1, RZ, PT"), False),
        (("LDC R1, c[0x0][0x210]", "ISETP.NE.AND P0, PT, R1, RZ, PT"), False),
        (("LDC R1, c[0x0][R0+0x210]", "ISETP.NE.AND P0, PT, R1, RZ, PT"), True),
        (("LDG.E.STRONG.GPU R1, desc[UR4][R2.64]", "ISETP.NE.AND P0, PT, R1, RZ, PT"), True),  # threads read at different times
        (("MOV R4, RZ", "STL [R1+0x8], R4", "LDL R5, [R1+0x8]", "ISETP.NE.AND P0, PT, R5, RZ, PT"), False),
        (("STL [R1+0x8], R0", "LDL R5, [R1+0x8]", "ISETP.NE.AND P0, PT, R5, RZ, PT"), True),
        (("ELECT P0, URZ, PT",), True),
    ],
)
def test_a_branch_that_some_threads_of_a_warp_take(aligned: str, condition: tuple[str, ...], differs: bool) -> None:
    lines = (TID, *condition, "@P0 BRA <on>", aligned, "on: MOV R90, RZ")
    assert skips(*lines) == ([(len(lines) - 2, len(lines) - 3)] if differs else [])
    # Where the branches meet again all threads come by.
    assert skips(TID, *condition, "@P0 BRA <on>", "MOV R90, RZ", f"on: {aligned}") == []
    assert skips(TID, *condition, f"@P0 {aligned}") == ([(len(condition) + 1, len(condition) + 1)] if differs else [])


@pytest.mark.parametrize("called", [False, True])
def test_branches_meet_in_a_loop_that_only_a_predicated_end_leaves(called: bool) -> None:
    leave, call = ("RET.REL.NODEC R62 0x0", ("CALL.REL.NOINC <sub>", "EXIT")) if called else ("EXIT", ())
    lines = (*call, f"sub: {TID}", "ISETP.NE.AND P0, PT, R0, RZ, PT", "loop: @P0 BRA <on>")
    end = ("LDC R1, c[0x0][0x210]", "ISETP.NE.AND P1, PT, R1, RZ, PT", f"@P1 {leave}", "BRA <loop>")
    assert skips(*lines, "MOV R90, RZ", f"on: {PRODUCT}", *end) == []
    branch = len(lines) - 1
    assert skips(*lines, PRODUCT, f"on: {PRODUCT}", *end) == [(branch + 1, branch)]


def test_what_only_some_threads_write_differs() -> None:
    lines = (TID, "MOV R4, RZ", "ISETP.NE.AND P0, PT, R0, RZ, PT", "{}", "ISETP.NE.AND P1, PT, R4, RZ, PT", f"@P1 {PRODUCT}")
    assert skips(*(line.format("@P0 MOV R4, 0x1") for line in lines)) == [(5, 5)]
    assert skips(*(line.format("@!PT MOV R4, 0x1") for line in lines)) == []
    branch = (
        TID,
        "MOV R4, RZ",
        "ISETP.NE.AND P0, PT, R0, RZ, PT",
        "@P0 BRA <on>",
        "MOV R4, 0x1",
        "on: ISETP.NE.AND P1, PT, R4, RZ, PT",
    )
    assert skips(*branch, f"@P1 {PRODUCT}") == [(6, 6)]


@pytest.mark.parametrize(
    "between, predicate, differs",
    [
        ((), "@P0", False),
        ((), "@!P0", True),  # those threads have not written it
        ((), "", True),
        (("ISETP.NE.AND P0, PT, R7, RZ, PT",), "@P0", True),  # the predicate is another one
        (("@P0 IADD3 R4, R0, R4, RZ",), "@P0", True),
        (("@P0 IADD3 R4, R4, 0x1, RZ",), "@P0", False),
    ],
)
def test_what_is_written_and_read_under_one_predicate(between: tuple[str, ...], predicate: str, differs: bool) -> None:
    """A register that had a number of the thread's, and gets one that is equal under a predicate that is equal."""
    equal = ("S2R R7, SR_CTAID.X", "ISETP.GT.AND P0, PT, R7, RZ, PT", "MOV R5, RZ")
    lines = (TID, "MOV R4, R0", *equal, "@P0 MOV R4, R7", *between, f"{predicate} IADD3 R5, R4, 0x1, RZ".strip())
    last = ("ISETP.NE.AND P1, PT, R5, RZ, PT", f"@P1 {PRODUCT}")
    assert skips(*lines, *last) == ([(len(lines) + 1,) * 2] if differs else [])


def test_no_code_is_no_finding() -> None:
    assert in_flight(flow(())) == InFlight((), (), False, 0, 0, 0)
    assert skipped(flow(())) == ()


def test_a_loop_that_threads_leave_at_different_times() -> None:
    lines = (TID, "loop: {}", "VIADD R0, R0, 0xffffffff", "ISETP.NE.AND P0, PT, R0, RZ, PT", "@P0 BRA <loop>", PRODUCT)
    assert skips(*(line.format("WARPGROUP.ARRIVE") for line in lines)) == [(1, 4)]
    assert skips(*(line.format("MOV R90, RZ") for line in lines)) == []


@pytest.mark.parametrize("bit, differs", [(0x1, True), (0x8, False)])
def test_predicates_that_are_kept_as_bits_of_a_register_are_told_apart(bit: int, differs: bool) -> None:
    kept = (
        TID,
        "MOV R60, RZ",
        "ISETP.NE.AND P6, PT, R0, RZ, PT",  # differs between threads
        "LOP3.LUT R60, R60, 0xfffffffe, RZ, 0xc0, !PT",
        "@P6 LOP3.LUT R60, R60, 0x1, RZ, 0xfc, !PT",
        "ISETP.GT.U32.AND P6, PT, R0, 0x7f, PT",  # the first four warps and the others
        "LOP3.LUT R60, R60, 0xfffffff7, RZ, 0xc0, !PT",
        "@P6 LOP3.LUT R60, R60, 0x8, RZ, 0xfc, !PT",
    )
    tested = (f"LOP3.LUT P5, RZ, R60, {bit:#x}, RZ, 0xc0, !PT", f"@P5 {PRODUCT}")
    assert skips(*kept, *tested) == ([(9, 9)] if differs else [])
    # The register as a whole is as different as any of its bits; and what writes it as a whole writes all of them.
    assert skips(*kept, "ISETP.NE.AND P5, PT, R60, RZ, PT", f"@P5 {PRODUCT}") == [(9, 9)]
    assert skips(*kept, "MOV R60, R0", *tested) == [(10, 10)]
    assert skips(*kept, "MOV R60, RZ", *tested) == []
    assert (
        skips(*kept, "MOV R60, R0", "ISETP.GT.U32.AND P5, PT, R60, 0x7f, PT", f"@P5 {PRODUCT}") == []
    )  # four warps and the others


def test_calls_without_end_are_an_error_and_no_endless_walk() -> None:
    with pytest.raises(ValueError, match="calls that do not return"):
        run(PRODUCT, "on: CALL.REL.NOINC <on>", "EXIT")


BARRIER = "BAR.SYNC.DEFER_BLOCKING 0x1, 0x80"
SUB = ("sub: MUFU.RCP R60, R61", "RET.REL.NODEC R62 0x0")


def test_threads_that_call_come_back_to_behind_their_own_call() -> None:
    """Some threads of a warp take the slow path of a division, and all of them meet behind it, whoever else calls it."""
    some = (TID, "ISETP.NE.AND P0, PT, R0, 0x5, PT", "@P0 BRA <on>", "CALL.REL.NOINC <sub>", f"on: {BARRIER}")
    assert skips(*some, "CALL.REL.NOINC <sub>", "EXIT", *SUB) == []


def test_what_is_called_by_some_threads_runs_in_some_threads() -> None:
    sub = (f"sub: {BARRIER}", SUB[1])
    condition = (TID, "ISETP.NE.AND P0, PT, R0, 0x5, PT")
    assert skips(*condition, "@P0 BRA <on>", "CALL.REL.NOINC <sub>", "on: EXIT", *sub) == [(5, 2)]
    assert skips(*condition, "@P0 CALL.REL.NOINC <sub>", "EXIT", *sub) == [(4, 2)]
    assert skips(*condition, "CALL.REL.NOINC <sub>", "EXIT", *sub) == []


def test_a_call_keeps_what_it_does_not_write() -> None:
    """A register that is equal here and differs at another call of the same code is equal behind this call."""
    lines = ("LDC R4, c[0x0][0xc]", "CALL.REL.NOINC <sub>", "ISETP.NE.AND P1, PT, R4, RZ, PT", "@P1 BRA <on>", BARRIER)
    other = ("on: S2R R4, SR_TID.X", "CALL.REL.NOINC <sub>", "EXIT")
    assert skips(*lines, *other, *SUB) == []
    assert skips(*lines, *other, "sub: S2R R4, SR_TID.X", SUB[1]) == [(4, 3)]
