"""A kernel of several phases as one ``.cu`` file.

Comes in: ``CallLayout`` and the kinds of the stages of each part. Goes out: CUDA C++. A part is a namespace with what a kernel of
its own would have. Parts with the same text are one namespace, and those of one phase a loop, so that the updates of thirty
parameters are compiled once. In the kernel each role runs the parts in their order. Between two parts the CTA meets, between two
phases the grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kitsune_jax.targets.cuda import print_kernel
from kitsune_jax.targets.cuda.call_layout import CallLayout, LaidOut, Source
from kitsune_jax.targets.cuda.sharing import Kind


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """The parts that run the same code, in the order of their phases. ``types``: of the pointers of its Params."""

    name: str
    text: str
    types: tuple[str, ...]
    members: tuple[LaidOut, ...]


def source(call: CallLayout, found: list[list[Kind]]) -> str:
    """The source of the kernel ``kitsune_region``."""
    groups, a = _groups(call, found), call.parts[0].layout.a
    phases = len({part.phase for part in call.parts})
    head = [
        f"// {call.name}: {len(call.parts)} parts in {phases} phases, {call.grid} CTAs, {a.lanes} lanes",
        "#define KITSUNE_PHASES 1",
        print_kernel.INCLUDES + f"constexpr int kLanes = {a.lanes};\n",
    ]
    spaces = [f"namespace {g.name} {{\n\n{g.text}\n}}  // namespace {g.name}\n" for g in groups]
    params = print_kernel.struct("Params", [f"{buffer};" for buffer in call.buffers])
    headers = print_kernel.struct("Headers", [f"{g.name}::Header {g.name}[{len(g.members)}];" for g in groups])
    given = [_given(call, g) for g in groups]
    return "\n".join([*head, *spaces, params, headers, *given, "}  // namespace\n", _entry(call, groups)])


def _groups(call: CallLayout, found: list[list[Kind]]) -> list[_Group]:
    """In the order of their first parts."""
    by_text: dict[str, list[int]] = {}
    for k, (part, kinds) in enumerate(zip(call.parts, found, strict=True)):
        by_text.setdefault(_text(part, kinds), []).append(k)
    return [
        _Group(f"part{members[0]}", text, _types(call.parts[members[0]]), tuple(call.parts[k] for k in members))
        for text, members in by_text.items()
    ]


def _text(part: LaidOut, kinds: list[Kind]) -> str:
    at = part.layout
    fields = [*print_kernel.params(at), *(f"void* out{k};" for k in range(len(at.program.outputs)))]
    fields += ["u8* workspace;", "u8* counters;", "KITSUNE_DEVICE u8* zeroed() const { return counters; }"]
    head = f"// {print_kernel.told(at)}\n{print_kernel.constants(at)}"
    return "\n".join([head, print_kernel.struct("Params", fields), *print_kernel.roles(at, kinds)])


def _types(part: LaidOut) -> tuple[str, ...]:
    given = [field.rsplit(" ", 1)[0] for field in print_kernel.params(part.layout)]
    return (*given, *("void*" for _ in part.layout.program.outputs), "u8*", "u8*")


# -- what a part is given


def _given(call: CallLayout, group: _Group) -> str:
    """Where the pointers of a part point to. What an earlier phase writes is read behind the barrier, so its pointer is opaque."""
    opaque = [any(s.made for s in sources) for sources in zip(*(m.sources for m in group.members), strict=True)]
    if len(group.members) == 1:
        lines, pointers = list[str](), [_pointer(call, s, t) for s, t in zip(group.members[0].sources, group.types, strict=True)]
        title = f"{group.name}::Params {group.name}_params(const Params& p)"
    else:
        lines = [_table(group)]
        pointers = [f"static_cast<{t}>(pointer(p, at[{k}]))" for k, t in enumerate(group.types)]
        pointers = [x.replace("static_cast<const float*>", "reinterpret_cast<const float*>") for x in pointers]
        title = f"{group.name}::Params {group.name}_params(const Params& p, u32 member)"
    pointers = [f"opaque({x})" if hidden else x for x, hidden in zip(pointers, opaque, strict=True)]
    lines += [f"KITSUNE_DEVICE {title} {{"]
    lines += [f"  const Pointer* const at = k{group.name.title()}[member].pointers;"] if len(group.members) > 1 else []
    return "\n".join([*lines, "  return {", *(f"      {x}," for x in pointers), "  };", "}\n"])


def _pointer(call: CallLayout, source: Source, type_: str) -> str:
    field = call.buffers[source.buffer].split()[-1]
    if source.byte:  # in the workspace, whose type is u8*
        return f"static_cast<{type_}>(p.{field} + {source.byte})"
    return f"p.{field}"


def _table(group: _Group) -> str:
    """For each member its CTAs and the pointers that it is given."""
    name = group.name.title()
    lines = [f"struct {name} {{", "  u32 first, ctas;", f"  Pointer pointers[{len(group.types)}];", "};"]
    lines.append(f"KITSUNE_CONSTANT {name} k{name}[] = {{")
    for m in group.members:
        pointers = ", ".join(f"{{{s.buffer}, {s.byte}}}" for s in m.sources)
        lines.append(f"    {{{m.first}, {m.ctas}, {{{pointers}}}}},")
    return "\n".join([*lines, "};"])


# -- the kernel


def _entry(call: CallLayout, groups: list[_Group]) -> str:
    a = call.parts[0].layout.a
    load, consume = (
        "if (fetches()) {part}::load({params}, header, base, share);",
        "{part}::consume({params}, header, base, share, group - 1);",
    )
    init = [
        f"    for (u32 m = 0; m < {len(g.members)}; ++m) {g.name}::init(headers.{g.name}[m]);"
        if len(g.members) > 1
        else f"    {g.name}::init(headers.{g.name}[0]);"
        for g in groups
    ]
    lines = [
        f"static_assert(sizeof(Headers) <= {call.parts[0].layout.header_bytes});\n",
        f"KITSUNE_KERNEL(kitsune_region, Params, p, {a.threads}) {{",
        "  Headers& headers = shared<Headers>();",
        "  u8* const base = reinterpret_cast<u8*>(&headers);",
        "  u32* const arrived = reinterpret_cast<u32*>(p.workspace);",
        "  const u32 group = thread_id() / kGroupThreads;",
        "  if (thread_id() == 0) {",
        *init,
        "    fence_mbar_init();",
        "  }",
        "  block_sync();",
        "  if (group == 0) {",
        "    become_loader<kLanes>();",
        *_role(call, groups, load, lambda n: []),
        "  } else {",
        "    become_consumer<kLanes>();",
        *_role(call, groups, consume, lambda n: [f"end_of_phase<kLanes>(arrived, {n});"]),
        *([] if call.fetch is None else [f"    {call.fetch.call}"]),
        "  }",
        "}\n",
    ]
    return "\n".join(lines)


def _role(call: CallLayout, groups: list[_Group], run: str, end_of_phase: Callable[[int], list[str]]) -> list[str]:
    """The parts in their order, with what comes behind phase number n of them: ``end_of_phase(n)``."""
    phases = sorted({part.phase for part in call.parts})
    lines: list[str] = []
    for n, phase in enumerate(phases):
        lines.append(f"// phase {phase}")
        mine = [(g, [k for k, m in enumerate(g.members) if m.phase == phase]) for g in groups]
        for group, members in mine:
            if members:
                lines += _run(call, group, members, run)
        if n + 1 < len(phases):
            lines += end_of_phase(n)
    return [f"    {line}" for line in lines]


def _run(call: CallLayout, group: _Group, members: list[int], run: str) -> list[str]:
    """Those ``members`` of the group, which follow each other."""
    ctas, name = group.members[0].layout.a.ctas, group.name
    if len(group.members) == 1:
        place, member, params = f"{group.members[0].first}, {group.members[0].ctas}", "0", f"{name}_params(p)"
    else:
        table = f"k{name.title()}[m]"
        place, member, params = f"{table}.first, {table}.ctas", "m", f"{name}_params(p, m)"
    body = [
        f"const Share share = Share::of({place}, {ctas});",
        "if (share.is_mine()) {",
        f"  {name}::Header& header = headers.{name}[{member}];",
        f"  section({call.parts.index(group.members[members[0]])}, group);",
        f"  {run.format(part=name, params=params)}",
        "  end_of_part<kLanes>();",
        "}",
    ]
    loop = f"for (u32 m = {members[0]}; m < {members[-1] + 1}; ++m) {{"
    head = (
        ["KITSUNE_NO_UNROLL", loop] if len(members) > 1 else ["{", *([f"  const u32 m = {members[0]};"] if member == "m" else [])]
    )
    return [*head, *(f"  {line}" for line in body), "}"]
